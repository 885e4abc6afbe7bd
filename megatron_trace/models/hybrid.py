"""HybridModel from Megatron's local modules, with the classes that a side of TRACE plugs in.

A decoder layer is the checkpoint's: one token mixer (attention, Gated DeltaNet, Mamba) and the MLP
or MoE after it. In a hybrid pattern such as `*E*E` these are two positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_linear_attention_pattern,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols, parse_hybrid_pattern
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.parallel_state import is_pipeline_first_stage, is_pipeline_last_stage
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from megatron_trace.config import DeltaRule
from megatron_trace.models.attention import SDPACoreAttention
from megatron_trace.models.gated_delta_net import LocalGatedDeltaNet
from megatron_trace.models.moe import DispatchInputMoELayer, UnweightedSequentialMLP
from megatron_trace.models.norm import RMSNorm, UncentredRMSNorm
from megatron_trace.models.routing import forget_global_replay_instances

DecoderModel = HybridModel | GPTModel

MIXERS = frozenset(
    {Symbols.ATTENTION, Symbols.GDN, Symbols.MAMBA, Symbols.MLA, Symbols.DS_ATTENTION}
)


@dataclass(frozen=True)
class HybridModules:
    """Classes of a HybridModel that rollout and training replace by their own.

    Attributes:
        self_attention: Attention module; the engine's reads a paged cache.
        core_attention: Attention arithmetic over query, key, value.
        moe_layer: MoE layer; gets the routed input before dispatch.
        experts: Routed experts.
        expert_fc1: First linear of a routed expert.
        expert_fc2: Second linear of a routed expert.
        gated_delta_net: Gated DeltaNet module; the engine's keeps the states of requests.
        delta_rule: Kernels of Gated DeltaNet layers.
        norm: RMSNorm before a layer's parts, and of queries and keys.
    """

    self_attention: type[SelfAttention] = SelfAttention
    core_attention: type = SDPACoreAttention
    moe_layer: type[MoELayer] = DispatchInputMoELayer
    experts: type = UnweightedSequentialMLP
    expert_fc1: type = ColumnParallelLinear
    expert_fc2: type = RowParallelLinear
    gated_delta_net: type[LocalGatedDeltaNet] = LocalGatedDeltaNet
    delta_rule: DeltaRule = "auto"
    norm: type[RMSNorm] = RMSNorm


@dataclass(frozen=True)
class DecoderLayer:
    """The parts of one decoder layer that TRACE touches.

    Attributes:
        index: Decoder layer of the checkpoint, from 0, equal on every pipeline stage.
        attention: Self-attention module, if the mixer is full attention.
        moe: MoE layer, if it has one.
        mlp: Dense MLP, if it has one; nothing of it is quantised.
    """

    index: int
    attention: SelfAttention | None
    moe: MoELayer | None
    mlp: MLP | None


class GroupedExpertLinear:
    """One expert of a grouped linear, which holds its weight among those of others.

    Args:
        group: Megatron's `TEGroupedLinear`.
        index: Local index of the expert.
    """

    def __init__(self, group: torch.nn.Module, index: int) -> None:
        self.group: Any = group
        self.index = index

    @property
    def weight(self) -> torch.nn.Parameter:
        """The expert's weight."""
        return getattr(self.group, f"weight{self.index}")

    @property
    def place(self) -> Any:
        """Where the expert stands, if the linear quantises."""
        return self.group.places[self.index]

    @place.setter
    def place(self, place: Any) -> None:
        self.group.places[self.index] = place


type ExpertLinear = torch.nn.Module | GroupedExpertLinear


class LocalHybridStack(HybridStack):
    """HybridStack whose final norm needs no Transformer Engine.

    Megatron 0.19.2 hard-codes `TENorm` there (models/hybrid/hybrid_block.py).
    """

    def __init__(self, *args: Any, post_layer_norm: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, post_layer_norm=False, **kwargs)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = RMSNorm(
                self.config, self.config.hidden_size, eps=self.config.layernorm_epsilon
            )


class _ExpertSpecProvider(LocalSpecProvider):
    """Local modules for shared experts, the given classes for the routed ones."""

    def __init__(self, modules: HybridModules) -> None:
        self.modules = modules

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        linears = MLPSubmodules(
            linear_fc1=self.modules.expert_fc1,
            linear_fc2=self.modules.expert_fc2,
            activation_func=None,
        )
        return partial(self.modules.experts, submodules=linears)


def attention_spec(modules: HybridModules, *, qk_layernorm: bool) -> ModuleSpec:
    """Gives the spec of a self-attention.

    Args:
        modules: Classes of this side.
        qk_layernorm: Whether queries and keys are normalised before RoPE.
    """
    qk_norm: Any = modules.norm if qk_layernorm else None
    return ModuleSpec(
        module=modules.self_attention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=modules.core_attention,
            linear_proj=RowParallelLinear,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )


