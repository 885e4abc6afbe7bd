"""MoE layer and expert linears that compute with what the rollout computed with.

Legend: S positions, B samples, H hidden size, N rows that the experts receive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_trace.hints.types import Site
from megatron_trace.models.hybrid import expert_linears
from megatron_trace.models.moe import DispatchInputMoELayer, UnweightedSequentialMLP
from megatron_trace.training.dispatch import dispatch_rows
from megatron_trace.training.products import quantised_product, weighted_product
from megatron_trace.training.rounding import PackedRows
from megatron_trace.training.sites import TraceSites
from megatron_trace.training.slots import SlotRows
from megatron_trace.training.weights import ExpertWeight, shared_amax


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
class ExpertsPlace:
    """Where the routed experts of a layer stand.

    Attributes:
        sites: The model's `TraceSites`.
        layer: Decoder layer of the checkpoint.
        moe: MoE layer that they belong to.
    """

    sites: TraceSites
    layer: int
    moe: MoELayer


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

    def row_origin(self, row: int) -> tuple[int, int | None]:
        """Gives the expert, and which row of the micro-batch its row is; None across ranks."""
        dispatcher: Any = self.moe.token_dispatcher
        if dispatcher.ep_size > 1 or dispatcher.tp_size > 1:
            return self.expert, None
        return self.expert, int(dispatcher.routing_map[:, self.expert].nonzero()[row, 0])


@dataclass(frozen=True)
class ExpertRows:
    """What one expert's linears must know of their rows.

    Attributes:
        probs: [rows]; the router's probability.
        slots: Hints of the rows at fc2; None if there are none.
        packed_input: Codes of fc1's input; None if backward keeps its values.
        weight_amax: FP32 0-d each; amax of fc1's and fc2's weight over the ranks that split them,
            None if the expert is whole.
    """

    probs: torch.Tensor
    slots: SlotRows | None
    packed_input: PackedRows | None
    weight_amax: Mapping[str, torch.Tensor | None]


_EXPERT_ROWS: ContextVar[ExpertRows] = ContextVar("megatron_trace_expert_rows")


@contextlib.contextmanager
def _expert_rows(rows: ExpertRows) -> Iterator[None]:
    """Tells an expert's linears about their rows; Megatron's MLP passes nothing but values on."""
    token = _EXPERT_ROWS.set(rows)
    try:
        yield
    finally:
        _EXPERT_ROWS.reset(token)


def _current_rows(place: ExpertPlace) -> ExpertRows:
    try:
        return _EXPERT_ROWS.get()
    except LookupError:
        raise LookupError(
            f"{place.matrix} of layer {place.layer}, expert {place.expert} was called by itself: "
            "the hints and probabilities of its rows are unknown; call the MoE layer"
        ) from None


def bind_experts(moe: MoELayer, layer: int, sites: TraceSites) -> None:
    """Tells a MoE layer, its experts and their linears where they stand.

    Args:
        moe: MoE layer of quantising modules, local or Transformer Engine's.
        layer: Decoder layer of the checkpoint.
        sites: What scopes hints and routing of the model.
    """
    parts: Any = moe
    parts.place = MoEPlace(sites, layer)
    parts.experts.place = ExpertsPlace(sites, layer, parts)
    for expert, matrix, module in expert_linears(moe):
        linear: Any = module
        linear.place = ExpertPlace(sites, layer, expert, matrix, moe)


class GuidedMoELayer(DispatchInputMoELayer):
    """Quantises each token once, before dispatch; router and shared experts read the original.

    Under quads (W4A16), and where the layer has no place, nothing is quantised here.
    """

    place: MoEPlace | None = None
    packed_tokens: PackedRows | None = None

    def transform_dispatch_input(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Gives the fake-quantised input of the routed experts, [S, B, H]."""
        if self.place is None or not self.place.sites.quantises_expert_inputs:
            return hidden_states
        sites, layer = self.place.sites, self.place.layer
        if sites.trace.save_packed_activations:
            quantised, self.packed_tokens = sites.quantise_and_pack(
                hidden_states, (layer, Site.FC1)
            )
            return quantised
        return sites.quantise_rows(hidden_states, (layer, Site.FC1))

    def routed_experts_compute(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Computes the routed experts."""
        try:
            return super().routed_experts_compute(hidden_states, probs)
        finally:
            self.packed_tokens = None


class GuidedExperts(UnweightedSequentialMLP):
    """Experts whose fc2 input is rounded by the hints of its (token, expert slot) rows."""

    place: ExpertsPlace | None = None

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        """Gives the weighted outputs of the local experts.

        Args:
            permuted_local_hidden_states: [N, H], rows of one expert after those of another.
            tokens_per_expert: integer [local experts].
            permuted_probs: [N], router probability of each row.

        Returns:
            [N, H] in the input's dtype, and no bias.
        """
        if self.place is None:
            return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)
        splits = tokens_per_expert.tolist()
        parts = zip(
            self.local_experts,
            permuted_local_hidden_states.split(splits),
            self._rows_of_experts(splits, permuted_probs),
            strict=True,
        )
        outputs = []
        for expert, hidden_states, rows in parts:
            with _expert_rows(rows):
                # QuantisedWeightFc2 applies the probability.
                outputs.append(expert(hidden_states, None)[0])
        return torch.cat(outputs), None

    def _rows_of_experts(self, splits: list[int], probs: torch.Tensor) -> list[ExpertRows]:
        assert self.place is not None, "checked by forward"
        sites, moe = self.place.sites, self.place.moe
        assert isinstance(moe, GuidedMoELayer), "QUANTISING_MODULES go together"
        nothing: list[None] = [None] * len(splits)
        dispatcher: Any = moe.token_dispatcher
        slots = None
        if sites.quantises_expert_inputs:
            slots = sites.dispatched_slots((self.place.layer, Site.FC2), dispatcher)
        packed = moe.packed_tokens
        if packed is not None:
            packed = packed.moved(partial(dispatch_rows, dispatcher))
        linears: list[Any] = [[e.linear_fc1, e.linear_fc2] for e in self.local_experts]
        amax = shared_amax([linear.weight for pair in linears for linear in pair], self.tp_group)
        rows = zip(
            probs.split(splits),
            nothing if slots is None else slots.split(splits),
            nothing if packed is None else packed.split(splits),
            [{"fc1": amax[2 * i], "fc2": amax[2 * i + 1]} for i in range(len(splits))],
            strict=True,
        )
        return [ExpertRows(*parts) for parts in rows]


class QuantisedWeightFc1(ColumnParallelLinear):
    """First linear of an expert, with the engine's quantised weight."""

    place: ExpertPlace | None = None

    def _forward_impl(
        self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if self.place is None:
            return super()._forward_impl(input, weight, *args, **kwargs)
        packed = _current_rows(self.place).packed_input
        return quantised_product(input, weight, _quantised_weight(weight, self.place), packed)


class QuantisedWeightFc2(RowParallelLinear):
    """Second linear of an expert, with quantised weight and quantised unweighted input.

    Its output is multiplied by the router's probability.
    """

    place: ExpertPlace | None = None

    def _forward_impl(
        self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        place = self.place
        if place is None:
            return super()._forward_impl(input, weight, *args, **kwargs)
        rows = _current_rows(place)
        rounding = None
        if place.sites.quantises_expert_inputs:
            rounding = place.sites.slot_rounding(
                input, (place.layer, Site.FC2), rows.slots, place.row_origin, expert=place.expert
            )
        return weighted_product(
            input,
            rows.probs,
            weight,
            _quantised_weight(weight, place),
            rounding,
            save_packed=place.sites.trace.save_packed_activations,
        )


def _quantised_weight(weight: torch.Tensor, place: ExpertPlace) -> torch.Tensor:
    amax = _current_rows(place).weight_amax[place.matrix]
    quantised, fresh = place.weight.current(weight, place.sites.weight_rule, amax)
    place.sites.count_weight((place.layer, place.expert, place.matrix), fresh=fresh)
    return quantised.values
