"""The RL step on real parts: Megatron's engine, modules and optimizer, ModelOpt's quantisers."""

import collections
import contextlib
import re
import statistics
import weakref

import pytest
import torch
from torch.utils._pytree import tree_leaves

from megatron_trace.config import TraceConfig
from megatron_trace.hints.types import Site
from megatron_trace.rl import step, updates
from megatron_trace.rl.advantages import group_advantages
from megatron_trace.rl.health import must_stop
from megatron_trace.rl.optimizer import OptimizerSettings
from megatron_trace.rl.own_task import Scores
from megatron_trace.rl.rewards import score_samples
from megatron_trace.rl.run import evaluate
from megatron_trace.rl.step import rl_step, roll_out, scores_of
from megatron_trace.rl.updates import train, training_batches
from megatron_trace.rl_config import HealthConfig, LossConfig
from megatron_trace.rollout import RolloutEngine
from megatron_trace.training.prefetch import MicroBatchPrefetcher
from megatron_trace.training.sites import TraceSites

METHODS = ["bf16", "qat", "qarl", "quads", "score_centering", "trace"]


def weights_of(run):
    return {name: value.clone() for name, value in run.named_weights().items()}


@pytest.mark.parametrize("method", METHODS)
def test_step_trains_and_pushes(started, method):
    run = started(method)
    before = weights_of(run)
    metrics = rl_step(run)
    assert metrics["groups_with_spread"] > 0, "the fixture must give mixed rewards"
    assert metrics["grad_norm"] > 0
    assert any(not torch.equal(value, before[name]) for name, value in weights_of(run).items())
    assert (run.progress.step, run.progress.policy_version, run.progress.prompt_cursor) == (1, 1, 4)
    assert metrics["policy_version"] == 0
    assert rl_step(run)["policy_version"] == 1


@pytest.mark.parametrize("method", METHODS)
def test_quantisers_run_where_the_method_says(started, method):
    run = started(method)
    quantisers = rl_step(run)["quantisers"]
    sites = quantisers["sites"]
    assert (quantisers["weight_uses"] > 0) == (method != "bf16")
    if method in ("bf16", "quads"):
        assert sites == {}
        return
    assert sites.keys() == {str(site) for site in Site}
    assert all(counts["calls"] > 0 for counts in sites.values())
    guided = {site for site, counts in sites.items() if counts["coverage"] == 1.0}
    assert guided == ({"fc1", "k", "v"} if method == "trace" else set())


def test_a_trainer_that_is_not_the_rollouts_model_is_refused_after_the_step(started, monkeypatch):
    run = started("trace")

    def roll_out_then_change(run):
        rolled = roll_out(run)
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.normal_(std=0.02)
        return rolled

    monkeypatch.setattr(step, "roll_out", roll_out_then_change)
    with pytest.raises(RuntimeError, match=r"step 0: hints guided .* of .* rows at site"):
        rl_step(run)
    assert run.progress.policy_version == 0


@pytest.mark.parametrize("in_files", [False, True])
def test_packed_samples_train_as_samples_side_by_side(started, tmp_path, in_files):
    steps = []
    for packed in (False, True):
        folder = {"hint_folder": tmp_path / str(packed)} if in_files else {}
        run = started(
            "trace",
            trainer_attention="sdpa",
            trainer_dtype="fp32",
            pack_samples=packed,
            **folder,
        )
        steps.append(rl_step(run))
    for name in ("loss", "grad_norm", "reward"):
        assert steps[1][name] == pytest.approx(steps[0][name], rel=1e-4), name
    for site, counts in steps[0]["quantisers"]["sites"].items():
        assert steps[1]["quantisers"]["sites"][site]["guided"] == counts["guided"]
        assert steps[1]["quantisers"]["sites"][site]["padding"] == 0
    assert steps[0]["quantisers"]["sites"]["k"]["padding"] > 0


def test_packs_contradict_the_trainers_megatron_attention(started):
    with pytest.raises(ValueError, match="pack_samples contradicts trainer_attention=megatron"):
        started("trace", pack_samples=True)


@pytest.mark.parametrize("objective", ["dapo", "gspo", "tbpo", "score_centering"])
def test_a_guided_run_trains_under_every_objective(started, objective):
    run = started("trace", loss=LossConfig(objective=objective))
    before, metrics = weights_of(run), rl_step(run)
    assert metrics["grad_norm"] > 0
    assert any(not torch.equal(value, before[name]) for name, value in weights_of(run).items())


