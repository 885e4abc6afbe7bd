"""Decode attention over plain pages in Triton, without waiting for the GPU: a new token each.

Legend: T tokens of a step, N query heads, G key/value heads, H query heads of each, D head dim,
R requests, P pages, S tokens of a page.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_trace.formats.kernels_inputs import INTERPRETED
from megatron_trace.rollout.kernels import online_softmax as softmax
from megatron_trace.rollout.kernels.online_softmax import LOG2_E, LOWEST, TOKENS, splits_of
from megatron_trace.rollout.pages import Pages

_WARPS = 4
_STAGES = 3


def why_not(head_dim: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Says why `paged_attention` cannot run; None if it can.

    Args:
        head_dim: D.
        dtype: Of the pages.
        device: Where they lie.
    """
    if not (device.type == "cuda" or INTERPRETED):
        return f"it needs a GPU, and the pages lie on {device}"
    if head_dim < 16 or head_dim & (head_dim - 1):
        return f"head_dim must be a power of two from 16; got {head_dim}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it reads BF16 and FP16; got {dtype}"
    return None


def paged_attention(
    query: torch.Tensor,
    keys: Pages,
    values: Pages,
    cu_query_lengths: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    *,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Gives `reference.paged_attention` of one new token a request.

    Args:
        query: [T, N, D], the new token of one request after that of another.
        keys: Pages of keys; the new tokens are in them already.
        values: Pages of values.
        cu_query_lengths: int32 [R + 1], where each request's row is.
        lengths: int32 [R], tokens of each request so far, the new one included; 0 is padding.
        block_table: int32 [R, >= P], pages of each request.
        scale: Factor of the logits.
        num_splits: Parts into which a context is cut; None chooses.

    Returns:
        [T, N, D]; 0 in padding rows.

    Raises:
        ValueError: It cannot run on these; says why.
    """
    reason = why_not(query.shape[-1], keys.stored.dtype, query.device)
    if reason is not None:
        raise ValueError(f"implementation triton cannot read these plain pages: {reason}")
    output = torch.zeros_like(query, memory_format=torch.contiguous_format)
    num_requests, head_dim = len(lengths), query.shape[-1]
    if num_requests == 0:
        return output
    heads = keys.stored.shape[2]
    ratio = query.shape[1] // heads
    rows = max(16, triton.next_power_of_2(ratio))
    if num_splits is None:
        longest = block_table.shape[1] * keys.page_tokens
        num_splits = splits_of(longest, num_requests * heads)
    grid = (num_requests * heads, num_splits)
    parts = query.new_empty((*grid, rows, head_dim), dtype=torch.float32)
    sums = query.new_empty((*grid, rows, 2), dtype=torch.float32)
    shape = {"H": ratio, "G": heads, "D": head_dim, "ROWS": rows, "SPLITS": num_splits}
    with torch.cuda.device_of(query):
        _attention_kernel[grid](
            query.contiguous(),
            keys.stored,
            values.stored,
            block_table,
            cu_query_lengths,
            lengths,
            parts,
            sums,
            scale,
            block_table.stride(0),
            keys.stored.stride(0),
            PAGE=keys.page_tokens,
            TOKENS=TOKENS,
            num_warps=_WARPS,
            num_stages=_STAGES,
            **shape,
        )
        _combine_kernel[grid[:1]](output, cu_query_lengths, lengths, parts, sums, **shape)
    return output


@triton.jit
def _attention_kernel(
    query_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    starts_ptr,
    lengths_ptr,
    parts_ptr,
    sums_ptr,
    scale,
    table_stride,
    page_stride,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    request, head, split = tl.program_id(0) // G, tl.program_id(0) % G, tl.program_id(1)
    length = tl.load(lengths_ptr + request)
    row, column = tl.arange(0, ROWS), tl.arange(0, D)
    if length > 0:
        query_row = tl.load(starts_ptr + request).to(tl.int64) * G * H + head * H + row
        query = tl.load(
            query_ptr + query_row[:, None] * D + column[None, :], mask=row[:, None] < H, other=0.0
        )
        tiles = tl.cdiv(tl.cdiv(length, TOKENS), SPLITS)
        first = split * tiles * TOKENS
        last = tl.minimum(length, first + tiles * TOKENS)
        maximum = tl.full((ROWS,), LOWEST, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        output = tl.zeros((ROWS, D), tl.float32)
        for token in range(first, last, TOKENS):
            tokens = token + tl.arange(0, TOKENS)
            known = tokens < last
            page = tl.load(table_ptr + request * table_stride + tokens // PAGE, mask=known, other=0)
            at = page.to(tl.int64) * page_stride + (tokens % PAGE * G + head) * D
            at = at[:, None] + column[None, :]
            key = tl.load(keys_ptr + at, mask=known[:, None], other=0.0)
            score = tl.dot(query, tl.trans(key)) * (scale * LOG2_E)
            weight, shrink, maximum, total = softmax.seen(score, known[None, :], maximum, total)
            value = tl.load(values_ptr + at, mask=known[:, None], other=0.0)
            output = output * shrink[:, None] + tl.dot(weight.to(value.dtype), value)
        part = (tl.program_id(0).to(tl.int64) * SPLITS + split) * ROWS + row
        tl.store(parts_ptr + part[:, None] * D + column[None, :], output)
        tl.store(sums_ptr + 2 * part, maximum)
        tl.store(sums_ptr + 2 * part + 1, total)


@triton.jit
def _combine_kernel(
    output_ptr,
    starts_ptr,
    lengths_ptr,
    parts_ptr,
    sums_ptr,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    request, head = tl.program_id(0) // G, tl.program_id(0) % G
    row, column = tl.arange(0, ROWS), tl.arange(0, D)
    if tl.load(lengths_ptr + request) > 0:
        maximum = tl.full((ROWS,), LOWEST, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        output = tl.zeros((ROWS, D), tl.float32)
        part = tl.program_id(0).to(tl.int64) * SPLITS * ROWS + row
        for _ in range(SPLITS):
            part_maximum = tl.load(sums_ptr + 2 * part)
            part_total = tl.load(sums_ptr + 2 * part + 1)
            shrink, grow, maximum, total = softmax.joined(maximum, total, part_maximum, part_total)
            values = tl.load(parts_ptr + part[:, None] * D + column[None, :])
            output = output * shrink[:, None] + values * grow[:, None]
            part += ROWS
        query_row = tl.load(starts_ptr + request).to(tl.int64) * G * H + head * H + row
        tl.store(
            output_ptr + query_row[:, None] * D + column[None, :],
            (output / total[:, None]).to(output_ptr.dtype.element_ty),
            mask=row[:, None] < H,
        )
