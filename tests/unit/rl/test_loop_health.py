"""Alarms inside Megatron's loop: which it takes, what they read, how samples are left out."""

import math

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from megatron_trace.config import RecordedConfig, TraceConfig
from megatron_trace.hints import HintFilesWriter, Site
from megatron_trace.metrics import CodeMismatch, logprob_gap
from megatron_trace.rl.health import MEASURES
from megatron_trace.rl.loop_health import LoopHealth
from megatron_trace.rl.loop_record import SampleOrigin
from megatron_trace.rl.losses import LossSums
from megatron_trace.rl.recorded import RecordedTraining
from megatron_trace.rl.rollout_folder import Reward, commit_rollouts
from megatron_trace.rl_config import HealthConfig
from megatron_trace.testing.single_process import single_process
from megatron_trace.testing.tiny_trainer import recorded_rollout, tiny_trainer
from megatron_trace.training import gradients
from megatron_trace.training.megatron_model import trace_sites
from megatron_trace.training.report import ActivationDifference, SiteReport, TraceReport
from megatron_trace.training.rounding import NonFiniteError

DIAGNOSED = TraceConfig(hint_layers="all", diagnostic_share=1.0)
# What the quantisers of a step counted.
REPORT = TraceReport(
    sites={
        Site.K: SiteReport(calls=1, guided=90, rejected=6, missing=4, blocks=50),
        Site.FC1: SiteReport(calls=1, guided=100, blocks=100, saturated_blocks=3),
    },
    routing_compared=40,
    routing_different=2,
    code_mismatch={
        Site.K: CodeMismatch(
            values=100, rtn_different=20, blocks=10, scale_bytes_different=1, guided_values=100
        )
    },
    activation_difference={(1, Site.K): ActivationDifference(trained=4, nearest=9, rollout=16)},
)
# Of the gaps .1, -.3 and .2 of three tokens.
SUMS = LossSums(
    num_tokens=3, clipped=1.5, ratio=3.0, ratio_squared=3.75, surprise=6.0, amplifying=4, damping=2
)


INDICES = {"part": torch.tensor([0, 0]), "sample": torch.tensor([0, 1])}


def health_of(*texts, trace=DIAGNOSED, saves=True):
    return LoopHealth(HealthConfig(alarms=texts), trace, saves=saves)


@pytest.fixture(scope="module")
def rolled():
    with single_process(seed=0):
        yield recorded_rollout(((5, 3), (3, 2)))


@pytest.fixture
def model(rolled):
    model, sites = tiny_trainer(settings=rolled.settings, dtype=torch.bfloat16)
    object.__setattr__(model, "trace_sites", sites)
    return model


@pytest.fixture
def groups(model):
    return trace_sites(model).groups


@pytest.fixture
def forwarded(rolled, model, tmp_path):
    """Forwards both samples in Megatron's way, with alarms; gives the training, logits and loss."""
    with HintFilesWriter(tmp_path) as files:
        rolled.put_records(files)
        rewards = [
            Reward(sample.sample_id, "g", 2, float(n)) for n, sample in enumerate(rolled.samples)
        ]
        commit_rollouts(files, rolled.samples, rewards, rolled.settings)

    def forward(*texts, max_skipped_steps=3, logs=False):
        trace = TraceConfig(hint_layers="all")
        config = HealthConfig(alarms=texts, max_skipped_steps=max_skipped_steps)
        health = LoopHealth(config, trace, saves=True, logs=logs)
        training = RecordedTraining(trace, RecordedConfig(hint_dir=str(tmp_path)), health=health)
        return training, *training.forward_step(iter([INDICES]), model)

    return forward


@pytest.fixture
def ddp(model):
    """The model inside Megatron's DDP, whose optimizer skips steps with Inf as `main` asks."""
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return DistributedDataParallel(model.config, config, model)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("gap_mean=0.19:stop", 0.2),
        ("gap_max=0.29:stop", 0.3),
        # 98 % of the way from .2 to .3.
        ("gap_p99=0.29:stop", 0.298),
        # exp(d) - 1 - d is .00517 at .1, .04082 at -.3, .02140 at .2.
        ("kl=0.022:stop", 0.02246),
        # The root of 1.25 - 1.
        ("ratio_spread=0.4:stop", 0.5),
        ("clipped_share=0.4:stop", 0.5),
        ("entropy=3:stop", 2.0),
        ("rho_asym=1.85:stop", 2.0),
        ("coverage=0.96:stop", 0.95),
        ("guard_rejections=0.02:stop", 0.03),
        ("saturation=0.02:stop", 0.03),
        ("router_disagreement=0.04:stop", 0.05),
        ("nearest_mismatch=0.1:stop", 0.2),
        ("scale_mismatch=0.05:stop", 0.1),
        # The root of 4 / 16, and of 9 / 16.
        ("d_act=0.4:stop", 0.5),
        ("d_act_nearest=0.4:stop", 0.75),
    ],
)
def test_a_step_raises_alarms_on_hand_computed_values_and_then_forgets(groups, text, value):
    health = health_of(text)
    health.add(torch.tensor([0.1]), LossSums(num_tokens=1, clipped=0.5), groups)
    rest = LossSums(**{**vars(SUMS), "num_tokens": 2, "clipped": 1.0})
    health.add(torch.tensor([-0.3, 0.2]), rest, groups)
    (found,) = health.check(7, REPORT)
    assert found["value"] == pytest.approx(value, abs=1e-5)
    assert health.stop_reason.startswith(f"{found['alarm']} is {found['value']:.4g} (threshold ")
    health.check(8, TraceReport())
    assert health.stop_reason == ""


