"""Alarms: which are set, when they are raised, and what a run does then."""

import math
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

from megatron_trace.config import TraceConfig
from megatron_trace.rl import checkpoint
from megatron_trace.rl.advantages import group_advantages
from megatron_trace.rl.fallback import fall_back_to_bf16
from megatron_trace.rl.health import (
    MEASURES,
    Alarm,
    must_stop,
    parse_alarms,
    raised,
    require_measurable,
    samples_to_drop,
)
from megatron_trace.rl.health_metrics import health_of, largest_nearest, nearest_growth
from megatron_trace.rl.optimizer import OptimizerSettings
from megatron_trace.rl.run import RunSettings
from megatron_trace.rl.step import rl_step, roll_out, scores_of
from megatron_trace.rl.updates import train
from megatron_trace.rl_config import HealthConfig

METRICS_PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
# A step of a guided run, as far as alarms read it.
RECORD = {
    "step": 7,
    "gap": {"mean": 0.02, "p99": 0.3, "max": 1.5, "kl": 0.001},
    "importance_ratio_std": 0.1,
    "clipped_share": 0.02,
    "importance_masked_share": 0.0,
    "rho_asym": None,
    "entropy": 0.7,
    "response_tokens": 30.0,
    "unfinished": 0.25,
    "grad_norm": 2.0,
    "health": {
        "code_mismatch": {"fc1": 0.001, "k": 0.0},
        "nearest_mismatch": {"fc1": 0.03, "k": 0.05},
        "scale_mismatch": {"fc1": 0.02, "k": 0.01},
        "d_act": {"fc1": {"0": 0.0, "1": 0.01}},
        "d_act_nearest": {"fc1": {"0": 0.1, "1": 0.2}, "k": {"0": None}},
        "nearest_growth": 2.5,
        "lag_max": 3,
        "coverage": 0.9,
        "guard_rejections": 0.1,
        "saturation": {"fc1": 0.0, "v": 0.04},
        "rollout_saturation": 0.01,
        "router_disagreement": 0.06,
        "degenerate": 0.0,
    },
}


def alarms_of(*texts):
    return parse_alarms(HealthConfig(alarms=texts))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("code_mismatch=0.0005:warn", 0.001),
        ("nearest_mismatch=0.04:warn", 0.05),
        ("scale_mismatch=0.01:warn", 0.02),
        ("d_act=0.005:warn", 0.01),
        ("d_act_nearest=0.15:warn", 0.2),
        ("staleness=2:stop", 2.5),
        ("lag=2:bf16", 3),
        ("coverage=0.95:warn", 0.9),
        ("guard_rejections=0.05:warn", 0.1),
        ("saturation=0.03:warn", 0.04),
        ("rollout_saturation=0:warn", 0.01),
        ("gap_mean=0.01:stop", 0.02),
        ("gap_p99=0.2:warn", 0.3),
        ("gap_max=1:warn", 1.5),
        ("kl=1e-4:warn", 0.001),
        ("ratio_spread=0.05:warn", 0.1),
        ("clipped_share=0.01:warn", 0.02),
        ("router_disagreement=0.05:warn", 0.06),
        ("entropy=0.8:warn", 0.7),
        ("response_tokens=20:warn", 30.0),
        ("unfinished=0.2:warn", 0.25),
        ("grad_norm=1:warn", 2.0),
    ],
)
def test_an_alarm_is_raised_beyond_its_threshold_and_not_at_it(text, value):
    (alarm,) = alarms_of(text)
    (found,) = raised([alarm], RECORD)
    expected = {"alarm": alarm.name, "value": value, "threshold": alarm.threshold}
    assert found == expected | {"action": alarm.action}
    assert raised([Alarm(alarm.name, value, alarm.action)], RECORD) == []


def test_what_a_step_does_not_have_raises_no_alarm_and_nan_does():
    assert raised(alarms_of("rho_asym=0:stop"), RECORD) == []
    assert len(raised(alarms_of("grad_norm=1:stop"), RECORD | {"grad_norm": math.nan})) == 1


@pytest.mark.parametrize("layers", [(0.001, math.nan), (math.nan, 0.001)])
def test_a_nan_of_one_layer_raises_an_alarm_wherever_it_stands(layers):
    health = RECORD["health"] | {"d_act": {"fc1": dict(enumerate(layers))}}
    (found,) = raised(alarms_of("d_act=1:stop"), RECORD | {"health": health})
    assert math.isnan(found["value"])


