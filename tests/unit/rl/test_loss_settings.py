"""Which objective a method has, what contradicts it, and which samples it takes."""

from types import SimpleNamespace

import pytest
import torch

from megatron_trace.config import TraceConfig
from megatron_trace.rl.objectives.settings import LossSettings, loss_settings
from megatron_trace.rl.run import Progress, RunSettings
from megatron_trace.rl.staleness import StaleSampleError, fresh_samples
from megatron_trace.rl.step import choose
from megatron_trace.rl_config import LossConfig


@pytest.mark.parametrize(
    ("method", "changes", "expected"),
    [
        *[(method, {}, LossSettings()) for method in ("bf16", "qat", "quads", "trace")],
        ("qarl", {}, LossSettings("tbpo", "none", 3e-4, 4e-4, 2.0)),
        (
            "score_centering",
            {},
            LossSettings("score_centering", "tis", importance_cap=2.0, center_top_k=128),
        ),
        (
            "trace",
            {"objective": "score_centering", "correction": "none", "center_top_k": 8},
            LossSettings("score_centering", "none", importance_cap=2.0, center_top_k=8),
        ),
        ("trace", {"objective": "gspo"}, LossSettings("gspo", "tis", 3e-4, 4e-4)),
        ("qat", {"objective": "dapo", "correction": "icepop"}, LossSettings("dapo", "icepop")),
        (
            "qat",
            {"correction": "mis_sequence"},
            LossSettings("grpo", "mis_sequence", importance_cap=2.0),
        ),
        ("qat", {"importance_cap": 3.0}, LossSettings(importance_cap=3.0)),
        ("trace", {"objective": "tbpo"}, LossSettings("tbpo", "none", 3e-4, 4e-4, 2.0)),
    ],
)
def test_what_is_left_out_follows_from_method_and_objective(method, changes, expected):
    assert loss_settings(method, LossConfig(**changes)) == expected


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("qarl", {"objective": "grpo"}, "method=qarl contradicts objective=grpo"),
        ("score_centering", {"objective": "tbpo"}, "method=score_centering contradicts"),
        ("qarl", {"correction": "tis"}, "correction=tis contradicts objective=tbpo"),
        ("qat", {"objective": "tbpo", "correction": "mis_token"}, "they would count twice"),
        ("score_centering", {"correction": "icepop"}, "contradicts objective=score_centering"),
        ("score_centering", {"clip_low": 0.1}, "clip_low=0.1 has no effect"),
        (
            "score_centering",
            {"correction": "none", "importance_cap": 3.0},
            "importance_cap=3.0 has no effect",
        ),
        ("qat", {"correction": "none", "importance_cap": 5.0}, "importance_cap=5.0 has no effect"),
        ("qat", {"importance_floor": 0.5}, "importance_floor=0.5 has no effect"),
        ("qat", {"center_top_k": 8}, "center_top_k=8 has no effect"),
    ],
)
def test_settings_that_contradict_an_objective_are_refused(method, changes, message):
    with pytest.raises(ValueError, match=message):
        loss_settings(method, LossConfig(**changes))
    trace = TraceConfig(method=method)
    with pytest.raises(ValueError, match=message):
        RunSettings(trace=trace, loss=LossConfig(**changes))


@pytest.mark.parametrize(
    "change",
    [
        {"objective": "ppo"},
        {"correction": "clip"},
        {"clip_low": 1.0},
        {"clip_low": -0.1},
        {"clip_high": -0.1},
        {"importance_cap": 0.5},
        {"importance_floor": 1.5},
        {"center_top_k": 0},
        {"max_lag": -1},
        {"stale_samples": "keep"},
        {"stale_samples": "error"},
    ],
)
def test_a_value_out_of_range_is_refused_by_name(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        LossConfig(**change)


def test_samples_within_the_bound_are_fresh():
    versions = {"a": 5, "b": 2, "c": 1, "d": 4}
    assert fresh_samples(versions, 5, LossConfig()) == ["a", "b", "c", "d"]
    assert fresh_samples(versions, 5, LossConfig(max_lag=3)) == ["a", "b", "d"]
    assert fresh_samples(versions, 5, LossConfig(max_lag=0)) == ["a"]


def test_an_older_sample_stops_a_run_that_asks_for_it():
    config = LossConfig(max_lag=3, stale_samples="error")
    with pytest.raises(StaleSampleError, match=r"1 of 2 samples .* oldest is b of version 1"):
        fresh_samples({"a": 5, "b": 1}, 5, config)


def test_a_sample_of_a_later_policy_is_refused():
    with pytest.raises(ValueError, match="sample a is of policy version 6, but version 5"):
        fresh_samples({"a": 6}, 5, LossConfig())


REWARDS = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 1.0]])


def chosen(rewards=REWARDS, versions=(0,) * 8, **loss):
    settings = RunSettings(trace=TraceConfig(method="qat"), loss=LossConfig(**loss))
    run = SimpleNamespace(settings=settings, progress=Progress(policy_version=max(versions)))
    samples = [
        SimpleNamespace(sample_id=str(n), policy_version=version)
        for n, version in enumerate(versions)
    ]
    found = choose(run, samples, rewards)
    return found, [sample.sample_id for sample in found.samples]


def test_grpo_keeps_groups_without_spread_at_an_advantage_of_zero():
    found, names = chosen()
    assert names == list("01234567")
    assert found.advantages[2:6].tolist() == [0.0] * 4
    assert (found.num_stale, found.num_without_spread) == (0, 0)


def test_dapo_leaves_groups_without_spread_out_and_counts_them():
    found, names = chosen(objective="dapo")
    assert names == list("0167")
    # (1 - .5) / (std .7071 + 1e-4)
    assert found.advantages.tolist() == pytest.approx(
        [0.707007, -0.707007, -0.707007, 0.707007], abs=1e-5
    )
    assert found.num_without_spread == 4


def test_dapo_may_leave_nothing():
    found, names = chosen(REWARDS[1:3], versions=(0,) * 4, objective="dapo")
    assert (names, found.advantages.numel(), found.num_without_spread) == ([], 0, 4)


def test_stale_samples_are_dropped_with_the_advantages_of_their_whole_groups():
    found, names = chosen(versions=(3, 0, 3, 3, 3, 3, 1, 3), max_lag=2)
    assert names == list("0234567")
    assert found.advantages[0].item() == pytest.approx(0.707007, abs=1e-5)
    assert found.num_stale == 1
