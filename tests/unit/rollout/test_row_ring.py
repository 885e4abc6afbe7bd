"""Rows come to the host in the order of the steps, whatever is under way."""

from __future__ import annotations

import pytest
import torch

from megatron_trace.rollout.row_ring import RowRing


class _Sink:
    def __init__(self) -> None:
        self.places: list[int] = []
        self.values: list[int] = []

    def __call__(self, places: torch.Tensor, rows: torch.Tensor) -> None:
        self.places += places.tolist()
        self.values += rows[:, 0].tolist()


def _ring(sink: _Sink, num_rows: int = 7, largest_step: int = 6) -> RowRing:
    return RowRing(num_rows, largest_step, 8, torch.empty(0, device="cuda").device, sink)


def _step(ring: RowRing, places: list[int], padding: int = 0) -> None:
    """Sends rows whose values are their places; padding is 255."""
    ring.begin(torch.tensor(places), len(places) + padding)
    values = torch.tensor([*places, *[255] * padding], dtype=torch.uint8, device=ring.index.device)
    ring.write(values[:, None].expand(-1, 8).contiguous())
    ring.send()


def test_rows_arrive_in_order_while_several_steps_are_under_way():
    ring = _ring(sink := _Sink())
    _step(ring, [5, 3])
    _step(ring, [9], padding=3)
    _step(ring, [4, 8])
    assert (ring.num_under_way, sink.places) == (3, [])
    ring.take_all()
    assert sink.places == sink.values == [5, 3, 9, 4, 8]


def test_rows_are_the_same_after_the_ring_is_full_many_times():
    ring = _ring(sink := _Sink())
    sizes = [3, 5, 1, 6, 2, 6, 4, 1, 1, 6]
    sent: list[int] = []
    for size in sizes:
        places = [len(sent) + row for row in range(size)]
        _step(ring, places, padding=6 - size)
        sent += places
    ring.take_all()
    assert sink.places == sink.values == sent


def test_a_full_ring_hands_over_only_what_must_make_room():
    ring = _ring(sink := _Sink())
    _step(ring, [1, 2])
    _step(ring, [3, 4])
    _step(ring, [5, 6, 7])
    assert sink.places == []
    _step(ring, [8, 9, 10])
    assert sink.places == [1, 2, 3, 4]
    assert ring.num_under_way == 2


def test_a_step_that_the_ring_cannot_hold_is_refused():
    ring = _ring(_Sink())
    with pytest.raises(RuntimeError, match="a step of 8 rows, 8 with padding, does not fit"):
        _step(ring, list(range(8)))


def test_rows_that_are_dropped_never_arrive():
    ring = _ring(sink := _Sink())
    _step(ring, [1, 2, 3])
    ring.begin(torch.tensor([4]), 1)  # A forward that failed.
    ring.drop()
    _step(ring, [5, 6, 7, 8, 9, 10])
    ring.take_all()
    assert sink.places == sink.values == [5, 6, 7, 8, 9, 10]


def test_the_index_of_rows_stays_where_a_captured_graph_reads_it():
    ring = _ring(_Sink())
    address = ring.index.data_ptr()
    for _ in range(4):
        _step(ring, [1, 2, 3], padding=1)
    assert ring.index.data_ptr() == address
    assert ring.index.tolist() == [row % 7 for row in range(12, 18)]


def test_padding_is_not_written_over_rows_that_are_under_way():
    ring = _ring(sink := _Sink())
    _step(ring, [1, 2, 3, 4])
    _step(ring, [5], padding=2)  # The ring is full to its last row.
    assert sink.places == []
    _step(ring, [6], padding=2)
    assert sink.places == [1, 2, 3, 4]
    ring.take_all()
    assert sink.places == sink.values == [1, 2, 3, 4, 5, 6]