def test_a_step_whose_groups_have_no_spread_leaves_the_weights_alone(started, monkeypatch):
    """DAPO then has no sample to train on, and nothing is divided by their number.

    Nor is their entropy 0, for which an alarm would stop the run.
    """
    watched = HealthConfig(alarms=("entropy=0.1:stop",))
    run = started("qat", loss=LossConfig(objective="dapo"), health=watched)
    monkeypatch.setattr(step, "scores_of", lambda *_: Scores([1.0] * 16))
    before, metrics = weights_of(run), rl_step(run)
    assert metrics["without_spread_dropped"] == 16
    assert (metrics["loss"], metrics["grad_norm"], metrics["gap"]["num_tokens"]) == (0.0, 0.0, 0)
    assert (metrics["entropy"], metrics["alarms"]) == (None, [])
    for name, value in weights_of(run).items():
        assert torch.equal(value, before[name]), name
    assert run.progress.policy_version == 1
    assert rl_step(run)["step"] == 1


def test_hints_expire_after_the_step(started):
    run = started("trace")
    metrics = rl_step(run)
    # fc1: 128 bits and 8 scale bytes; K and V: 64 bits and 4 bytes each; two layers.
    assert metrics["hint_bytes_per_token"] == 2 * (24 + 12 + 12)
    assert len(run.store) == 0


def test_kv_cache_takes_a_quarter_and_scales(started):
    metrics = rl_step(started("qat"))
    # 2 layers x (K, V) x 2 heads x 32 values: 2 bytes each, or half a byte and 1/16 of a scale.
    assert metrics["kv_bytes_per_token_bf16"] == 512
    assert metrics["kv_bytes_per_token"] == 144


@pytest.mark.parametrize(
    ("changes", "sites", "hint_bytes", "kv_bytes"),
    [
        # Blocks of 32 instead of 16: half the bytes of scales.
        ({"number_format": "mxfp4"}, {"fc1", "fc2", "k", "v"}, 2 * (20 + 10 + 10), 136),
        ({"number_format": "mxfp4_w4a8"}, {"fc1", "fc2", "k", "v"}, 2 * (20 + 10 + 10), 136),
        ({"quantised_parts": "experts"}, {"fc1", "fc2"}, 2 * 24, 512),
        ({"quantised_parts": "kv"}, {"k", "v"}, 2 * (12 + 12), 144),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else None,
)
def test_a_step_in_other_formats_and_with_one_part_quantised(
    started, changes, sites, hint_bytes, kv_bytes
):
    """The push in each step compares the digests of both sides."""
    trace = TraceConfig(hint_layers="all", diagnostic_share=0.5, **changes)
    run = started("trace", trace=trace)
    metrics = rl_step(run)
    assert metrics["quantisers"]["sites"].keys() == sites
    for counts in metrics["quantisers"]["code_mismatch"].values():
        assert counts["unexplained"] == 0
    assert metrics["hint_bytes_per_token"] == hint_bytes
    assert metrics["kv_bytes_per_token"] == kv_bytes


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("quads", {"number_format": "mxfp4"}),
        ("quads", {"quantised_parts": "experts"}),
        ("score_centering", {"number_format": "mxfp4_w4a8"}),
        ("qarl", {"quantised_parts": "kv"}),
    ],
)
def test_the_other_methods_train_and_serve_other_formats(started, method, changes):
    metrics = rl_step(started(method, trace=TraceConfig(method=method, **changes)))
    assert metrics["updates"] == 1
    assert metrics["grad_norm"] > 0
    expected = 512 if changes.get("quantised_parts") == "experts" else 136
    assert metrics["kv_bytes_per_token"] == (144 if method == "qarl" else expected)


def test_every_mismatch_under_guidance_is_explained(started):
    mismatch = rl_step(started("trace"))["quantisers"]["code_mismatch"]
    assert mismatch.keys() == {"fc1", "k", "v"}
    for counts in mismatch.values():
        assert counts["guided_values"] > 0
        assert counts["unexplained"] == 0


def test_same_seed_gives_the_same_run(started):
    first, second = started("trace"), started("trace")
    for _ in range(2):
        a, b = rl_step(first), rl_step(second)
        assert {**a, "seconds": None} == {**b, "seconds": None}
    for name, value in first.named_weights().items():
        assert torch.equal(value, second.named_weights()[name]), name


