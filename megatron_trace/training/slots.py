"""Hints of fc2, one per (token, expert slot), in the order of the rows that experts receive.

A hint of fc2 has a row per token: its expert slots side by side, in the order of the sample's
routing record. An expert's rows are some slots of some tokens, with expert parallelism also of
other ranks.

A rank that has all experts knows the order of its rows before it has them, as long as tokens go
where the record says: what rounds them reads their hints where these lie.

Legend: T tokens of this rank, k expert slots of a token, N rows that this rank's experts receive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

from megatron_trace.formats import NumberFormat
from megatron_trace.hints.types import ScaleForm
from megatron_trace.training.dispatch import dispatch_rows, dispatch_slot_rows, keeps_all_rows
from megatron_trace.training.hint_rows import HintRows, move_together

# From a dispatched row to its global expert, and to its row of the micro-batch where that is known.
RowOrigin = Callable[[int], tuple[int, int | None]]


@dataclass(frozen=True)
class SlotRows:
    """What is known of rows at fc2.

    Attributes:
        hint: Their hints; None where the place is not guided.
        codes: The rollout's full codes, for metrics; None where they are not compared.
        real: bool [N]; rows of tokens, not of padding. None where the rows are those of this rank's
            tokens at the experts of the record: then the micro-batch tells how many are.
        rerouted: bool [N]; rows of tokens whose expert is not one that the rollout chose for them.
            None likewise: then there are none.
    """

    hint: HintRows | None
    codes: HintRows | None
    real: torch.Tensor | None = None
    rerouted: torch.Tensor | None = None

    def cut(self, columns: range | None) -> SlotRows:
        """Gives the rows with some columns of each slot only, on block boundaries; None keeps all.

        Expert-tensor-parallel ranks receive the same rows, each for its own columns.
        """
        if columns is None:
            return self
        return replace(self, hint=_cut(self.hint, columns), codes=_cut(self.codes, columns))


def no_slot_hints(
    num_tokens: int,
    num_values: int,
    num_bits: int,
    scale_form: ScaleForm,
    number_format: NumberFormat,
    device: torch.device,
) -> HintRows:
    """Gives the rows [T, ...] of tokens that have no hint.

    Args:
        num_tokens: T.
        num_values: Values of a token's row.
        num_bits: Bits per value.
        scale_form: Form of the block scales of rows that other ranks have.
        number_format: Format of the values.
        device: Where the rows are.
    """

    def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return HintRows(
        zeros(num_tokens, num_values * num_bits // 8),
        zeros(num_tokens, num_values // number_format.block_size),
        num_bits,
        zeros(num_tokens, dtype=torch.bool),
        scale_form,
        number_format,
    )


def dispatched_slots(
    dispatcher: MoETokenDispatcher,
    experts: torch.Tensor,
    real: torch.Tensor,
    hint: HintRows | None,
    codes: HintRows | None,
    *,
    replayed: bool,
    order: torch.Tensor | None = None,
) -> SlotRows | None:
    """Gives what is known of every row that the local experts receive; None if nothing is.

    A row of an expert that the record does not have for its token has no hint.

    With more than one rank it communicates, so that all ranks must give hints, or none, and codes,
    or none. See `dispatch.dispatch_rows` for when to call it.

    Args:
        dispatcher: A dispatcher that has just dispatched the T tokens.
        experts: int64 [T, k]; the routing record.
        real: bool [T]; tokens, not padding.
        hint: Hints of the T tokens, k slots in a row.
        codes: Full codes of the T tokens, likewise.
        replayed: Whether the tokens went to the experts of the record.
        order: int32 [T * k]; the slots by expert, and of an expert by token, as the record says;
            None sorts them here where they are needed.
    """
    given = [rows for rows in (hint, codes) if rows is not None]
    if not given:
        return None
    if replayed and keeps_all_rows(dispatcher):
        return _sorted_slots(experts, hint, codes, order)
    num_slots = experts.shape[1]
    move = partial(_move_slots, dispatcher, experts)
    flags = [real, *(rows.has_hint for rows in given)]
    parts = [flag.repeat_interleave(num_slots).to(torch.uint8).unsqueeze(-1) for flag in flags]
    for rows in given:
        parts += [
            part.reshape(part.shape[0] * num_slots, -1) for part in (rows.payload, rows.scale_bytes)
        ]
    moved = move_together(move, *parts)
    arrived = [flag.squeeze(-1) != 0 for flag in moved[: len(flags)]]
    bytes_of = moved[len(flags) :]
    found = iter(
        replace(
            rows,
            payload=bytes_of[2 * i],
            scale_bytes=bytes_of[2 * i + 1],
            has_hint=arrived[1 + i],
        )
        for i, rows in enumerate(given)
    )
    # A slot that the record does not have arrives as zeros.
    known = real_rows = arrived[0]
    if not replayed:
        of_tokens = dispatch_rows(dispatcher, real.to(torch.uint8).unsqueeze(-1))
        real_rows = of_tokens.squeeze(-1) != 0
    return SlotRows(
        next(found) if hint is not None else None,
        next(found) if codes is not None else None,
        real_rows,
        real_rows & ~known,
    )


def _sorted_slots(
    experts: torch.Tensor,
    hint: HintRows | None,
    codes: HintRows | None,
    order: torch.Tensor | None,
) -> SlotRows:
    """Gives the slots of all tokens by expert, and of an expert by token.

    That is the order of a rank that has all experts, when tokens go where the record says. Nothing
    is asked of the device here, so that the host need not wait for it.
    """
    if order is None:
        order = experts.flatten().to(torch.int16).sort(stable=True).indices.int()
    return SlotRows(
        None if hint is None else _slots_in_place(hint, order),
        None if codes is None else _slots_in_place(codes, order).in_order(),
    )


def _slots_in_place(rows: HintRows, order: torch.Tensor) -> HintRows:
    """Gives rows [T, ...] of tokens as rows of slots, which are where they were."""
    num_slots = len(order)
    return HintRows(
        rows.payload.view(num_slots, -1),
        rows.scale_bytes.view(num_slots, -1),
        rows.num_bits,
        rows.has_hint,
        rows.scale_form,
        rows.number_format,
        order,
    )


def _move_slots(
    dispatcher: MoETokenDispatcher, experts: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """Takes uint8 [T * k, bytes] to uint8 [N, bytes]."""
    return dispatch_slot_rows(dispatcher, rows.view(*experts.shape, rows.shape[-1]), experts)


def _cut(rows: HintRows | None, columns: range) -> HintRows | None:
    if rows is None:
        return None
    num_bytes, num_blocks = rows.payload.shape[-1], rows.scale_bytes.shape[-1]
    block_bytes, block_size = num_bytes // num_blocks, num_bytes * 8 // rows.num_bits // num_blocks
    first, last = columns.start // block_size, columns.stop // block_size
    return replace(
        rows,
        payload=rows.payload[:, first * block_bytes : last * block_bytes].contiguous(),
        scale_bytes=rows.scale_bytes[:, first:last].contiguous(),
    )
