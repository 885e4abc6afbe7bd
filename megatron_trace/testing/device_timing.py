"""Times of calls on a device, by its events, for the benchmarks under `tools/`."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def median_us(function: Callable[[], object], repeats: int = 15) -> float:
    """Gives the median time of a call in us, by events, after one call that is not counted."""
    function()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return statistics.median(times)


def copy_bandwidth(num_bytes: int = 1 << 31) -> float:
    """Gives bytes read and written by a copy on the current device, in TB/s.

    Args:
        num_bytes: Bytes that are copied; 2 GiB do not fit into any cache.
    """
    source = torch.ones(num_bytes, dtype=torch.uint8, device=torch.cuda.current_device())
    target = torch.empty_like(source)
    return 2 * num_bytes / median_us(lambda: target.copy_(source)) / 1e6
