"""Global scales: who saw what in calibration, and what the settings do with it."""

from __future__ import annotations

import pickle

import modelopt.torch.opt as mto
import pytest
import torch

from megatron_trace.formats import format_set
from megatron_trace.hints import QuantizerSettings, Site
from megatron_trace.rollout.calibration import calibrated_scales
from megatron_trace.rollout.quantize import BACKEND, site_quantisers
from megatron_trace.testing.rollouts import assert_same_rollout
from megatron_trace.testing.tiny_rollout import (
    calibration_tokens,
    random_prompts,
    roll_out,
    tiny_engine,
)


@pytest.fixture(scope="module")
def engine(weights):
    engine = tiny_engine(None, hint_layers="all")
    engine.load_weights(weights)
    return engine


def _calibrate(engine, weights, tokens):
    engine.load_weights(weights)
    engine.calibrate(tokens)
    return engine.settings


def test_every_place_gets_the_scale_of_the_largest_value_seen(engine, weights):
    seen = {}
    hooks = [
        layer.attention.core_attention.register_forward_pre_hook(
            lambda _, args, layer=layer: seen.setdefault(layer.index, []).append(
                [x.abs().amax().float() for x in args[1:3]]
            )
        )
        for layer in engine.layers
    ]
    settings = _calibrate(engine, weights, calibration_tokens())
    for hook in hooks:
        hook.remove()
    assert set(settings.global_scales) == {(layer, site) for layer in (0, 1) for site in Site}
    for layer, values in seen.items():
        for index, site in enumerate((Site.K, Site.V)):
            amax = max(value[index] for value in values)
            assert settings.global_scale(layer, site) == float(amax.cpu() / (6 * 448))


def test_the_experts_of_a_layer_share_the_largest_value_of_any(engine, weights):
    seen = {layer.index: [] for layer in engine.layers}
    hooks = [
        quantiser.register_forward_pre_hook(
            lambda _, args, layer=layer: seen[layer.index].append(args[0].abs().amax().float())
        )
        for layer in engine.layers
        for quantiser in site_quantisers(layer)[Site.FC2].values()
    ]
    settings = _calibrate(engine, weights, calibration_tokens())
    for hook in hooks:
        hook.remove()
    for layer, values in seen.items():
        assert max(values) > values[0], "the first expert has the largest: the test shows nothing"
        assert settings.global_scale(layer, Site.FC2) == float(max(values) / (6 * 448))


def test_experts_without_a_token_are_reported_and_share_the_layers_scale(engine, weights, caplog):
    # One token reaches 4 of 16 experts of each layer.
    _calibrate(engine, weights, [torch.tensor([[3]])])
    assert {layer: len(e) for layer, e in engine.experts_without_calibration.items()} == {
        0: 12,
        1: 12,
    }
    assert "layer 1: no calibration token reached 12 experts" in caplog.text
    for layer in engine.layers:
        amax = {float(q.amax) for q in site_quantisers(layer)[Site.FC2].values()}
        assert len(amax) == 1
    engine.push_weights(weights, 0)
    samples, _ = roll_out(engine, random_prompts(30))
    assert all(torch.isfinite(sample.logprobs).all() for sample in samples)


def test_a_site_that_saw_nothing_is_named(weights):
    engine = tiny_engine(None, hint_layers="all")
    with pytest.raises(RuntimeError, match="layer 0, site fc1: the quantiser never saw"):
        _calibrate(engine, weights, [])
    with pytest.raises(RuntimeError, match="push_weights needs the quantisers' global scales"):
        engine.push_weights(weights, 0)
    _calibrate(engine, weights, calibration_tokens())
    for quantiser in site_quantisers(engine.layers[1])[Site.FC2].values():
        quantiser.reset_amax()
    with pytest.raises(RuntimeError, match="layer 1, site fc2: no expert of the layer saw"):
        calibrated_scales(engine.layers, format_set("nvfp4"), power_of_two=False)


