"""Guard and rounding in one call: rows are guided by those hints that the guard accepts.

Legend: N rows of x, K values of a row, B blocks of a row; M rows of a hint, which x's rows may have
in another order, s of them for each flag that says whether they are there.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_trace.formats import ops
from megatron_trace.formats.number_format import NVFP4, NumberFormat
from megatron_trace.hints.guard import GuardThresholds, guided_rows, kernels
from megatron_trace.hints.types import require_hint_bits


@torch.no_grad()
def guided_codes(
    x: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    has_hint: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    *,
    num_bits: int,
    thresholds: GuardThresholds,
    number_format: NumberFormat = NVFP4,
    order: torch.Tensor | None = None,
    rejected: torch.Tensor | None = None,
    implementation: ops.Implementation = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives the codes of rows that are guided by those hints that `guided_rows` accepts.

    Args:
        x: float [N, K], finite: a NaN that is guided has no code.
        hint: See `guided_values`, like the others.
        scale_bytes: See there.
        has_hint: See there.
        global_scale: See there.
        num_bits: See there.
        thresholds: See there.
        number_format: See there.
        order: See there.
        rejected: See there.
        implementation: See there.

    Returns:
        packed_codes: uint8 [N, K * code_bits / 8].
        scale_bytes: uint8 [N, B]; those given, and own ones in rows that are not guided.
        accepted: bool [N].

    Raises:
        ValueError: See there.
    """
    if ops.takes_triton(implementation, x):
        require_hint_bits(num_bits, number_format)
        return kernels().guided_codes(
            x,
            hint,
            scale_bytes,
            has_hint,
            global_scale,
            number_format,
            thresholds.limits,
            num_bits=num_bits,
            order=order,
            rejected=rejected,
        )
    rows = rows_in_order(hint, scale_bytes, has_hint, order)
    how = _by_torch(num_bits, number_format)
    accepted = _judged(x, rows, global_scale, thresholds, rejected, how)
    packed_codes, own_bytes = ops.guided_packed(
        x, *rows[:2], global_scale, has_hint=accepted, **how
    )
    return packed_codes, own_bytes, accepted


def guided_values(
    x: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    has_hint: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    *,
    num_bits: int,
    thresholds: GuardThresholds,
    number_format: NumberFormat = NVFP4,
    dtype: torch.dtype | None = None,
    order: torch.Tensor | None = None,
    rejected: torch.Tensor | None = None,
    implementation: ops.Implementation = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives `ops.guided` by those hints that `guided_rows` accepts, and which these are.

    A row whose hint is not accepted, or that has none, is rounded to nearest with its own block
    scales. The gradient to x is the identity.

    Args:
        x: float [N, K]; the trainer's values.
        hint: uint8 [M, K * num_bits / 8]; M = N without `order`.
        scale_bytes: uint8 [M, B]; the rollout's block scales, restored if residues were stored.
        has_hint: bool [M / s]; which s rows of a hint, one after the other, there are; s = 1
            without `order`.
        global_scale: FP32 0-d tensor or number, or one for each row of x; the rollout's, decode
            side. None if the format has none.
        num_bits: Bits per value of the hint.
        thresholds: What the guard decides by.
        number_format: Format of the hint.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
        order: int32 [N]; which row of the hint a row of x has, each one of 0 to M - 1. None: its
            own. That of a trainer is a sort of the routing record (`training.slots`), so a
            permutation. In host memory it is checked. On a GPU nothing checks it, as the host would
            wait for the answer: another number there reads beyond the hint.
        rejected: int64 [1] on x's device, to which the number of rows is added that have a hint
            that is not accepted; None: they are not counted.
        implementation: `torch`, `triton`, or `auto` (Triton where x is on a GPU).

    Returns:
        y: [N, K] in the dtype of x.
        accepted: bool [N]; rows that are guided.

    Raises:
        ValueError: Shapes disagree, K is not a multiple of the block size, num_bits is not that of
            a hint of the format, an order in host memory names a row that is not there, or the
            implementation cannot run on x.
    """
    if ops.takes_triton(implementation, x):
        require_hint_bits(num_bits, number_format)
        y, accepted = kernels().guided_values(
            x.detach() if x.requires_grad else x,
            hint,
            scale_bytes,
            has_hint,
            global_scale,
            number_format,
            thresholds.limits,
            num_bits=num_bits,
            dtype=dtype,
            order=order,
            rejected=rejected,
        )
        return ops.straight_through(x, y) if x.requires_grad else y, accepted
    rows = rows_in_order(hint, scale_bytes, has_hint, order)
    how = _by_torch(num_bits, number_format)
    accepted = _judged(x, rows, global_scale, thresholds, rejected, how)
    y = ops.guided(x, *rows[:2], global_scale, has_hint=accepted, dtype=dtype, **how)
    return y, accepted


def rows_in_order(
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    has_hint: torch.Tensor,
    order: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives hint, scale bytes and flags of each row of x.

    Args:
        hint: uint8 [M, bytes]; see `guided_values`, like the others.
        scale_bytes: uint8 [M, B].
        has_hint: bool [M / s].
        order: int32 [N], or None; checked as there.

    Raises:
        ValueError: There are not as many scale bytes, no whole number of rows for each flag, or an
            order in host memory names a row that is not there.
    """
    rows_of_flag, left = divmod(len(hint), max(len(has_hint), 1))
    if len(scale_bytes) != len(hint) or left:
        raise ValueError(
            "hint and scale_bytes need as many rows, a multiple of those of has_hint; got "
            f"{len(hint)}, {len(scale_bytes)} and {len(has_hint)}"
        )
    if order is None:
        return hint, scale_bytes, has_hint
    _require_rows(order, len(hint))
    flags = has_hint.index_select(0, order // max(rows_of_flag, 1))
    return hint.index_select(0, order), scale_bytes.index_select(0, order), flags


def _require_rows(order: torch.Tensor, num_rows: int) -> None:
    """Checks that an order in host memory names rows of a hint only."""
    if order.device.type != "cpu" or not order.numel():
        return
    lowest, highest = (int(end) for end in order.aminmax())
    if lowest < 0 or highest >= num_rows:
        raise ValueError(
            f"order must name rows 0 to {num_rows - 1} of the hint; got {lowest} to {highest}; "
            "give that of this hint's rows"
        )


def _by_torch(num_bits: int, number_format: NumberFormat) -> dict[str, Any]:
    """Gives what the two steps of torch, guard and rounding, have in common."""
    return {"num_bits": num_bits, "number_format": number_format, "implementation": "torch"}


def _judged(
    x: torch.Tensor,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    global_scale: torch.Tensor | float | None,
    thresholds: GuardThresholds,
    rejected: torch.Tensor | None,
    how: dict[str, Any],
) -> torch.Tensor:
    """Gives which rows of `rows_in_order` the guard accepts, and counts those it rejects."""
    accepted = guided_rows(x, *rows, global_scale, thresholds=thresholds, **how)
    if rejected is not None:
        rejected += (rows[2] & ~accepted).sum()
    return accepted
