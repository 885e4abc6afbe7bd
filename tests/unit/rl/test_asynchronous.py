"""Rollouts ahead of the training: the bound, equality with the synchronous run, resuming."""

import dataclasses
import itertools

import pytest
import torch

from megatron_trace.hints import VersionSpan
from megatron_trace.hints.files import HintFiles
from megatron_trace.rl import checkpoint
from megatron_trace.rl.asynchronous import AsyncRollouts, AsyncSettings
from megatron_trace.rl.optimizer import OptimizerSettings
from megatron_trace.rl.run import evaluate
from megatron_trace.rl.staleness import batches_in_reach, version_of, without_stale_tokens
from megatron_trace.rl.step import rl_step
from megatron_trace.rl_config import HealthConfig, LossConfig
from megatron_trace.testing.hint_samples import recorded_sample

IDENTITY = {"method": "trace"}
# Samples of a step are 16: with 12 requests, later steps' samples begin amid it.
AHEAD = {"max_requests": 12, "max_response_tokens": 8}


def comparable(metrics):
    return {key: value for key, value in metrics.items() if key not in ("seconds", "asynchronous")}


def steps(run, rollouts, count):
    return [rollouts.step(run) for _ in range(count)]


def same_weights(run, other):
    theirs = other.named_weights()
    return all(torch.equal(value, theirs[name]) for name, value in run.named_weights().items())


def test_a_batch_is_begun_when_no_sample_of_it_can_be_too_old():
    assert list(batches_in_reach(0, 0, num_batches=9)) == [0]
    assert list(batches_in_reach(4, 3, num_batches=9)) == [4, 5, 6, 7]
    assert list(batches_in_reach(4, 3, num_batches=6)) == [4, 5]
    assert list(batches_in_reach(2, 1, num_batches=9, batches_per_step=2)) == [4, 5, 6, 7]


