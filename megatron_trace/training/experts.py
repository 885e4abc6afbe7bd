"""MoE layer and expert linears that compute with what the rollout computed with.

Legend: S positions, B samples, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_trace.formats import ops
from megatron_trace.hints.types import Site
from megatron_trace.models.moe import DispatchInputMoELayer
from megatron_trace.training.sites import TraceSites
from megatron_trace.training.weights import ExpertWeight


@dataclass(frozen=True)
class MoEPlace:
    """Where a MoE layer stands.

    Attributes:
        sites: The model's `TraceSites`.
        layer: Decoder layer of the checkpoint.
    """

    sites: TraceSites
    layer: int


@dataclass(frozen=True)
class ExpertPlace:
    """Where an expert linear stands.

    Attributes:
        sites: The model's `TraceSites`.
        layer: Decoder layer of the checkpoint.
        expert: Global index of the expert.
        matrix: `fc1` or `fc2`.
        moe: MoE layer that the expert belongs to.
        weight: Quantised form of the linear's weight.
    """

    sites: TraceSites
    layer: int
    expert: int
    matrix: str
    moe: MoELayer
    weight: ExpertWeight = field(default_factory=ExpertWeight)

    def token_rows(self) -> torch.Tensor | None:
        """Gives which rows of the micro-batch the expert's rows are, int64; None across ranks."""
        if self.moe.ep_group.size() > 1:
            return None
        dispatcher: Any = self.moe.token_dispatcher
        return dispatcher.routing_map[:, self.expert].nonzero()[:, 0]


class GuidedMoELayer(DispatchInputMoELayer):
    """Quantises each token once, before dispatch; router and shared experts read the original."""

    place: MoEPlace | None = None

    def transform_dispatch_input(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Gives the fake-quantised input of the routed experts, [S, B, H]."""
        if self.place is None:
            return hidden_states
        return self.place.sites.quantise_rows(hidden_states, (self.place.layer, Site.FC1))


class QuantisedWeightFc1(ColumnParallelLinear):
    """First linear of an expert, with the engine's quantised weight.

    dgrad uses the quantised weight; wgrad lands on the parameter (straight-through).
    """

    place: ExpertPlace | None = None

    def _forward_impl(
        self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if self.place is not None:
            weight = _quantised_weight(weight, self.place)
        return super()._forward_impl(input, weight, *args, **kwargs)


class QuantisedWeightFc2(RowParallelLinear):
    """Second linear of an expert, with quantised weight and quantised unweighted input."""

    place: ExpertPlace | None = None

    def _forward_impl(
        self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        place = self.place
        if place is not None:
            input = place.sites.quantise_fc2(
                input, (place.layer, Site.FC2), place.expert, place.token_rows
            )
            weight = _quantised_weight(weight, place)
        return super()._forward_impl(input, weight, *args, **kwargs)


def _quantised_weight(weight: torch.Tensor, place: ExpertPlace) -> torch.Tensor:
    quantised, fresh = place.weight.current(weight, place.sites.operand_dtype)
    place.sites.count_weight((place.layer, place.expert, place.matrix), fresh=fresh)
    return ops.straight_through(weight, quantised.values.to(weight.dtype))
