"""MoE layer and expert linears that compute with what the rollout computed with.

Legend: S positions, B samples, H hidden size, N rows that the experts receive.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_trace.hints.types import Site
from megatron_trace.models.hybrid import expert_linears
from megatron_trace.models.moe import (
    DispatchInputMoELayer,
    UnweightedSequentialMLP,
    activation_of,
)
from megatron_trace.training.dispatch import dispatch_rows, rows_of_experts
from megatron_trace.training.products import (
    ExpertWeights,
    quantised_products,
    weighted_products,
)
from megatron_trace.training.rounding import PackedRows
from megatron_trace.training.shape import ExpertMatrix
from megatron_trace.training.sites import TraceSites
from megatron_trace.training.weights import (
    ExpertWeight,
    QuantisedWeight,
    current_weights,
    shared_amax,
)


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

    @functools.cached_property
    def expert_matrix(self) -> ExpertMatrix:
        """What counts call its weight."""
        return self.layer, self.expert, self.matrix


def row_origin(
    places: Sequence[ExpertPlace],
    splits: Sequence[int],
    row: int,
    *,
    tokens: torch.Tensor | None,
) -> tuple[int, int | None]:
    """Gives the global expert of a row among those of all local experts, and its token.

    Args:
        places: A linear of each expert.
        splits: Rows of each expert.
        row: The row.
        tokens: bool [T, experts], `dispatch.rows_of_experts`.

    Returns:
        The expert, and the row of the micro-batch; None where that is another rank's.
    """
    for place, rows in zip(places, splits, strict=True):
        if row < rows:
            of_expert = None if tokens is None else tokens[:, place.expert]
            return place.expert, None if of_expert is None else int(of_expert.nonzero()[row, 0])
        row -= rows
    raise AssertionError("a row belongs to some expert")


def count_weights(
    places: Sequence[ExpertPlace], known: Sequence[tuple[QuantisedWeight, bool]]
) -> None:
    """Counts a forward pass that takes the quantised weights of some linears.

    Args:
        places: The linears, of one layer.
        known: Their weights, and whether each was quantised for it.
    """
    fresh = sum(quantised for _, quantised in known)
    places[0].sites.count_weights([place.expert_matrix for place in places], num_fresh=fresh)


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
    """Local experts whose fc2 input is rounded by the hints of its (token, expert slot) rows.

    The rows of all experts are activated and rounded together: on a GPU, hundreds of experts would
    wait for as many small kernels, and for the host.
    """

    place: ExpertsPlace | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Not a submodule: it has nothing that a checkpoint could hold.
        self._activations = (activation_of(self.local_experts[0]),)

    @property
    def activation(self) -> MLP:
        """What stands between fc1 and fc2 of every expert."""
        return self._activations[0]

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
        splits, sites, moe = tokens_per_expert.tolist(), self.place.sites, self.place.moe
        assert isinstance(moe, GuidedMoELayer), "QUANTISING_MODULES go together"
        dispatcher: Any = moe.token_dispatcher
        packed = moe.packed_tokens
        if packed is not None:
            packed = packed.moved(partial(dispatch_rows, dispatcher))
        fc1, fc2 = self._weights(sites)
        gate_up = quantised_products(permuted_local_hidden_states, splits, fc1, packed)
        activation, _ = self.activation(gate_up)
        rounding = None
        if sites.quantises_expert_inputs:
            place = (self.place.layer, Site.FC2)
            slots = sites.dispatched_slots(place, dispatcher)
            experts: Any = self.local_experts
            places = [expert.linear_fc2.place for expert in experts]
            tokens = rows_of_experts(dispatcher)
            origin = partial(row_origin, places, splits, tokens=tokens)
            rounding = sites.slot_rounding(activation, place, slots, origin)
        output = weighted_products(
            activation,
            permuted_probs,
            splits,
            fc2,
            rounding,
            save_packed=sites.trace.save_packed_activations,
        )
        return output, None

    def _weights(self, sites: TraceSites) -> tuple[ExpertWeights, ExpertWeights]:
        """Gives fc1 and fc2 of the local experts."""
        experts: Any = self.local_experts
        linears = [e.linear_fc1 for e in experts] + [e.linear_fc2 for e in experts]
        # By a call of each, so that what waits on one, such as Megatron's parameter gathers, runs.
        with _weights_asked_for():
            weights = [linear(None) for linear in linears]
        amax = shared_amax(weights, self.tp_group)
        places: list[ExpertPlace] = [linear.place for linear in linears]
        known = current_weights([p.weight for p in places], weights, sites.weight_rule, amax)
        count_weights(places, known)
        quantised = [form.values for form, _ in known]
        size = len(experts)
        return (
            ExpertWeights(weights[:size], quantised[:size]),
            ExpertWeights(weights[size:], quantised[size:]),
        )


_ASKED: ContextVar[bool] = ContextVar("megatron_trace_weights_asked_for", default=False)


@contextlib.contextmanager
def _weights_asked_for() -> Iterator[None]:
    """Says that a call of an expert's linear asks for its weight."""
    token = _ASKED.set(True)
    try:
        yield
    finally:
        _ASKED.reset(token)


class _QuantisedWeight:
    """What both linears of an expert add: `GuidedExperts` multiplies, and asks for the weight."""

    place: ExpertPlace | None = None
    weight: torch.Tensor

    def forward(self, input_: Any, *args: Any, **kwargs: Any) -> Any:
        """Gives the weight; or the product, where the linear has no place."""
        place = self.place
        if place is None:
            return super().forward(input_, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        if not _ASKED.get():
            raise LookupError(
                f"{place.matrix} of layer {place.layer}, expert {place.expert} was called by "
                "itself: the hints and probabilities of its rows are unknown; call the MoE layer"
            )
        return self.weight


class QuantisedWeightFc1(_QuantisedWeight, ColumnParallelLinear):
    """First linear of an expert, whose weight is quantised as the engine's."""


class QuantisedWeightFc2(_QuantisedWeight, RowParallelLinear):
    """Second linear of an expert, whose weight is quantised as the engine's."""
