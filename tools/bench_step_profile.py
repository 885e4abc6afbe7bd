"""Where a training step's time goes: `bench_step.py --profile` prints it."""

from __future__ import annotations

import cProfile
import gc
import pstats
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, Self

import torch

# Calls of the runtime in which the host waits for the device.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")

_HOST_RUNS = 10


def profiled(name: str, run: Callable[[], None], num_rows: int) -> None:
    """Runs something under torch.profiler and prints what took longest.

    Args:
        name: What it is.
        run: Runs it once.
        num_rows: Rows of each table.
    """
    on_gpu = torch.cuda.is_available() and torch.version.cuda is not None
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        run()
        if on_gpu:
            torch.cuda.synchronize()
    events = profile.key_averages()
    kernels = [event for event in events if event.self_device_time_total > 0]
    launches = sum(event.count for event in events if "LaunchKernel" in event.key)
    waits = {event.key: event.count for event in events if event.key in WAITS}
    busy = sum(event.self_device_time_total for event in kernels) / 1e3
    print(f"profile of {name}: device busy {busy:.2f} ms, {launches} launches, waits {waits}")
    for title, key, chosen in (
        ("device", "self_device_time_total", kernels),
        ("host", "self_cpu_time_total", list(events)),
    ):
        print(f"  {title:>8} ms  count")
        for event in sorted(chosen, key=lambda e: getattr(e, key), reverse=True)[:num_rows]:
            print(f"  {getattr(event, key) / 1e3:11.3f} {event.count:6}  {event.key[:100]}")
    print(flush=True)


def host_profiled(name: str, run: Callable[[], None], num_rows: int) -> None:
    """Runs something under cProfile, its backward pass in the same thread, and prints the longest.

    Args:
        name: What it is.
        run: Runs it once; it is run ten times.
        num_rows: Rows of each table; functions of this package have one of their own.
    """
    profile = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(_HOST_RUNS):
            profile.runcall(run)
    stats = pstats.Stats(profile)
    print(f"host profile of {name}, {_HOST_RUNS} times")
    stats.sort_stats("tottime").print_stats(num_rows)
    stats.sort_stats("cumulative").print_stats("megatron_trace", 2 * num_rows)


def waits_profiled(name: str, run: Callable[[], None], num_rows: int) -> None:
    """Runs something and prints the lines of Python at which the host waited for the device.

    Args:
        name: What it is.
        run: Runs it once.
        num_rows: Rows of the table.
    """
    if not (torch.cuda.is_available() and torch.version.cuda is not None):
        return
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with torch.autograd.set_multithreading_enabled(False):
                run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    lines = Counter(
        f"{warning.filename}:{warning.lineno}"
        for warning in noted
        if "synchronizing" in str(warning.message)
    )
    print(f"waits of {name}: {lines.total()}")
    for line, count in lines.most_common(num_rows):
        print(f"  {count:4} {line}")
    print(flush=True)


def print_compilations() -> None:
    """Prints each compilation of a Triton kernel from now on, with its seconds and its variant."""
    # Only here: Triton looks for a GPU driver when it is imported.
    from triton import knobs

    started = time.perf_counter()

    def compiled(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        if cache_hit:
            return
        variant = {name: kind for name, kind in src.signature.items() if kind != "constexpr"}
        print(
            f"[triton {time.perf_counter() - started:.1f} s] {src.name}: {times.total / 1e6:.2f} s "
            f"{variant} {[*src.attrs]}",
            flush=True,
        )

    knobs.compilation.listener = compiled


class Collections:
    """Keeps what lives already out of Python's garbage collections, and notes what they take.

    As in a training of any length: a million objects of imports live to the end, and a collection
    of all objects looks at each of them, amid whatever runs then. A context manager.

    Attributes:
        first_s: Seconds of a collection of all objects, before.
        longest_s: Seconds of the longest one inside.
        total_s: Seconds of all of them.
    """

    def __init__(self) -> None:
        self.first_s = self.longest_s = self.total_s = self._started = 0.0

    def __enter__(self) -> Self:
        """Begins."""
        started = time.perf_counter()
        gc.collect()
        self.first_s = time.perf_counter() - started
        gc.freeze()
        gc.callbacks.append(self._noted)
        return self

    def __exit__(self, *_: object) -> None:
        """Ends."""
        gc.callbacks.remove(self._noted)
        gc.unfreeze()

    def __str__(self) -> str:
        """Gives what tables show."""
        return (
            f"garbage: {self.total_s:.3f} s, at most {self.longest_s:.3f} s at a time; "
            f"{self.first_s:.3f} s with what imports and models left"
        )

    def _noted(self, phase: str, _: dict[str, Any]) -> None:
        if phase == "start":
            self._started = time.perf_counter()
            return
        seconds = time.perf_counter() - self._started
        self.longest_s, self.total_s = max(self.longest_s, seconds), self.total_s + seconds
