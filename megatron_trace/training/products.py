"""Products of the routed experts, with what backward needs kept as BF16 values or as packed codes.

    fc1   y = X Wq^T             X the quantised routed input
    fc2   y = (Q(a) Wq^T) p      a the activation, p the router's probability of each row

dgrad uses the quantised weight Wq, wgrad the quantised input, and the gradient of a passes its
quantiser unchanged. fc2's output is not kept: backward multiplies Q(a) and Wq again for the
gradient of p. Both ways of keeping the input give the same bits.

All experts of a layer are one function of autograd; the products are one for each expert.

Legend: N rows, those of one expert after those of another, E experts, K values of a row, M outputs
of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_trace.training.rounding import PackedRows, Rounding

# Rows of a part, of which there are values in FP32, or decoded ones, at a time.
_PART_ROWS = 8192


@dataclass(frozen=True)
class ExpertWeights:
    """One matrix of each expert.

    Attributes:
        parameters: float [M, K] each; they get the gradients.
        quantised: [M, K] each; their dequantised codes.
    """

    parameters: Sequence[torch.Tensor]
    quantised: Sequence[torch.Tensor]


def quantised_products(
    x: torch.Tensor, splits: Sequence[int], weights: ExpertWeights, packed: PackedRows | None
) -> torch.Tensor:
    """Gives the products of each expert's rows of a quantised input with its quantised weight.

    Args:
        x: float [N, K]; the quantised input.
        splits: Rows of each of the E experts.
        weights: The experts' matrices.
        packed: Codes of x, which backward then keeps instead of x; None keeps x.

    Returns:
        [N, M] in the dtype of x.
    """
    return _QuantisedProducts.apply(  # pyright: ignore[reportReturnType]
        x, packed, list(splits), weights.quantised, *weights.parameters
    )


def weighted_products(
    activation: torch.Tensor,
    probs: torch.Tensor,
    splits: Sequence[int],
    weights: ExpertWeights,
    rounding: Rounding | None,
    *,
    save_packed: bool,
) -> torch.Tensor:
    """Gives the products of an activation, quantised here, with quantised weights, times p.

    Args:
        activation: float [N, K], not multiplied by p.
        probs: float [N]; p.
        splits: Rows of each of the E experts.
        weights: The experts' matrices.
        rounding: How the activation is quantised; None leaves it as it is.
        save_packed: Whether backward keeps the quantised activation as codes.

    Returns:
        [N, M] in the dtype of the activation.
    """
    packed = quantised = None
    if rounding is None:
        quantised = activation.detach()
    elif save_packed:
        packed = rounding.packed(activation)
    else:
        quantised = rounding.quantised(activation)
    return _WeightedProducts.apply(  # pyright: ignore[reportReturnType]
        activation, probs, quantised, packed, list(splits), weights.quantised, *weights.parameters
    )


class _QuantisedProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, packed, splits, quantised_weights, *weights):
        _keep(ctx, x, packed, splits, quantised_weights)
        output = x.new_empty(x.shape[0], quantised_weights[0].shape[0])
        _multiply(x, splits, quantised_weights, output, transposed=True)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs):
        (grad,) = grad_outputs
        kept = _Kept(ctx, grad.dtype)
        needs_x, _, _, _, *needs_weights = ctx.needs_input_grad
        grad_x = grad.new_empty(grad.shape[0], kept.num_columns) if needs_x else None
        grad_weights: list[torch.Tensor | None] = []
        for part in kept.parts():
            own = grad[part.rows]
            if grad_x is not None:
                _multiply(own, part.splits, part.weights, grad_x[part.rows])
            needs = needs_weights[part.experts]
            grad_weights += _weight_gradients(own, part.values, part.splits, needs)
        return grad_x, None, None, None, *grad_weights


class _WeightedProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, activation, probs, quantised, packed, splits, quantised_weights, *weights
    ):
        _keep(ctx, quantised, packed, splits, quantised_weights, probs)
        output = activation.new_empty(activation.shape[0], quantised_weights[0].shape[0])
        kept = _Kept(ctx, activation.dtype, quantised, packed, quantised_weights)
        for part in kept.parts():
            product = torch.empty_like(output[part.rows])
            _multiply(part.values, part.splits, part.weights, product, transposed=True)
            torch.mul(product, probs[part.rows].unsqueeze(-1), out=output[part.rows])
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs):
        (grad,) = grad_outputs
        kept = _Kept(ctx, grad.dtype)
        (probs,) = kept.others
        needs_activation, needs_probs, _, _, _, _, *needs_weights = ctx.needs_input_grad
        grad_activation = grad.new_empty(grad.shape[0], kept.num_columns)
        grad_probs = torch.empty_like(probs)
        grad_weights: list[torch.Tensor | None] = []
        for part in kept.parts():
            # As autograd differentiates the multiplication, which runs in the wider of both dtypes.
            wide = grad[part.rows].to(torch.promote_types(grad.dtype, probs.dtype))
            if needs_probs:
                output = torch.empty_like(grad[part.rows])
                _multiply(part.values, part.splits, part.weights, output, transposed=True)
                grad_probs[part.rows] = (wide * output).sum(-1).to(probs.dtype)
            grad_output = (wide * probs[part.rows].unsqueeze(-1)).to(grad.dtype)
            if needs_activation:
                own = grad_activation[part.rows]
                _multiply(grad_output, part.splits, part.weights, own)
            needs = needs_weights[part.experts]
            grad_weights += _weight_gradients(grad_output, part.values, part.splits, needs)
        return (
            grad_activation if needs_activation else None,
            grad_probs if needs_probs else None,
            *(None,) * 4,
            *grad_weights,
        )


def _multiply(
    rows: torch.Tensor,
    splits: Sequence[int],
    weights: Sequence[torch.Tensor],
    output: torch.Tensor,
    *,
    transposed: bool = False,
) -> None:
    """Writes the products of each expert's rows with its weight, or with the transposed one."""
    parts = zip(rows.split(splits), weights, output.split(splits), strict=True)
    for own, weight, out in parts:
        weight = weight.to(rows.dtype)
        torch.mm(own, weight.t() if transposed else weight, out=out)