def gated_delta_net_spec(modules: HybridModules) -> ModuleSpec:
    """Gives the spec of a Gated DeltaNet."""
    return ModuleSpec(
        module=modules.gated_delta_net,
        params={"delta_rule": modules.delta_rule},
        submodules=GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear,
            out_norm=UncentredRMSNorm,
            out_proj=RowParallelLinear,
        ),
    )


def moe_builder(modules: HybridModules, *, num_experts: int) -> Any:
    """Gives what builds a MoE layer from a configuration.

    Args:
        modules: Classes of this side.
        num_experts: Routed experts.
    """
    moe: Any = get_moe_module_spec_for_backend(
        _ExpertSpecProvider(modules), num_experts=num_experts, moe_grouped_gemm=False
    )
    return partial(modules.moe_layer, **moe.keywords)


def hybrid_stack_spec(
    modules: HybridModules, *, num_experts: int, qk_layernorm: bool
) -> ModuleSpec:
    """Gives the layer specs of `*`, `G`, `-` and `E`: attention, Gated DeltaNet, dense MLP, MoE.

    Args:
        modules: Classes of this side.
        num_experts: Routed experts of a MoE layer; 0 if the model has none.
        qk_layernorm: Whether queries and keys are normalised before RoPE.
    """
    bias_dropout_add: Any = get_bias_dropout_add
    norm: Any = modules.norm
    layers: dict[str, ModuleSpec] = {}
    if num_experts:
        layers["moe_layer"] = ModuleSpec(
            module=MoETransformerLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=norm,
                mlp=moe_builder(modules, num_experts=num_experts),
                mlp_bda=bias_dropout_add,
            ),
        )
    return ModuleSpec(
        module=LocalHybridStack,
        submodules=HybridStackSubmodules(
            attention_layer=ModuleSpec(
                module=TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    input_layernorm=norm,
                    self_attention=attention_spec(modules, qk_layernorm=qk_layernorm),
                    self_attn_bda=bias_dropout_add,
                ),
            ),
            gdn_layer=ModuleSpec(
                module=TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    input_layernorm=norm,
                    self_attention=gated_delta_net_spec(modules),
                    self_attn_bda=bias_dropout_add,
                ),
            ),
            mlp_layer=ModuleSpec(
                module=TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=norm, mlp=dense_mlp, mlp_bda=bias_dropout_add
                ),
            ),
            mtp_block_spec=_mtp_block_spec(),
            **layers,
        ),
    )


def _mtp_block_spec() -> ModuleSpec:
    """Gives the norms and the projection of MTP; its layers are those of the pattern after `/`."""
    norm: Any = RMSNorm
    layer = ModuleSpec(
        module=MultiTokenPredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=norm, hnorm=norm, layer_norm=norm, eh_proj=ColumnParallelLinear
        ),
    )
    return ModuleSpec(
        module=MultiTokenPredictionBlock,
        submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[layer]),
    )


def dense_mlp(config: TransformerConfig, *args: Any, **kwargs: Any) -> MLP:
    """Builds the dense MLP of a layer."""
    linears: Any = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    kwargs["ffn_hidden_size"] = config.ffn_hidden_size
    return MLP.as_mlp_submodule(linears, config, *args, **kwargs)


