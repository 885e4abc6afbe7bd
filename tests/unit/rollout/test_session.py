"""Samples in flight over pushes of weights: versions of tokens and rows, records, states."""

import pytest
import torch

from megatron_trace.hints import HintKey, HintStore, Site
from megatron_trace.rollout import SamplingSettings
from megatron_trace.testing.tiny_rollout import (
    VOCAB_SIZE,
    random_prompts,
    roll_out,
    tiny_engine,
    tiny_weights,
)

SAMPLING = SamplingSettings(max_new_tokens=9)
PROMPTS = random_prompts(6, shortest=3, longest=9)
NAMES = [f"s{n}" for n in range(len(PROMPTS))]
ON_PUSH = ["keep", "recompute"]


@pytest.fixture(scope="module")
def versions():
    """Weights of three versions, so far apart that log-probs differ."""
    return [tiny_weights(seed=seed) for seed in (1, 2, 3)]


@pytest.fixture(scope="module")
def engine(versions):
    # No token ends a sample, so that all have nine.
    return tiny_engine(versions[0], hint_layers="all", max_requests=4, eod_token=VOCAB_SIZE)


@pytest.fixture(autouse=True)
def _first_weights(engine, versions):
    yield
    if engine.session is not None:
        engine.session.close()
    engine.push_weights(versions[0], policy_version=0)


def _in_flight(engine, on_push, store=None):
    session = engine.open_session(store=store, sampling=SAMPLING, on_push=on_push)
    session.add(PROMPTS, NAMES, seed=0)
    return session


def _steps(session, count):
    for _ in range(count):
        session.step()


def _finish(session):
    while session.num_unfinished:
        session.step()
    return session.take(NAMES)


def _over_two_pushes(engine, versions, on_push, store=None):
    """Six samples on four requests: two begin only after the pushes, which are amid the others."""
    session = _in_flight(engine, on_push, store)
    for version in (1, 2):
        _steps(session, 3)
        engine.push_weights(versions[version], policy_version=version)
    return _finish(session)


def test_without_a_push_the_samples_are_those_of_generate(engine):
    expected, stored = roll_out(engine, PROMPTS, sample_ids=NAMES, max_new_tokens=9)
    store = HintStore()
    samples = _finish(_in_flight(engine, "keep", store))
    engine.session.close()
    for mine, other in zip(samples, expected, strict=True):
        assert mine.response_tokens == other.response_tokens
        assert torch.equal(mine.logprobs, other.logprobs)
        assert torch.equal(mine.routing, other.routing)
        assert mine.version_spans is None is mine.record_spans
        for place in stored.places(mine.sample_id):
            key = HintKey(mine.sample_id, *place, 0, mine.settings_digest)
            hints = [s.get(key, num_rows=mine.num_rows) for s in (store, stored)]
            assert torch.equal(hints[0].payload, hints[1].payload)
            assert torch.equal(hints[0].scale_bytes, hints[1].scale_bytes)


def test_kept_rows_and_tokens_are_of_the_versions_that_served(engine, versions):
    samples = _over_two_pushes(engine, versions, "keep")
    for sample in samples[:4]:
        assert sample.policy_version == 0
        first = len(sample.prompt_tokens) - 1
        assert [span[:2] for span in sample.version_spans] == [(0, 0), (3, 1), (6, 2)]
        assert torch.equal(sample.row_versions[first:], sample.token_versions)
        assert set(sample.row_versions[:first].tolist()) <= {0}
    assert all(sample.version_spans is None for sample in samples[4:])
    assert {sample.policy_version for sample in samples[4:]} == {2}


def test_recomputed_rows_are_of_the_last_version_and_tokens_of_those_that_served(engine, versions):
    samples = _over_two_pushes(engine, versions, "recompute")
    for sample in samples[:4]:
        assert [span[:2] for span in sample.version_spans] == [(0, 0), (3, 1), (6, 2)]
        assert [span[:2] for span in sample.record_spans] == [(0, 2)]


def test_each_span_has_the_digest_of_its_weights(engine, versions):
    sample = _over_two_pushes(engine, versions, "keep")[0]
    digests = [engine.push_weights(versions[n], policy_version=9 + n) for n in range(3)]
    assert [span.weights_digest for span in sample.version_spans] == digests
    assert len(set(digests)) == 3


def test_recomputed_records_are_those_of_a_rollout_that_computes_the_sample_at_once(
    engine, versions
):
    store = HintStore()
    sample = _over_two_pushes(engine, versions, "recompute", store)[0]
    stop = len(sample.prompt_tokens) + 5
    engine.session.close()
    engine.push_weights(versions[2], policy_version=2)
    (again,), other = roll_out(engine, [sample.tokens[: stop + 1]], max_new_tokens=1)
    compared = 0
    for place in store.places(sample.sample_id):
        mine = store.get(
            HintKey(sample.sample_id, *place, 0, sample.settings_digest), num_rows=sample.num_rows
        )
        theirs = other.get(
            HintKey(again.sample_id, *place, 2, again.settings_digest), num_rows=again.num_rows
        )
        assert torch.equal(mine.payload[:stop], theirs.payload[:stop]), place
        assert torch.equal(mine.scale_bytes[:stop], theirs.scale_bytes[:stop]), place
        compared += 1
    assert compared == 6  # fc1, k and v of two layers


