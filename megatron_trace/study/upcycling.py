"""A MoE from the last layers of a dense model: Megatron's up-cycling, once per group of experts.

Megatron's `upcycling_utils` (0.19.2) cuts a dense MLP into `granularity` slices and repeats them
until there are `num_experts`, so that experts come in equal copies. Here every group of slices cuts
the same MLP after a permutation of its neurons of its own, which does not change what the MLP
computes: no two experts are equal, and a token that is sent to all slices of one group gets
(about, see `megatron_scale`) what the dense model gives.

Megatron's function takes the first submodule called `mlp` for a MoE. In a HybridModel that is the
empty one of an attention position, so it refuses the model; it is given one layer at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.upcycling_utils import upcycle_state_dict

from megatron_trace.models.hybrid import HybridModules, build_hybrid_model

ROUTER_STD = 0.02


@dataclass(frozen=True)
class Upcycling:
    """How a dense model becomes a MoE.

    Attributes:
        num_layers: Last decoder layers whose MLP becomes a MoE.
        num_groups: Times that the neurons of an MLP are dealt out.
        granularity: Slices, that is experts, of a group; also the experts of a token.
        megatron_scale: Whether fc1 and fc2 are multiplied by the cube root of `granularity`, as
            Megatron does, which with SwiGLU is the dense function only about; if not, fc2 alone is
            multiplied by `granularity`, which is exact.
        seed: Seed of the permutations and the router.
    """

    num_layers: int
    num_groups: int
    granularity: int
    megatron_scale: bool = True
    seed: int = 0

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer."""
        return self.num_groups * self.granularity


def moe_config(dense: TransformerConfig, upcycling: Upcycling) -> TransformerConfig:
    """Gives the configuration of the up-cycled model."""
    assert dense.ffn_hidden_size is not None, "TransformerConfig fills it in"
    return dataclasses.replace(
        dense,
        num_moe_experts=upcycling.num_experts,
        moe_router_topk=upcycling.granularity,
        moe_ffn_hidden_size=dense.ffn_hidden_size // upcycling.granularity,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-2,
        moe_token_dispatcher_type="alltoall",
        moe_enable_routing_replay=True,
    )


def build_part(
    config: TransformerConfig,
    *,
    pattern: str,
    vocab_size: int,
    max_sequence_length: int,
    rotary_base: int,
    first: bool,
    last: bool,
) -> HybridModel:
    """Builds the layers of a pattern as a pipeline stage: without embedding, head, or both.

    Args:
        config: Configuration of the whole model.
        pattern: Hybrid layer pattern of the part.
        vocab_size: Rows of embedding and head.
        max_sequence_length: Longest sequence in tokens.
        rotary_base: Base period of RoPE.
        first: Whether the part has the embedding.
        last: Whether it has the final norm and the head.
    """
    return build_hybrid_model(
        dataclasses.replace(config, num_layers=len(pattern)),
        pattern=pattern,
        vocab_size=vocab_size,
        max_sequence_length=max_sequence_length,
        modules=HybridModules(),
        rotary_base=rotary_base,
        pre_process=first,
        post_process=last,
    )


def weights_of_part(
    weights: Mapping[str, torch.Tensor], model: HybridModel, *, first_position: int
) -> dict[str, torch.Tensor]:
    """Gives the parameters of a part, by the part's names, out of those of the whole model."""
    return {name: weights[_shifted(name, first_position)] for name, _ in model.named_parameters()}


def with_part(
    weights: Mapping[str, torch.Tensor], part: Mapping[str, torch.Tensor], *, first_position: int
) -> dict[str, torch.Tensor]:
    """Gives the parameters of the whole model whose layers from a position on are the part's."""
    prefix = "decoder.layers."
    kept = {
        name: value
        for name, value in weights.items()
        if not name.startswith(prefix) or int(name.split(".")[2]) < first_position
    }
    return kept | {_shifted(name, first_position): value for name, value in part.items()}


def _shifted(name: str, by: int) -> str:
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(int(parts[2]) + by)
    return ".".join(parts)


@torch.no_grad()
def upcycle(dense: HybridModel, moe: HybridModel, upcycling: Upcycling) -> None:
    """Fills a MoE part from a dense part with the same positions; the dense part is not changed.

    Args:
        dense: Pattern `*-*-...`, with its weights.
        moe: Pattern `*E*E...`.
        upcycling: How.
    """
    generator = torch.Generator().manual_seed(upcycling.seed)
    ours: dict[str, torch.Tensor] = dict(moe.named_parameters())
    theirs: dict[str, torch.Tensor] = dict(dense.named_parameters())
    for name in ours.keys() & theirs.keys():
        ours[name].copy_(theirs[name])
    stacks: Any = (dense.decoder, moe.decoder)
    for dense_layer, moe_layer in zip(*(stack.layers for stack in stacks), strict=True):
        if moe_layer.is_moe_layer:
            _upcycle_layer(dense_layer, moe_layer, upcycling, generator)


def _upcycle_layer(dense: Any, moe: Any, upcycling: Upcycling, generator: torch.Generator) -> None:
    router = moe.mlp.router.weight
    router.copy_(ROUTER_STD * torch.randn(router.shape, generator=generator))
    original = [linear.weight.clone() for linear in (dense.mlp.linear_fc1, dense.mlp.linear_fc2)]
    filled: dict[str, torch.Tensor] = {}
    for group in range(upcycling.num_groups):
        _permute_neurons(dense.mlp, original, generator)
        state = upcycle_state_dict([moe], [dense])["model"]
        own = range(group * upcycling.granularity, (group + 1) * upcycling.granularity)
        filled |= {
            name: value
            for name, value in state.items()
            if any(f".local_experts.{expert}." in name for expert in own)
        }
        filled["mlp.router.weight"] = state["mlp.router.weight"]
    for linear, weight in zip((dense.mlp.linear_fc1, dense.mlp.linear_fc2), original, strict=True):
        linear.weight.copy_(weight)
    scale = 1.0 if upcycling.megatron_scale else upcycling.granularity ** (-1 / 3)
    parameters = dict(moe.named_parameters())
    for name, value in filled.items():
        if name not in parameters:  # Megatron's state has entries of None, of other linears
            continue
        factor = scale if "linear_fc1" in name else scale**-2 if "linear_fc2" in name else 1.0
        parameters[name].copy_(value * factor)


def _permute_neurons(
    mlp: Any, original: Sequence[torch.Tensor], generator: torch.Generator
) -> None:
    """Puts the neurons of an MLP into a random order; it computes the same."""
    fc1, fc2 = original
    order = torch.randperm(fc2.shape[1], generator=generator).to(fc2.device)
    mlp.linear_fc1.weight.copy_(fc1.unflatten(0, (2, -1))[:, order].flatten(0, 1))
    mlp.linear_fc2.weight.copy_(fc2[:, order])
