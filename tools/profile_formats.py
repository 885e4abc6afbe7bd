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
    MXFP4,
    MXFP8,
    NUMBER_FORMATS,
    NVFP4,
    NVFP4_4OVER6,
    kernels_fused,
    kernels_whole,
)

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
    for name, number_format, values in (
        ("NVFP4", NVFP4, x),
        ("NVFP4 FP32", NVFP4, x.float()),
        ("4over6", NVFP4_4OVER6, x),
        ("MXFP4", MXFP4, x),
        ("MXFP8", MXFP8, x),
    ):
        form = scale if number_format.has_global_scale else None, number_format
        hint = torch.zeros(*x.shape[:-1], x.shape[-1] // 8, dtype=torch.uint8, device=x.device)
        blocks = x.shape[-1] // number_format.block_size
        scale_bytes = torch.full((*x.shape[:-1], blocks), 0x40, dtype=torch.uint8, device=x.device)
        guide = (values, hint, scale_bytes, *form)
        found += [
            (f"{name} rtn", _call(kernels_whole.rtn, values, *form)),
            (f"{name} record", _call(kernels_whole.rtn_record, values, *form, num_bits=1)),
            (f"{name} guided", _call(kernels_whole.guided, *guide, num_bits=1)),
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
