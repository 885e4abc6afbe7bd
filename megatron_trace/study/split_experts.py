"""Routed experts of a plain training, as few launches as torch's own products allow.

Megatron's `SequentialMLP` calls a module per expert and matrix, which costs more than the product
itself where experts are small; its grouped experts need Transformer Engine.

Legend: N dispatched rows, H hidden size, F hidden size of an expert.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from megatron_trace.models.moe import UnweightedSequentialMLP


class SplitExperts(UnweightedSequentialMLP):
    """`UnweightedSequentialMLP` with one activation for all experts; same parameters and function.

    Gated SiLU experts without bias on one rank of tensor parallelism.
    """

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        """Gives the weighted outputs of the local experts, [N, H], and no bias."""
        experts: Any = self.local_experts
        fc1 = [expert.linear_fc1.weight for expert in experts]
        fc2 = [expert.linear_fc2.weight for expert in experts]
        rows = permuted_local_hidden_states
        gate, linear = self.products(rows, tokens_per_expert, fc1).chunk(2, dim=-1)
        output = self.products(F.silu(gate) * linear, tokens_per_expert, fc2)
        return (output * permuted_probs.unsqueeze(-1)).to(output.dtype), None

    def products(
        self, x: torch.Tensor, tokens_per_expert: torch.Tensor, weights: list[torch.Tensor]
    ) -> torch.Tensor:
        """Gives the product of each expert's rows with its weight."""
        splits = tokens_per_expert.tolist()
        return _SplitProducts.apply(x, splits, *weights)  # pyright: ignore[reportReturnType]


class GroupedExperts(SplitExperts):
    """The same with one product for all experts: torch's grouped product, in BF16 on a GPU."""

    def products(
        self, x: torch.Tensor, tokens_per_expert: torch.Tensor, weights: list[torch.Tensor]
    ) -> torch.Tensor:
        """Gives the product of each expert's rows with its weight."""
        ends = tokens_per_expert.to(x.device, non_blocking=True).cumsum(0).to(torch.int32)
        return F.grouped_mm(x, torch.stack(weights).transpose(-2, -1), offs=ends)


class _SplitProducts(torch.autograd.Function):
    """Product of each part of the rows with a weight of its own."""

    @staticmethod
    def forward(ctx: Any, x, splits, *weights):
        ctx.splits = splits
        ctx.save_for_backward(x, *weights)
        output = x.new_empty(x.shape[0], weights[0].shape[0])
        for rows, out, weight in zip(x.split(splits), output.split(splits), weights, strict=True):
            torch.mm(rows, weight.t(), out=out)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs):
        (grad,) = grad_outputs
        x, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = torch.empty_like(x)
        grad_weights = []
        parts = zip(
            x.split(ctx.splits),
            grad.split(ctx.splits),
            grad_x.split(ctx.splits),
            weights,
            strict=True,
        )
        for rows, grad_rows, out, weight in parts:
            torch.mm(grad_rows, weight, out=out)
            grad_weights.append(grad_rows.t().mm(rows))
        return grad_x, None, *grad_weights