def _weight_gradients(
    grad: torch.Tensor, values: torch.Tensor, splits: Sequence[int], needed: Sequence[bool]
) -> list[torch.Tensor | None]:
    parts = zip(grad.split(splits), values.split(splits), needed, strict=True)
    return [own.t().matmul(rows) if needs else None for own, rows, needs in parts]


@dataclass(frozen=True)
class _Part:
    """Some experts and their rows.

    Attributes:
        experts: Which experts.
        rows: Which rows.
        splits: Rows of each of them.
        values: [rows, K]; the quantised input.
        weights: [M, K] each.
    """

    experts: slice
    rows: slice
    splits: list[int]
    values: torch.Tensor
    weights: Sequence[torch.Tensor]


def _keep(
    ctx: Any,
    quantised: torch.Tensor | None,
    packed: PackedRows | None,
    splits: list[int],
    quantised_weights: Sequence[torch.Tensor],
    *others: torch.Tensor,
) -> None:
    ctx.splits, ctx.num_others, ctx.packed = splits, len(others), None
    if packed is None:
        assert quantised is not None, "the input is kept one way or the other"
        ctx.save_for_backward(quantised, *others, *quantised_weights)
        return
    ctx.packed = packed.global_scale, packed.operand_dtype, packed.number_format
    ctx.save_for_backward(packed.packed_codes, packed.scale_bytes, *others, *quantised_weights)


class _Kept:
    """What was kept: the quantised input, other tensors, and quantised weights.

    Args:
        ctx: Of autograd.
        dtype: dtype in which is multiplied.
        given: The input, its codes and the weights, where they are not to be taken from autograd.
    """

    def __init__(self, ctx: Any, dtype: torch.dtype, *given: Any) -> None:
        self._splits, self._dtype = ctx.splits, dtype
        if given:
            self._values, self._packed, self._weights = given
            return
        num_own = 1 if ctx.packed is None else 2
        saved = ctx.saved_tensors
        own, rest = saved[:num_own], saved[num_own:]
        self.others, self._weights = rest[: ctx.num_others], rest[ctx.num_others :]
        self._values = own[0] if ctx.packed is None else None
        self._packed = None if ctx.packed is None else PackedRows(*own, *ctx.packed)

    @property
    def num_columns(self) -> int:
        """K."""
        return self._weights[0].shape[1]

    def parts(self) -> Iterator[_Part]:
        """Gives consecutive experts, with as many rows as may have values at a time."""
        first = first_row = 0
        while first < len(self._splits):
            last, num_rows = first + 1, self._splits[first]
            while last < len(self._splits) and num_rows + self._splits[last] <= _PART_ROWS:
                num_rows += self._splits[last]
                last += 1
            experts, rows = slice(first, last), slice(first_row, first_row + num_rows)
            splits = self._splits[experts]
            yield _Part(experts, rows, splits, self._rows(rows), self._weights[experts])
            first, first_row = last, rows.stop

    def _rows(self, rows: slice) -> torch.Tensor:
        if self._packed is not None:
            return self._packed.taken(rows).values(self._dtype)
        assert self._values is not None, "the input is kept one way or the other"
        return self._values[rows]
