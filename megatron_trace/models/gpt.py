"""GPTModel from the parts that a HybridModel of the pattern `*E*E` is built from.

Megatron 0.19.2 calls GPTModel deprecated, but most checkpoints are of it.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import is_pipeline_first_stage, is_pipeline_last_stage
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from megatron_trace.models.hybrid import (
    HybridModules,
    attention_spec,
    dense_mlp,
    gated_delta_net_spec,
    gpt_delta_nets,
    moe_builder,
)
from megatron_trace.models.norm import RMSNorm
from megatron_trace.models.routing import forget_global_replay_instances


def gpt_layer_spec(
    modules: HybridModules, *, num_experts: int, qk_layernorm: bool, is_delta_net: bool = False
) -> ModuleSpec:
    """Gives the spec of a decoder layer of attention and MoE, or dense MLP.

    Args:
        modules: Classes of this side.
        num_experts: Routed experts; 0 for a dense MLP.
        qk_layernorm: Whether queries and keys are normalised before RoPE.
        is_delta_net: Whether it has a Gated DeltaNet instead of attention.
    """
    bias_dropout_add: Any = get_bias_dropout_add
    mixer = attention_spec(modules, qk_layernorm=qk_layernorm)
    if is_delta_net:
        mixer = gated_delta_net_spec(modules)
    mlp = moe_builder(modules, num_experts=num_experts) if num_experts else dense_mlp
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=mixer,
            self_attn_bda=bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=bias_dropout_add,
        ),
    )


def build_gpt_model(
    config: TransformerConfig,
    *,
    vocab_size: int,
    max_sequence_length: int,
    modules: HybridModules,
    rotary_percent: float = 1.0,
    rotary_base: int = 10_000,
    vp_stage: int | None = None,
) -> GPTModel:
    """Builds a GPTModel, or this rank's stage of it, from Megatron's local modules.

    Args:
        config: Model configuration; `num_layers` counts decoder layers, `linear_attention_freq`
            says which have a Gated DeltaNet if that is its `experimental_attention_variant`.
        vocab_size: Rows of the embedding.
        max_sequence_length: Longest sequence in tokens.
        modules: Classes of this side.
        rotary_percent: Share of the head dim that RoPE rotates.
        rotary_base: Base period of RoPE.
        vp_stage: Virtual pipeline stage of this rank to build; None without virtual stages.

    Raises:
        ValueError: The configuration mixes dense and MoE layers or has multi-token prediction (a
            HybridModel does both), has another variant of attention, or contradicts the modules.
    """
    for name, value, plain in (
        ("moe_layer_freq", config.moe_layer_freq, 1),
        ("mtp_num_layers", config.mtp_num_layers, None),
    ):
        if value != plain:
            raise ValueError(
                f"GPTModel of the local spec has layers of one kind; {name}={value} asks for more: "
                "build a HybridModel, whose pattern says it"
            )
    variant = config.experimental_attention_variant
    if variant not in (None, "gated_delta_net"):
        raise ValueError(
            f"GPTModel of the local spec has full attention and Gated DeltaNet; got "
            f"experimental_attention_variant={variant}"
        )
    are_delta_nets = gpt_delta_nets(config)
    if modules.delta_rule != "auto" and not any(are_delta_nets):
        raise ValueError(
            f"delta_rule={modules.delta_rule} has no effect without Gated DeltaNet layers; leave "
            "it out"
        )
    specs = [
        gpt_layer_spec(
            modules,
            num_experts=config.num_moe_experts or 0,
            qk_layernorm=config.qk_layernorm,
            is_delta_net=is_delta_net,
        )
        for is_delta_net in are_delta_nets
    ]
    norm: Any = RMSNorm
    first = get_transformer_layer_offset(config, vp_stage)
    last = first + get_num_layers_to_build(config, vp_stage)
    block: Any = TransformerBlockSubmodules(layer_specs=specs[first:last], layer_norm=norm)
    model = GPTModel(
        config,
        block,
        vocab_size=vocab_size,
        max_sequence_length=max_sequence_length,
        pre_process=is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        position_embedding_type="rope",
        rotary_percent=rotary_percent,
        rotary_base=rotary_base,
        parallel_output=True,
        share_embeddings_and_output_weights=False,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        vp_stage=vp_stage,
    )
    forget_global_replay_instances(model)
    return model.to(torch.cuda.current_device())