def test_a_run_stops_for_alarms_with_that_action_only():
    alarms = alarms_of("gap_mean=0.01:stop", "kl=0:warn", "lag=1:stop")
    record = RECORD | {"alarms": raised(alarms, RECORD)}
    assert must_stop(record) == "gap_mean is 0.02 (threshold 0.01); lag is 3 (threshold 1)"
    assert must_stop(RECORD | {"alarms": raised(alarms_of("kl=0:warn"), RECORD)}) == ""


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["kl"], "NAME=THRESHOLD:ACTION"),
        (["kl=0.1"], "NAME=THRESHOLD:ACTION"),
        (["loss=1:warn"], "'loss' is none of code_mismatch"),
        (["kl=much:warn"], "the threshold must be a number; got 'much'"),
        (["kl=nan:warn"], "the threshold must be a number; got 'nan'"),
        (["kl=inf:stop"], "the threshold must be a number; got 'inf'"),
        (["kl=1:panic"], "'panic' is none of warn, drop, bf16, stop"),
        (["entropy=1:drop"], "entropy is of a whole step.*gap_mean, gap_max, kl can"),
        (["lag=1:drop"], "set max_lag, which drops old samples"),
        (["kl=1:warn", "kl=2:warn"], "kl with action warn twice"),
    ],
)
def test_an_alarm_that_cannot_be_is_refused(texts, message):
    with pytest.raises(ValueError, match=message):
        RunSettings(trace=TraceConfig(), health=HealthConfig(alarms=tuple(texts)))


@pytest.mark.parametrize(
    ("text", "trace", "needs"),
    [
        ("code_mismatch=0.1:warn", {"method": "qat"}, "diagnostics"),
        ("staleness=3:warn", {"method": "trace"}, "diagnostics"),
        ("coverage=0.1:warn", {"method": "qat"}, "hints"),
        ("saturation=0.1:warn", {"method": "quads"}, "quantisers"),
        ("kl=0.1:bf16", {"method": "bf16"}, "it is in BF16 already"),
    ],
)
def test_an_alarm_that_a_run_can_never_raise_is_refused(text, trace, needs):
    with pytest.raises(ValueError, match=f"alarm {text} has no effect.*{needs}"):
        require_measurable(HealthConfig(alarms=(text,)), TraceConfig(**trace))


@pytest.mark.parametrize("method", ["bf16", "qat", "quads", "trace"])
def test_the_default_alarms_suit_every_method(method):
    require_measurable(HealthConfig(), TraceConfig(method=method))


def test_every_measure_is_explained():
    text = METRICS_PAGE.read_text()
    assert [name for name in MEASURES if f"`{name}`" not in text] == []


def test_none_sets_no_alarm():
    config = HealthConfig(alarms=("none",))
    require_measurable(config, TraceConfig())
    assert parse_alarms(config) == ()


def test_samples_beyond_a_threshold_are_dropped():
    # |delta|: mean .1 and max .2; mean .3 and max .3 (its padding is never read); no tokens.
    delta = torch.tensor([[0.0, -0.2], [0.3, math.nan], [math.nan, math.nan]])
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    for text, expected in (
        ("gap_mean=0.15:drop", [False, True, False]),
        ("gap_max=0.1:drop", [True, True, False]),
        # exp(d) - 1 - d is .0187 at -.2, .0094 on average, and .0499 at .3.
        ("kl=0.009:drop", [True, True, False]),
        ("kl=0.01:drop", [False, True, False]),
        ("kl=0.01:warn", [False, False, False]),
    ):
        assert samples_to_drop(alarms_of(text), delta, mask).tolist() == expected, text


def test_growth_of_the_mismatch_to_nearest_equals_hand_computed_values():
    assert nearest_growth({"nearest_mismatch": {"fc1": 0.03, "k": 0.05}}, 0.02) == 2.5
    assert nearest_growth({"nearest_mismatch": {}}, 0.02) is None
    assert nearest_growth({"nearest_mismatch": {"k": 0.05}}, None) is None
    assert nearest_growth({"nearest_mismatch": {"k": 0.05}}, 0.0) is None