def test_kept_records_before_a_push_are_those_without_it(engine, versions):
    store = HintStore()
    pushed = _over_two_pushes(engine, versions, "keep", store)[0]
    engine.session.close()
    engine.push_weights(versions[0], policy_version=0)
    (without, *_), other = roll_out(engine, PROMPTS, sample_ids=NAMES, max_new_tokens=9)
    rows = len(pushed.prompt_tokens) + 2
    key = HintKey("s0", 1, Site.K, 0, pushed.settings_digest)
    mine = store.get(key, num_rows=pushed.num_rows).payload
    theirs = other.get(key, num_rows=without.num_rows).payload
    assert pushed.response_tokens[:3] == without.response_tokens[:3]
    assert torch.equal(mine[:rows], theirs[:rows])
    assert not torch.equal(mine[rows], theirs[rows])


@pytest.mark.parametrize("on_push", ON_PUSH)
def test_log_probs_before_a_push_stay_as_sampled(engine, versions, on_push):
    expected, _ = roll_out(engine, PROMPTS, sample_ids=NAMES, max_new_tokens=9)
    samples = _over_two_pushes(engine, versions, on_push)
    for mine, other in zip(samples[:4], expected, strict=False):
        assert torch.equal(mine.logprobs[:3], other.logprobs[:3])
        assert not torch.equal(mine.logprobs[3:], other.logprobs[3:])


@pytest.mark.parametrize("on_push", ON_PUSH)
def test_evicted_and_chunked_samples_keep_their_versions(versions, on_push):
    """A cache of four pages for requests of up to three, and steps shorter than the prompts."""
    engine = tiny_engine(
        versions[0],
        hint_layers="all",
        max_requests=4,
        limits={"cache_tokens": 64, "max_step_tokens": 64},
    )
    prompts = random_prompts(4, shortest=20, longest=28)
    session = engine.open_session(
        store=HintStore(), sampling=SamplingSettings(max_new_tokens=20), on_push=on_push
    )
    session.add(prompts, NAMES[:4], seed=0)
    _steps(session, 8)
    engine.push_weights(versions[1], policy_version=1)
    while session.num_unfinished:
        session.step()
    samples = session.take(NAMES[:4])
    first = samples[0]
    assert [span.policy_version for span in first.version_spans] == [0, 1]
    if on_push == "keep":
        begin = len(first.prompt_tokens) - 1
        assert torch.equal(first.row_versions[begin:], first.token_versions)
    else:
        assert set(first.row_versions.tolist()) == {1}


def test_a_sample_is_over_when_it_can_be_taken(engine):
    session = _in_flight(engine, "keep")
    with pytest.raises(RuntimeError, match="take needs samples that are over"):
        session.take(NAMES[:1])
    while not session.is_over(NAMES[:4]):
        session.step()
    assert session.num_in_flight == 6
    assert [sample.sample_id for sample in session.take(NAMES[:4])] == NAMES[:4]
    assert session.num_in_flight == session.num_unfinished == 2


def test_what_would_change_samples_in_flight_is_refused(engine, versions):
    _in_flight(engine, "keep")
    for call in (
        lambda: engine.load_weights(versions[1]),
        lambda: engine.use_settings(engine.settings),
        lambda: engine.calibrate([]),
        lambda: engine.recalibrate(versions[1], [], 1),
        lambda: roll_out(engine, PROMPTS),
        lambda: engine.open_session(store=None, sampling=SAMPLING, on_push="keep"),
    ):
        with pytest.raises(RuntimeError, match="while a session is open"):
            call()
    with pytest.raises(RuntimeError, match="a session is closed as a whole"):
        engine.abort(NAMES[:1])
    with pytest.raises(ValueError, match="policy version 0 amid a session that has version 0"):
        engine.push_weights(versions[1], policy_version=0)


def test_a_prefix_cache_is_refused(versions):
    engine = tiny_engine(versions[0], limits={"prefix_caching": True})
    with pytest.raises(ValueError, match="contradicts prefix_caching"):
        engine.open_session(store=None, sampling=SAMPLING, on_push="keep")


def test_an_error_of_the_engine_closes_the_session(engine, versions):
    session = _in_flight(engine, "keep")
    session.step()
    name = "output_layer.weight"
    broken = versions[0] | {name: torch.full_like(versions[0][name], torch.nan)}
    engine.push_weights(broken, policy_version=1)
    with pytest.raises(RuntimeError, match="NaN or Inf"):
        session.step()
    assert engine.session is None
    with pytest.raises(RuntimeError, match="the session is closed"):
        session.step()
