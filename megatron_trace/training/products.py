"""Products of the routed experts, with what backward needs kept as BF16 values or as packed codes.

    fc1   y = X Wq^T             X the quantised routed input
    fc2   y = (Q(a) Wq^T) p      a the activation, p the router's probability of each row

dgrad uses the quantised weight Wq, wgrad the quantised input, and the gradient of a passes its
quantiser unchanged. fc2's output is not kept: backward multiplies Q(a) and Wq again for the
gradient of p. Both ways of keeping the input give the same bits.

All experts of a layer are one function of autograd. Their products are one for each expert, and on
a GPU in BF16 one for all whose matrices lie side by side (`torch.nn.functional.grouped_mm`): with
hundreds of experts the host would take several times longer to launch them than the GPU to compute.
Both ways multiply the same operands; a GPU may add up a product's terms in another order.

Legend: N rows, those of one expert after those of another, E experts, K values of a row, M outputs
of a row, n experts whose matrices lie side by side.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from megatron_trace.training.rounding import PackedRows, Rounding

# Rows of a part, of which there are values in FP32, or decoded ones, at a time.
_PART_ROWS = 16384
# Grouped products want rows that begin at multiples of 16 bytes, and take less than 1024 matrices.
_GROUPED_COLUMNS = 8
_PART_EXPERTS = 1023


@dataclass(frozen=True)
class ExpertWeights:
    """One matrix of each expert.

    Attributes:
        parameters: float [M, K] each; they get the gradients.
        quantised: [M, K] each; their dequantised codes.
    """

    parameters: Sequence[torch.Tensor]
    quantised: Sequence[torch.Tensor]

    @functools.cached_property
    def stacks(self) -> tuple[torch.Tensor, ...]:
        """The quantised matrices of consecutive experts that lie side by side, [n, M, K] each."""
        return side_by_side(self.quantised)


def side_by_side(matrices: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Gives views of matrices, each of as many consecutive ones as lie side by side in memory.

    Args:
        matrices: [M, K] each.

    Returns:
        [n, M, K] each.
    """
    stacks: list[torch.Tensor] = []
    first = 0
    while first < len(matrices):
        last = first + _num_side_by_side(matrices, first)
        stacks.append(_stack(matrices[first:last]))
        first = last
    return tuple(stacks)


def _num_side_by_side(matrices: Sequence[torch.Tensor], first: int) -> int:
    """Gives how many matrices, from one on, lie side by side in its memory."""
    head = matrices[first]
    if not head.is_contiguous():
        return 1
    # By addresses: to ask hundreds for their storages takes the host as long as several products.
    storage, size = head.untyped_storage(), head.nbytes
    end, start = storage.data_ptr() + storage.nbytes(), head.data_ptr()
    form = head.shape, head.dtype
    for number, matrix in enumerate(itertools.islice(matrices, first + 1, None), 1):
        start += size
        if matrix.data_ptr() != start or start + size > end:
            return number
        if (matrix.shape, matrix.dtype) != form or not matrix.is_contiguous():
            return number
    return len(matrices) - first


def _stack(matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    first = matrices[0].detach()
    if len(matrices) == 1:
        return first.unsqueeze(0)
    shape, strides = (len(matrices), *first.shape), (first.numel(), *first.stride())
    return first.as_strided(shape, strides, first.storage_offset())


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
        x, packed, list(splits), weights.stacks, *weights.parameters
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
        activation, probs, quantised, packed, list(splits), weights.stacks, *weights.parameters
    )


class _QuantisedProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, packed, splits, stacks, *weights):
        # Nothing here is wider than what is kept: without codes to decode, a part is a stack.
        plan = _plan(splits, stacks, x, whole_stacks=packed is None)
        kept = _Kept(x.dtype, plan, x, packed, stacks)
        kept.save(ctx)
        return _joined([part.product(part.values, transposed=True) for part in kept.parts()])

    @staticmethod
    def backward(ctx: Any, *grad_outputs):
        (grad,) = grad_outputs
        kept = _Kept.saved(ctx, grad.dtype)
        needs_x, _, _, _, *needs_weights = ctx.needs_input_grad
        grad_inputs: list[torch.Tensor] = []
        grad_weights: list[torch.Tensor | None] = []
        for part in kept.parts():
            own = grad[part.rows]
            if needs_x:
                grad_inputs.append(part.product(own))
            grad_weights += part.weight_gradients(own, needs_weights)
        return _joined(grad_inputs) if needs_x else None, None, None, None, *grad_weights


