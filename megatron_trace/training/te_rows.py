"""Which hints the rows of a grouped linear's input have, and the scope in which TE asks for them.

Transformer Engine calls a quantiser once per expert, with that expert's rows and nothing else, and
keeps quantisers from step to step. So a quantiser of ours holds no hint: it asks for the call that
is running, which knows the whole input, how to round it, and which of its rows the part is.

Legend: N dispatched rows (one per token and expert slot, those of one expert after those of
another), P of them after padding, K values of a row, B = K / 16 blocks of a row.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch

from megatron_trace.formats import NVFP4
from megatron_trace.training.hint_rows import RowMove
from megatron_trace.training.rounding import Rounding
from megatron_trace.training.slots import SlotRows
from megatron_trace.training.weights import QuantisedWeight


def moved(rounding: Rounding, move: RowMove) -> Rounding:
    """Gives the rounding of rows that `move` takes where an operand's rows went.

    Args:
        rounding: Rounding of the operand's N rows.
        move: From uint8 [N, bytes] to uint8 [other rows, bytes]; a row of zeros has no hint.
    """
    if rounding.hint is None:
        return rounding
    return replace(rounding, hint=rounding.hint.in_order().moved(move))


@dataclass(frozen=True)
class ExpertCall:
    """One forward of the routed experts of one layer.

    Attributes:
        splits: Rows of each local expert, before padding.
        fc1: Rounding of the N dispatched rows; None if they were rounded before dispatch.
        slots: What is known of the rows at fc2.
    """

    splits: tuple[int, ...]
    fc1: Rounding | None
    slots: SlotRows | None


class LinearCall:
    """One forward of one grouped linear.

    Args:
        name: Name of the linear, for messages.
        values: float [P, K], contiguous; the input that TE splits by expert.
        rounding: Rounding of the P rows; None if TE is not to round them.
        weights: Each expert's parameter with its quantised form.
    """

    def __init__(
        self,
        name: str,
        values: torch.Tensor,
        rounding: Rounding | None,
        weights: Iterable[tuple[torch.Tensor, QuantisedWeight]] = (),
    ) -> None:
        if values.dim() != 2 or not values.is_contiguous():
            raise ValueError(
                f"{name}: the input must be contiguous [rows, values]; got {tuple(values.shape)} "
                f"with strides {values.stride()}"
            )
        self.name = name
        self.values = values.detach()
        self.was_quantised = False
        self._rounding = rounding
        self._weights = {weight.data_ptr(): quantised for weight, quantised in weights}

    @property
    def rounding(self) -> Rounding:
        """Rounding of the P rows.

        Raises:
            RuntimeError: TE is not to round them.
        """
        if self._rounding is None:
            raise RuntimeError(
                f"{self.name}: the input is rounded already, so TE must not quantise it; with "
                "experts=te the recipe is that of weight_fake_quantizer_factory"
            )
        return self._rounding

    def weight(self, weight: torch.Tensor) -> QuantisedWeight:
        """Gives the quantised form of one expert's parameter.

        Raises:
            RuntimeError: It is no weight of this linear.
        """
        try:
            return self._weights[weight.data_ptr()]
        except KeyError:
            raise RuntimeError(
                f"{self.name}: the quantiser got a weight {tuple(weight.shape)} that is none of "
                "the linear's; TE must not cast or copy weights before it quantises them"
            ) from None

    def quantised(self, part: torch.Tensor) -> torch.Tensor:
        """Gives the fake-quantised rows of one expert; all rows are rounded at the first call.

        Args:
            part: One expert's rows, a view of `values`.
        """
        return self._quantised[self.rows_of(part)]

    def codes(self, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gives packed codes [rows, K / 2] and block scales [rows, B] of one expert's rows.

        Raises:
            ValueError: The format is not NVFP4, whose products TE has.
        """
        number_format = self.rounding.number_format
        if number_format is not NVFP4:
            raise ValueError(
                f"{self.name}: native products are of nvfp4 only; got {number_format.name}; choose "
                "number_format=nvfp4 or another quantiser factory"
            )
        rows = self.rows_of(part)
        codes, scale_bytes = self._codes
        return codes[rows], scale_bytes[rows]

    @functools.cached_property
    def _quantised(self) -> torch.Tensor:
        self._note()
        return self.rounding.quantised(self.values)

    @functools.cached_property
    def _codes(self) -> tuple[torch.Tensor, torch.Tensor]:
        self._note()
        packed = self.rounding.packed(self.values)
        return packed.packed_codes, packed.scale_bytes

    def _note(self) -> None:
        self.was_quantised = True

    def rows_of(self, part: torch.Tensor) -> slice:
        """Gives which rows of the input an expert's part is.

        Raises:
            RuntimeError: The part is no view of the input.
        """
        same_storage = part.untyped_storage().data_ptr() == self.values.untyped_storage().data_ptr()
        if not same_storage or part.dtype != self.values.dtype:
            raise RuntimeError(
                f"{self.name}: the quantiser got {part.dtype} {tuple(part.shape)} that is no view "
                f"of the linear's {self.values.dtype} input, so its hint rows are unknown; TE must "
                "not cast or copy the input before it splits it"
            )
        offset = int(part.storage_offset()) - int(self.values.storage_offset())
        return rows_of_part(offset, part.shape, total=self.values.shape)


