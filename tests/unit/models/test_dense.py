"""Dense MLP layers (`-`) in the hybrid pattern: what is built, digested and refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_trace.config import TraceConfig
from megatron_trace.hints.types import Site
from megatron_trace.models.hybrid import (
    HybridModules,
    build_hybrid_model,
    decoder_layers,
    named_expert_linears,
    pattern_sites,
)
from megatron_trace.rollout.weights import plain_digest
from megatron_trace.testing.single_process import tiny_moe_config
from megatron_trace.testing.tiny_rollout import random_prompts, roll_out, tiny_engine, tiny_weights
from megatron_trace.testing.tiny_trainer import tiny_trainer
from megatron_trace.training.micro_batch import make_micro_batch
from megatron_trace.training.weights import expert_weight_digest

pytestmark = pytest.mark.usefixtures("one_rank")


def _model(pattern, **overrides):
    return build_hybrid_model(
        tiny_moe_config(pattern, **overrides),
        pattern=pattern,
        vocab_size=16,
        max_sequence_length=32,
        modules=HybridModules(),
    )


def test_a_decoder_layer_has_a_dense_mlp_or_a_moe():
    dense, moe = decoder_layers(_model("*-*E", ffn_hidden_size=96))
    assert (dense.moe, moe.mlp) == (None, None)
    assert dense.mlp is not None
    assert moe.moe is not None
    shapes = {name: tuple(p.shape) for name, p in dense.mlp.named_parameters()}
    # Gate and up are one matrix; the experts keep a width of their own.
    assert shapes == {"linear_fc1.weight": (192, 128), "linear_fc2.weight": (128, 96)}
    _, _, fc1 = next(named_expert_linears(moe))
    assert fc1.get_parameter("weight").shape == (128, 128)


def test_queries_and_keys_are_normalised_only_if_the_configuration_says_so():
    names = {name for name, _ in _model("*-").named_parameters()}
    assert {"decoder.layers.0.self_attention.q_layernorm.weight"} <= names
    names = {name for name, _ in _model("*-", qk_layernorm=False).named_parameters()}
    assert not [name for name in names if "q_layernorm" in name or "k_layernorm" in name]


def test_a_pattern_with_experts_needs_their_number():
    with pytest.raises(ValueError, match="MoE layers, but num_moe_experts=None"):
        _model("*E", num_moe_experts=None, moe_ffn_hidden_size=None)


@pytest.mark.parametrize(
    ("pattern", "sites"),
    [("*-*-", {Site.K, Site.V}), ("*-*E", set(Site)), ("M-GE", {Site.FC1, Site.FC2})],
)
def test_the_sites_of_a_pattern(pattern, sites):
    assert set(pattern_sites(pattern)) == sites


def test_the_default_hint_sites_are_narrowed_and_a_choice_is_not():
    assert TraceConfig().sites_in(("k", "v")) == ("k", "v")
    assert TraceConfig().sites_in(("fc1", "fc2", "k", "v")) == ("fc1", "k", "v")
    with pytest.raises(ValueError, match="names fc1, fc2, but the model has k, v only"):
        TraceConfig(hint_sites=("fc1", "fc2")).sites_in(("k", "v"))


def test_without_experts_the_digest_is_that_of_all_weights():
    weights = tiny_weights(seed=1, pattern="*-")
    engine = tiny_engine(weights, pattern="*-")
    digest = engine.push_weights(weights, policy_version=1)
    assert digest == plain_digest(weights)
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    assert engine.push_weights(weights | {name: weights[name] + 1}, policy_version=2) != digest
    model, sites = tiny_trainer(pattern="*-")
    with pytest.raises(ValueError, match="compare the digest of its plain weights"):
        expert_weight_digest(model, sites)


def test_calibration_after_a_push_is_possible_without_experts():
    weights = tiny_weights(seed=1, pattern="*-")
    engine = tiny_engine(weights, pattern="*-")
    before = engine.settings
    engine.calibrate([torch.randint(0, 15, (4, 12))])
    assert before is not None
    assert engine.settings is not None
    assert engine.settings.global_scales.keys() == before.global_scales.keys()


def test_routing_of_a_moe_is_refused_by_a_dense_trainer():
    engine = tiny_engine(tiny_weights(seed=1, pattern="*-"), pattern="*-")
    samples, store = roll_out(engine, random_prompts(2))
    _, sites = tiny_trainer(pattern="*-", settings=engine.settings, hint_layers="latter_half")
    wrong = [
        dataclasses.replace(s, routing=torch.zeros(s.num_rows, 1, 4, dtype=torch.int16))
        for s in samples
    ]
    with pytest.raises(ValueError, match=r"\(1, 4\), but the model has \(0, 0\)"):
        make_micro_batch(wrong, store, sites)