def build_hybrid_model(
    config: TransformerConfig,
    *,
    pattern: str,
    vocab_size: int,
    max_sequence_length: int,
    modules: HybridModules,
    rotary_percent: float = 1.0,
    rotary_base: int = 10_000,
    pre_process: bool | None = None,
    post_process: bool | None = None,
    vp_stage: int | None = None,
) -> HybridModel:
    """Builds a HybridModel of attention, Gated DeltaNet, MLP and MoE layers on this device.

    With `init_model_with_meta_device`, inside `torch.device("meta")`, it stays where it is.

    Args:
        config: Model configuration; `num_layers` counts pattern positions.
        pattern: Hybrid layer pattern, such as `*E*E`, `*-*E` with a dense MLP, or `GEGEGE*E` with
            three Gated DeltaNets to an attention. `|` ends a pipeline stage: `*E*|E` gives two;
            stage i of p ranks and v virtual stages goes to rank i % p as its virtual stage i // p.
            `/` begins the layers of multi-token prediction.
        vocab_size: Rows of the embedding.
        max_sequence_length: Longest sequence in tokens.
        modules: Classes of this side.
        rotary_percent: Share of the head dim that RoPE rotates.
        rotary_base: Base period of RoPE.
        pre_process: Whether this stage has the embedding; None asks Megatron's parallel state.
        post_process: Whether this stage has the output layer; None likewise.
        vp_stage: Virtual pipeline stage of this rank to build; None without virtual stages.

    Raises:
        ValueError: The pattern contains other layers, or contradicts `num_layers`,
            `num_moe_experts` or the pipeline.
    """
    main = _main_pattern(pattern)
    unknown = sorted(set(main) - {Symbols.ATTENTION, Symbols.GDN, Symbols.MLP, Symbols.MOE})
    if unknown:
        raise ValueError(
            f"pattern {pattern!r} has layers {unknown}; the local spec builds attention (*), Gated "
            "DeltaNet (G), MLP (-) and MoE (E) layers only"
        )
    if modules.delta_rule != "auto" and Symbols.GDN not in main:
        raise ValueError(
            f"delta_rule={modules.delta_rule} has no effect with pattern {pattern!r}, which has no "
            "Gated DeltaNet (G); leave it out"
        )
    if len(main) != config.num_layers:
        raise ValueError(
            f"pattern {pattern!r} has {len(main)} positions, but num_layers={config.num_layers}"
        )
    num_experts = (config.num_moe_experts or 0) if Symbols.MOE in main else 0
    if Symbols.MOE in main and not num_experts:
        raise ValueError(
            f"pattern {pattern!r} has MoE layers, but num_moe_experts={config.num_moe_experts}"
        )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    _require_stages(config, pattern, groups.pp.size(), vp_stage)
    if pre_process is None:
        pre_process = is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    if post_process is None:
        post_process = is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    model = HybridModel(
        config,
        hybrid_stack_spec(modules, num_experts=num_experts, qk_layernorm=config.qk_layernorm),
        vocab_size=vocab_size,
        max_sequence_length=max_sequence_length,
        hybrid_layer_pattern=pattern,
        pre_process=pre_process,
        post_process=post_process,
        position_embedding_type="rope",
        rotary_percent=rotary_percent,
        rotary_base=rotary_base,
        parallel_output=True,
        share_embeddings_and_output_weights=False,
        pg_collection=groups,
        vp_stage=vp_stage,
    )
    forget_global_replay_instances(model)
    if config.init_model_with_meta_device:
        return model
    # `use_cpu_initialization` gives the same weights on every machine, but leaves them on the CPU.
    return model.to(torch.cuda.current_device())


def _require_stages(
    config: TransformerConfig, pattern: str, num_ranks: int, vp_stage: int | None
) -> None:
    """Refuses what Megatron 0.19.2 would build otherwise than the pattern says."""
    if config.pipeline_model_parallel_size != num_ranks:
        raise ValueError(
            f"pipeline_model_parallel_size={config.pipeline_model_parallel_size} in the model "
            f"configuration, but the pipeline group has {num_ranks} ranks; set both alike"
        )
    virtual = config.virtual_pipeline_model_parallel_size
    if (virtual is None) != (vp_stage is None):
        raise ValueError(
            f"virtual_pipeline_model_parallel_size={virtual} contradicts vp_stage={vp_stage}; give "
            "the virtual stage to build, or none of both"
        )
    stages = (parse_hybrid_pattern(pattern).main_pattern or "").split(Symbols.PIPE)
    num_stages = len(stages)
    if not all(stages[1:-1]):
        # Measured with virtual stages: its output is its input, and gradients came out wrong.
        raise ValueError(
            f"pattern {pattern!r} has a stage without layers between others, through which "
            "gradients do not flow rightly; give it a layer"
        )
    if num_stages != num_ranks * (virtual or 1):
        raise ValueError(
            f"pattern {pattern!r} has {num_stages} stages (parted by |), but "
            f"pipeline_model_parallel_size={num_ranks} with {virtual or 1} virtual stages needs "
            f"{num_ranks * (virtual or 1)}"
        )


def decoder_layer_indices(pattern: str) -> list[int]:
    """Gives the decoder layer of every position of the main pattern.

    A mixer opens a decoder layer; the MLP or MoE after it belongs to it.

    Raises:
        ValueError: The pattern has an MLP or MoE without a mixer of its own before it.
    """
    indices: list[int] = []
    previous = None
    layer = -1
    for position, symbol in enumerate(_main_pattern(pattern)):
        if symbol in MIXERS:
            layer += 1
        elif previous not in MIXERS:
            raise ValueError(
                f"pattern {pattern!r}: position {position} ({symbol}) does not follow a token "
                "mixer, so it belongs to no decoder layer"
            )
        indices.append(layer)
        previous = symbol
    return indices


def pattern_sites(pattern: str) -> tuple[str, ...]:
    """Gives the sites that any decoder layer of this pattern has, of fc1, fc2, k and v.

    Dense MLPs have none: TRACE quantises routed experts and K/V.
    """
    main = _main_pattern(pattern)
    sites: tuple[str, ...] = ()
    if Symbols.MOE in main:
        sites += ("fc1", "fc2")
    if Symbols.ATTENTION in main:
        sites += ("k", "v")
    return sites


