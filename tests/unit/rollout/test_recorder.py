"""The recorder keeps every row where the cache keeps its token, and says so when it cannot."""

from __future__ import annotations

import pytest
import torch

from megatron_trace.hints import Site
from megatron_trace.rollout.recorder import Recorder

PLACE = (3, Site.FC1)
FC2 = (3, Site.FC2)
PAGES, PAGE_TOKENS = 5, 4


def _recorder(places=(PLACE,), *, keep: bool = True) -> Recorder:
    recorder = Recorder(places)
    recorder.reserve(PAGES, PAGE_TOKENS, largest_step=8)
    recorder.start({10: "a", 11: "b"}, keep=keep)
    return recorder


def _begin(recorder: Recorder, rows: list[tuple[int, int]], places, padding: int = 0) -> None:
    """Begins a step of rows (request, position) that go to places (page, offset)."""
    requests, positions = (
        torch.tensor(column, dtype=torch.int32) for column in zip(*rows, strict=True)
    )
    pages, offsets = (
        torch.tensor(column, dtype=torch.int32) for column in zip(*places, strict=True)
    )
    recorder.begin_step(requests, positions, pages, offsets, num_padded=len(rows) + padding)
    requests.fill_(-1)  # the engine reuses its buffers


def _put(recorder: Recorder, values: list[int], place=PLACE) -> None:
    codes = torch.tensor([[value, value + 1] for value in values], dtype=torch.uint8)
    recorder.put(*place, codes, codes + 100)


def _rows(recorder: Recorder, places, place=PLACE) -> tuple[list[list[int]], list[list[int]]]:
    pages, offsets = (torch.tensor(column) for column in zip(*places, strict=True))
    codes, scale_bytes = recorder.rows(place, pages, offsets)
    return codes.tolist(), scale_bytes.tolist()


def test_rows_are_found_where_their_tokens_are_cached():
    recorder = _recorder()
    _begin(recorder, [(11, 0), (11, 1), (10, 0)], [(2, 0), (2, 1), (0, 0)], padding=2)
    _put(recorder, [10, 20, 30, 70, 80])
    recorder.end_step()
    _begin(recorder, [(10, 1), (11, 2)], [(0, 1), (2, 2)])
    _put(recorder, [40, 50])
    recorder.end_step()
    codes, scale_bytes = _rows(recorder, [(2, 0), (2, 1), (2, 2)])
    assert codes == [[10, 11], [20, 21], [50, 51]]
    assert scale_bytes == [[110, 111], [120, 121], [150, 151]]
    assert _rows(recorder, [(0, 0), (0, 1)])[0] == [[30, 31], [40, 41]]


def test_padding_is_kept_nowhere():
    recorder = _recorder()
    _begin(recorder, [(10, 0)], [(0, 0)], padding=3)
    _put(recorder, [1, 7, 8, 9])
    recorder.end_step()
    every = [(page, offset) for page in range(PAGES) for offset in range(PAGE_TOKENS)]
    assert _rows(recorder, every)[0] == [[1, 2]] + [[0, 0]] * (len(every) - 1)


def test_rows_are_put_back_at_other_places():
    recorder = _recorder()
    _begin(recorder, [(10, 0), (10, 1)], [(0, 0), (0, 1)])
    _put(recorder, [1, 2])
    recorder.end_step()
    pages, offsets = torch.tensor([0, 0]), torch.tensor([0, 1])
    saved = recorder.rows(PLACE, pages, offsets)
    recorder.restore(PLACE, pages + 3, offsets + 2, saved)
    assert _rows(recorder, [(3, 2), (3, 3)]) == _rows(recorder, [(0, 0), (0, 1)])


def test_what_is_kept_of_codes_may_be_narrower():
    recorder = Recorder([PLACE], narrowed=lambda site, codes: codes[:, :1] + (site == Site.FC1))
    recorder.reserve(PAGES, PAGE_TOKENS, largest_step=8)
    recorder.start({10: "a"}, keep=True)
    _begin(recorder, [(10, 0), (10, 1)], [(0, 0), (0, 1)])
    _put(recorder, [10, 20])
    recorder.end_step()
    assert _rows(recorder, [(0, 0), (0, 1)]) == ([[11], [21]], [[110, 111], [120, 121]])


def test_codes_of_a_site_are_narrowed_together_and_kept_apart():
    calls = []

    def narrowed(site, codes):
        calls.append(site)
        return codes[:, ::2]

    layers = (3, 5)
    recorder = Recorder([(layer, Site.FC1) for layer in layers], narrowed=narrowed)
    recorder.reserve(PAGES, PAGE_TOKENS, largest_step=8)
    recorder.start({10: "a"}, keep=True)
    _begin(recorder, [(10, 0)], [(1, 2)], padding=1)
    for layer in reversed(layers):
        _put(recorder, [10 * layer, 0], (layer, Site.FC1))
    recorder.end_step()
    assert calls == [Site.FC1]
    for layer in layers:
        assert _rows(recorder, [(1, 2)], (layer, Site.FC1))[0] == [[10 * layer]]