def test_nothing_is_begun_over_a_step_that_drains():
    settings = AsyncSettings(max_version_lag=3, drain_every=4)
    begun = [list(settings.batches_to_begin(step, num_steps=10)) for step in (0, 2, 3, 4, 8)]
    assert begun == [[0, 1, 2, 3], [2, 3], [3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("method", ["bf16", "trace"])
def test_without_lag_the_run_is_the_synchronous_one_bit_for_bit(started, method):
    synchronous, other = started(method), started(method)
    rollouts = AsyncRollouts(other, AsyncSettings(max_version_lag=0), num_steps=3)
    expected = [comparable(rl_step(synchronous)) for _ in range(3)]
    found = steps(other, rollouts, 3)
    assert [comparable(metrics) for metrics in found] == expected
    assert other.progress == synchronous.progress
    assert same_weights(other, synchronous)
    assert [metrics["asynchronous"]["in_flight"] for metrics in found] == [0, 0, 0]


@pytest.mark.parametrize("on_push", ["keep", "recompute"])
def test_with_lag_samples_of_several_versions_are_trained_fully_guided(started, on_push):
    # At the rate of other tests, 1e-3, the guard refuses hints of weights two steps ago.
    run = started("trace", optimizer=OptimizerSettings(learning_rate=1e-5), **AHEAD)
    settings = AsyncSettings(max_version_lag=2, on_push=on_push, engine_steps_per_update=1)
    found = steps(run, AsyncRollouts(run, settings, num_steps=5), 5)
    reports = [metrics["asynchronous"] for metrics in found]
    assert max(report["spans_max"] for report in reports) >= 2
    assert 2 in [metrics["health"]["lag_max"] for metrics in found]
    assert all(metrics["health"]["lag_max"] <= 2 for metrics in found)
    lags = set(itertools.chain(*(report["lag_tokens"] for report in reports)))
    assert lags >= {"0", "1"}
    assert lags <= {"0", "1", "2"}
    for metrics in found:
        assert metrics["health"]["coverage"] == 1.0
        assert metrics["health"]["guard_rejections"] == 0.0
    assert reports[0]["in_flight"] > 0 == reports[-1]["in_flight"]
    assert run.store.sample_ids() == ()
    assert evaluate(run, run.items[:2]) >= 0  # The engine is free again.


def test_a_run_repeats_bit_for_bit(started):
    settings = AsyncSettings(max_version_lag=2, engine_steps_per_update=1)
    runs = [started("trace", **AHEAD) for _ in range(2)]
    one, two = (steps(run, AsyncRollouts(run, settings, num_steps=4), 4) for run in runs)
    assert [comparable(m) for m in one] == [comparable(m) for m in two]
    assert [m["asynchronous"] for m in one] == [m["asynchronous"] for m in two]
    assert same_weights(*runs)


def test_a_run_that_is_saved_where_it_drains_resumes_bit_for_bit(build, started, tmp_path):
    settings = AsyncSettings(max_version_lag=2, engine_steps_per_update=1, drain_every=3)
    through = started("trace", **AHEAD)
    expected = steps(through, AsyncRollouts(through, settings, num_steps=5), 5)

    first = started("trace", **AHEAD)
    steps(first, AsyncRollouts(first, settings, num_steps=5), 3)
    path = checkpoint.save(first, tmp_path, identity=IDENTITY)
    second = build("trace", **AHEAD)
    checkpoint.resume(second, path, identity=IDENTITY)
    found = steps(second, AsyncRollouts(second, settings, num_steps=5), 2)
    assert [comparable(m) for m in found] == [comparable(m) for m in expected[3:]]
    assert [m["asynchronous"] for m in found] == [m["asynchronous"] for m in expected[3:]]
    assert same_weights(second, through)


def test_a_step_beyond_the_last_is_refused(started):
    run = started("bf16")
    rollouts = AsyncRollouts(run, AsyncSettings(), num_steps=1)
    rollouts.step(run)
    with pytest.raises(ValueError, match="step 1 is beyond the run's num_steps=1"):
        rollouts.step(run)


def test_samples_in_flight_are_not_saved(started, tmp_path):
    run = started("trace", **AHEAD)
    rollouts = AsyncRollouts(run, AsyncSettings(), num_steps=4)
    rollouts.step(run)
    with pytest.raises(ValueError, match="48 samples are in flight, which a checkpoint"):
        checkpoint.save(run, tmp_path, identity=IDENTITY)
    rollouts.abandon()
    checkpoint.save(run, tmp_path, identity=IDENTITY)
    assert rollouts.step(run)["step"] == 1  # Begun anew.


def test_hints_in_files_are_trained_with_too(started, tmp_path):
    memory, files = started("trace", **AHEAD), started("trace", hint_folder=tmp_path, **AHEAD)
    settings = AsyncSettings(max_version_lag=2, engine_steps_per_update=1)
    one, two = (
        [comparable(m) for m in steps(r, AsyncRollouts(r, settings, num_steps=4), 4)]
        for r in (memory, files)
    )
    assert one == two
    assert HintFiles(tmp_path).sample_ids() == ()


def test_too_old_tokens_are_not_counted_where_the_bound_is_by_token(started):
    loss = LossConfig(max_lag=0, stale_by="token")
    run = started("trace", loss=loss, **AHEAD)
    settings = AsyncSettings(max_version_lag=2, engine_steps_per_update=1)
    found = steps(run, AsyncRollouts(run, settings, num_steps=4), 4)
    for metrics in found:
        fresh = metrics["asynchronous"]["lag_tokens"].get("0", 0)
        assert metrics["gap"]["num_tokens"] == fresh
    assert sum(metrics["stale_tokens_dropped"] for metrics in found) > 0


def test_a_sample_of_two_versions_is_as_old_as_the_setting_says():
    sample = recorded_sample("a", policy_version=3).sample
    count = len(sample.response_tokens)
    sample = dataclasses.replace(
        sample,
        version_spans=(VersionSpan(0, 3, "x"), VersionSpan(count - 1, 5, "y")),
        record_spans=(VersionSpan(0, 5, "y"),),
    )
    oldest, token = (LossConfig(max_lag=1, stale_by=by) for by in ("oldest", "token"))
    assert (version_of(sample, oldest), version_of(sample, token)) == (3, 5)
    assert without_stale_tokens(sample, 6, oldest) is sample
    assert without_stale_tokens(sample, 4, token) is sample
    assert without_stale_tokens(sample, 6, token).given.tolist() == [1] * (count - 1) + [0]


def test_what_contradicts_is_refused(started):
    alarms = HealthConfig(alarms=("gap_mean=1:bf16",))
    with pytest.raises(ValueError, match="contradicts an alarm with action bf16"):
        AsyncRollouts(started("trace", health=alarms), AsyncSettings(), num_steps=4)
    strict = LossConfig(max_lag=1, stale_samples="error")
    with pytest.raises(ValueError, match="contradicts max_lag=1 with stale_samples=error"):
        AsyncRollouts(started("trace", loss=strict), AsyncSettings(), num_steps=4)
    with pytest.raises(ValueError, match="drain_every must be >= 0; got -1"):
        AsyncSettings(drain_every=-1)
    with pytest.raises(ValueError, match="max_version_lag=3 has no effect with drain_every=1"):
        AsyncSettings(drain_every=1)
    AsyncSettings(max_version_lag=0, drain_every=1)
