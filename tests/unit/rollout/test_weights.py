"""Weights that are pushed: bit-equal to ModelOpt's, digested, refused if they do not fit."""

from __future__ import annotations

import pytest
import torch
from modelopt.torch.quantization.qtensor import NVFP4QTensor

from megatron_trace.formats import encode, global_scale_from_amax, pack_codes
from megatron_trace.hints.weight_digest import combine_digests, matrix_digest
from megatron_trace.models.hybrid import named_expert_linears
from megatron_trace.testing.rollouts import assert_same_rollout
from megatron_trace.testing.tiny_rollout import random_prompts, roll_out


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
