"""The recorder returns every row to its sample and position, and says so when it cannot."""

from __future__ import annotations

import pytest
import torch

from megatron_trace.hints import Site
from megatron_trace.rollout.recorder import Recorder

PLACE = (3, Site.FC1)


def _recorder(places=(PLACE,), sample_ids=("a", "b"), first_request_id=10) -> Recorder:
    recorder = Recorder(places)
    recorder.start(sample_ids, first_request_id, keep=True)
    return recorder


def _step(recorder: Recorder, rows: list[tuple[int, int]], *, places=(PLACE,), padding=0) -> None:
    """Records a step whose values say to which request and position they belong."""
    requests, positions = (
        torch.tensor(column, dtype=torch.int32) for column in zip(*rows, strict=True)
    )
    recorder.begin_step(requests, positions)
    codes = torch.stack([requests, positions], dim=1).to(torch.uint8)
    codes = torch.cat([codes, torch.full((padding, 2), 255, dtype=torch.uint8)])
    for layer, site in places:
        recorder.put(layer, site, codes, codes + 100)
    requests.fill_(-1)  # the engine reuses its buffers


def test_rows_of_interleaved_steps_return_to_sample_and_position():
    recorder = _recorder()
    _step(recorder, [(11, 0), (11, 1)])
    _step(recorder, [(10, 0), (10, 1), (10, 2), (11, 2)], padding=4)
    _step(recorder, [(11, 3), (10, 3)], padding=62)
    codes, scale_bytes = recorder.take([4, 4])[PLACE]
    expected = [[10, p] for p in range(4)] + [[11, p] for p in range(4)]
    assert codes.tolist() == expected
    assert scale_bytes.tolist() == [[request + 100, p + 100] for request, p in expected]


FC2 = (3, Site.FC2)


def _put_slots(recorder: Recorder, tokens: list[int], slots: list[int]) -> None:
    """Records rows whose values say to which token and slot they belong."""
    index = torch.tensor(tokens, dtype=torch.int64), torch.tensor(slots, dtype=torch.int64)
    codes = torch.stack([10 * index[0] + index[1]], dim=1).to(torch.uint8)
    recorder.put_slots(*FC2, codes, codes + 100, slots=index, num_slots=2)


def test_slots_that_come_expert_by_expert_lie_side_by_side():
    recorder = _recorder([FC2])
    recorder.begin_step(torch.tensor([11, 10, 10]), torch.tensor([0, 1, 0]))
    _put_slots(recorder, [0, 2, 3], [1, 0, 0])  # token 3 is padding
    _put_slots(recorder, [], [])
    _put_slots(recorder, [1, 2, 3], [0, 1, 1])
    _put_slots(recorder, [0, 1], [0, 1])
    codes, scale_bytes = recorder.take([2, 1])[FC2]
    assert codes.tolist() == [[20, 21], [10, 11], [0, 1]]
    assert scale_bytes.tolist() == [[120, 121], [110, 111], [100, 101]]


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([], "site fc2 was quantised but not in every"),
        ([1, 1], "site fc2 was quantised in a slot twice"),
    ],
)
def test_a_slot_not_recorded_exactly_once_is_named(slots, message):
    recorder = _recorder([FC2])
    recorder.begin_step(torch.tensor([10, 11]), torch.tensor([0, 0]))
    _put_slots(recorder, [0, 1], [0, 0])
    _put_slots(recorder, [1, 2], [1, 0])
    for slot in slots:
        _put_slots(recorder, [0], [slot])
    with pytest.raises(RuntimeError, match=f"layer 3, {message}.*, the first of sample a; the "):
        recorder.take([1, 1])


def test_other_slots_than_rows_are_refused():
    recorder = _recorder([FC2])
    recorder.begin_step(torch.tensor([10, 11]), torch.tensor([0, 0]))
    codes, index = torch.zeros(1, 1, dtype=torch.uint8), torch.tensor([0, 1])
    with pytest.raises(RuntimeError, match=r"got 1 rows, but the routing record .* says 2"):
        recorder.put_slots(*FC2, codes, codes, slots=(index, index), num_slots=2)


def test_only_the_places_asked_for_are_kept():
    recorder = _recorder()
    _step(recorder, [(10, 0)], places=[PLACE, (2, Site.FC1), (3, Site.K)])
    assert list(recorder.take([1])) == [PLACE]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(10, 0), (11, 0), (11, 2)], "sample b: position 1 .* 2 rows .* 3 positions"),
        ([(10, 0), (11, 0), (11, 1)], "sample b: position 2 .* 2 rows .* 3 positions"),
        ([(10, 0), (11, 0), (11, 1), (11, 1), (11, 2)], "sample b: position 1 .* 4 rows"),
        ([(11, 0), (11, 1), (11, 2)], "sample a: position 0 .* 0 rows .* 1 positions"),
        ([(10, 0), (10, 1), (11, 0), (11, 1), (11, 2)], "sample a: position 1 .* 2 rows"),
    ],
    ids=["gap", "cut", "twice", "absent", "surplus"],
)
def test_a_position_not_recorded_exactly_once_is_named(rows, message):
    recorder = _recorder()
    _step(recorder, rows)
    with pytest.raises(RuntimeError, match=message):
        recorder.take([1, 3])


def test_a_step_that_bypassed_a_quantiser_is_named():
    recorder = _recorder()
    _step(recorder, [(10, 0)])
    _step(recorder, [(10, 1)], places=[])
    with pytest.raises(RuntimeError, match=r"layer 3, site fc1 was not quantised.*sample a"):
        recorder.take([2])


def test_quantising_a_place_twice_in_a_step_is_refused():
    recorder = _recorder()
    with pytest.raises(RuntimeError, match="layer 3, site fc1 was quantised twice"):
        _step(recorder, [(10, 0)], places=[PLACE, PLACE])


def test_a_row_of_the_running_step_is_named():
    recorder = _recorder()
    _step(recorder, [(10, 4), (11, 7)])
    assert recorder.sample_of_row(1) == "sample b, position 7"
    recorder.stop()
    assert recorder.num_rows is None
    assert "no rollout" in recorder.sample_of_row(1)


def test_without_keep_samples_are_known_but_no_rows_are_kept():
    recorder = Recorder([PLACE])
    recorder.start(["a"], 0, keep=False)
    _step(recorder, [(0, 0)])
    _step(recorder, [(0, 1)])
    assert recorder.sample_of_row(0) == "sample a, position 1"
    assert recorder.seconds == 0.0
