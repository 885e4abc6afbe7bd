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
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from megatron_trace.formats import NVFP4
from megatron_trace.hints.types import Site
from megatron_trace.training.rounding import Rounding, RowMove


def moved(rounding: Rounding, move: RowMove) -> Rounding:
    """Gives the rounding of rows that `move` takes where an operand's rows went.

    Args:
        rounding: Rounding of the operand's N rows.
        move: From uint8 [N, bytes] to uint8 [other rows, bytes]; a row of zeros has no hint.
    """
    if rounding.hint is None:
        return rounding
    return replace(rounding, hint=rounding.hint.moved(move))


class RoundingSource(Protocol):
    """Where MoE layers ask, at every forward, how their operands are rounded.

    It must give the same answer when asked again for the same micro-batch, and from any thread:
    recomputation asks a second time, on a GPU from autograd's own thread, where context variables
    of the training loop are not set.
    """

    def rounding(self, layer: int, site: Site, values: torch.Tensor | None) -> Rounding:
        """Gives the rounding of one operand.

        Args:
            layer: Decoder layer of the checkpoint.
            site: fc1 or fc2.
            values: For fc1 the routed input [tokens, K] before dispatch, whose rows the hints
                follow; None for fc2, which is not guided here.

        Raises:
            LookupError: The place is guided, and its hints are missing.
        """
        ...

    def count_call(self, layer: int, site: Site) -> None:
        """Notes that the quantiser of a place ran once more."""
        ...


@dataclass(frozen=True)
class ExpertCall:
    """One forward of the routed experts of one layer.

    Attributes:
        rounding: From a site to the rounding of its dispatched, unpadded rows.
        count_call: Told the site whose quantiser ran.
        splits: Rows of each local expert before padding; None outside of the experts' forward.
    """

    rounding: Callable[[Site], Rounding]
    count_call: Callable[[Site], None]
    splits: tuple[int, ...] | None = None


class LinearCall:
    """One forward of one grouped linear.

    Args:
        name: Name of the linear, for messages.
        values: float [P, K], contiguous; the input that TE splits by expert.
        rounding: Rounding of the P rows.
        amax_group: Ranks that share each expert's weight; None if they are whole.
        on_quantised: Called when the input is quantised.
    """

    def __init__(
        self,
        name: str,
        values: torch.Tensor,
        rounding: Rounding,
        *,
        amax_group: torch.distributed.ProcessGroup | None = None,
        on_quantised: Callable[[], None] = lambda: None,
    ) -> None:
        if values.dim() != 2 or not values.is_contiguous():
            raise ValueError(
                f"{name}: the input must be contiguous [rows, values]; got {tuple(values.shape)} "
                f"with strides {values.stride()}"
            )
        if rounding.number_format is not NVFP4:
            raise ValueError(
                f"{name}: Transformer Engine's experts quantise to nvfp4 only; got "
                f"{rounding.number_format.name}; choose number_format=nvfp4 or the local experts"
            )
        self.name = name
        self.values = values.detach()
        self.rounding = rounding
        self.amax_group = amax_group
        self.was_quantised = False
        self._on_quantised = on_quantised

    def quantised(self, part: torch.Tensor) -> torch.Tensor:
        """Gives the fake-quantised rows of one expert; all rows are rounded at the first call.

        Args:
            part: One expert's rows, a view of `values`.
        """
        return self._quantised[self.rows_of(part)]

    def codes(self, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gives packed codes [rows, K / 2] and block scales [rows, B] of one expert's rows."""
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
        self._on_quantised()

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
            "no rounding is set for the routed experts: they must be called by a TraceTEMoELayer "
            "that is attached to a RoundingSource"
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