def rows_of_part(offset: int, part: Sequence[int], *, total: Sequence[int]) -> slice:
    """Gives the rows of a contiguous [total rows, K] tensor that one of its row ranges covers.

    Args:
        offset: Values between the starts of the tensor and of the part.
        part: Shape of the part.
        total: Shape of the tensor.

    Raises:
        ValueError: The part is not a range of whole rows of the tensor.
    """
    num_rows, num_values = part
    first, within = divmod(offset, num_values)
    last = first + num_rows
    if num_values != total[1] or within or first < 0 or last > total[0]:
        raise ValueError(
            f"{tuple(part)} at offset {offset} is not a range of rows of {tuple(total)}"
        )
    return slice(first, last)


def padded_positions(splits: Sequence[int], padded_splits: Sequence[int]) -> torch.Tensor:
    """Gives where each row goes when every expert's rows are followed by rows of padding.

    Args:
        splits: Rows of each expert.
        padded_splits: Rows of each expert with its padding.

    Returns:
        int64 [N] on the CPU, strictly increasing.

    Raises:
        ValueError: The lengths differ, or padding would remove rows.
    """
    if len(splits) != len(padded_splits) or any(
        padded < rows for rows, padded in zip(splits, padded_splits, strict=False)
    ):
        raise ValueError(
            f"rows per expert {list(splits)} do not fit into padded rows {list(padded_splits)}"
        )
    rows = torch.as_tensor(splits, dtype=torch.int64)
    padding = torch.as_tensor(padded_splits, dtype=torch.int64) - rows
    padding_before = padding.cumsum(0) - padding
    return torch.arange(int(rows.sum())) + padding_before.repeat_interleave(rows)


def pad_rows(
    rows: torch.Tensor, splits: Sequence[int], padded_splits: Sequence[int]
) -> torch.Tensor:
    """Gives the rows with zero rows after those of each expert, as TE's `Fp8Padding` does.

    A row of padding thus has no hint, and rounds the padded input's zeros to zeros.

    Args:
        rows: [N, bytes].
        splits: Rows of each expert.
        padded_splits: Rows of each expert with its padding.

    Returns:
        [P, bytes].

    Raises:
        ValueError: `splits` does not sum to N, or padding would remove rows.
    """
    if sum(splits) != rows.shape[0]:
        raise ValueError(f"rows per expert {list(splits)} must sum to {rows.shape[0]} rows")
    if list(splits) == list(padded_splits):
        return rows
    positions = padded_positions(splits, padded_splits).to(rows.device)
    padded = rows.new_zeros(sum(padded_splits), rows.shape[1])
    return padded.index_copy_(0, positions, rows)


_EXPERT_CALL: ContextVar[ExpertCall] = ContextVar("megatron_trace_expert_call")
_LINEAR_CALL: ContextVar[LinearCall] = ContextVar("megatron_trace_linear_call")


@contextlib.contextmanager
def expert_call(call: ExpertCall) -> Iterator[None]:
    """Makes a call of the routed experts the running one of this thread."""
    token = _EXPERT_CALL.set(call)
    try:
        yield
    finally:
        _EXPERT_CALL.reset(token)


def current_expert_call() -> ExpertCall:
    """Gives the running call of the routed experts.

    Raises:
        LookupError: None is running.
    """
    try:
        return _EXPERT_CALL.get()
    except LookupError:
        raise LookupError(
            "no rounding is set for the routed experts: a grouped linear of TRACE must be called "
            "by its TraceTEGroupedMLP"
        ) from None


@contextlib.contextmanager
def linear_call(call: LinearCall) -> Iterator[None]:
    """Makes a call of a grouped linear the running one of this thread."""
    token = _LINEAR_CALL.set(call)
    try:
        yield
    finally:
        _LINEAR_CALL.reset(token)


def current_linear_call() -> LinearCall:
    """Gives the running call of a grouped linear.

    Raises:
        LookupError: None is running.
    """
    try:
        return _LINEAR_CALL.get()
    except LookupError:
        raise LookupError(
            "a TRACE quantiser was called outside of a TRACE grouped linear, so there is no hint "
            "for it: build the experts from TraceTESpecProvider, and do not quantise in backward"
        ) from None