def test_calibrating_again_forgets_what_was_seen_before(engine, weights):
    few = [torch.tensor([[3]])]
    small = _calibrate(engine, weights, few)
    large = _calibrate(engine, weights, calibration_tokens())
    assert large != small
    assert large.digest() != small.digest()
    assert _calibrate(engine, weights, few) == small
    assert len(engine.experts_without_calibration[0]) == 12


def test_calibration_that_fails_can_be_repeated(engine, weights):
    expected = _calibrate(engine, weights, calibration_tokens())

    def fail_at_the_last_batch(_, args):
        assert args[0].numel() > 1, "last batch"

    hook = engine.model.register_forward_pre_hook(fail_at_the_last_batch)
    with pytest.raises(AssertionError, match="last batch"):
        engine.calibrate([*calibration_tokens(), torch.tensor([[3]])])
    hook.remove()
    assert engine.settings == expected
    assert _calibrate(engine, weights, calibration_tokens()) == expected
    engine.push_weights(weights, 0)
    roll_out(engine, random_prompts(2))


def test_tokens_outside_the_vocabulary_are_refused_before_the_model_sees_them(engine, weights):
    expected = _calibrate(engine, weights, calibration_tokens())
    with pytest.raises(ValueError, match="batch 2: tokens must lie in 0 to 15; got 3 to 16"):
        engine.calibrate([*calibration_tokens(), torch.tensor([[3, 16]])])
    assert engine.settings == expected


EMBEDDING = "embedding.word_embeddings.weight"
EXPERT = "decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("name", "row", "place"),
    [
        (EMBEDDING, 7, r"layer 0, site k, batch 1, sequence 2, position 1;"),
        (EXPERT, slice(None), r"layer 0, site fc2, batch 0, sequence \d, position \d;"),
    ],
    ids=["embedding", "expert"],
)
def test_a_value_that_is_not_finite_is_named_and_calibration_can_be_repeated(
    engine, weights, name, row, place, value
):
    expected = _calibrate(engine, weights, calibration_tokens())
    poisoned = weights | {name: weights[name].clone()}
    poisoned[name][row] = value
    batches = [torch.arange(5).repeat(4, 1), torch.arange(5).repeat(4, 1)]
    batches[1][2, 1] = 7
    with pytest.raises(RuntimeError, match=f"NaN or Inf activation in the calibration at {place}"):
        _calibrate(engine, poisoned, batches)
    assert _calibrate(engine, weights, calibration_tokens()) == expected


def test_calibration_needs_unquantised_weights(engine, weights):
    _calibrate(engine, weights, calibration_tokens())
    engine.push_weights(weights, 0)
    with pytest.raises(RuntimeError, match="unquantised weights; call load_weights"):
        engine.calibrate(calibration_tokens())


def test_an_engine_can_take_the_settings_of_another(trace_engine, weights):
    other = tiny_engine(None, hint_layers="all", diagnostic_share=1.0)
    other.use_settings(trace_engine.settings)
    assert other.push_weights(weights, 0) == trace_engine.push_weights(weights, 0)
    prompts = random_prompts(8)
    assert_same_rollout(roll_out(other, prompts), roll_out(trace_engine, prompts))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"prefill_attends_to": "fresh"}, "prefill_attends_to"),
        ({"operand_dtype": "float32"}, "operand_dtype"),
        ({"model_id": "another"}, "model_id"),
        ({"global_scales": {(0, Site.FC1): 1.0}}, "global_scales"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_of_another_kind_of_engine_are_refused(trace_engine, change, name):
    fields = vars(trace_engine.settings) | change
    with pytest.raises(ValueError, match=f"settings with {name}"):
        trace_engine.use_settings(QuantizerSettings(**fields))


def test_bf16_refuses_calibration(bf16_engine):
    with pytest.raises(ValueError, match="calibrate has no effect with method=bf16"):
        bf16_engine.calibrate(calibration_tokens())


def test_modelopts_state_of_the_model_holds_nothing_of_ours(trace_engine):
    state = pickle.dumps(mto.modelopt_state(trace_engine.model))
    assert BACKEND.encode() in state, "the backend's name belongs to the state"
    assert b"megatron_trace.rollout" not in state
    assert len(state) < 2_000_000