def test_other_seed_gives_other_samples(started):
    assert rl_step(started("bf16"))["gap"] != rl_step(started("bf16", seed=1))["gap"]


def test_no_two_rollouts_of_two_runs_share_a_sampling_seed(started, monkeypatch):
    generate, seeds = RolloutEngine.generate, []

    def noting_seed(self, *args, seed, **kwargs):
        seeds.append(seed)
        return generate(self, *args, seed=seed, **kwargs)

    monkeypatch.setattr(RolloutEngine, "generate", noting_seed)
    for run in (started("bf16", seed=0), started("bf16", seed=1)):
        rl_step(run)
        rl_step(run)
    assert len(set(seeds)) == len(seeds) == 4


def test_both_sides_use_the_temperature_of_the_run(started):
    """Measured: mean gap 1.3e-6; .097 where only one side divides by it."""
    run = started("bf16", temperature=0.5)
    assert run.settings.sampling().temperature == 0.5
    assert rl_step(run)["gap"]["mean"] <= 0.01


def test_every_sample_has_the_advantage_of_its_own_answer(started, monkeypatch):
    """Rewards and advantages follow the samples' names, whatever order they go through."""
    run, samples, batches = started("bf16", micro_batch_samples=5), [], []
    generate = run.engine.generate

    def noting_samples(*args, **kwargs):
        samples.extend(generate(*args, **kwargs))
        return samples

    def noting_batches(*args):
        made = training_batches(*args)
        batches.extend(made)
        return made

    monkeypatch.setattr(run.engine, "generate", noting_samples)
    monkeypatch.setattr(updates, "training_batches", noting_batches)
    rl_step(run)

    rewards = collections.defaultdict(dict)
    for sample in samples:
        group, row = re.fullmatch(r"(.*/item-(\d+))/sample-\d", sample.sample_id).groups()
        assert list(sample.prompt_tokens) == run.prompts[int(row)]
        (reward,) = score_samples([sample], [run.items[int(row)]], run.tokenizer)
        rewards[group][sample.sample_id] = reward
    expected = {
        sample_id: (reward - statistics.mean(of_group.values()))
        / (statistics.stdev(of_group.values()) + 1e-4)
        for of_group in rewards.values()
        for sample_id, reward in of_group.items()
    }
    got = {
        sample_id: advantage
        for batch in batches
        for sample_id, advantage in zip(
            batch.micro_batch.sample_ids, batch.advantages.tolist(), strict=True
        )
    }
    assert any(got.values()), "no group has different rewards: the test shows nothing"
    assert got == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("micro_batch_samples", [16, 5])
def test_size_of_micro_batches_does_not_matter(started, micro_batch_samples):
    reference, other = started("trace"), started("trace", micro_batch_samples=micro_batch_samples)
    a, b = rl_step(reference), rl_step(other)
    assert a["reward"] == b["reward"]
    # BF16 gradients summed in another order; measured: loss 7e-9, gradient norm 2.2e-4 relative.
    assert b["loss"] == pytest.approx(a["loss"], abs=1e-7)
    assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-3)


def test_one_update_never_clips(started):
    metrics = rl_step(started("trace"))
    assert metrics["clipped_share"] == 0.0
    assert metrics["kl_old"] == 0.0


def test_later_updates_are_compared_with_the_policy_before_the_step(started):
    # Of this seed, a group of the first update has different rewards, so that it changes weights.
    run = started("trace", updates_per_rollout=2, seed=1)
    metrics = rl_step(run)
    assert metrics["kl_old"] > 0.0
    assert run.progress.policy_version == 1


def test_fp32_trainer_agrees_on_the_expert_weights(started):
    run = started("trace", trainer_dtype="fp32")
    rl_step(run)  # pushes, and compares the digests
    assert run.progress.policy_version == 1


@pytest.mark.parametrize("trainer_dtype", ["bf16", "fp32"])
def test_bf16_engine_holds_the_trainers_weights(started, trainer_dtype):
    run = started("bf16", trainer_dtype=trainer_dtype)
    rl_step(run)
    own = run.named_weights()
    for name, value in run.engine.model.named_parameters():
        assert torch.equal(value, own[name].to(torch.bfloat16)), name


