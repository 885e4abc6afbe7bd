"""Weights that are pushed: bit-equal to ModelOpt's, digested, refused if they do not fit."""

from __future__ import annotations

import pytest
import torch
from modelopt.torch.quantization.qtensor import NVFP4QTensor

from megatron_trace.formats import encode, global_scale_from_amax, pack_codes
from megatron_trace.hints import Site
from megatron_trace.hints.weight_digest import combine_digests, matrix_digest
from megatron_trace.models.hybrid import named_expert_linears
from megatron_trace.rollout.weights import holds_bits
from megatron_trace.testing.rollouts import assert_same_rollout
from megatron_trace.testing.tiny_rollout import (
    calibration_tokens,
    random_prompts,
    roll_out,
    tiny_engine,
)


def _expert_weights(engine):
    return [
        (layer.index, expert, matrix, linear.weight)
        for layer in engine.layers
        for expert, matrix, linear in named_expert_linears(layer)
    ]


def _pushed_name(layer: int, expert: int, matrix: str) -> str:
    position = 2 * layer + 1
    return f"decoder.layers.{position}.mlp.experts.local_experts.{expert}.linear_{matrix}.weight"


def test_expert_weights_are_those_of_modelopts_nvfp4_tensor(trace_engine, weights):
    trace_engine.push_weights(weights, 0)
    for layer, expert, matrix, folded in _expert_weights(trace_engine):
        weight = weights[_pushed_name(layer, expert, matrix)].to(folded)
        scale = global_scale_from_amax(weight.abs().amax())
        quantised, block_scales, _ = NVFP4QTensor.quantize(
            weight, 16, weights_scaling_factor_2=scale
        )
        dequantised = quantised.dequantize(
            dtype=torch.bfloat16, scale=block_scales, double_scale=scale, block_sizes={-1: 16}
        )
        assert torch.equal(folded, dequantised), (layer, expert, matrix)


def test_all_other_weights_are_the_bf16_cast(trace_engine, weights):
    trace_engine.push_weights(weights, 0)
    own = dict(trace_engine.model.named_parameters())
    assert own.keys() == weights.keys()
    others = [name for name in own if ".experts." not in name]
    assert len(others) == len(own) - 2 * 2 * 16
    for name in others:
        assert torch.equal(own[name].cpu(), weights[name].bfloat16()), name


def test_digest_is_over_the_codes_of_every_expert(trace_engine, weights):
    digests = []
    for layer, expert, matrix, _ in reversed(_expert_weights(trace_engine)):
        weight = weights[_pushed_name(layer, expert, matrix)].bfloat16()
        scale = global_scale_from_amax(weight.abs().amax())
        codes, scale_bytes = encode(weight, scale)
        digests.append(matrix_digest(layer, expert, matrix, pack_codes(codes), scale_bytes, scale))
    assert trace_engine.push_weights(weights, 0) == combine_digests(digests)


def test_fp32_and_bf16_weights_of_equal_cast_give_one_digest(trace_engine, weights):
    in_bf16 = {name: weight.bfloat16() for name, weight in weights.items()}
    assert trace_engine.push_weights(weights, 0) == trace_engine.push_weights(in_bf16, 1)


@pytest.mark.parametrize("method", ["trace", "bf16"])
def test_pushing_a_then_b_then_a_restores_digest_and_outputs(
    request, method, weights, other_weights
):
    engine = request.getfixturevalue(f"{method}_engine")
    prompts = random_prompts(10)
    digest = engine.push_weights(weights, 0)
    first = roll_out(engine, prompts)
    assert engine.push_weights(other_weights, 1) != digest
    other, _ = roll_out(engine, prompts)
    assert {sample.policy_version for sample in other} == {1}
    assert [s.tokens for s in other] != [s.tokens for s in first[0]]
    assert engine.push_weights(weights, 0) == digest
    assert_same_rollout(first, roll_out(engine, prompts))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w, n: w.pop(n), "1 of .* missing: decoder.layers.1"),
        (lambda w, n: w.update({"surplus": w[n]}), "1 of .* unknown to the engine: surplus"),
        (
            lambda w, n: w.update({n: w[n][:, :32]}),
            r"of another shape: decoder.layers.1.*\(128, 32\) instead of \(128, 128\)",
        ),
    ],
    ids=["missing", "unknown", "misshaped"],
)
def test_weights_that_do_not_fit_are_named_and_nothing_is_copied(
    trace_engine, weights, other_weights, change, message
):
    trace_engine.push_weights(weights, 0)
    before = {name: p.clone() for name, p in trace_engine.model.named_parameters()}
    broken = dict(other_weights)
    change(broken, _pushed_name(0, 0, "fc1"))
    with pytest.raises(ValueError, match=message):
        trace_engine.push_weights(broken, 1)
    for name, parameter in trace_engine.model.named_parameters():
        assert torch.equal(parameter, before[name]), name


class _BreaksAt(dict):
    """Parameters of which one can be looked at, but not be read a second time."""

    def __init__(self, named, name):
        super().__init__(named)
        self.name, self.times = name, 0

    def __getitem__(self, name):
        self.times += name == self.name
        if self.times > 1 and name == self.name:
            raise OSError("the trainer's memory is gone")
        return super().__getitem__(name)