class _WeightedProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation, probs, quantised, packed, splits, stacks, *weights):
        plan = _plan(splits, stacks, activation, whole_stacks=False)
        kept = _Kept(activation.dtype, plan, quantised, packed, stacks, (probs,))
        kept.save(ctx)
        output = activation.new_empty(activation.shape[0], stacks[0].shape[1])
        for part in kept.parts():
            product = part.product(part.values, transposed=True)
            torch.mul(product, probs[part.rows].unsqueeze(-1), out=output[part.rows])
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs):
        (grad,) = grad_outputs
        kept = _Kept.saved(ctx, grad.dtype)
        (probs,) = kept.others
        needs_activation, needs_probs, _, _, _, _, *needs_weights = ctx.needs_input_grad
        grad_activations: list[torch.Tensor] = []
        grad_probs = torch.empty_like(probs)
        grad_weights: list[torch.Tensor | None] = []
        for part in kept.parts():
            # As autograd differentiates the multiplication, which runs in the wider of both dtypes.
            wide = grad[part.rows].to(torch.promote_types(grad.dtype, probs.dtype))
            if needs_probs:
                output = part.product(part.values, transposed=True)
                grad_probs[part.rows] = (wide * output).sum(-1).to(probs.dtype)
            grad_output = (wide * probs[part.rows].unsqueeze(-1)).to(grad.dtype)
            if needs_activation:
                grad_activations.append(part.product(grad_output))
            grad_weights += part.weight_gradients(grad_output, needs_weights)
        return (
            _joined(grad_activations) if needs_activation else None,
            grad_probs if needs_probs else None,
            *(None,) * 4,
            *grad_weights,
        )


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


