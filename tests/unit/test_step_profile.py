"""Kernels of a profiled call are told apart by the launch that they belong to."""

from __future__ import annotations

import time

import pytest

from megatron_trace.testing.step_profile import Kernel, by_part, host_profile


def test_kernels_are_before_in_or_after_the_graph_and_idle_time_is_not_busy():
    kernels = [
        Kernel(9000, 12000, "sample", 4),
        Kernel(0, 1000, "copy", 1),
        Kernel(2000, 4000, "multiply", 3),
        Kernel(3000, 5000, "combine", 3),
        Kernel(7000, 8000, "multiply", 3),
    ]
    parts = by_part(kernels, {3})
    assert list(parts) == ["before", "graph", "after"]
    graph = parts["graph"]
    assert (graph.num_kernels, graph.span_us, graph.busy_us) == (3, 6, 4)
    assert graph.longest(1) == [("multiply", 2, pytest.approx(3.0))]
    assert [parts[name].busy_us for name in ("before", "after")] == [1, 3]


def test_without_a_graph_all_is_before():
    assert list(by_part([Kernel(0, 1, "copy", 1)], set())) == ["before"]


def test_a_profile_of_the_host_names_what_runs():
    def busy():
        until = time.perf_counter() + 0.01
        while time.perf_counter() < until:
            pass

    def called_from(depth: int) -> str:
        return called_from(depth - 1) if depth else host_profile(busy, calls=3)

    text = called_from(60)  # Deeper than the table is long.
    itself, calling = text.split("with what it calls")
    assert " busy" in itself
    assert " busy" in calling
    assert " host_profile" in calling
    assert "called_from" not in text