@dataclass(frozen=True)
class DecoderLayout:
    """Decoder layers of a whole model, equal on every pipeline stage; without those of MTP.

    Attributes:
        num_layers: Decoder layers of the checkpoint.
        moe_layers: Those with a MoE, as in routing records.
        sites: Sites that any of them has, of fc1, fc2, k and v.
    """

    num_layers: int
    moe_layers: tuple[int, ...]
    sites: tuple[str, ...]


def gpt_delta_nets(config: TransformerConfig) -> list[bool]:
    """Gives for each decoder layer of a GPTModel whether it has a Gated DeltaNet."""
    if config.experimental_attention_variant != "gated_delta_net":
        return [False] * config.num_layers
    return [kind == 1 for kind in get_linear_attention_pattern(config)]


def decoder_layout(model: DecoderModel) -> DecoderLayout:
    """Gives the decoder layers of the whole model of which `model` may be a stage."""
    if isinstance(model, GPTModel):
        layers = tuple(range(model.config.num_layers))
        cached = () if all(gpt_delta_nets(model.config)) else ("k", "v")
        if model.config.num_moe_experts is None:
            return DecoderLayout(len(layers), (), cached)
        return DecoderLayout(len(layers), layers, ("fc1", "fc2", *cached))
    pattern = model.hybrid_layer_pattern
    assert pattern is not None, "build_hybrid_model sets the pattern"
    indices = decoder_layer_indices(pattern)
    symbols = zip(_main_pattern(pattern), indices, strict=True)
    return DecoderLayout(
        num_layers=1 + max(indices),
        moe_layers=tuple(layer for symbol, layer in symbols if symbol == Symbols.MOE),
        sites=pattern_sites(pattern),
    )


def decoder_layers(model: DecoderModel) -> list[DecoderLayer]:
    """Gives the decoder layers of this pipeline stage, without those of MTP.

    A layer that a stage boundary cuts in two appears on both stages, with what each holds.
    """
    stack: Any = model.decoder
    if isinstance(model, GPTModel):
        return [
            DecoderLayer(
                layer.layer_number - 1,
                None if isinstance(layer.self_attention, GatedDeltaNet) else layer.self_attention,
                moe=layer.mlp if isinstance(layer.mlp, MoELayer) else None,
                mlp=None if isinstance(layer.mlp, MoELayer) else layer.mlp,
            )
            for layer in stack.layers
        ]
    assert model.hybrid_layer_pattern is not None, "build_hybrid_model sets the pattern"
    indices = decoder_layer_indices(model.hybrid_layer_pattern)
    parts: dict[int, dict[str, Any]] = {}
    for symbol, layer in zip(stack.layer_type_list, stack.layers, strict=True):
        empty: dict[str, Any] = {"attention": None, "moe": None, "mlp": None}
        part = parts.setdefault(indices[layer.layer_number - 1], empty)
        if symbol == Symbols.ATTENTION:
            part["attention"] = layer.self_attention
        elif symbol == Symbols.MOE:
            part["moe"] = layer.mlp
        elif symbol == Symbols.MLP:
            part["mlp"] = layer.mlp
    return [DecoderLayer(index, **part) for index, part in sorted(parts.items())]


def named_expert_linears(layer: DecoderLayer) -> Iterator[tuple[int, str, ExpertLinear]]:
    """Gives (global expert, `fc1` or `fc2`, linear) of the routed experts held by this rank."""
    if layer.moe is not None:
        yield from expert_linears(layer.moe)


def expert_linears(moe: MoELayer) -> Iterator[tuple[int, str, ExpertLinear]]:
    """Gives (global expert, `fc1` or `fc2`, linear) of a layer's experts held by this rank."""
    experts: Any = moe.experts
    of_experts = getattr(experts, "local_experts", None)
    for local, expert in enumerate(moe.local_expert_indices):
        for matrix in ("fc1", "fc2"):
            if of_experts is None:
                yield (
                    expert,
                    matrix,
                    GroupedExpertLinear(getattr(experts, f"linear_{matrix}"), local),
                )
            else:
                yield expert, matrix, getattr(of_experts[local], f"linear_{matrix}")


def causal_mask(num_positions: int, device: torch.device | None = None) -> torch.Tensor:
    """Gives Megatron's boolean attention mask [1, 1, S, S], True where attention is forbidden."""
    shape = (1, 1, num_positions, num_positions)
    return torch.ones(shape, dtype=torch.bool, device=device).triu(1)


def _main_pattern(pattern: str) -> str:
    parsed = parse_hybrid_pattern(pattern)
    return (parsed.main_pattern or "").replace(Symbols.PIPE, "")