def test_every_alarm_of_the_loop_reads_what_a_step_has(groups):
    names = [name for name, measure in MEASURES.items() if measure.in_loop]
    health = health_of(*(f"{name}=-1e9:warn" for name in names))
    health.add(torch.tensor([0.1, -0.3, 0.2]), SUMS, groups)
    below = {name for name in names if MEASURES[name].below}
    assert {alarm["alarm"] for alarm in health.check(7, REPORT)} == set(names) - below


def test_a_step_without_a_token_raises_no_alarm_of_the_gap(rolled):
    health = health_of(*(f"gap_{kind}=-1:stop" for kind in ("mean", "p99", "max")))
    assert health.check(7, TraceReport()) == []


@pytest.mark.parametrize(
    ("text", "trace", "message"),
    [
        ("lag=1:warn", DIAGNOSED, "a step there has no lag, but code_mismatch"),
        ("degenerate=1:warn", DIAGNOSED, "a step there has no degenerate"),
        ("kl=1:bf16", DIAGNOSED, "go on in their precision; choose warn, drop or stop"),
        ("code_mismatch=1:warn", TraceConfig(), "it needs diagnostics"),
        ("coverage=1:warn", TraceConfig(method="qat"), "it needs hints"),
        ("kl=1:panic", DIAGNOSED, "'panic' is none of warn, drop, bf16, stop"),
    ],
)
def test_an_alarm_that_cannot_be_in_the_loop_is_refused(text, trace, message):
    with pytest.raises(ValueError, match=message):
        health_of(text, trace=trace)


def test_a_stop_without_checkpoints_is_refused():
    with pytest.raises(ValueError, match=r"kl=1:stop cannot be in Megatron's loop.*give --save"):
        health_of("kl=1:stop", saves=False)
    health_of("kl=1:warn", saves=False)


@pytest.mark.parametrize("method", ["bf16", "qat", "quads", "trace"])
def test_default_alarms_that_the_loop_cannot_raise_are_left_out(method):
    health = LoopHealth(HealthConfig(), TraceConfig(method=method), saves=False)
    assert [alarm.name for alarm in health.alarms] == ["gap_mean", "saturation", "guard_rejections"]


def test_a_training_step_ends_with_its_alarms(forwarded):
    training, logits, loss = forwarded("entropy=1e9:stop", "gap_max=1e9:stop")
    loss(logits)
    assert training.end_step(3, []).startswith("entropy is ")
    assert training.end_step(4, []) == "", "no token was added since"


def test_a_logged_step_has_what_an_rl_run_logs_also_without_alarms(forwarded):
    training, logits, loss = forwarded("none", logs=True)
    loss(logits)
    assert training.health is not None
    assert training.end_step(3, []) == ""
    record = training.health.take_record()
    # Samples of three and two tokens, with rewards 0 and 1.
    assert (record["samples"], record["reward"], record["dropped_samples"]) == (2, 0.5, 0)
    assert record["groups_with_spread"] == 1.0
    assert (record["response_tokens"], record["response_tokens_max"]) == (2.5, 3)
    assert record["gap"]["num_tokens"] == 5
    assert record["gap"]["mean"] <= record["gap"]["p99"] <= record["gap"]["max"]
    assert record["gap"]["ratio_min"] <= record["gap"]["ratio_mean"] <= record["gap"]["ratio_max"]
    assert record["entropy"] > 0
    assert record["health"]["coverage"] == 1.0
    assert record["health"]["router_disagreement"] is not None
    assert record["quantisers"]["sites"]["fc1"]["guided"] > 0
    assert record["alarms"] == []
    assert 0 < record["seconds"]["wait"] < record["seconds"]["train"]
    assert training.health.take_record() == {}


