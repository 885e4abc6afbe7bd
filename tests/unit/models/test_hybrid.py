"""HybridModel from local modules: layer indices, spec, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router_replay import RouterReplay

from megatron_trace.models.hybrid import (
    HybridModules,
    build_hybrid_model,
    causal_mask,
    decoder_layer_indices,
    decoder_layers,
    named_expert_linears,
)
from megatron_trace.models.routing import global_replay_instances, replay_instances
from megatron_trace.testing.single_process import tiny_moe_config

pytestmark = pytest.mark.usefixtures("one_rank")


def _model(pattern: str = "*E*E", modules: HybridModules | None = None, **overrides):
    return build_hybrid_model(
        tiny_moe_config(pattern, **overrides),
        pattern=pattern,
        vocab_size=16,
        max_sequence_length=32,
        modules=modules or HybridModules(),
    )


def _logits(model, tokens):
    batch, positions = tokens.shape
    tokens = tokens.to(torch.cuda.current_device())
    ids = torch.arange(positions, device=tokens.device).expand(batch, -1)
    return model(tokens, ids, causal_mask(positions).to(tokens.device))


def test_a_decoder_layer_is_a_mixer_and_the_mlp_after_it():
    assert decoder_layer_indices("GEGEGE*E") == [0, 0, 1, 1, 2, 2, 3, 3]


def test_pipeline_bars_and_mtp_do_not_change_decoder_layer_indices():
    assert decoder_layer_indices("*E*|E*E/*E") == [0, 0, 1, 1, 2, 2]


def test_a_mixer_without_mlp_is_a_decoder_layer_of_its_own():
    assert decoder_layer_indices("M*E") == [0, 1, 1]


@pytest.mark.parametrize("pattern", ["E*E", "*EE"])
def test_an_mlp_without_its_own_mixer_is_refused(pattern):
    with pytest.raises(ValueError, match="does not follow a token mixer"):
        decoder_layer_indices(pattern)


def test_decoder_layers_give_attention_and_experts_of_each_layer():
    layers = decoder_layers(_model())
    assert [layer.index for layer in layers] == [0, 1]
    for layer in layers:
        assert layer.attention is not None
        names = [(expert, matrix) for expert, matrix, _ in named_expert_linears(layer)]
        assert names == [(e, m) for e in range(16) for m in ("fc1", "fc2")]


def test_a_gated_delta_net_has_experts_but_no_attention():
    layers = decoder_layers(_model("GE*E"))
    assert [layer.attention is None for layer in layers] == [True, False]
    assert all(layer.moe is not None for layer in layers)


def test_probability_after_fc2_gives_the_same_function_as_before_it():
    ours, theirs = _model(), _model(modules=HybridModules(experts=SequentialMLP))
    theirs.load_state_dict(ours.state_dict())
    tokens = torch.randint(0, 16, (4, 9))
    # Measured: 1.2e-7 in FP32; the two differ in rounding only.
    torch.testing.assert_close(_logits(ours, tokens), _logits(theirs, tokens), atol=1e-6, rtol=0)


def test_a_causal_model_is_blind_to_padding_on_the_right():
    model = _model()
    tokens = torch.randint(0, 16, (1, 9))
    padded = torch.cat([tokens, torch.zeros(1, 4, dtype=torch.long)], dim=1)
    # Measured: 2e-7; other batch shapes give other summation orders.
    torch.testing.assert_close(
        _logits(model, padded)[:, :9], _logits(model, tokens), atol=2e-6, rtol=0
    )


def test_a_pattern_with_other_layers_is_refused():
    with pytest.raises(ValueError, match=r"DeltaNet \(G\), MLP \(-\) and MoE"):
        _model("ME*E")


def test_a_pattern_of_another_length_than_num_layers_is_refused():
    with pytest.raises(ValueError, match="4 positions, but num_layers=2"):
        _model(num_layers=2)


@pytest.mark.parametrize(
    "overrides",
    [
        {"moe_shared_expert_overlap": True, "moe_shared_expert_intermediate_size": 64},
        {"fp4": "e2m1"},
    ],
)
def test_a_feature_that_would_bypass_the_dispatch_hook_is_refused(overrides):
    with pytest.raises(ValueError, match="would not pass its quantiser"):
        _model(**overrides)


def test_models_do_not_stay_in_megatrons_process_wide_replay_list():
    model = _model()
    assert RouterReplay.global_router_replay_instances == []
    with global_replay_instances(model):
        assert RouterReplay.global_router_replay_instances == replay_instances(model)
        assert len(replay_instances(model)) == 2
    assert RouterReplay.global_router_replay_instances == []


def test_the_replay_list_is_restored_after_an_exception():
    model = _model()

    def fail():
        with global_replay_instances(model):
            raise KeyError("inside")

    with pytest.raises(KeyError):
        fail()
    assert RouterReplay.global_router_replay_instances == []
