"""Up-cycling the last layers of a dense model: the same function at first, experts unlike."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megatron_trace.models.hybrid import (
    HybridModules,
    build_hybrid_model,
    causal_mask,
    decoder_layers,
)
from megatron_trace.study import smollm2
from megatron_trace.study.experts_differ import experts_differ
from megatron_trace.study.gguf_llama import hybrid_weights
from megatron_trace.study.upcycling import (
    Upcycling,
    build_part,
    moe_config,
    upcycle,
    weights_of_part,
    with_part,
)
from megatron_trace.testing import llama_reference

SHAPE = dataclasses.replace(llama_reference.TINY, num_layers=3)
UPCYCLING = Upcycling(num_layers=2, num_groups=4, granularity=2, megatron_scale=False)
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "max_sequence_length": 64,
    "rotary_base": SHAPE.rotary_base,
}


@pytest.fixture(scope="module")
def weights():
    return hybrid_weights(llama_reference.random_tensors(SHAPE, seed=1), SHAPE)


@pytest.fixture(scope="module")
def tokens():
    tokens = torch.randint(0, 32, (4, 30), generator=torch.Generator().manual_seed(2))
    return tokens.to(torch.cuda.current_device())


def _whole(config, pattern, weights):
    modules = HybridModules()
    model = build_hybrid_model(config, pattern=pattern, modules=modules, **SIZES)
    _copy(model, weights)
    return model


def _copy(model, weights):
    assert weights.keys() == dict(model.named_parameters()).keys()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


def _upcycled(weights, upcycling):
    dense_config = smollm2.dense_config(SHAPE)
    parts: dict[str, Any] = {"first": False, "last": True, **SIZES}
    dense = build_part(dense_config, pattern="*-*-", **parts)
    _copy(dense, weights_of_part(weights, dense, first_position=2))
    before = {name: value.clone() for name, value in dense.named_parameters()}
    config = moe_config(dense_config, upcycling)
    moe = build_part(config, pattern="*E*E", **parts)
    upcycle(dense, moe, upcycling)
    assert all(torch.equal(before[name], value) for name, value in dense.named_parameters())
    part = {name: value.detach() for name, value in moe.named_parameters()}
    return config, with_part(weights, part, first_position=2)


@torch.no_grad()
def _logits(model, tokens):
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return model(tokens, positions, causal_mask(tokens.shape[1]).to(tokens.device))


def test_the_parts_of_a_model_compute_what_the_whole_computes(weights, tokens):
    config = smollm2.dense_config(SHAPE)
    trunk = build_part(config, pattern="*-", first=True, last=False, **SIZES)
    tail = build_part(config, pattern="*-*-", first=False, last=True, **SIZES)
    _copy(trunk, weights_of_part(weights, trunk, first_position=0))
    _copy(tail, weights_of_part(weights, tail, first_position=2))
    tail.set_input_tensor(_logits(trunk, tokens))
    assert torch.equal(_logits(tail, tokens), _logits(_whole(config, "*-*-*-", weights), tokens))


def test_an_upcycled_model_computes_what_the_dense_one_computes(weights, tokens):
    config, upcycled = _upcycled(weights, UPCYCLING)
    expected = _logits(_whole(smollm2.dense_config(SHAPE), "*-*-*-", weights), tokens)
    got = _logits(_whole(config, "*-*E*E", upcycled), tokens)
    # Measured 2.6e-6; logits reach 4.
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)


def test_megatrons_scale_is_the_dense_function_only_about(weights, tokens):
    config, upcycled = _upcycled(weights, dataclasses.replace(UPCYCLING, megatron_scale=True))
    expected = _logits(_whole(smollm2.dense_config(SHAPE), "*-*-*-", weights), tokens)
    error = (_logits(_whole(config, "*-*E*E", upcycled), tokens) - expected).abs()
    assert 1e-3 < error.max() < 1.0


def test_no_two_experts_are_alike(weights, tokens):
    config, upcycled = _upcycled(weights, UPCYCLING)
    model = _whole(config, "*-*E*E", upcycled)
    assert [layer.moe is not None for layer in decoder_layers(model)] == [False, True, True]
    found = experts_differ(model, [tokens])
    assert found.keys() == {1, 2}
    for layer in found.values():
        assert layer.largest_cosine < 0.8


def test_every_neuron_of_the_mlp_is_in_every_group_once(weights):
    _, upcycled = _upcycled(weights, UPCYCLING)
    name = "decoder.layers.3.mlp"
    columns = weights[f"{name}.linear_fc2.weight"]
    for group in range(UPCYCLING.num_groups):
        experts = [f"{name}.experts.local_experts.{2 * group + part}" for part in range(2)]
        slices = [upcycled[f"{expert}.linear_fc2.weight"] / 2 for expert in experts]
        dealt = torch.cat(slices, dim=1).to(columns.device)
        torch.testing.assert_close(dealt[0].sort().values, columns[0].sort().values)
