"""Launches each format kernel once over an input that no cache holds, for a profiler to look at.

    ncu --clock-control none --metrics \\
        sm__inst_issued.avg.pct_of_peak_sustained_active,\\
    gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed,launch__registers_per_thread,\\
    sm__warps_active.avg.pct_of_peak_sustained_active,gpu__time_duration.sum \\
        --kernel-name regex:kernel --csv python tools/profile_formats.py

Prints the order of the launches, so that the profiler's rows can be named. `--fused` launches the
kernels of RMSNorm and SwiGLU with each format instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from megatron_trace.formats import (
    kernels,
    kernels_four_over_six,
    kernels_fused,
    kernels_mxfp4,
    kernels_mxfp8,
)
from megatron_trace.formats.number_format import NUMBER_FORMATS

COLUMNS = 4096
GLOBAL_SCALE = 0.002


def main() -> None:
    """Launches rtn, rtn_record (1 bit) and guided (1 bit) of every format."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=256, help="size of the input")
    parser.add_argument("--fused", action="store_true", help="RMSNorm and SwiGLU with each format")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    num_values = arguments.megabytes * 10**6 // 2
    x = torch.randn(num_values // COLUMNS, COLUMNS, device="cuda").to(torch.bfloat16)
    for name, launch in fused_launches(x) if arguments.fused else launches(x):
        launch()
        torch.cuda.synchronize()
        print(name, flush=True)


def launches(x: torch.Tensor) -> list[tuple[str, Callable[[], object]]]:
    """Gives every launch with its name, in order.

    Args:
        x: float [rows, K] on a GPU.
    """
    scale = torch.tensor(GLOBAL_SCALE, device=x.device)
    found: list[tuple[str, Callable[[], object]]] = []
    for name, module, scales, values in (
        ("NVFP4", kernels, (scale,), x),
        ("NVFP4 FP32", kernels, (scale,), x.float()),
        ("4over6", kernels_four_over_six, (scale,), x),
        ("MXFP4", kernels_mxfp4, (), x),
        ("MXFP8", kernels_mxfp8, (), x),
    ):
        hint = torch.zeros(*x.shape[:-1], x.shape[-1] // 8, dtype=torch.uint8, device=x.device)
        block = 32 if name.startswith("MX") else 16
        scale_bytes = torch.full(
            (*x.shape[:-1], x.shape[-1] // block), 0x40, dtype=torch.uint8, device=x.device
        )
        found += [
            (f"{name} rtn", _call(module.rtn, values, *scales)),
            (f"{name} record", _call(module.rtn_record, values, *scales, num_bits=1)),
            (
                f"{name} guided",
                _call(module.guided, values, hint, scale_bytes, *scales, num_bits=1),
            ),
        ]
    return found


def fused_launches(x: torch.Tensor) -> list[tuple[str, Callable[[], object]]]:
    """Gives every launch of a fused kernel with its name, in order.

    Args:
        x: BF16 [rows, K] on a GPU; the norm's input, and in pairs of rows gate and up.
    """
    weight = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
    gate_up = x.view(x.shape[0] // 2, 2 * x.shape[1])
    found: list[tuple[str, Callable[[], object]]] = []
    for fmt in NUMBER_FORMATS.values():
        scale = GLOBAL_SCALE if fmt.largest_block_scale is not None else None
        for part, source, leading, options in (
            ("rms_norm", x, (weight,), {"eps": 1e-6}),
            ("swiglu", gate_up, (), {}),
        ):
            options = options | {"number_format": fmt}
            shape = (source.shape[0], COLUMNS)
            hint = torch.zeros(shape[0], COLUMNS // 8, dtype=torch.uint8, device=x.device)
            scale_bytes = torch.full(
                (shape[0], COLUMNS // fmt.block_size), 0x40, dtype=torch.uint8, device=x.device
            )
            rtn, record, guided = (
                getattr(kernels_fused, f"{part}_{way}") for way in ("rtn", "rtn_record", "guided")
            )
            given = (source, *leading)
            found += [
                (f"{fmt.name} {part} rtn", _call(rtn, *given, scale, **options)),
                (f"{fmt.name} {part} record", _call(record, *given, scale, num_bits=1, **options)),
                (
                    f"{fmt.name} {part} guided",
                    _call(guided, *given, hint, scale_bytes, scale, num_bits=1, **options),
                ),
            ]
    return found


def _call(
    function: Callable[..., object], *args: object, **options: object
) -> Callable[[], object]:
    return lambda: function(*args, **options)


if __name__ == "__main__":
    main()
