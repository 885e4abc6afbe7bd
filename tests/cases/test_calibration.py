"""Cases 13, 15, 16, 17 and 19: experts without tokens, and calibrations that went wrong elsewhere.

Each test's name starts with the number of its case. A rank without tokens (13, EP=2) is a scenario
of `tests/distributed/test_expert_parallel.py` and three rows of `docs/layouts.md`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from modelopt.torch.quantization.nn import TensorQuantizer

from megatron_trace.models.hybrid import named_expert_linears
from megatron_trace.rollout import RolloutEngine, SamplingSettings
from megatron_trace.testing.rollouts import assert_same_rollout
from megatron_trace.testing.tiny_rollout import (
    calibration_tokens,
    random_prompts,
    roll_out,
    tiny_engine,
    tiny_weights,
)
from megatron_trace.testing.tiny_trainer import recorded_rollout, tiny_trainer
from megatron_trace.training.micro_batch import make_micro_batch
from megatron_trace.training.weights import expert_weight_digest

pytestmark = pytest.mark.usefixtures("one_rank")

EIGHT_EXPERTS = {"num_moe_experts": 8, "moe_router_topk": 2}
ROUTERS = ("decoder.layers.1.mlp.router.weight", "decoder.layers.3.mlp.router.weight")
LAST = "decoder.layers.3.mlp.experts.local_experts.6.linear_fc2.weight"


def _weights_that_use_experts_0_to_3() -> dict[str, torch.Tensor]:
    """Gives weights under which the scores of experts 4 to 7 are never among the two largest."""
    weights = tiny_weights(0, config=EIGHT_EXPERTS)
    for name in ROUTERS:
        router = torch.zeros_like(weights[name])
        router[0], router[2] = weights[name][0], weights[name][2]
        # One of expert 0 and 1, and one of 2 and 3, has a score > 0.
        router[1], router[3] = -router[0], -router[2]
        weights[name] = router
    return weights


def _trainer_digest(weights: Mapping[str, torch.Tensor], settings: Any, config: Any) -> str:
    model, sites = tiny_trainer("trace", weights=weights, settings=settings, config=config)
    return expert_weight_digest(model, sites)


def _engine(weights: Mapping[str, torch.Tensor], config: Any) -> RolloutEngine:
    engine = tiny_engine(None, config=config, hint_layers="all")
    engine.load_weights(weights)
    engine.calibrate(calibration_tokens())
    return engine


def test_13_experts_that_no_token_reached_are_named_and_have_the_layers_scale(caplog) -> None:
    weights = _weights_that_use_experts_0_to_3()
    with caplog.at_level(logging.WARNING):
        engine = _engine(weights, EIGHT_EXPERTS)
    assert engine.experts_without_calibration == {0: (4, 5, 6, 7), 1: (4, 5, 6, 7)}
    assert "layer 1: no calibration token reached 4 experts (4, 5, 6, 7)" in caplog.text
    assert engine.settings is not None
    assert len(engine.settings.global_scales) == 2 * 4
    assert all(math.isfinite(s) and s > 0 for s in engine.settings.global_scales.values())
    # A later policy sends tokens to them.
    later = weights | {name: tiny_weights(0, config=EIGHT_EXPERTS)[name] for name in ROUTERS}
    digest = engine.push_weights(later, 1)
    samples, _ = roll_out(engine, random_prompts(12))
    assert any((sample.routing >= 4).any() for sample in samples)
    assert all(torch.isfinite(sample.logprobs).all() for sample in samples)
    assert _trainer_digest(later, engine.settings, EIGHT_EXPERTS) == digest


def test_15_every_quantiser_that_is_on_saw_calibration_tokens() -> None:
    engine = _engine(tiny_weights(0), None)
    found = {
        name: module.amax
        for name, module in engine.model.named_modules()
        if isinstance(module, TensorQuantizer) and module.is_enabled
    }
    # Of each layer: fc1's input, 16 inputs of fc2, K and V.
    assert len(found) == 2 * (1 + 16 + 2)
    for name, amax in found.items():
        assert amax is not None, name
        assert amax.isfinite(), name
        assert amax > 0, name


def test_15_a_layer_that_bypasses_its_quantiser_is_named_in_calibration_and_rollout() -> None:
    weights = tiny_weights(0)
    settings = _engine(weights, None).settings
    assert settings is not None
    engine = tiny_engine(None, hint_layers="all")
    moe: Any = engine.layers[1].moe
    moe.transform_dispatch_input = lambda hidden_states: hidden_states
    engine.load_weights(weights)
    with pytest.raises(RuntimeError, match="layer 1, site fc1: the quantiser never saw"):
        engine.calibrate(calibration_tokens())
    assert engine.settings is None
    # With scales from elsewhere nothing is missing, and layer 0's quantiser runs.
    engine.use_settings(settings)
    engine.push_weights(weights, 0)
    with pytest.raises(RuntimeError, match=r"layer 1, site fc1 was not quantised in a step .* s0"):
        roll_out(engine, [[1, 2]])
    sampling = SamplingSettings(max_new_tokens=2)
    with pytest.raises(RuntimeError, match="no quantiser at 1 of 8 places: layer 1 site fc1;"):
        engine.generate([[1, 2]], ["s0"], store=None, sampling=sampling, seed=0)


def test_16_a_dead_expert_is_pushed_with_its_whole_layer() -> None:
    """Expert 5 saw no token and its weights are 0: codes 0, scale 0, and the output 0."""
    weights = _weights_that_use_experts_0_to_3()
    dead = [name for name in weights if ".1.mlp.experts.local_experts.5." in name]
    assert len(dead) == 2
    weights |= {name: torch.zeros_like(weights[name]) for name in dead}
    engine = _engine(weights, EIGHT_EXPERTS)
    assert 5 in engine.experts_without_calibration[0]
    weights |= {name: tiny_weights(0, config=EIGHT_EXPERTS)[name] for name in ROUTERS}
    digest = engine.push_weights(weights, 0)
    for layer in engine.layers:
        for expert, matrix, linear in named_expert_linears(layer):
            folded = linear.weight
            assert folded.isfinite().all(), (layer.index, expert, matrix)
            is_dead = (layer.index, expert) == (0, 5)
            assert bool(folded.any()) != is_dead, (layer.index, expert, matrix)
    samples, _ = roll_out(engine, random_prompts(12))
    assert any((sample.routing[:, 0] == 5).any() for sample in samples)
    assert all(torch.isfinite(sample.logprobs).all() for sample in samples)
    assert _trainer_digest(weights, engine.settings, EIGHT_EXPERTS) == digest


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_17_a_bad_amax_is_refused_and_the_weights_before_it_serve_on(value: float) -> None:
    """In the last matrix but one, of an expert that no token reaches."""
    weights = _weights_that_use_experts_0_to_3()
    engine = _engine(weights, EIGHT_EXPERTS)
    engine.push_weights(weights, 0)
    prompts = random_prompts(4)
    expected = roll_out(engine, prompts)
    bad = weights | {LAST: weights[LAST].clone()}
    bad[LAST][3, 5] = value
    with pytest.raises(ValueError, match=r"1 of 16 .* NaN or Inf: layer 1, expert 6, fc2; "):
        engine.push_weights(bad, 1)
    assert_same_rollout(roll_out(engine, prompts), expected)
    engine.push_weights(weights, 0)
    assert_same_rollout(roll_out(engine, prompts), expected)


def test_17_a_calibration_that_fails_keeps_the_settings_before_it() -> None:
    """A quantiser that saw nothing but zeros has no scale; known only at the end."""
    weights = tiny_weights(0)
    engine = _engine(weights, None)
    settings = engine.settings
    engine.push_weights(weights, 0)
    prompts = random_prompts(4)
    expected = roll_out(engine, prompts)
    qkv = "decoder.layers.2.self_attention.linear_qkv.weight"
    without_values = weights[qkv].clone()
    # Of each of the 2 KV heads: 2 x 32 rows of queries, 32 of keys, 32 of values.
    without_values.view(2, 128, -1)[:, 96:] = 0
    engine.load_weights(weights | {qkv: without_values})
    with pytest.raises(ValueError, match="global scale of layer 1, site v must be finite and > 0"):
        engine.calibrate(calibration_tokens())
    assert engine.settings == settings
    engine.push_weights(weights, 0)
    assert_same_rollout(roll_out(engine, prompts), expected)


@pytest.mark.parametrize("method", ["bf16", "trace"])
def test_19_experts_that_ranks_cannot_share_evenly_are_refused_with_the_sizes(method) -> None:
    config = {"num_moe_experts": 36, "expert_model_parallel_size": 8}
    sizes = r"\[1, 2, 3, 4, 6, 9, 12, 18, 36\]"
    message = f"expert_model_parallel_size=8 cannot split 36 experts evenly; choose one of {sizes}"
    with pytest.raises(ValueError, match=message):
        tiny_trainer(method, config=config)


def test_19_scales_of_36_experts_are_those_of_their_own_weights() -> None:
    """Each expert 1.1 times the one before it, so that no two have the same global scale."""
    config = {"num_moe_experts": 36}
    weights = tiny_weights(0, config=config)
    for name in weights:
        if ".local_experts." in name:
            expert = int(name.split(".local_experts.")[1].split(".")[0])
            weights[name] = weights[name] * 1.1 ** (expert - 18)
    engine = _engine(weights, config)
    digest = engine.push_weights(weights, 0)
    assert _trainer_digest(weights, engine.settings, config) == digest
    for layer in engine.layers:
        for expert, matrix, linear in named_expert_linears(layer):
            name = (
                f"decoder.layers.{2 * layer.index + 1}.mlp.experts.local_experts.{expert}."
                f"linear_{matrix}.weight"
            )
            error = (linear.weight.float().cpu() - weights[name]).norm() / weights[name].norm()
            # .095 is the error of NVFP4's codes; by a neighbour's scale 1 / 1.1 would be lost.
            assert error < 0.12, (layer.index, expert, matrix)


def test_19_a_routing_record_with_minus_one_is_refused_by_name() -> None:
    rolled = recorded_rollout()
    _, sites = tiny_trainer("trace", settings=rolled.settings)
    routing = rolled.samples[1].routing.clone()
    routing[1, 1, 2] = -1
    samples = [rolled.samples[0], replace(rolled.samples[1], routing=routing), *rolled.samples[2:]]
    named = "sample sample-1: the experts of row 1 in MoE layer 1 are not all of 0 to 15"
    with pytest.raises(ValueError, match=named):
        make_micro_batch(samples, rolled.store, sites)