def test_the_gap_of_a_logged_step_is_that_of_an_rl_run(groups):
    health = LoopHealth(HealthConfig(alarms=("none",)), DIAGNOSED, saves=True, logs=True)
    delta = torch.tensor([0.1, -0.3, 0.2])
    health.add(delta, SUMS, groups)
    health.check(7, REPORT)
    expected = logprob_gap(torch.zeros(3), delta, torch.ones(3, dtype=torch.bool)).as_dict()
    assert health.take_record()["gap"] == pytest.approx(expected, rel=1e-6)


def test_lags_are_logged_where_samples_have_one(groups):
    health = LoopHealth(HealthConfig(alarms=("none",)), TraceConfig(), saves=True, logs=True)
    mask, dropped = torch.ones(2, 3, dtype=torch.bool), torch.tensor([True, False])
    for lags in ((0, 2), (1, 1)):
        origin = SampleOrigin((0.0, 1.0), lags, spreads=(True, False))
        health.add_samples(origin, mask, dropped, groups)
    health.check(7, TraceReport())
    record = health.take_record()
    assert (record["health"]["lag_mean"], record["health"]["lag_max"]) == (1.0, 2)
    assert (record["samples"], record["dropped_samples"]) == (4, 2)
    assert record["groups_with_spread"] == 0.5


def test_an_evaluation_raises_no_alarm_and_drops_nothing(forwarded, model):
    model.eval()
    training, logits, loss = forwarded("gap_max=-1:drop", "gap_mean=-1:stop")
    value, _, report = loss(logits)
    assert (value != 0, report["dropped"].tolist()) == (True, [0.0, 5.0])
    assert training.end_step(3, []) == ""
    model.train()


def test_a_dropped_sample_adds_nothing_but_counts_in_the_mean(forwarded, model):
    _, logits, loss = forwarded("gap_max=-1:drop")
    value, counted, report = loss(logits)
    assert (value.item(), int(counted), report["dropped"].tolist()) == (0.0, 5, [5.0, 5.0])
    assert report["log-prob gap"][1] == 5
    value.backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("broken", ["decoder.layers.1.mlp.router.weight", "output_layer.weight"])
def test_a_step_with_nan_leaves_gradients_that_the_optimizer_skips_and_the_next_is_judged_again(
    forwarded, model, ddp, broken
):
    """NaN is seen at a quantised site after the router, or by the loss alone after the head."""
    weight = model.get_parameter(broken)
    whole = weight.data.clone()
    weight.data[0] = math.nan
    training, logits, loss = forwarded("gap_mean=1e9:stop", max_skipped_steps=1)
    config = OptimizerConfig(lr=1.0, bf16=True, params_dtype=torch.bfloat16, loss_scale=1.0)
    optimizer = get_megatron_optimizer(config, [ddp])
    before = [parameter.clone() for parameter in ddp.parameters()]
    reasons = []
    for again in (True, False):
        loss(logits)[0].backward()
        reasons.append(training.end_step(3, [ddp]))
        assert optimizer.step()[0] is False
        training.assert_ran()
        ddp.zero_grad_buffer()
        if again:
            logits, loss = training.forward_step(iter([INDICES]), model)
    assert reasons == ["", "non_finite is 2 (threshold 1)"]
    for a, b in zip(before, ddp.parameters(), strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    weight.data.copy_(whole)
    logits, loss = training.forward_step(iter([INDICES]), model)
    loss(logits)[0].backward()
    assert training.end_step(4, [ddp]) == ""
    training.assert_ran()
    assert "guided" in training.summary()


def test_a_count_of_skipped_steps_is_refused_where_none_can_be_skipped():
    config = HealthConfig(max_skipped_steps=1)
    with pytest.raises(ValueError, match=r"max_skipped_steps=1 has no effect.*without --bf16"):
        LoopHealth(config, DIAGNOSED, saves=True, skips=False)
    health = LoopHealth(HealthConfig(), DIAGNOSED, saves=True, skips=False)
    with pytest.raises(NonFiniteError, match="no token"):
        health.note_non_finite(NonFiniteError("no token"))


def test_nan_in_an_evaluation_is_an_error(forwarded, model):
    model.eval()
    model.output_layer.weight.data[0] = math.nan
    _, logits, loss = forwarded("none")
    with pytest.raises(NonFiniteError, match="must be finite at every response token"):
        loss(logits)
    model.train()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_gradient_that_is_not_finite_is_found(ddp, value):
    ddp.zero_grad_buffer()
    assert gradients.are_finite([ddp])
    ddp.buffers[0].grad_data[-1] = value
    assert not gradients.are_finite([ddp])
