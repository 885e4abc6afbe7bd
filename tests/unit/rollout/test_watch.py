"""What is watched of the quantisers' inputs, and when it is read."""

from __future__ import annotations

import pytest
import torch

from megatron_trace.rollout.watch import Watch

PLACE, LATER = (0, "k"), (0, "fc1")


def _observe(watch: Watch, rows: list[list[float]], place=PLACE, **options) -> None:
    watch.observe(place, torch.tensor(rows), **{"largest": 2.0, "finite": True, **options})


def test_values_beyond_the_largest_are_added_up_without_padding():
    watch = Watch()
    watch.real_rows = torch.tensor([2], dtype=torch.int32)
    _observe(watch, [[2.0, -2.5], [3.0, torch.inf], [9.0, 9.0]])
    _observe(watch, [[2.5, 0.0]])
    assert watch.beyond() == {PLACE: 4}


def test_the_first_place_with_nan_is_told_with_its_first_token():
    watch = Watch()
    _observe(watch, [[0.0], [0.0]])
    _observe(watch, [[torch.nan], [torch.nan], [0.0]], place=LATER, tokens=torch.tensor([7, 5, 1]))
    assert watch.first_bad() == (LATER, 5, 2)
    _observe(watch, [[0.0], [torch.nan]])
    assert watch.first_bad() == (PLACE, 1, 1)
    watch.clear()
    assert watch.first_bad() is None


def test_rows_of_padding_may_be_nan():
    watch = Watch()
    watch.real_rows = torch.tensor([1], dtype=torch.int32)
    _observe(watch, [[0.0], [0.0], [torch.nan], [torch.nan]], rows_of_token=2)
    assert watch.first_bad() is None


@pytest.mark.gpu
def test_on_a_gpu_the_first_place_with_nan_is_that_of_when_reading_began():
    watch = Watch()
    for values, place in (([[0.0], [0.0]], PLACE), ([[0.0], [torch.nan]], LATER)):
        watch.observe(place, torch.tensor(values, device="cuda"), largest=2.0, finite=True)
    watch.begin_reading()
    watch.observe(PLACE, torch.tensor([[torch.inf]], device="cuda"), largest=2.0, finite=True)
    torch.cuda.synchronize()
    assert watch.first_bad() == (LATER, 1, 1)
    assert watch.first_bad() == (PLACE, 0, 1)


def test_memory_stays_where_a_captured_graph_adds_to_it():
    watch = Watch()
    _observe(watch, [[3.0]])
    address = watch._of(PLACE, torch.device("cpu")).data_ptr()
    watch.clear()
    _observe(watch, [[3.0, 4.0]])
    assert watch._of(PLACE, torch.device("cpu")).data_ptr() == address
    assert watch.beyond() == {PLACE: 2}
