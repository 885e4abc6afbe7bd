"""Launches each format kernel once over an input that no cache holds, for a profiler to look at.

    ncu --clock-control none --metrics \\
        sm__inst_issued.avg.pct_of_peak_sustained_active,\\
    gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed,launch__registers_per_thread,\\
    sm__warps_active.avg.pct_of_peak_sustained_active,gpu__time_duration.sum \\
        --kernel-name regex:kernel --csv python tools/profile_formats.py

Prints the order of the launches, so that the profiler's rows can be named.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from megatron_trace.formats import (
    kernels,
    kernels_four_over_six,
    kernels_mxfp4,
    kernels_mxfp8,
)

COLUMNS = 4096
GLOBAL_SCALE = 0.002


def main() -> None:
    """Launches rtn, rtn_record (1 bit) and guided (1 bit) of every format."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=256, help="size of the input")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    num_values = arguments.megabytes * 10**6 // 2
    x = torch.randn(num_values // COLUMNS, COLUMNS, device="cuda").to(torch.bfloat16)
    for name, launch in launches(x):
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


def _call(
    function: Callable[..., object], *args: object, **options: object
) -> Callable[[], object]:
    return lambda: function(*args, **options)


if __name__ == "__main__":
    main()