def _put_slots(recorder: Recorder, tokens: list[int], slots: list[int]) -> None:
    """Records rows whose values say to which token and slot they belong."""
    index = torch.tensor(tokens, dtype=torch.int64), torch.tensor(slots, dtype=torch.int64)
    codes = torch.stack([10 * index[0] + index[1]], dim=1).to(torch.uint8)
    recorder.put_slots(*FC2, codes, codes + 100, slots=index, num_slots=2)


def _slots_step() -> Recorder:
    """Two real tokens and one of padding."""
    recorder = _recorder([FC2])
    _begin(recorder, [(11, 0), (10, 0)], [(1, 3), (0, 0)], padding=1)
    return recorder


def test_slots_that_come_expert_by_expert_lie_side_by_side():
    recorder = _slots_step()
    _put_slots(recorder, [0, 2], [1, 0])
    _put_slots(recorder, [], [])
    _put_slots(recorder, [0, 1], [0, 1])
    _put_slots(recorder, [1, 2], [0, 1])
    recorder.end_step()
    codes, scale_bytes = _rows(recorder, [(0, 0), (1, 3)], FC2)
    assert codes == [[10, 11], [0, 1]]
    assert scale_bytes == [[110, 111], [100, 101]]


def test_a_slot_that_is_missing_is_noticed_at_the_end_of_the_step():
    recorder = _slots_step()
    _put_slots(recorder, [0, 1, 2], [0, 0, 0])
    _put_slots(recorder, [0, 2], [1, 1])
    with pytest.raises(RuntimeError, match=r"site fc2 was quantised for 5 of 6 slots.*sample b"):
        recorder.end_step()


def test_a_slot_quantised_twice_in_place_of_another_is_noticed_when_rows_are_read():
    recorder = _slots_step()
    _put_slots(recorder, [0, 1, 2], [0, 0, 0])
    _put_slots(recorder, [0, 0, 2], [1, 1, 1])
    recorder.end_step()
    with pytest.raises(RuntimeError, match="site fc2: an expert slot was quantised twice"):
        _rows(recorder, [(0, 0)], FC2)


def test_other_slots_than_rows_are_refused():
    recorder = _slots_step()
    codes, index = torch.zeros(1, 1, dtype=torch.uint8), torch.tensor([0, 1])
    with pytest.raises(RuntimeError, match=r"got 1 rows, but the routing record .* says 2"):
        recorder.put_slots(*FC2, codes, codes, slots=(index, index), num_slots=2)


def test_only_the_places_asked_for_are_kept():
    recorder = _recorder()
    _begin(recorder, [(10, 0)], [(0, 0)])
    _put(recorder, [1], (2, Site.FC1))
    assert not recorder.keeps(2, Site.FC1)
    with pytest.raises(KeyError):
        _rows(recorder, [(0, 0)], (2, Site.FC1))


def test_keys_are_left_to_the_cache_but_must_be_quantised():
    place = (3, Site.K)
    recorder = _recorder([place])
    _begin(recorder, [(10, 0)], [(0, 0)])
    _put(recorder, [1], place)
    recorder.end_step()
    with pytest.raises(KeyError):
        _rows(recorder, [(0, 0)], place)
    _begin(recorder, [(10, 1)], [(0, 1)])
    with pytest.raises(RuntimeError, match="layer 3, site k was not quantised"):
        recorder.end_step()


def test_a_step_that_bypassed_a_quantiser_is_named():
    recorder = _recorder()
    _begin(recorder, [(10, 1)], [(0, 0)])
    with pytest.raises(RuntimeError, match=r"layer 3, site fc1 was not quantised.*sample a"):
        recorder.end_step()


def test_quantising_a_place_twice_in_a_step_is_refused():
    recorder = _recorder()
    _begin(recorder, [(10, 0)], [(0, 0)])
    _put(recorder, [1])
    with pytest.raises(RuntimeError, match="layer 3, site fc1 was quantised twice"):
        _put(recorder, [1])


def test_a_row_of_the_running_step_is_named():
    recorder = _recorder()
    _begin(recorder, [(10, 4), (11, 7)], [(0, 0), (1, 0)])
    assert recorder.sample_of_row(1) == "sample b, position 7"
    recorder.stop()
    assert recorder.num_rows is None
    assert "no rollout" in recorder.sample_of_row(1)


def test_without_keep_samples_are_known_but_no_rows_are_kept():
    recorder = _recorder(keep=False)
    _begin(recorder, [(10, 1)], [(0, 0)])
    assert recorder.sample_of_row(0) == "sample a, position 1"
    recorder.end_step()  # nothing is missed
    assert recorder.seconds == 0.0