@dataclass(frozen=True)
class _Part:
    """Some experts and their rows.

    Attributes:
        experts: Which experts.
        rows: Which rows.
        splits: Rows of each of them.
        values: [rows, K]; the quantised input.
        weights: [n, M, K].
        ends: int32 [n] on the device; where the rows of each expert end, counted from the first.
            None where each expert has a product of its own.
    """

    experts: slice
    rows: slice
    splits: list[int]
    values: torch.Tensor
    weights: torch.Tensor
    ends: torch.Tensor | None

    def product(self, rows: torch.Tensor, *, transposed: bool = False) -> torch.Tensor:
        """Gives the products of each expert's rows with its matrix, or with the transposed one."""
        weights = self.weights.to(rows.dtype)
        weights = weights.mT if transposed else weights
        if self.ends is not None:
            return F.grouped_mm(rows.contiguous(), weights, offs=self.ends)
        output = rows.new_empty(rows.shape[0], weights.shape[2])
        for own, weight, out in zip(
            rows.split(self.splits), weights, output.split(self.splits), strict=True
        ):
            torch.mm(own, weight, out=out)
        return output

    def weight_gradients(
        self, grad: torch.Tensor, needed: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Gives the gradient of each expert's matrix, [M, K], where it is needed.

        Args:
            grad: [rows, M].
            needed: For each of all E experts, whether its gradient is needed.
        """
        own = needed[self.experts]
        if self.ends is None or not any(own):
            parts = zip(grad.split(self.splits), self.values.split(self.splits), own, strict=True)
            return [of.t().matmul(rows) if needs else None for of, rows, needs in parts]
        gradients = F.grouped_mm(grad.contiguous().t(), self.values, offs=self.ends)
        # A sum of no rows; nothing promises that the product writes it.
        for index, num_rows in enumerate(self.splits):
            if not num_rows:
                gradients[index].zero_()
        return [of if needs else None for of, needs in zip(gradients.unbind(), own, strict=True)]


@dataclass(frozen=True)
class _Range:
    """Which experts a part has.

    Attributes:
        experts: Which of all E.
        stack: Which of the stacks they are in.
        within: Which of its matrices they are.
        rows: Which rows.
        splits: Rows of each of them.
    """

    experts: slice
    stack: int
    within: slice
    rows: slice
    splits: list[int]


@dataclass(frozen=True)
class _Plan:
    """In which parts experts are multiplied.

    Attributes:
        ranges: The parts, consecutive experts of one stack each.
        ends: int32 [E] on the device; where each expert's rows end, counted from the first of its
            part. None where each expert has a product of its own.
    """

    ranges: list[_Range]
    ends: torch.Tensor | None


def _plan(
    splits: Sequence[int],
    stacks: Sequence[torch.Tensor],
    values: torch.Tensor,
    *,
    whole_stacks: bool,
) -> _Plan:
    """Plans parts of as many rows as there may be values of at a time, or of whole stacks."""
    ranges: list[_Range] = []
    ends: list[int] = []
    first = first_row = 0
    for number, stack in enumerate(stacks):
        start, end = first, first + len(stack)
        while first < end:
            last, num_rows = first + 1, splits[first]
            most = min(end, first + _PART_EXPERTS)
            while last < most and (whole_stacks or num_rows + splits[last] <= _PART_ROWS):
                num_rows += splits[last]
                last += 1
            rows, own = slice(first_row, first_row + num_rows), list(splits[first:last])
            within = slice(first - start, last - start)
            ranges.append(_Range(slice(first, last), number, within, rows, own))
            ends += itertools.accumulate(own)
            first, first_row = last, rows.stop
    if not all(can_group(values, stack) for stack in stacks):
        return _Plan(ranges, None)
    on_host = torch.tensor(ends, dtype=torch.int32)
    return _Plan(ranges, on_host.to(values.device, non_blocking=True))


class _Kept:
    """What backward needs: the quantised input, other tensors, and quantised weights.

    Args:
        dtype: dtype in which is multiplied.
        plan: In which parts.
        values: [N, K]; the quantised input; None if its codes are kept.
        packed: Its codes, or None.
        stacks: Quantised weights, see `ExpertWeights`.
        others: Other tensors.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        plan: _Plan,
        values: torch.Tensor | None,
        packed: PackedRows | None,
        stacks: Sequence[torch.Tensor],
        others: Sequence[torch.Tensor] = (),
    ) -> None:
        self._dtype, self._plan, self._stacks, self.others = dtype, plan, stacks, others
        self._packed = packed
        # Codes are kept instead of the values.
        self._values = values if packed is None else None

    def save(self, ctx: Any) -> None:
        """Leaves everything to autograd."""
        ctx.plan, ctx.num_others, ctx.packed = self._plan, len(self.others), None
        packed = self._packed
        if packed is None:
            own = [self._values]
        else:
            ctx.packed = packed.global_scale, packed.operand_dtype, packed.number_format
            own = [packed.packed_codes, packed.scale_bytes]
        ctx.save_for_backward(*own, *self.others, *self._stacks)

    @classmethod
    def saved(cls, ctx: Any, dtype: torch.dtype) -> _Kept:
        """Gives what was left to autograd."""
        num_own = 1 if ctx.packed is None else 2
        own, rest = ctx.saved_tensors[:num_own], ctx.saved_tensors[num_own:]
        values = own[0] if ctx.packed is None else None
        packed = None if ctx.packed is None else PackedRows(*own, *ctx.packed)
        others, stacks = rest[: ctx.num_others], rest[ctx.num_others :]
        return cls(dtype, ctx.plan, values, packed, stacks, others)

    def parts(self) -> Iterator[_Part]:
        """Gives the parts, in order."""
        ends = self._plan.ends
        for of in self._plan.ranges:
            has_rows = of.rows.stop > of.rows.start
            yield _Part(
                of.experts,
                of.rows,
                of.splits,
                self._rows(of.rows),
                self._stacks[of.stack][of.within],
                ends[of.experts] if ends is not None and has_rows else None,
            )

    def _rows(self, rows: slice) -> torch.Tensor:
        if self._packed is not None:
            return self._packed.taken(rows).values(self._dtype)
        assert self._values is not None, "the input is kept one way or the other"
        return self._values[rows]


def can_group(values: torch.Tensor, weights: torch.Tensor) -> bool:
    """Says whether experts are multiplied by one grouped product.

    Args:
        values: [rows, K].
        weights: [n, M, K].
    """
    is_bf16 = values.dtype == weights.dtype == torch.bfloat16
    aligned = all(columns % _GROUPED_COLUMNS == 0 for columns in weights.shape[1:])
    return values.is_cuda and is_bf16 and aligned