def test_a_step_tells_how_healthy_a_guided_run_is(started):
    run = started("trace", trainer_attention="sdpa", trainer_dtype="fp32")
    record = rl_step(run)
    health = record["health"]
    assert (health["coverage"], health["guard_rejections"]) == (1.0, 0.0)
    assert health["nearest_mismatch"].keys() == {"fc1", "k", "v"}
    assert all(share > 0 for share in health["nearest_mismatch"].values())
    assert max(health["code_mismatch"].values()) < min(health["nearest_mismatch"].values())
    for site, by_layer in health["d_act"].items():
        assert by_layer.keys() == {"0", "1"}
        for layer, share in by_layer.items():
            assert share < 0.2 * health["d_act_nearest"][site][layer]
    assert health["nearest_growth"] == 1.0
    assert 0 <= health["router_disagreement"] < 0.5
    assert (health["lag_mean"], health["lag_max"]) == (0, 0)
    assert record["entropy"] > 0
    assert record["alarms"] == []


def test_old_hints_hide_the_distance_of_the_weights_but_not_from_the_mismatch_to_nearest(started):
    """Trained again and again on one rollout, as with lag.

    Measured: to nearest .005, then .171 of the codes differ; under the old hints 0, then .011.
    """
    run = started("trace", optimizer=OptimizerSettings(learning_rate=1e-4))
    samples, rows = roll_out(run)
    advantages = group_advantages(
        torch.tensor(scores_of(run, samples, rows).rewards).view(len(rows), -1)
    ).flatten()
    nearest, trained = [], []
    for _ in range(5):
        run.sites.reset_report()
        train(run, samples, advantages)
        health = health_of(run.sites.report(), run.engine.report)
        nearest.append(largest_nearest(health))
        trained.append(max(health["code_mismatch"].values()))
    assert nearest_growth(health, nearest[0]) > 2
    assert trained[-1] < 0.2 * nearest[-1]


def test_plain_training_differs_by_what_rounding_to_nearest_gives(started):
    health = rl_step(started("qat", trainer_dtype="fp32"))["health"]
    assert health["d_act"] == health["d_act_nearest"]
    assert health["code_mismatch"] == health["nearest_mismatch"]
    assert health["coverage"] is None


def test_dropped_samples_add_nothing_and_are_counted(started):
    run = started("qat", health=HealthConfig(alarms=("gap_max=-1:drop",)))
    before = {name: value.clone() for name, value in run.named_weights().items()}
    metrics = rl_step(run)
    assert (metrics["dropped_samples"], metrics["loss"], metrics["grad_norm"]) == (16, 0.0, 0.0)
    assert metrics["gap"]["num_tokens"] > 0
    for name, value in run.named_weights().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("files", [False, True], ids=["in memory", "in files"])
@pytest.mark.parametrize("method", ["trace", "qarl"])
def test_an_alarm_lets_a_run_go_on_in_bf16_with_weights_and_optimizer(
    started, tmp_path, method, files
):
    health = HealthConfig(alarms=("grad_norm=0:bf16",))
    run = started(method, health=health, hint_folder=tmp_path if files else None)
    objective = run.settings.objective
    metrics = rl_step(run)
    assert [alarm["action"] for alarm in metrics["alarms"]] == ["bf16"]
    assert (run.settings.trace.method, run.settings.objective) == ("bf16", objective)
    assert run.progress.in_bf16
    second = rl_step(run)
    assert (second["policy_version"], second["alarms"]) == (1, [])
    assert second["quantisers"]["sites"] == {}
    assert second["kv_bytes_per_token"] == second["kv_bytes_per_token_bf16"]
    with pytest.raises(ValueError, match="in BF16 already"):
        fall_back_to_bf16(run)


def test_weights_and_optimizer_state_stay_what_they_were_in_bf16(started):
    def tensors():
        state = run.model.state_dict(), run.optimizer.state_dict()
        return [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]

    run = started("trace")
    rl_step(run)
    before = [tensor.clone() for tensor in tensors()]
    fall_back_to_bf16(run)
    after = tensors()
    # Parameters, FP32 masters, two moments.
    assert len(before) == len(after) > 3 * len(list(run.model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_run_that_went_on_in_bf16_resumes_there(started, build, tmp_path):
    settings = {"health": HealthConfig(alarms=("grad_norm=0:bf16",))}
    run = started("trace", **settings)
    rl_step(run)
    saved = checkpoint.save(run, tmp_path, identity={})
    expected = rl_step(run)
    resumed = build("trace", **settings)
    checkpoint.resume(resumed, saved, identity={})
    assert resumed.settings.trace.method == "bf16"
    assert {**rl_step(resumed), "seconds": 0} == {**expected, "seconds": 0}