def test_push_of_other_weights_is_noticed(started, monkeypatch):
    run = started("trace")
    push = run.engine.push_weights

    def push_scaled(named, policy_version):
        return push({name: value * 1.5 for name, value in named.items()}, policy_version)

    monkeypatch.setattr(run.engine, "push_weights", push_scaled)
    with pytest.raises(RuntimeError, match="policy version 1 the engine's weights have digest"):
        rl_step(run)


def test_gradients_that_are_not_finite_stop_the_run(started, monkeypatch):
    run = started("bf16")
    monkeypatch.setattr(run.optimizer, "step", lambda: (True, float("nan"), None))
    with pytest.raises(RuntimeError, match="step 0: the gradients must be finite; got norm nan"):
        rl_step(run)


def test_without_clipping_the_norm_is_known_all_the_same(started):
    """Megatron computes none at clip_grad=0; the norm is that before clipping."""
    clipped = rl_step(started("trace"))
    unclipped = rl_step(started("trace", optimizer=OptimizerSettings(max_grad_norm=0.0)))
    assert unclipped["grad_norm"] == clipped["grad_norm"] > 0


def optimizer_state_of(run):
    leaves = tree_leaves(run.optimizer.state_dict())
    return [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_updates_with_nan_gradients_are_skipped_and_counted_up_to_a_number(started, max_grad_norm):
    run = started(
        "bf16",
        optimizer=OptimizerSettings(max_grad_norm=max_grad_norm),
        health=HealthConfig(max_skipped_steps=1),
    )
    rl_step(run)
    before, state = weights_of(run), optimizer_state_of(run)
    weight = dict(run.model.named_parameters())["output_layer.weight"]
    spoiling = weight.register_hook(lambda grad: grad * float("nan"))
    first, second = rl_step(run), rl_step(run)
    for name, value in weights_of(run).items():
        assert torch.equal(value, before[name]), name
    assert len(state) > 2 * len(before)
    for value, other in zip(optimizer_state_of(run), state, strict=True):
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
    assert [of["skipped_updates"] for of in (first, second)] == [1, 1]
    assert [of["health"]["skipped_updates"] for of in (first, second)] == [1, 2]
    assert must_stop(first) == ""
    assert must_stop(second) == "non_finite is 2 (threshold 1)"
    spoiling.remove()
    assert rl_step(run)["grad_norm"] > 0
    assert any(not torch.equal(value, before[name]) for name, value in weights_of(run).items())
    assert run.progress.num_updates == 2


@pytest.mark.parametrize("updates", [1, 2])
def test_an_activation_that_is_nan_skips_every_update_of_its_step_and_is_named(
    started, updates, caplog
):
    run = started("qat", updates_per_rollout=updates)
    samples, rows = roll_out(run)
    advantages = group_advantages(
        torch.tensor(scores_of(run, samples, rows).rewards).view(len(rows), -1)
    ).flatten()
    weight = dict(run.model.named_parameters())["embedding.word_embeddings.weight"]
    with torch.no_grad():
        weight.fill_(float("nan"))
    update = train(run, samples, advantages)
    assert (update.num_skipped, update.losses) == (updates, [])
    assert "nothing is updated: nan at layer 0, site k, sample " in caplog.text


def test_a_loss_that_is_not_finite_skips_the_update(started, monkeypatch):
    run = started("qat")
    monkeypatch.setattr(
        step, "advantages_of_rewarded", lambda rewards: torch.full_like(rewards, float("inf"))
    )
    before, metrics = weights_of(run), rl_step(run)
    assert (metrics["skipped_updates"], metrics["updates"], metrics["loss"]) == (1, 0, 0.0)
    for name, value in weights_of(run).items():
        assert torch.equal(value, before[name]), name


def test_advantages_are_on_the_device_of_the_micro_batch(started, monkeypatch):
    run = started("trace")
    samples, _ = roll_out(run)
    # Stands for a GPU: another device than that of the rewards.
    monkeypatch.setattr(TraceSites, "device", torch.device("meta"))
    first, *_ = training_batches(run, samples, torch.zeros(len(samples)))
    assert first.micro_batch.loss_mask.device.type == "meta"
    assert first.advantages.device.type == "meta"


def test_evaluation_changes_nothing(started, weights):
    run = started("trace")
    accuracy = evaluate(run, run.items)
    assert 0.0 <= accuracy <= 1.0
    assert evaluate(run, run.items) == accuracy
    assert len(run.store) == 0
    assert rl_step(run)["gap"] == rl_step(started("trace"))["gap"]


def test_an_evaluation_of_nothing_is_refused(started):
    with pytest.raises(ValueError, match="at least one held-out item; got none"):
        evaluate(started("bf16"), [])


def test_prompt_longer_than_the_context_is_refused(build):
    with pytest.raises(ValueError, match="do not fit into the context of 6 tokens"):
        build("bf16", context=6)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", float("nan")),
        ("learning_rate", float("inf")),
        ("learning_rate", -1.0),
        ("weight_decay", -0.1),
        ("max_grad_norm", float("nan")),
        ("beta2", 1.0),
    ],
)
def test_settings_of_the_optimizer_that_would_spoil_the_weights_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be"):
        OptimizerSettings(**{name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples_per_prompt": 1}, "samples_per_prompt must be >= 2"),
        ({"micro_batch_samples": 0}, "micro_batch_samples must be >= 1"),
        ({"updates_per_rollout": 3}, "multiple of updates_per_rollout=3"),
        ({"trainer_dtype": "fp16"}, "trainer_dtype must be bf16 or fp32"),
        ({"trainer_attention": "flash"}, "trainer_attention must be sdpa or megatron; got .flash"),
        ({"answer_format": "json"}, "answer_format must be whole or .*got 'json'"),
        ({"temperature": 0.0}, "temperature must be at least 1e-6"),
        ({"max_response_tokens": 0}, "max_new_tokens must be >= 1"),
        ({"max_requests": 0}, "max_requests must be >= 1"),
        ({"prompts_per_step": 11}, "takes 11 distinct prompts, but there are 10"),
    ],
)
def test_bad_settings_raise(started, change, message):
    with pytest.raises(ValueError, match=message):
        rl_step(started("bf16", **change))


