"""All routed experts of a layer in two grouped products, without a word from the host.

Megatron's experts compute one after another on splits that the host must know: that waits for the
device in every layer, and cannot be captured in a CUDA graph. Here slots are sorted by expert on
the device, and the products take the bounds from there (`torch.nn.functional.grouped_mm`). The
numbers are those of the experts one by one, but for the order of sums: a product's own, and that of
a token's slots, which are added up in FP32.

Legend: T tokens of a step, k expert slots of a token, E experts, H hidden size, F columns of fc2's
input; rows are the T k slots, sorted by expert.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F

from megatron_trace.hints import Site
from megatron_trace.models.hybrid import expert_linears
from megatron_trace.models.moe import DispatchInputMoELayer, activation_of, beside_products
from megatron_trace.rollout.sites import OPERAND_DTYPE, RolloutSites


class GroupedExperts:
    """The routed experts of one layer, whose weights it puts side by side in memory.

    The parameters stay the experts' own: what is copied into them is seen here, and by captured
    graphs.

    Args:
        moe: The layer.
        sites: Sites of the engine.
        layer: Decoder layer.

    Raises:
        ValueError: The experts compute something that this does not.
    """

    quantises_input = False

    def __init__(self, moe: DispatchInputMoELayer, sites: RolloutSites, layer: int) -> None:
        if names := beside_products(moe.config):
            raise ValueError(f"{', '.join(names)}: not supported by grouped experts; switch it off")
        experts: Any = moe.experts
        self._activation = activation_of(experts.local_experts[0])
        self._sites, self._layer = sites, layer
        self._quantises = "fc2" in sites.trace.quantised_sites
        self._fc1, self._fc2 = (_side_by_side(moe, matrix) for matrix in ("fc1", "fc2"))
        device = self._fc1.device
        self._experts = torch.arange(len(self._fc1), device=device)

    def __call__(
        self, x: torch.Tensor, chosen: torch.Tensor, probabilities: torch.Tensor
    ) -> torch.Tensor:
        """Gives the weighted sum of each token's experts.

        Args:
            x: BF16 [T, H], quantised already.
            chosen: int64 [T, k], experts.
            probabilities: float [T, k].

        Returns:
            BF16 [T, H].
        """
        num_slots = chosen.shape[1]
        chosen = self._without_padding(chosen)
        experts, order = chosen.flatten().sort(stable=True)
        bounds = torch.searchsorted(experts, self._experts, right=True).to(torch.int32)
        tokens = order // num_slots
        activation, _ = self._activation(F.grouped_mm(x[tokens], self._fc1.mT, offs=bounds))
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        if self._quantises:
            activation = self._quantised(activation, tokens, back, num_slots)
        products = F.grouped_mm(activation, self._fc2.mT, offs=bounds)[back]
        # As one after another: the product with the probability is rounded, then summed.
        weighted = (products * probabilities.reshape(-1, 1)).to(products.dtype)
        return weighted.view(len(x), num_slots, -1).float().sum(1).to(x.dtype)

    def _without_padding(self, chosen: torch.Tensor) -> torch.Tensor:
        """Gives rows of padding the experts of the first token, so that they load no others."""
        tokens = torch.arange(len(chosen), device=chosen.device)[:, None]
        is_real = self._sites.watch.is_real(tokens)
        return chosen if is_real is None else torch.where(is_real, chosen, chosen[:1])

    def _quantised(
        self, x: torch.Tensor, tokens: torch.Tensor, back: torch.Tensor, num_slots: int
    ) -> torch.Tensor:
        """Quantises fc2's input [T k, F]; records a token's slots side by side."""
        sites, layer = self._sites, self._layer
        sites.begin(layer, Site.FC2, x, rows_of_token=num_slots, tokens=tokens)
        y, hint, scale_bytes = sites.quantised(layer, Site.FC2, x)
        if hint is not None and scale_bytes is not None:
            num_tokens = len(x) // num_slots
            hint, scale_bytes = (part[back].view(num_tokens, -1) for part in (hint, scale_bytes))
            sites.recorder.put_hint(layer, Site.FC2, hint, scale_bytes)
        return y.to(OPERAND_DTYPE)


def _side_by_side(moe: DispatchInputMoELayer, matrix: str) -> torch.Tensor:
    """Gives the weights of all experts, [E, out, in], of which the parameters become parts."""
    weights = [
        cast("torch.Tensor", linear.weight)
        for _, name, linear in expert_linears(moe)
        if name == matrix
    ]
    first = weights[0]
    stride = first.numel() * first.element_size()
    together = (
        all(
            weight.data_ptr() == first.data_ptr() + index * stride and weight.is_contiguous()
            for index, weight in enumerate(weights)
        )
        and first.untyped_storage().nbytes() == len(weights) * stride
    )
    if together:
        return first.data.as_strided(
            (len(weights), *first.shape), (first.numel(), *first.stride()), first.storage_offset()
        )
    every = torch.empty((len(weights), *first.shape), dtype=first.dtype, device=first.device)
    with torch.no_grad():
        for part, weight in zip(every, weights, strict=True):
            part.copy_(weight)
            weight.data = part
    return every
