"""The trainer's model: built, bound to its TraceSites, and asked for log-probabilities.

Legend: S positions, B samples.
"""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from typing import Any, Literal

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention

from megatron_trace.config import TraceConfig
from megatron_trace.hints.sharding import expert_columns, kv_heads, local_experts
from megatron_trace.models.attention import SDPACoreAttention, packed_seq_params
from megatron_trace.models.gpt import build_gpt_model
from megatron_trace.models.hybrid import (
    DecoderModel,
    HybridModules,
    build_hybrid_model,
    causal_mask,
    decoder_layers,
)
from megatron_trace.training.attention import (
    AttentionPlace,
    GuidedCoreAttention,
    GuidedDotProductAttention,
)
from megatron_trace.training.experts import (
    GuidedExperts,
    GuidedMoELayer,
    QuantisedWeightFc1,
    QuantisedWeightFc2,
    bind_experts,
)
from megatron_trace.training.logprobs import chosen_logprobs, target_logprobs, whole_samples
from megatron_trace.training.micro_batch import MicroBatch
from megatron_trace.training.model_shape import model_shape
from megatron_trace.training.routing import install_keyed_replay
from megatron_trace.training.sites import TraceSites
from megatron_trace.training.te_choice import (
    ExpertsKind,
    chosen_experts,
    require_runnable,
    with_recipe,
)

QUANTISING_MODULES = HybridModules(
    moe_layer=GuidedMoELayer,
    experts=GuidedExperts,
    expert_fc1=QuantisedWeightFc1,
    expert_fc2=QuantisedWeightFc2,
)

TrainerAttention = Literal["sdpa", "megatron"]
# Of each attention arithmetic: the plain class, and the one that quantises K and V.
CORE_ATTENTION: dict[TrainerAttention, tuple[type, type]] = {
    "sdpa": (SDPACoreAttention, GuidedCoreAttention),
    "megatron": (DotProductAttention, GuidedDotProductAttention),
}


def build_trainer_model(
    model_config: TransformerConfig,
    *,
    pattern: str,
    vocab_size: int,
    max_sequence_length: int,
    trace: TraceConfig,
    dtype: torch.dtype = torch.bfloat16,
    attention: TrainerAttention = "sdpa",
    rotary_percent: float = 1.0,
    rotary_base: int = 10_000,
    vp_stage: int | None = None,
) -> tuple[HybridModel, TraceSites]:
    """Builds a trainer model, or this rank's stage of it, and what scopes its hints and routing.

    With method bf16 the model has Megatron's plain modules: no quantiser can run.

    Args:
        model_config: Model configuration; not changed.
        pattern: Hybrid layer pattern, such as `*E*E`; `|` ends a pipeline stage.
        vocab_size: Rows of the embedding.
        max_sequence_length: Longest sequence in tokens.
        trace: The run's configuration.
        dtype: dtype of parameters and computation, BF16 or FP32.
        attention: `sdpa` is torch's attention, the engine's arithmetic and bit-equal to it on some
            machines; `megatron` is Megatron's own `DotProductAttention`, which rounds elsewhere,
            as a trainer's kernels do. The routed experts are those of `trace.experts`.
        rotary_percent: Share of the head dim that RoPE rotates.
        rotary_base: Base period of RoPE.
        vp_stage: Virtual pipeline stage of this rank; see `pipeline.build_trainer_chunks`.

    Raises:
        ValueError: The configuration asks for something that would break agreement with the
            rollout or that this model does not support.
    """
    config, modules = _prepared(model_config, trace, dtype, attention)
    model = build_hybrid_model(
        config,
        pattern=pattern,
        vocab_size=vocab_size,
        max_sequence_length=max_sequence_length,
        modules=modules,
        rotary_percent=rotary_percent,
        rotary_base=rotary_base,
        vp_stage=vp_stage,
    )
    return model, _bound_sites(model, trace, max_sequence_length)


