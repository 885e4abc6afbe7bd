"""What RL asks of a rollout: stop tokens, samples per prompt, seeds, streams, aborts, turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_trace.hints import HintStore, RecordKind
from megatron_trace.rollout import SamplingSettings
from megatron_trace.testing.rollouts import assert_same_rollout, records_of
from megatron_trace.testing.tiny_rollout import EOD_TOKEN, random_prompts, tiny_engine

PROMPTS = random_prompts(8, shortest=2, longest=20)


def _generate(engine, prompts=PROMPTS, ids=None, **options: Any):
    """Like `roll_out`, with the callbacks of `generate`."""
    callbacks = {name: options.pop(name, None) for name in ("on_tokens", "next_turn", "seeds")}
    settings = SamplingSettings(**{"max_new_tokens": 12, **options})
    ids = [f"s{n}" for n in range(len(prompts))] if ids is None else ids
    store = HintStore()
    samples = engine.generate(prompts, ids, store=store, sampling=settings, seed=0, **callbacks)
    return samples, store


@pytest.fixture(scope="module")
def usual(trace_engine, exact_products):
    return _generate(trace_engine)


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("stop_tokens", [(3,), (3, 7, 11)], ids=str)
def test_a_response_ends_at_the_first_of_several_stop_tokens(trace_engine, usual, stop_tokens):
    samples, store = _generate(trace_engine, stop_tokens=stop_tokens)
    ends = {EOD_TOKEN, *stop_tokens}
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}
    for sample, other in zip(samples, usual[0], strict=True):
        cut = next((n for n, t in enumerate(other.response_tokens, 1) if t in ends), 12)
        assert sample.response_tokens == other.response_tokens[:cut]
        stopped = sample.response_tokens[-1] in ends
        assert sample.finish_reason == ("stop" if stopped else "length")
        for place, record in records_of(store, sample).items():
            rows = records_of(usual[1], other)[place].payload[: sample.num_rows]
            assert torch.equal(record.payload, rows), place


def test_a_stop_token_that_is_no_token_is_refused(trace_engine):
    with pytest.raises(ValueError, match=r"stop_tokens must lie in 0 to 15; got \(3, 16\)"):
        _generate(trace_engine, stop_tokens=(3, 16))


def test_samples_of_a_prompt_lie_next_to_each_other_and_differ(trace_engine):
    ids = [f"{prompt}/{n}" for prompt in "abc" for n in range(4)]
    samples, _ = _generate(trace_engine, PROMPTS[:3], ids, samples_per_prompt=4)
    assert [sample.sample_id for sample in samples] == ids
    for number, prompt in enumerate(PROMPTS[:3]):
        group = samples[4 * number : 4 * number + 4]
        assert {sample.prompt_tokens for sample in group} == {tuple(prompt)}
        assert len({sample.response_tokens for sample in group}) > 1


def test_other_names_than_samples_are_refused(trace_engine):
    message = r"6 prompts \(3 of 2 samples each\), but 3 sample ids"
    with pytest.raises(ValueError, match=message):
        _generate(trace_engine, PROMPTS[:3], ["a", "b", "c"], samples_per_prompt=2)


@pytest.mark.usefixtures("exact_products")
def test_seeds_of_samples_take_the_place_of_their_names(trace_engine):
    seeds = [5, 2**64 - 1, 7]
    samples, store = _generate(trace_engine, PROMPTS[:3], ["a", "b", "c"], seeds=seeds)
    others = _generate(trace_engine, PROMPTS[2:3] * 2, ["d", "e"], seeds=[7, 5])
    assert_same_rollout((others[0][:1], others[1]), (samples[2:], store))
    assert others[0][1].tokens != samples[2].tokens
    with pytest.raises(ValueError, match="2 seeds, but 3 sample ids"):
        _generate(trace_engine, PROMPTS[:3], ["a", "b", "c"], seeds=[1, 2])


@pytest.mark.usefixtures("exact_products")
def test_every_token_is_streamed_once_in_order_with_its_logprob(trace_engine, usual):
    steps = []
    samples, store = _generate(trace_engine, on_tokens=lambda tokens: steps.append(list(tokens)))
    assert_same_rollout((samples, store), usual)
    for sample in samples:
        told = [one for step in steps for one in step if one.sample_id == sample.sample_id]
        assert [one.index for one in told] == list(range(len(sample.response_tokens)))
        assert tuple(one.token for one in told) == sample.response_tokens
        assert [one.logprob for one in told] == sample.logprobs.tolist()
    assert len(steps) == 12
    assert len(steps[0]) == len(PROMPTS)


def _abort_at(engine, names, *, token: int, keep: bool):
    """Aborts samples when the first of them has so many tokens."""

    def on_tokens(tokens):
        if any(one.sample_id == names[0] and one.index == token - 1 for one in tokens):
            engine.abort(names, keep=keep)

    return on_tokens


@pytest.mark.usefixtures("exact_products")
def test_an_aborted_sample_leaves_neither_sample_nor_hints(trace_engine, usual):
    on_tokens = _abort_at(trace_engine, ["s2", "s5"], token=3, keep=False)
    samples, store = _generate(trace_engine, on_tokens=on_tokens)
    others = [sample for sample in usual[0] if sample.sample_id not in ("s2", "s5")]
    assert_same_rollout((samples, store), (others, usual[1]))
    assert set(store.sample_ids()) == {sample.sample_id for sample in others}
    assert trace_engine.report.num_aborted == 2
    assert trace_engine.report.num_samples == len(PROMPTS) - 2


@pytest.mark.usefixtures("exact_products")
def test_an_aborted_sample_that_is_kept_ends_with_the_running_step(trace_engine, usual):
    on_tokens = _abort_at(trace_engine, ["s2"], token=3, keep=True)
    samples, store = _generate(trace_engine, on_tokens=on_tokens)
    kept, whole = samples[2], usual[0][2]
    assert (kept.finish_reason, kept.response_tokens) == ("abort", whole.response_tokens[:4])
    for kind in RecordKind:
        assert store.places("s2", kind) == usual[1].places("s2", kind)
    for place, record in records_of(store, kept).items():
        rows = records_of(usual[1], whole)[place].payload[: kept.num_rows]
        assert torch.equal(record.payload, rows), place
    assert trace_engine.report.num_aborted == 1
    assert trace_engine.report.finish_reasons["abort"] == 1


def test_samples_that_wait_can_be_aborted(weights):
    engine = tiny_engine(weights, hint_layers="all", max_requests=2)
    on_tokens = _abort_at(engine, ["s0", "s6", "s7"], token=1, keep=True)
    samples, store = _generate(engine, on_tokens=on_tokens)
    assert [sample.sample_id for sample in samples] == [f"s{n}" for n in range(6)]
    assert set(store.sample_ids()) == {sample.sample_id for sample in samples}


def test_a_sample_that_was_evicted_can_be_aborted_and_kept(weights):
    """The cache holds four pages, and each of the two samples comes to need a third."""
    engine = tiny_engine(
        weights, hint_layers="all", eod_token=99, limits={"cache_tokens": 64}, max_requests=2
    )
    told: list[str] = []

    def on_tokens(tokens):
        told.extend(one.sample_id for one in tokens)
        if len(told) == 40:
            engine.abort(["s0", "s1"], keep=True)

    samples, store = _generate(engine, [[1] * 15, [2] * 15], on_tokens=on_tokens, max_new_tokens=49)
    assert engine.report.num_evictions == 1
    assert [sample.finish_reason for sample in samples] == ["abort", "abort"]
    assert sorted(len(sample.tokens) for sample in samples) == [33, 38]
    for sample in samples:
        records = records_of(store, sample)
        assert {record.num_rows for record in records.values()} == {sample.num_rows}


def test_only_samples_of_a_running_rollout_can_be_aborted(trace_engine):
    with pytest.raises(RuntimeError, match="no rollout is running"):
        trace_engine.abort(["s0"])

    with pytest.raises(ValueError, match="sample x cannot be aborted: it is not of this rollout"):
        _generate(trace_engine, on_tokens=lambda tokens: trace_engine.abort(["x"]))
    # The failure left nothing behind.
    assert len(_generate(trace_engine)[0]) == len(PROMPTS)


def test_one_string_is_no_list_of_samples_to_abort(trace_engine):
    with pytest.raises(ValueError, match=r"several names; got one string, give \['s0'\]"):
        _generate(trace_engine, on_tokens=lambda tokens: trace_engine.abort("s0"))


GIVEN = (4, 9)


def _two_turns(turn):
    assert turn.tokens[-1] == EOD_TOKEN
    return None if turn.number > 1 else GIVEN


@pytest.fixture(scope="module")
def turns(trace_engine):
    """Samples of which some stop twice."""
    prompts = random_prompts(24, longest=20, seed=8)
    return _generate(trace_engine, prompts, max_new_tokens=20, next_turn=_two_turns, top_logprobs=3)


@pytest.mark.usefixtures("exact_products")
def test_a_turn_goes_on_with_the_tokens_that_are_given(trace_engine, turns):
    prompts = random_prompts(24, longest=20, seed=8)
    single, _ = _generate(trace_engine, prompts, max_new_tokens=20)
    samples, _ = turns
    assert any(s.given is not None for s in samples)
    for sample, first in zip(samples, single, strict=True):
        length = len(first.response_tokens)
        assert sample.response_tokens[:length] == first.response_tokens
        if first.finish_reason == "length" or sample.given is None:
            continue
        assert sample.response_tokens[length : length + 2] == GIVEN
        given = sample.given.nonzero()[:, 0].tolist()
        assert given == [length, length + 1]
        assert sample.logprobs[given].tolist() == [0.0, 0.0]
        assert sample.top_logprobs is not None
        assert (sample.top_logprobs[given] == -torch.inf).all()
        assert sample.num_sampled <= 20


def test_the_end_of_a_turn_and_given_tokens_have_rows(turns):
    samples, store = turns
    for sample in samples:
        records = records_of(store, sample)
        assert {record.num_rows for record in records.values()} == {len(sample.tokens) - 1}
        assert sample.routing.shape[0] == len(sample.tokens) - 1


@pytest.mark.usefixtures("exact_products")
def test_the_rows_of_a_turn_are_those_that_its_tokens_were_sampled_with(trace_engine, turns):
    prompts = random_prompts(24, longest=20, seed=8)
    single, single_store = _generate(trace_engine, prompts, max_new_tokens=20)
    samples, store = turns
    compared = 0
    for sample, first in zip(samples, single, strict=True):
        for place, record in records_of(store, sample).items():
            rows = record.payload[: first.num_rows]
            assert torch.equal(rows, records_of(single_store, first)[place].payload)
            compared += len(rows) < record.num_rows
    assert compared > 0


@pytest.mark.parametrize("more", [None, GIVEN], ids=["ends", "goes_on"])
@pytest.mark.parametrize("keep", [True, False], ids=["kept", "dropped"])
@pytest.mark.usefixtures("exact_products")
def test_a_sample_can_be_aborted_by_its_own_turn(trace_engine, usual, keep, more):
    stopped = [sample for sample in usual[0] if sample.finish_reason == "stop"]
    assert stopped, "else no turn is asked for"

    def next_turn(turn):
        trace_engine.abort([turn.sample_id], keep=keep)
        return more

    samples, store = _generate(trace_engine, next_turn=next_turn)
    by_name = {sample.sample_id: sample for sample in samples}
    assert trace_engine.report.num_aborted == len(stopped)
    assert set(store.sample_ids()) == set(by_name)
    for sample in stopped:
        if keep:
            kept = by_name[sample.sample_id]
            assert (kept.finish_reason, kept.tokens) == ("abort", sample.tokens)
        else:
            assert sample.sample_id not in by_name


def test_the_tokens_of_a_turn_may_be_a_tensor(trace_engine):
    """Of the one token 0, which is no truth."""
    given = [
        _generate(trace_engine, max_new_tokens=20, next_turn=lambda turn, more=more: more)[0]
        for more in ([0], torch.tensor([0]))
    ]
    assert [sample.tokens for sample in given[0]] == [sample.tokens for sample in given[1]]
    assert any(sample.given is not None for sample in given[0])


def test_tokens_of_a_turn_outside_the_vocabulary_are_refused(trace_engine):
    with pytest.raises(ValueError, match="next turn must lie in 0 to 15; got 4 to 16"):
        _generate(trace_engine, max_new_tokens=30, next_turn=lambda turn: [4, 16])


def test_a_turn_without_room_ends_the_sample(trace_engine):
    samples, _ = _generate(
        trace_engine, random_prompts(8, seed=8), max_new_tokens=30, next_turn=lambda turn: [1] * 60
    )
    assert all(sample.given is None for sample in samples)
    assert "stop" in {sample.finish_reason for sample in samples}
