"""Reading ahead: order, bound, errors, and the end of the thread."""

from __future__ import annotations

import threading
from dataclasses import fields, replace
from functools import partial

import pytest
import torch

from megatron_trace.hints import HintFiles, HintFilesWriter, RecordKind
from megatron_trace.training.micro_batch import (
    make_micro_batch,
    planned_hint_bytes,
    stage_micro_batch,
)
from megatron_trace.training.prefetch import MicroBatchPrefetcher, read_micro_batch
from megatron_trace.training.read_ahead import Job, ReadAhead

PATIENCE_S = 300


def _threads():
    return {thread for thread in threading.enumerate() if thread.name == "trace-prefetch"}


@pytest.fixture(autouse=True)
def before():
    """The threads of earlier tests; none of this one's is left."""
    before = _threads()
    yield before
    assert _threads() <= before


@pytest.fixture
def read_ahead():
    """Makes `ReadAhead`, closed at the end."""
    made = []

    def make(jobs, max_bytes=None):
        made.append(ReadAhead(jobs, max_bytes=max_bytes))
        return made[-1]

    yield make
    for ahead in made:
        ahead.close()


def _jobs(sizes, built=None):
    for number, size in enumerate(sizes):
        yield Job(size, partial(_build, number, [] if built is None else built))


def _build(number, built):
    built.append(number)
    return number


def _take_all(ahead):
    while (held := ahead.take()) is not None:
        yield held.item
        ahead.release(held)


def _settled(ahead, ready):
    """Waits until `ready()` holds, which the thread makes true, and gives whether it does."""
    with ahead._changed:
        return ahead._changed.wait_for(ready, timeout=PATIENCE_S)


@pytest.mark.parametrize("max_bytes", [None, 10, 25, 1000])
def test_items_come_in_the_order_of_the_jobs(read_ahead, max_bytes):
    sizes = [10, 3, 7, 10, 0, 1, 9, 10]
    assert list(_take_all(read_ahead(_jobs(sizes), max_bytes))) == list(range(8))


@pytest.mark.parametrize(("max_bytes", "peak"), [(10, 10), (25, 20), (29, 20), (30, 30), (99, 40)])
def test_as_much_is_held_as_the_bound_allows_and_no_more(read_ahead, max_bytes, peak):
    ahead = read_ahead(_jobs([10] * 4), max_bytes)
    assert _settled(ahead, lambda: ahead._held_bytes == peak)
    assert list(_take_all(ahead)) == [0, 1, 2, 3]
    assert ahead.peak_bytes == peak


def test_what_was_taken_counts_until_it_is_released(read_ahead):
    built = []
    ahead = read_ahead(_jobs([10] * 3, built), 10)
    held = ahead.take()
    assert ahead.take(wait=False) is None
    assert built == [0]
    ahead.release(held)
    assert ahead.take().item == 1


def test_without_a_bound_one_item_is_made_ahead(read_ahead):
    built = []
    ahead = read_ahead(_jobs([10] * 5, built))
    for number in range(5):
        held = ahead.take()
        assert held.item == number
        made = min(number + 2, 5)
        assert _settled(ahead, lambda made=made: len(built) == made)
        ahead.release(held)


def test_the_next_item_is_made_while_the_consumer_uses_this_one(read_ahead):
    """A source that would be waited for: each job ends only when the consumer is at work."""
    at_work = [threading.Event() for _ in range(3)]

    def build(number):
        if number:
            assert at_work[number - 1].wait(PATIENCE_S), "made before it was waited for"
        return number

    jobs = (Job(1, partial(build, number)) for number in range(4))
    ahead = read_ahead(jobs, 2)
    for number in range(4):
        held = ahead.take()
        if number < 3:
            # Ends the next job in the middle of this use, and waits for its end.
            at_work[number].set()
            assert _settled(ahead, lambda: len(ahead._ready) == 1)
        assert held.item == number
        ahead.release(held)


def test_an_error_is_raised_at_its_place_and_ends_the_thread(read_ahead):
    def failing():
        raise LookupError("hint of item 2 is missing")

    def jobs():
        yield from _jobs([1, 1])
        yield Job(1, failing)
        raise AssertionError("nothing is read after an error")

    ahead = read_ahead(jobs(), 100)
    assert _settled(ahead, lambda: ahead._ended)
    for number in range(2):
        held = ahead.take()
        assert held.item == number
        ahead.release(held)
    for _ in range(2):
        with pytest.raises(LookupError, match="item 2 is missing"):
            ahead.take()
    ahead._thread.join(PATIENCE_S)
    assert not ahead._thread.is_alive()


def test_an_error_of_the_source_itself_is_raised_too(read_ahead):
    def jobs():
        yield from _jobs([1])
        raise ValueError("damaged")

    taken = _take_all(read_ahead(jobs(), 100))
    assert next(taken) == 0
    with pytest.raises(ValueError, match="damaged"):
        next(taken)


def test_an_item_larger_than_the_bound_is_one_error_that_names_both(read_ahead):
    taken = _take_all(read_ahead(_jobs([20, 21, 5]), 20))
    assert next(taken) == 0
    with pytest.raises(ValueError, match=r"take 21 bytes, but at most 20 .*--trace-hint-memory-mb"):
        next(taken)