def build_gpt_trainer_model(
    model_config: TransformerConfig,
    *,
    vocab_size: int,
    max_sequence_length: int,
    trace: TraceConfig,
    dtype: torch.dtype = torch.bfloat16,
    attention: TrainerAttention = "sdpa",
    rotary_percent: float = 1.0,
    rotary_base: int = 10_000,
    vp_stage: int | None = None,
) -> tuple[GPTModel, TraceSites]:
    """Builds a trainer's GPTModel; it computes what a HybridModel of the pattern `*E*E` does.

    Args:
        model_config: Model configuration, whose `num_layers` counts decoder layers; not changed.
        vocab_size: See `build_trainer_model`, as the others.
        max_sequence_length: See there.
        trace: See there.
        dtype: See there.
        attention: See there.
        rotary_percent: See there.
        rotary_base: See there.
        vp_stage: See there.

    Raises:
        ValueError: See `build_trainer_model`, and `models.gpt.build_gpt_model`.
    """
    config, modules = _prepared(model_config, trace, dtype, attention)
    model = build_gpt_model(
        config,
        vocab_size=vocab_size,
        max_sequence_length=max_sequence_length,
        modules=modules,
        rotary_percent=rotary_percent,
        rotary_base=rotary_base,
        vp_stage=vp_stage,
    )
    return model, _bound_sites(model, trace, max_sequence_length)