def _with_nan(named, name):
    return named | {name: torch.full_like(named[name], torch.nan)}


@pytest.mark.parametrize(
    ("broken", "error", "message"),
    [(_with_nan, ValueError, "hold NaN or Inf: layer 1"), (_BreaksAt, OSError, "memory is gone")],
    ids=["NaN in an expert", "failure amid copying"],
)
def test_a_push_that_fails_leaves_the_old_version_serving(
    trace_engine, weights, other_weights, broken, error, message
):
    prompts = random_prompts(6)
    trace_engine.push_weights(weights, 4)
    expected = roll_out(trace_engine, prompts)
    addresses = [p.data_ptr() for p in trace_engine.model.parameters()]
    with pytest.raises(error, match=message):
        trace_engine.push_weights(broken(other_weights, _pushed_name(1, 3, "fc2")), 5)
    again = roll_out(trace_engine, prompts)
    assert_same_rollout(again, expected)
    assert {sample.policy_version for sample in again[0]} == {4}
    assert [p.data_ptr() for p in trace_engine.model.parameters()] == addresses
    trace_engine.push_weights(other_weights, 5)
    assert [s.tokens for s in roll_out(trace_engine, prompts)[0]] != [s.tokens for s in expected[0]]


def test_weights_that_cannot_be_loaded_leave_the_old_ones(trace_engine, weights, other_weights):
    prompts = random_prompts(6)
    trace_engine.push_weights(weights, 0)
    expected = roll_out(trace_engine, prompts)
    with pytest.raises(OSError, match="memory is gone"):
        trace_engine.load_weights(_BreaksAt(other_weights, _pushed_name(1, 3, "fc2")))
    assert_same_rollout(roll_out(trace_engine, prompts), expected)


def test_scales_and_digest_stay_over_repeated_pushes(trace_engine, weights, other_weights):
    settings, version = trace_engine.settings, trace_engine.settings_version
    digests = {trace_engine.push_weights(weights, n) for n in range(3)}
    trace_engine.push_weights(other_weights, 3)
    digests.add(trace_engine.push_weights(weights, 4))
    assert len(digests) == 1
    assert trace_engine.settings is settings
    assert trace_engine.settings_version == version


@pytest.fixture
def drifted(weights):
    """An engine whose weights have outgrown its scales, with those weights."""
    engine = tiny_engine(weights, hint_layers="all")
    grown = {
        name: 4 * value if "linear_qkv" in name and "layer_norm" not in name else value
        for name, value in weights.items()
    }
    engine.push_weights(grown, 1)
    return engine, grown


def _saturation(engine, site) -> float:
    return max(engine.report.saturation((layer, site)) for layer in (0, 1))


def test_values_beyond_a_static_scale_are_counted_and_warned_of(drifted, caplog):
    engine, _ = drifted
    roll_out(engine, random_prompts(6))
    assert _saturation(engine, Site.V) > 0.01
    assert _saturation(engine, Site.K) < 0.01, "K has a norm of its own"
    assert "site v: a share of" in caplog.text
    assert "settings version 1 has; recalibrate" in caplog.text


def test_recalibration_sets_new_scales_under_a_new_version_and_says_so(drifted, caplog):
    engine, grown = drifted
    before = engine.settings
    engine.recalibrate(grown, calibration_tokens(), 2)
    samples, _ = roll_out(engine, random_prompts(6))
    assert _saturation(engine, Site.V) < 1e-3
    assert (engine.settings_version, engine.report.settings_version) == (2, 2)
    assert engine.settings.digest() != before.digest()
    assert {sample.settings_digest for sample in samples} == {engine.settings.digest()}
    assert {sample.policy_version for sample in samples} == {2}
    assert f"digest {engine.settings.digest()} instead of {before.digest()}" in caplog.text


def test_a_recalibration_that_fails_changes_neither_scales_nor_weights(drifted):
    engine, grown = drifted
    settings, prompts = engine.settings, random_prompts(6)
    expected = roll_out(engine, prompts)
    name = _pushed_name(0, 2, "fc1")
    # Experts are looked at last, when the new scales are there already.
    tokens = [torch.zeros(1, 1, dtype=torch.int64)] * 2
    with pytest.raises((ValueError, RuntimeError)):
        engine.recalibrate(_with_nan(grown, name), [*calibration_tokens(), *tokens], 2)
    assert engine.settings == settings
    assert engine.settings_version == 1
    assert_same_rollout(roll_out(engine, prompts), expected)


def test_recalibration_of_formats_without_global_scales_is_refused(weights):
    engine = tiny_engine(weights, number_format="mxfp4")
    with pytest.raises(ValueError, match="recalibrate has no effect with number_format=mxfp4"):
        engine.recalibrate(weights, calibration_tokens(), 1)
    roll_out(engine, random_prompts(2))
    assert engine.report.saturated_values == {}


def test_a_bf16_engine_holds_the_bits_of_what_was_pushed_and_no_others(weights):
    engine = tiny_engine(weights, "bf16")
    device = next(engine.model.parameters()).device
    named = {name: value.to(device) for name, value in weights.items()}
    assert holds_bits(engine.model, named)
    name = next(iter(named))
    assert not holds_bits(engine.model, named | {name: named[name] * (1 + 2**-7)})
    assert not holds_bits(engine.model, {n: value for n, value in named.items() if n != name})