@pytest.mark.parametrize(
    ("changes", "files"),
    [
        ({}, {}),
        ({"micro_batch_samples": 3}, {"hint_reader": "process"}),
        ({"updates_per_rollout": 2}, {}),
    ],
    ids=str,
)
def test_hints_in_files_give_the_same_step_as_hints_in_memory(started, tmp_path, changes, files):
    in_memory = [rl_step(run) for run in [started(**changes)] for _ in range(2)]
    with contextlib.closing(started(hint_folder=tmp_path, **files, **changes)) as run:
        in_files = [rl_step(run) for _ in range(2)]
    for a, b in zip(in_memory, in_files, strict=True):
        a, b = dict(a), dict(b)
        del a["seconds"], b["seconds"]
        assert a == b
    # Trained samples are expired; what is left is nothing.
    assert run.store.sample_ids() == ()


def test_hints_in_files_are_in_memory_as_far_as_the_bound_allows(started, tmp_path, monkeypatch):
    made, alive = [], []

    def noting(self, *args, **kwargs):
        micro_batch = next_batch(self, *args, **kwargs)
        alive.append(sum(ref() is not None for ref in made))
        made.append(weakref.ref(micro_batch))
        return micro_batch

    run = started(hint_folder=tmp_path, micro_batch_samples=2)
    next_batch = MicroBatchPrefetcher.__next__
    monkeypatch.setattr(MicroBatchPrefetcher, "__next__", noting)
    rl_step(run)
    run.store.close()
    assert len(made) == 8
    # Of those given before only the last may still be referred to when the next one is asked for.
    assert max(alive) <= 1


def test_hints_of_a_step_beyond_the_bound_are_refused(started, tmp_path):
    run = started(hint_folder=tmp_path)
    run.max_hint_bytes = 100
    with run.store, pytest.raises(ValueError, match="at most 100 may be held"):
        rl_step(run)


@pytest.mark.parametrize("setting", [{"max_hint_bytes": 8}, {"hint_reader": "process"}])
@pytest.mark.parametrize("changes", [{}, {"hint_folder": "hints", "updates_per_rollout": 2}])
def test_settings_of_reading_ahead_without_effect_are_refused(
    build, setting, changes, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    ((name, value),) = setting.items()
    with pytest.raises(ValueError, match=f"{name}={value} has no effect"):
        build(**setting, **changes)
