"""Triton kernel of `watch.Watch.observe`: one read of the rows, and atomics where there is news.

Legend: N rows of K values, a program each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def observe(
    x: torch.Tensor,
    counts: torch.Tensor,
    real_rows: torch.Tensor | None,
    largest: float | None,
    finite: bool,
    tokens: torch.Tensor | None,
    rows_of_token: int,
) -> None:
    """Adds rows to the counts of their place, see `watch.Watch.observe`.

    Args:
        x: float [N, K] on a GPU; the values of a row must lie side by side.
        counts: int64 [3]: values beyond the largest, rows with NaN or Inf, the first's token.
        real_rows: int32 [1] on the device, tokens that are no padding; None if all are.
        largest: Largest value; None counts none.
        finite: Whether NaN and Inf are looked for.
        tokens: int64 [N], the token of each row; None if there are `rows_of_token` of each token.
        rows_of_token: See `tokens`.
    """
    num_rows, num_values = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    block = triton.next_power_of_2(num_values)
    with torch.cuda.device_of(x):
        _observe_kernel[(num_rows,)](
            x,
            counts,
            counts if real_rows is None else real_rows,
            counts if tokens is None else tokens,
            0.0 if largest is None else largest,
            x.stride(0),
            num_values,
            rows_of_token,
            COUNTS_LARGE=largest is not None,
            FINITE=finite,
            ALL_REAL=real_rows is None,
            HAS_TOKENS=tokens is not None,
            BLOCK=block,
            num_warps=4 if block <= 4096 else 16,
        )


@triton.jit(do_not_specialize=["largest"])
def _observe_kernel(
    x_ptr,
    counts_ptr,
    real_ptr,
    tokens_ptr,
    largest,
    stride,
    num_values,
    rows_of_token,
    COUNTS_LARGE: tl.constexpr,
    FINITE: tl.constexpr,
    ALL_REAL: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    token = (row // rows_of_token).to(tl.int64)
    if HAS_TOKENS:
        token = tl.load(tokens_ptr + row)
    is_real = True
    if not ALL_REAL:
        is_real = token < tl.load(real_ptr)
    if is_real:
        column = tl.arange(0, BLOCK)
        at = row.to(tl.int64) * stride + column
        x = tl.load(x_ptr + at, mask=column < num_values, other=0.0)
        size = tl.abs(x.to(tl.float32))
        if COUNTS_LARGE:
            beyond = tl.sum((size > largest).to(tl.int64), axis=0)
            tl.atomic_add(counts_ptr, beyond, mask=beyond > 0)
        if FINITE:
            # The comparison is false for NaN too.
            is_bad = tl.sum((size < float("inf")).to(tl.int32), axis=0) < BLOCK
            tl.atomic_add(counts_ptr + 1, is_bad.to(tl.int64), mask=is_bad)
            tl.atomic_min(counts_ptr + 2, token, mask=is_bad)