@pytest.mark.parametrize("num_taken", [0, 1, 3])
@pytest.mark.parametrize("max_bytes", [10, 25])
def test_an_early_end_leaves_no_thread(read_ahead, before, num_taken, max_bytes):
    built = []
    ahead = read_ahead(_jobs([10] * 100, built), max_bytes)
    for _ in range(num_taken):
        ahead.release(ahead.take())
    ahead.close()
    assert _threads() <= before
    assert len(built) < 100


@pytest.fixture
def files(rollout, build, tmp_path):
    """Recorded rollouts in files: the folder, its sample ids, and sites of a trainer."""
    rolled = rollout(codes=True)
    with HintFilesWriter(tmp_path) as writer:
        rolled.put_records(writer, RecordKind)
        writer.commit(rolled.samples)
    _, sites = build("trace", settings=rolled.settings)
    sites.diagnostics = True
    return tmp_path, [[sample.sample_id] for sample in rolled.samples] * 3, sites


def _samples(reader, names):
    return ([reader.sample(name) for name in of_batch] for of_batch in names)


def _tensors(value, path=""):
    for field in fields(value):
        inner, name = getattr(value, field.name), f"{path}.{field.name}"
        if isinstance(inner, torch.Tensor):
            yield name, inner
        elif field.name in ("hints", "codes"):
            for place, rows in inner.items():
                yield from _tensors(rows, f"{name}[{place}]")
        elif field.name.endswith("_rows"):
            yield from _tensors(inner, name)


def assert_same(a, b):
    """Checks that micro-batches have the same bits."""
    assert a.sample_ids == b.sample_ids
    ours, theirs = dict(_tensors(a)), dict(_tensors(b))
    assert ours.keys() == theirs.keys()
    assert any(".hints" in name for name in ours)
    assert any(".codes" in name for name in ours)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_prefetched_micro_batches_have_the_bits_of_those_made_at_once(files):
    folder, names, sites = files
    plain, own = HintFiles(folder), HintFiles(folder)
    expected = [make_micro_batch(samples, plain, sites) for samples in _samples(plain, names)]
    with MicroBatchPrefetcher(
        _samples(own, names), own, sites, max_host_bytes=10 * expected[0].hint_bytes
    ) as prefetcher:
        for a, b in zip(prefetcher, expected, strict=True):
            assert_same(a, b)


def test_planned_bytes_are_those_of_the_hints(files):
    folder, names, sites = files
    reader = HintFiles(folder)
    for samples in _samples(reader, names):
        staged = stage_micro_batch(samples, reader, sites).on_host
        assert planned_hint_bytes(samples, reader, sites) == staged.hint_bytes > 0


def test_planned_bytes_of_packed_residues_are_those_of_the_hints(rollout, build):
    rolled = rollout(scale_form="residue")
    _, sites = build("trace", settings=rolled.settings, hint_scales="residue")
    staged = stage_micro_batch(rolled.samples, rolled.store, sites)
    planned = planned_hint_bytes(rolled.samples, rolled.store, sites)
    assert planned == staged.on_host.hint_bytes
    assert {rows.scale_form for rows in staged.on_host.hints.values()} == {"packed"}
    assert staged.on_device().hint_bytes > planned


def test_hints_held_stay_within_the_bound(files):
    folder, names, sites = files
    reader = HintFiles(folder)
    largest = max(planned_hint_bytes(samples, reader, sites) for samples in _samples(reader, names))
    for bound in (largest, 2 * largest):
        with MicroBatchPrefetcher(
            _samples(reader, names), reader, sites, max_host_bytes=bound
        ) as prefetcher:
            assert sum(1 for _ in prefetcher) == len(names)
        assert largest <= prefetcher.peak_host_bytes <= bound
    batches = list(_samples(reader, names))
    largest_batch = max(batches, key=lambda samples: samples[0].num_rows)
    with pytest.raises(ValueError, match="--trace-hint-memory-mb"):
        read_micro_batch(largest_batch, reader, sites, max_host_bytes=largest - 1)


def test_files_of_samples_that_were_read_are_closed(files):
    folder, names, sites = files
    reader = HintFiles(folder)
    with MicroBatchPrefetcher(_samples(reader, names), reader, sites, max_host_bytes=None) as made:
        num_samples = sum(len(micro_batch.sample_ids) for micro_batch in made)
    assert num_samples == len(names)
    assert not reader._open_files


def test_a_missing_hint_is_an_error_at_its_micro_batch(files):
    folder, names, sites = files
    reader = HintFiles(folder)

    def batches():
        good, bad, *_ = _samples(reader, names)
        yield good
        yield [replace(bad[0], sample_id="unknown")]

    with MicroBatchPrefetcher(batches(), reader, sites, max_host_bytes=None) as prefetcher:
        next(prefetcher)
        with pytest.raises(LookupError, match=r"no such sample.*unknown"):
            next(prefetcher)


@pytest.mark.gpu
def test_on_a_gpu_copies_on_the_side_stream_give_the_same_bits(files):
    folder, names, sites = files
    test_prefetched_micro_batches_have_the_bits_of_those_made_at_once(files)
    reader = HintFiles(folder)
    with MicroBatchPrefetcher(
        _samples(reader, names), reader, sites, max_host_bytes=None
    ) as prefetcher:
        assert all(micro_batch.tokens.is_cuda for micro_batch in prefetcher)
