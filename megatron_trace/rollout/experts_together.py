"""The routed experts of a layer in steps of the engine: a product of each, all else for all rows.

Megatron calls one expert after another; a small model's step is then hundreds of small calls, which
the host prepares for longer than the device computes. Here only the products are of one expert at a
time. They are Megatron's own, of the same rows, and what stands between them is computed value by
value and row by row: so the numbers are those of the experts one by one, bit for bit.

Legend: T tokens of a step, k expert slots of a token, N = T k dispatched rows, one expert's after
another's, H hidden size, F columns of fc2's input.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_trace.hints import Site
from megatron_trace.models.hybrid import expert_linears
from megatron_trace.models.moe import (
    DispatchInputMoELayer,
    activation_of,
    beside_products,
    weighted_rows,
)
from megatron_trace.rollout.sites import RolloutSites


class ExpertsTogether:
    """The routed experts of one layer.

    The weights stay the experts' own: what is copied into them is seen here.

    Args:
        moe: The layer, on one rank.
        sites: Sites of the engine.
        layer: Decoder layer.
    """

    def __init__(self, moe: DispatchInputMoELayer, sites: RolloutSites, layer: int) -> None:
        experts: Any = moe.experts
        self._router: Any = moe.router
        self._sites, self._layer = sites, layer
        self._quantises = "fc2" in sites.trace.quantised_sites
        self._activation = activation_of(experts.local_experts[0])
        linears: list[tuple[int, str, Any]] = list(expert_linears(moe))
        # Not by attribute: ModelOpt's modules look for a quantised weight first.
        self._fc1, self._fc2 = (
            [linear._parameters for _, name, linear in linears if name == matrix]
            for matrix in ("fc1", "fc2")
        )

    def __call__(
        self, x: torch.Tensor, splits: list[int], probabilities: torch.Tensor
    ) -> torch.Tensor:
        """Gives the weighted outputs.

        Args:
            x: BF16 [N, H], quantised already.
            splits: Rows of each expert.
            probabilities: float [N], router probability of each row.

        Returns:
            BF16 [N, H].
        """
        activation, _ = self._activation(_products(x, splits, self._fc1))
        if self._quantises:
            activation = self._quantised(activation)
        return weighted_rows(_products(activation, splits, self._fc2), probabilities)

    def _quantised(self, x: torch.Tensor) -> torch.Tensor:
        """Quantises fc2's input, BF16 [N, F]."""
        chosen: torch.Tensor = self._router.router_replay.get_recorded_indices()
        num_slots = chosen.shape[1]
        # Of an expert's rows the tokens ascend, as a token chooses it once.
        order = chosen.flatten().argsort(stable=True)
        tokens = order // num_slots
        return self._sites.quantise_slots(
            self._layer,
            Site.FC2,
            x,
            tokens=lambda: tokens,
            slots=lambda: (tokens, order % num_slots),
            num_slots=num_slots,
        )


def can_compute(moe: DispatchInputMoELayer, sites: RolloutSites) -> bool:
    """Whether a layer's experts compute nothing else than `ExpertsTogether` does."""
    return not (sites.trace.compensates_residual or beside_products(moe.config))


def _products(x: torch.Tensor, splits: list[int], weights: list[Any]) -> torch.Tensor:
    """Gives the product of each expert's rows with its weight, [N, out]."""
    first = weights[0]["weight"]
    products = x.new_empty(len(x), len(first))
    parts = zip(x.split(splits), products.split(splits), weights, strict=True)
    for rows, product, parameters in parts:
        if len(rows):
            torch.mm(rows, parameters["weight"].t(), out=product)
    return products
