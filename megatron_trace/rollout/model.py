"""The model of the rollout engine: the trainer's, in BF16, with the engine's modules."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer import TransformerConfig

from megatron_trace.config import TraceConfig
from megatron_trace.models.hybrid import HybridModules, build_hybrid_model, decoder_layers
from megatron_trace.rollout.attention import EngineCoreAttention, PagedSelfAttention
from megatron_trace.rollout.compensation import num_compensated
from megatron_trace.rollout.expert_shapes import ExpertShape
from megatron_trace.rollout.gated_delta_net import EngineGatedDeltaNet
from megatron_trace.rollout.moe import EngineMoELayer
from megatron_trace.rollout.norm import EngineRMSNorm


def engine_modules(**others: Any) -> HybridModules:
    """Gives the modules that read and write the engine's pages, states and records.

    Args:
        **others: Further fields of `HybridModules`.
    """
    return HybridModules(
        self_attention=PagedSelfAttention,
        core_attention=EngineCoreAttention,
        moe_layer=EngineMoELayer,
        gated_delta_net=EngineGatedDeltaNet,
        **others,
    )


def build_engine_model(
    model_config: TransformerConfig,
    *,
    trace: TraceConfig,
    pattern: str,
    vocab_size: int,
    max_sequence_length: int,
    rotary_percent: float,
    rotary_base: int,
    keep_bf16_experts: bool = True,
) -> HybridModel:
    """Builds the model in BF16, in evaluation mode and without gradients.

    Args:
        model_config: Configuration of the trained model.
        trace: Settings of TRACE; quantised widths must be whole blocks.
        pattern: Hybrid layer pattern, such as `*E*E`.
        vocab_size: Rows of the embedding.
        max_sequence_length: Longest sequence in tokens.
        rotary_percent: Share of the head dim that RoPE rotates.
        rotary_base: Base period of RoPE.
        keep_bf16_experts: Whether routed experts have weights in BF16, or shapes only.

    Raises:
        ValueError: The model is spread over ranks, a quantised width is not whole blocks, or no
            layer has full attention.
    """
    _require_one_rank(model_config)
    if Symbols.ATTENTION not in pattern.split("/")[0]:
        raise ValueError(
            f"pattern {pattern!r} has no full attention (*), without which Megatron's engine has "
            "no pages to schedule by"
        )
    _require_whole_blocks(model_config, trace)
    if trace.kv_attention != "auto" and not trace.quantises_kv:
        raise ValueError(
            f"kv_attention={trace.kv_attention} has no effect on an engine whose KV cache is not "
            "quantised; leave it out, or quantise the cache too"
        )
    config = dataclasses.replace(
        model_config,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        fp16=False,
        moe_enable_routing_replay=model_config.num_moe_experts is not None,
    )
    linears: dict[str, Any] = {}
    if not keep_bf16_experts:
        linears = {"expert_fc1": ExpertShape, "expert_fc2": ExpertShape}
    model = build_hybrid_model(
        config,
        pattern=pattern,
        vocab_size=vocab_size,
        max_sequence_length=max_sequence_length,
        modules=engine_modules(delta_rule=trace.delta_rule, norm=EngineRMSNorm, **linears),
        rotary_percent=rotary_percent,
        rotary_base=rotary_base,
    )
    for layer in decoder_layers(model):
        if layer.attention is not None:
            cast("PagedSelfAttention", layer.attention).kv_attention = trace.kv_attention
    return model.eval().requires_grad_(False)


def _require_one_rank(config: TransformerConfig) -> None:
    for name in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "expert_model_parallel_size",
        "context_parallel_size",
    ):
        if getattr(config, name) != 1:
            raise ValueError(
                f"the rollout engine holds the whole model on one rank; got {name}="
                f"{getattr(config, name)}; give it a configuration with {name}=1"
            )


def _require_whole_blocks(config: TransformerConfig, trace: TraceConfig) -> None:
    formats = trace.formats
    widths = [("kv_channels", "k and v", formats.kv_cache)] if trace.quantises_kv else []
    if config.num_moe_experts is not None and trace.quantises_experts:
        widths += [("hidden_size", "fc1", formats.activations)]
        widths += [("moe_ffn_hidden_size", "fc2", formats.activations)]
    for name, site, number_format in widths:
        width, block = getattr(config, name), number_format.block_size
        if width % block:
            raise ValueError(
                f"{name} must be a multiple of {block}, the block of {number_format.name}, to "
                f"quantise site {site}; got {width}"
            )
        if trace.compensates_residual and site in trace.quantised_sites:
            _require_compensable(name, width, trace, block)


def _require_compensable(name: str, width: int, trace: TraceConfig, block_size: int) -> None:
    if num_compensated(width, trace.residual_share, block_size) == 0:
        raise ValueError(
            f"method={trace.method} quantises a share of {trace.residual_share} of the channels "
            f"twice, in whole blocks of {block_size}; got {name}={width}, of which that is none"
        )
