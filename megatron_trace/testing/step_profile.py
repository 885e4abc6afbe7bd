"""Where a call's time goes on a device: its kernels by part, the gaps between them, the host.

A call that replays one CUDA graph has three parts: what comes before the graph, what is in it, and
what comes after. Kernels are told apart by the launch that they belong to.
"""

from __future__ import annotations

import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch._C._autograd import DeviceType

_NAME_CHARACTERS = 60
_GRAPH_LAUNCH = "cudaGraphLaunch"
_SAMPLE_S = 2e-4


class Kernel(NamedTuple):
    """A kernel or copy that ran, on the device's clock.

    Attributes:
        start_ns: When it began.
        end_ns: When it ended.
        name: Its name.
        launch: The launch that it belongs to.
    """

    start_ns: int
    end_ns: int
    name: str
    launch: int


@dataclass
class PartTime:
    """Time of a part of a call, us.

    Attributes:
        span_us: From the part's first kernel to its last.
        busy_us: In which some kernel ran.
        num_kernels: Kernels and copies.
        kernels: Count and time of each, by name.
    """

    span_us: float = 0.0
    busy_us: float = 0.0
    num_kernels: int = 0
    kernels: dict[str, tuple[int, float]] = field(default_factory=dict)

    def longest(self, count: int) -> list[tuple[str, int, float]]:
        """Gives name, count and time of the kernels that take longest."""
        by_time = sorted(self.kernels.items(), key=lambda item: -item[1][1])
        return [(name, *value) for name, value in by_time[:count]]


def profiled(function: Callable[[], object]) -> dict[str, PartTime]:
    """Gives the time of a call on the device by part: `before`, `graph` and `after` it.

    Args:
        function: The call; without a graph all of it is `before`.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        function()
        torch.cuda.synchronize()
    results: Any = profile.profiler
    events = [] if results is None else results.kineto_results.events()
    launches = [event for event in events if event.name().startswith(_GRAPH_LAUNCH)]
    kernels = [
        Kernel(event.start_ns(), event.end_ns(), event.name(), event.correlation_id())
        for event in events
        if event.device_type() == DeviceType.CUDA
    ]
    return by_part(kernels, {event.correlation_id() for event in launches})


def by_part(kernels: Iterable[Kernel], graph_launches: Collection[int]) -> dict[str, PartTime]:
    """Gives the time of kernels by part.

    Args:
        kernels: In any order.
        graph_launches: Launches that are replays of a graph.
    """
    parts: dict[str, list[Kernel]] = defaultdict(list)
    part = "before"
    for kernel in sorted(kernels):
        if kernel.launch in graph_launches:
            part = "graph"
        elif part == "graph":
            part = "after"
        parts[part].append(kernel)
    return {name: _part(of_part) for name, of_part in parts.items()}


def _part(kernels: Sequence[Kernel]) -> PartTime:
    by_name: dict[str, tuple[int, float]] = {}
    first = until = kernels[0].start_ns
    busy = 0
    for start, end, name, _ in kernels:
        busy += max(0, end - max(start, until))
        until = max(until, end)
        count, time = by_name.get(name[:_NAME_CHARACTERS], (0, 0.0))
        by_name[name[:_NAME_CHARACTERS]] = (count + 1, time + (end - start) / 1000)
    return PartTime((until - first) / 1000, busy / 1000, len(kernels), by_name)


def host_profile(function: Callable[[], object], *, calls: int, lines: int = 25) -> str:
    """Gives what the host does in a call, by samples of the main thread's stack.

    cProfile gives the time of coroutines and of torch's slices to whatever was called last.

    Args:
        function: The call.
        calls: How often it is called.
        lines: Lines that are named, of those that run themselves, and of those that call.
    """
    own: Counter[str] = Counter()
    every: Counter[str] = Counter()

    def sample(_: int, frame: FrameType | None) -> None:
        stack = []
        while frame is not None:
            code = frame.f_code
            stack.append(f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}")
            # What called this function is in every sample, and would crowd out what it calls.
            frame = None if code is host_profile.__code__ else frame.f_back
        own[stack[0]] += 1
        every.update(set(stack))
        # Not at intervals, in which a sample might interrupt the one before.
        if running:
            signal.setitimer(signal.ITIMER_REAL, _SAMPLE_S)

    running = [True]
    previous = signal.signal(signal.SIGALRM, sample)
    started = time.perf_counter()
    signal.setitimer(signal.ITIMER_REAL, _SAMPLE_S)
    try:
        for _ in range(calls):
            function()
    finally:
        running.clear()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    call_ms = 1000 * (time.perf_counter() - started) / calls
    share = call_ms / max(1, own.total())
    text = [f"host: {call_ms:.3f} ms a call, {own.total()} samples of {calls} calls"]
    for name, counts in (("itself", own), ("with what it calls", every)):
        text.append(f"  ms a call, {name}:")
        text += [f"    {share * count:7.3f}  {line}" for line, count in counts.most_common(lines)]
    return "\n".join(text)