def token_logprobs(
    model: torch.nn.Module,
    sites: TraceSites,
    micro_batch: MicroBatch,
    *,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Gives the log-probability of every next token.

    Args:
        model: The trainer model, or its DDP wrapper.
        sites: Its `TraceSites`, with the micro-batch in force.
        micro_batch: The samples.
        temperature: Temperature of the rollout's sampling.

    Returns:
        FP32 [B, S]; entry [b, s] belongs to token s + 1, as `logprobs_of_logits` gives it.

    Raises:
        RuntimeError: The micro-batch is not the one in force.
    """
    logits = forward_micro_batch(model, sites, micro_batch)
    return logprobs_of_logits(logits, micro_batch, temperature=temperature)


def forward_micro_batch(
    model: torch.nn.Module, sites: TraceSites, micro_batch: MicroBatch
) -> torch.Tensor:
    """Gives the output of a trainer model or one of its stages.

    Args:
        model: The model or stage, or its DDP wrapper.
        sites: Its `TraceSites`, with the micro-batch in force.
        micro_batch: The samples.

    Returns:
        [B, S, vocabulary] logits; of a stage that is not the last, [S, B, H] hidden states.

    Raises:
        RuntimeError: The micro-batch is not the one in force.
    """
    if sites.micro_batch_in_force is not micro_batch:
        raise RuntimeError(
            "the micro-batch to forward is not in force; call this inside `with "
            "sites.micro_batch(micro_batch)`"
        )
    return model(**forward_arguments(micro_batch))


def forward_arguments(micro_batch: MicroBatch) -> dict[str, Any]:
    """Gives what the model's forward takes on this rank: inputs, positions, and what attends.

    Only Megatron's own attention gets a mask, torch's is causal by itself; under context
    parallelism the core attention knows the positions. Nor is there one for a pack, which has the
    bounds of its sequences (`packed_seq_params`).
    """
    sites, order = micro_batch.made_for, micro_batch.order
    arguments = {
        "input_ids": micro_batch.inputs,
        "position_ids": micro_batch.positions,
        "attention_mask": None,
    }
    if order.packed:
        return arguments | {"packed_seq_params": packed_seq_params(order.bounds, sites.device)}
    if sites.shape.layout.cp_size == 1 and sites.needs_mask:
        arguments["attention_mask"] = causal_mask(micro_batch.num_positions, sites.device)
    return arguments


def logprobs_of_logits(
    logits: torch.Tensor, micro_batch: MicroBatch, *, temperature: float = 1.0
) -> torch.Tensor:
    """Gives the log-probability of every next token from the model's logits.

    Args:
        logits: [B, P, vocabulary / tp], output of the last stage on this rank.
        micro_batch: The samples that were forwarded.
        temperature: Temperature of the rollout's sampling.

    Returns:
        FP32 [B, S], the same on all tensor- and context-parallel ranks; entry [b, s] belongs to
        token s + 1. Its gradient reaches this rank's positions only, see `logprobs.whole_samples`.
    """
    groups = micro_batch.made_for.groups
    logprobs = target_logprobs(logits, micro_batch.targets, groups, temperature=temperature)
    return whole_samples(logprobs, groups, micro_batch.token_rows_of_samples)


def top_logprobs_of_logits(
    logits: torch.Tensor, micro_batch: MicroBatch, *, temperature: float = 1.0
) -> torch.Tensor:
    """Gives the trainer's log-probabilities of the rollout's most likely tokens.

    Args:
        logits: [B, P, vocabulary / tp], output of the last stage on this rank.
        micro_batch: The samples that were forwarded.
        temperature: Temperature of the rollout's sampling.

    Returns:
        FP32 [B, S, K], as `logprobs_of_logits` gives those of the next tokens; those of token 0 at
        positions outside the response.

    Raises:
        ValueError: The samples have no most likely tokens.
    """
    if micro_batch.top_tokens is None:
        raise ValueError(
            f"sample {micro_batch.sample_ids[0]} has no top_tokens; roll out with "
            "SamplingSettings.top_logprobs (--rollout-top-logprobs) above 0"
        )
    groups = micro_batch.made_for.groups
    tokens = micro_batch.attention_rows.take(micro_batch.top_tokens)
    top = chosen_logprobs(logits, tokens, groups, temperature=temperature)
    return whole_samples(top, groups, micro_batch.token_rows_of_samples)


def _prepared(
    model_config: TransformerConfig,
    trace: TraceConfig,
    dtype: torch.dtype,
    attention: TrainerAttention,
) -> tuple[TransformerConfig, HybridModules]:
    """Gives the configuration and the classes to build with, if they do together."""
    experts = chosen_experts(model_config, trace)
    config = with_recipe(_with_dtype(model_config, dtype), experts)
    _require_supported(config, trace, experts)
    require_runnable(config, trace, experts)
    _require_layout(config, trace, attention)
    modules = _modules(trace, attention, experts)
    if config.gradient_accumulation_fusion:
        modules = dataclasses.replace(modules, experts=partial(modules.experts, fuse_wgrad=True))
        # Megatron's own linears would need Apex for it.
        config.gradient_accumulation_fusion = False
    return config, modules


def _modules(
    trace: TraceConfig, attention: TrainerAttention, experts: ExpertsKind
) -> HybridModules:
    if attention not in CORE_ATTENTION:
        raise ValueError(f"attention must be {' or '.join(CORE_ATTENTION)}; got {attention!r}")
    plain, guided = CORE_ATTENTION[attention]
    quantising = trace.quantises_experts
    if experts == "local":
        modules = QUANTISING_MODULES if quantising else HybridModules()
    else:
        # Only here: Transformer Engine is no requirement.
        from megatron_trace.training import te_specs

        recipe = te_specs.TE_RECIPE_MODULES if experts == "te_recipe" else te_specs.TE_MODULES
        modules = recipe if quantising else te_specs.PLAIN_TE_MODULES
    core_attention = guided if trace.trains_quantised_kv else plain
    return dataclasses.replace(modules, core_attention=core_attention, delta_rule=trace.delta_rule)


def _with_dtype(config: TransformerConfig, dtype: torch.dtype) -> TransformerConfig:
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"the trainer computes in bfloat16 or float32; got {dtype}")
    config = copy.copy(config)
    config.params_dtype = config.pipeline_dtype = config.autocast_dtype = dtype
    config.bf16, config.fp16 = dtype == torch.bfloat16, False
    return config


def _require_supported(config: TransformerConfig, trace: TraceConfig, experts: ExpertsKind) -> None:
    unsupported: dict[str, bool] = {
        # Its schedule runs the layers of two micro-batches by turns, not through the model.
        "overlap_moe_expert_parallel_comm": config.overlap_moe_expert_parallel_comm,
        "delay_wgrad_compute": config.delay_wgrad_compute,
        "overlap_dispatch_backward_with_experts_wgrad": (
            config.overlap_dispatch_backward_with_experts_wgrad
        ),
        # Hints differ from replay to replay, and a replay calls no hook.
        f"cuda_graph_impl={config.cuda_graph_impl}": config.cuda_graph_impl != "none",
        # Two messages at once between the same two ranks: Megatron 0.19.2 mixes them up.
        "2 ranks with virtual stages, but not overlap_p2p_comm=True and batch_p2p_comm=False": (
            config.pipeline_model_parallel_size == 2
            and config.virtual_pipeline_model_parallel_size is not None
            and (config.batch_p2p_comm or not config.overlap_p2p_comm)
        ),
        # The rollout has no dropout, drops no token and adds no noise.
        "attention_dropout > 0": config.attention_dropout > 0,
        "hidden_dropout > 0": config.hidden_dropout > 0,
        "moe_expert_capacity_factor": config.moe_expert_capacity_factor is not None,
        "moe_input_jitter_eps": config.moe_input_jitter_eps is not None,
        # The probability is applied after fc2.
        "moe_apply_probs_on_input": config.moe_apply_probs_on_input,
        "add_bias_linear": config.add_bias_linear,
        # It adds into weight.main_grad, which a local quantised weight does not have.
        "gradient_accumulation_fusion with experts=local": (
            experts == "local" and config.gradient_accumulation_fusion
        ),
    }
    if trace.method != "bf16":
        formats = trace.formats
        widths = [("kv_channels", formats.kv_cache)] if trace.trains_quantised_kv else []
        if config.num_moe_experts is not None and trace.quantises_experts:
            widths += [("hidden_size", formats.activations)]
            widths += [("moe_ffn_hidden_size", formats.activations)]
        for name, number_format in widths:
            size, block = getattr(config, name), number_format.block_size
            what = f"{name}={size}, not a multiple of {block}, the block of {number_format.name}"
            unsupported[what] = size % block != 0
    if config.moe_enable_routing_replay:
        # Both choose experts without asking the replay instance.
        unsupported["moe_router_fusion"] = config.moe_router_fusion
        # The gate weights of replayed experts would come from random or biased logits.
        unsupported["moe_router_force_load_balancing"] = config.moe_router_force_load_balancing
        unsupported["moe_router_force_biased"] = config.moe_router_force_biased is not None
        balancing = config.moe_router_load_balancing_type
        for name in ("sinkhorn", "quantile_balancing"):
            unsupported[f"moe_router_load_balancing_type={name}"] = name in balancing
    for name, present in unsupported.items():
        if present:
            raise ValueError(
                f"a trainer model with method {trace.method} does not support {name}; change the "
                "model configuration"
            )


def _require_layout(
    config: TransformerConfig, trace: TraceConfig, attention: TrainerAttention
) -> None:
    """Raises ValueError if ranks would have parts that cannot be quantised as a whole's."""
    tp_size, cp_size = config.tensor_model_parallel_size, config.context_parallel_size
    if tp_size > 1 and config.num_moe_experts and not config.sequence_parallel:
        raise ValueError(
            f"tensor_model_parallel_size={tp_size} with MoE layers contradicts "
            "sequence_parallel=False, which Megatron refuses to train; set sequence_parallel"
        )
    if cp_size > 1 and attention == "megatron":
        raise ValueError(
            f"context_parallel_size={cp_size} contradicts attention=megatron: Megatron's "
            "DotProductAttention refuses it; choose attention=sdpa"
        )
    if config.num_moe_experts:
        local_experts(config.num_moe_experts, config.expert_model_parallel_size, 0)
    if trace.method == "bf16":
        return
    assert config.num_query_groups is not None, "TransformerConfig fills it in"
    kv_heads(config.num_query_groups, tp_size, 0)
    etp_size = config.expert_tensor_parallel_size or 1
    if config.num_moe_experts and etp_size > 1:
        assert config.moe_ffn_hidden_size is not None, "TransformerConfig fills it in"
        block_size = trace.formats.activations.block_size
        expert_columns(config.moe_ffn_hidden_size, etp_size, 0, block_size=block_size)


def _bound_sites(model: DecoderModel, trace: TraceConfig, max_sequence_length: int) -> TraceSites:
    sites = TraceSites(trace, model, model_shape(model, max_sequence_length))
    install_keyed_replay(model, sites)
    if sites.quantises:
        _bind(model, sites)
    return sites


def _bind(model: DecoderModel, sites: TraceSites) -> None:
    """Tells every quantising module of the decoder where it stands; MTP's stay plain."""
    for layer in decoder_layers(model):
        if layer.attention is not None and sites.trace.trains_quantised_kv:
            core_attention: Any = layer.attention.core_attention
            core_attention.place = AttentionPlace(sites, layer.index)
        if layer.moe is None or not sites.trace.quantises_experts:
            continue
        bind_experts(layer.moe, layer.index, sites)
