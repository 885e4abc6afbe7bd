"""Routed experts in plain torch, their operands quantised by the specification.

Legend: T tokens, H hidden size, F expert hidden size, E experts, N rows (token, expert slot), those
of one expert after those of another, K values of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from megatron_trace.formats import global_scale_from_amax, ops, reference
from megatron_trace.training.rounding import Rounding

GroupedProduct = Callable[[torch.Tensor, list[int]], torch.Tensor]


class TorchProduct:
    """Products of each expert's rows with its weight, one `torch` product per expert.

    Attributes:
        weights: Leaves that receive the gradients.
    """

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self.weights = [weight.detach().clone().requires_grad_() for weight in weights]

    def __call__(self, rows: torch.Tensor, splits: list[int]) -> torch.Tensor:
        """Gives the products of rows [N, in] of which each expert has `splits`."""
        parts = zip(torch.split(rows, splits), self.weights, strict=True)
        return torch.cat([part @ weight.T for part, weight in parts])


def routed_experts(
    tokens: torch.Tensor,
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    products: tuple[GroupedProduct, GroupedProduct],
    roundings: tuple[Rounding, Rounding],
) -> torch.Tensor:
    """Gives the routed experts' output: SwiGLU, the router's probability applied after fc2.

    Tokens are quantised before they are dispatched; gradients pass the roundings unchanged.

    Args:
        tokens: [T, H].
        probs: [T, E], router probabilities.
        routing_map: bool [T, E].
        products: Of fc1 (weights [2 F, H]) and fc2 (weights [H, F]), weights quantised already.
        roundings: Of fc1's tokens and fc2's rows.

    Returns:
        [T, H] in the dtype of the tokens.
    """
    expert, token = routing_map.T.nonzero(as_tuple=True)
    splits = routing_map.sum(0).tolist()
    activation = expert_activations(tokens, routing_map, products[0], roundings[0])
    activation = ops.straight_through(activation, quantised(roundings[1], activation))
    rows = products[1](activation, splits)
    rows = (rows * probs[token, expert].unsqueeze(-1)).to(rows.dtype)
    index = token.unsqueeze(-1).expand_as(rows)
    return torch.zeros_like(tokens).scatter_add(0, index, rows)


def expert_activations(
    tokens: torch.Tensor, routing_map: torch.Tensor, fc1: GroupedProduct, rounding: Rounding
) -> torch.Tensor:
    """Gives fc2's input before it is quantised, [N, F].

    Args:
        tokens: [T, H].
        routing_map: bool [T, E].
        fc1: Product of fc1.
        rounding: Of the tokens.
    """
    token = routing_map.T.nonzero()[:, 1]
    rounded = ops.straight_through(tokens, quantised(rounding, tokens))
    gate, up = fc1(rounded[token], routing_map.sum(0).tolist()).chunk(2, dim=-1)
    return F.silu(gate) * up


def quantised_weight(weight: torch.Tensor) -> torch.Tensor:
    """Gives an expert's fake-quantised weight [out, K]: one amax per matrix, blocks of 1 x 16."""
    weight = weight.detach()
    scale = global_scale_from_amax(weight.abs().amax().float())
    return reference.rtn(weight, scale, dtype=torch.bfloat16)


def quantised(rounding: Rounding, values: torch.Tensor) -> torch.Tensor:
    """Gives fake-quantised values [N, K], without gradient."""
    values, hint = values.detach(), rounding.hint
    assert rounding.global_scale is not None, "the reference is that of NVFP4"
    nearest = reference.rtn(values, rounding.global_scale, dtype=rounding.operand_dtype)
    if hint is None:
        return nearest
    guided = reference.guided(
        values,
        hint.payload,
        hint.scale_bytes,
        rounding.global_scale,
        num_bits=hint.num_bits,
        dtype=rounding.operand_dtype,
    )
    return torch.where(hint.has_hint.unsqueeze(-1), guided, nearest)
