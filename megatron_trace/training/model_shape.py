"""Reads the `ModelShape` off a model."""

from __future__ import annotations

from megatron_trace.models.hybrid import (
    DecoderModel,
    decoder_layers,
    decoder_layout,
    named_expert_linears,
)
from megatron_trace.training.layout import rank_layout
from megatron_trace.training.shape import ModelShape


def model_shape(model: DecoderModel, max_sequence_length: int) -> ModelShape:
    """Gives the sizes of a model.

    Args:
        model: Model of attention, MLP and MoE layers.
        max_sequence_length: Longest sequence in tokens.
    """
    config, layers, layout = model.config, decoder_layers(model), decoder_layout(model)
    experts = (0, 0, 0)
    if layout.moe_layers:
        assert config.num_moe_experts, "build_hybrid_model demands experts"
        assert config.moe_ffn_hidden_size, "TransformerConfig fills it in"
        experts = (config.num_moe_experts, config.moe_router_topk, config.moe_ffn_hidden_size)
    assert config.num_query_groups, "TransformerConfig fills it in"
    assert config.kv_channels, "TransformerConfig fills it in"
    return ModelShape(
        num_layers=layout.num_layers,
        model_sites=layout.sites,
        model_moe_layers=layout.moe_layers,
        attention_layers=tuple(layer.index for layer in layers if layer.attention is not None),
        moe_layers=tuple(layer.index for layer in layers if layer.moe is not None),
        expert_matrices=tuple(
            (layer.index, expert, matrix)
            for layer in layers
            for expert, matrix, _ in named_expert_linears(layer)
        ),
        num_experts=experts[0],
        top_k=experts[1],
        hidden_size=config.hidden_size,
        expert_values=experts[2],
        num_kv_heads=config.num_query_groups,
        kv_values=config.num_query_groups * config.kv_channels,
        max_sequence_length=max_sequence_length,
        vocab_size=model.vocab_size,
        layout=rank_layout(model.pg_collection),
    )
