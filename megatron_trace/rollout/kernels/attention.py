"""Triton kernels of `paged_attention` over packed NVFP4 pages: decode, prefill, or both in a step.

Legend: T tokens of a step, N query heads, G key/value heads, H query heads of each, D head dim,
R requests, S tokens of a page. Rows are pairs of (new token, query head of the group). Codes lie
two in a byte, so that q, p v and the operands come in even and odd columns.

As in decode_attention.cu, operands are FP16: a code's value times 2^-14 times its block scale is
exact there, q is scaled by a power of two, and weights are raised by 2^15.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from megatron_trace.formats.kernels_inputs import INTERPRETED
from megatron_trace.rollout.kernels import online_softmax as softmax
from megatron_trace.rollout.kernels.online_softmax import LOG2_E, LOWEST, TOKENS, splits_of
from megatron_trace.rollout.pages import PackedPages

_UNIT: tl.constexpr = tl.constexpr(16384.0)
_RAISED: tl.constexpr = tl.constexpr(15.0)


def require_e2m1_e4m3(pages: PackedPages, implementation: str) -> None:
    """Raises ValueError unless pages hold E2M1 codes with E4M3 scales of 16 values."""
    number_format = pages.layout.number_format
    if (number_format.element.code_bits, number_format.scale_encoding) != (4, "e4m3"):
        raise ValueError(
            f"implementation {implementation} reads pages of nvfp4 and nvfp4_4over6; got "
            f"{number_format.name}; use torch"
        )


def paged_attention(
    query: torch.Tensor,
    keys: PackedPages,
    values: PackedPages,
    cu_query_lengths: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    *,
    max_new_tokens: int,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Gives `reference.paged_attention` without waiting for the GPU.

    Args:
        query: BF16 [T, N, D], the new tokens of one request after those of another.
        keys: Pages of keys; the new tokens are in them already.
        values: Pages of values.
        cu_query_lengths: int32 [R + 1], where each request's rows begin.
        lengths: int32 [R], tokens of each request so far, new ones included; 0 is padding.
        block_table: int32 [R, >= P], pages of each request.
        scale: Factor of the logits.
        max_new_tokens: No request has more new tokens.
        num_splits: Parts into which a context is cut; None chooses.

    Returns:
        BF16 [T, N, D]; 0 in padding rows.

    Raises:
        ValueError: The pages are in another format, or nothing is on a GPU.
    """
    require_e2m1_e4m3(keys, "triton")
    if not (query.is_cuda or INTERPRETED):
        raise ValueError(f"implementation triton needs a query on a GPU; got {query.device}")
    output = torch.zeros_like(query, memory_format=torch.contiguous_format)
    num_requests, head_dim = len(lengths), query.shape[-1]
    if num_requests == 0 or max_new_tokens == 0:
        return output
    heads = keys.num_heads
    ratio = query.shape[1] // heads
    rows = min(64, max(16, triton.next_power_of_2(max_new_tokens * ratio)))
    row_tiles = triton.cdiv(max_new_tokens * ratio, rows)
    if num_splits is None:
        longest = block_table.shape[1] * keys.page_tokens
        num_splits = splits_of(longest, row_tiles * num_requests * heads)
    grid = (row_tiles, num_requests * heads, num_splits)
    # A dot product takes 16 values at least.
    half = max(16, triton.next_power_of_2(head_dim // 2))
    parts = query.new_empty((*grid, rows, 2, half) if num_splits > 1 else (1,), dtype=torch.float32)
    sums = query.new_empty((*grid, rows, 2) if num_splits > 1 else (1,), dtype=torch.float32)
    shape = {
        "H": ratio,
        "G": heads,
        "D": head_dim,
        "HALF": half,
        "ROWS": rows,
        "SPLITS": num_splits,
        "num_warps": 8 if rows * half >= 4096 else 4,
    }
    with torch.cuda.device_of(query):
        _attention_kernel[grid](
            query.contiguous(),
            output,
            keys.stored,
            values.stored,
            keys.global_scale,
            values.global_scale,
            block_table,
            cu_query_lengths,
            lengths,
            parts,
            sums,
            scale,
            block_table.stride(0),
            PAGE=keys.page_tokens,
            LINE_TOKENS=keys.layout.tokens_per_line,
            LINE_BYTES=keys.layout.line_bytes,
            ALIGNED=math.gcd(keys.layout.line_bytes, keys.layout.code_bytes, 16),
            TOKENS=TOKENS,
            **shape,
        )
        if num_splits > 1:
            _combine_kernel[grid[:2]](
                output, values.global_scale, cu_query_lengths, lengths, parts, sums, **shape
            )
    return output


@triton.jit
def _attention_kernel(
    query_ptr,
    output_ptr,
    keys_ptr,
    values_ptr,
    key_scale_ptr,
    value_scale_ptr,
    table_ptr,
    starts_ptr,
    lengths_ptr,
    parts_ptr,
    sums_ptr,
    scale,
    table_stride,
    PAGE: tl.constexpr,
    LINE_TOKENS: tl.constexpr,
    LINE_BYTES: tl.constexpr,
    ALIGNED: tl.constexpr,
    TOKENS: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row_tile = tl.program_id(0)
    request = tl.program_id(1) // G
    head = tl.program_id(1) % G
    length = tl.load(lengths_ptr + request)
    start = tl.load(starts_ptr + request)
    num_new = tl.load(starts_ptr + request + 1) - start
    if (length > 0) & (row_tile * ROWS < num_new * H):
        new, query_at, is_row = _rows(row_tile, request, head, start, num_new, H, G, D, ROWS)
        half = tl.arange(0, HALF)
        in_head = half < D // 2
        mask = is_row[:, None] & in_head[None, :]
        even = tl.load(query_ptr + query_at[:, None] + 2 * half[None, :], mask=mask, other=0.0)
        odd = tl.load(query_ptr + query_at[:, None] + 2 * half[None, :] + 1, mask=mask, other=0.0)
        even, odd, power = _scaled_query(even.to(tl.float32), odd.to(tl.float32))
        factor = power * (tl.load(key_scale_ptr) * scale * LOG2_E * _UNIT)

        last_seen = length - num_new + new
        end = tl.minimum(length, length - num_new + (row_tile * ROWS + ROWS - 1) // H + 1)
        tiles = tl.cdiv(tl.cdiv(end, TOKENS), SPLITS)
        first = tl.program_id(2) * tiles * TOKENS
        last = tl.minimum(end, first + tiles * TOKENS)
        maximum = tl.full((ROWS,), LOWEST, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        even_out = tl.zeros((ROWS, HALF), tl.float32)
        odd_out = tl.zeros((ROWS, HALF), tl.float32)
        for token in range(first, last, TOKENS):
            tokens = token + tl.arange(0, TOKENS)
            known = tokens < last
            page = tl.load(table_ptr + request * table_stride + tokens // PAGE, mask=known, other=0)
            offset = tokens % PAGE
            line = (page.to(tl.int64) * G + head) * (PAGE // LINE_TOKENS) + offset // LINE_TOKENS
            code_at = line * LINE_BYTES + offset % LINE_TOKENS * (D // 2)
            scale_at = line * LINE_BYTES + LINE_TOKENS * (D // 2)
            scale_at += offset % LINE_TOKENS * (D // 16)
            # Triton 3.6 takes lines of 54 bytes for aligned to 16.
            code_at = tl.multiple_of(code_at[:, None] + half[None, :], (ALIGNED, ALIGNED))
            scale_at = scale_at[:, None] + half[None, :] // 8
            present = known[:, None] & in_head[None, :]

            even_key, odd_key = _decoded(keys_ptr, code_at, scale_at, present)
            score = tl.dot(even, tl.trans(even_key)) + tl.dot(odd, tl.trans(odd_key))
            score = score * factor[:, None]
            visible = known[None, :] & (tokens[None, :] <= last_seen[:, None])
            weight, shrink, maximum, total = softmax.seen(score, visible, maximum, total, _RAISED)
            weight = weight.to(tl.float16)
            even_value, odd_value = _decoded(values_ptr, code_at, scale_at, present)
            even_out = even_out * shrink[:, None] + tl.dot(weight, even_value)
            odd_out = odd_out * shrink[:, None] + tl.dot(weight, odd_value)

        if SPLITS == 1:
            by = _UNIT * tl.load(value_scale_ptr)
            _store(output_ptr, query_at, is_row, even_out, odd_out, total, by, D, HALF)
        else:
            number = (row_tile * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
            row = (number * SPLITS + tl.program_id(2)) * ROWS + tl.arange(0, ROWS)
            parts_at = row[:, None] * (2 * HALF) + half[None, :]
            tl.store(parts_ptr + parts_at, even_out)
            tl.store(parts_ptr + parts_at + HALF, odd_out)
            tl.store(sums_ptr + 2 * row, maximum)
            tl.store(sums_ptr + 2 * row + 1, total)


@triton.jit
def _combine_kernel(
    output_ptr,
    value_scale_ptr,
    starts_ptr,
    lengths_ptr,
    parts_ptr,
    sums_ptr,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row_tile = tl.program_id(0)
    request = tl.program_id(1) // G
    head = tl.program_id(1) % G
    length = tl.load(lengths_ptr + request)
    start = tl.load(starts_ptr + request)
    num_new = tl.load(starts_ptr + request + 1) - start
    if (length > 0) & (row_tile * ROWS < num_new * H):
        _, query_at, is_row = _rows(row_tile, request, head, start, num_new, H, G, D, ROWS)
        half = tl.arange(0, HALF)
        number = (row_tile * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
        row = number * SPLITS * ROWS + tl.arange(0, ROWS)
        maximum = tl.full((ROWS,), LOWEST, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        even_out = tl.zeros((ROWS, HALF), tl.float32)
        odd_out = tl.zeros((ROWS, HALF), tl.float32)
        for _ in range(SPLITS):
            part_maximum = tl.load(sums_ptr + 2 * row)
            part_total = tl.load(sums_ptr + 2 * row + 1)
            shrink, grow, maximum, total = softmax.joined(maximum, total, part_maximum, part_total)
            parts_at = row[:, None] * (2 * HALF) + half[None, :]
            even_out = even_out * shrink[:, None] + tl.load(parts_ptr + parts_at) * grow[:, None]
            odd = tl.load(parts_ptr + parts_at + HALF)
            odd_out = odd_out * shrink[:, None] + odd * grow[:, None]
            row += ROWS
        by = _UNIT * tl.load(value_scale_ptr)
        _store(output_ptr, query_at, is_row, even_out, odd_out, total, by, D, HALF)


@triton.jit
def _rows(
    row_tile,
    request,
    head,
    start,
    num_new,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Gives of each row its new token, where its q begins (int64), and whether there is one."""
    row = row_tile * ROWS + tl.arange(0, ROWS)
    new = row // H
    query_head = ((start + new).to(tl.int64) * G + head) * H + row % H
    return new, query_head * D, new < num_new


@triton.jit
def _scaled_query(even, odd):
    """Gives q in FP16, largest magnitude 2^13 to 2^14 in each row, and the power it lacks."""
    largest = tl.maximum(tl.max(tl.abs(even), 1), tl.max(tl.abs(odd), 1))
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) - 127 - 13
    exponent = tl.minimum(tl.maximum(exponent, -126), 126)
    down = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    power = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
    return (even * down[:, None]).to(tl.float16), (odd * down[:, None]).to(tl.float16), power


@triton.jit
def _decoded(pages_ptr, code_at, scale_at, mask):
    """Gives the values of even and of odd columns, FP16, times 2^-14; 0 where masked."""
    byte = tl.load(pages_ptr + code_at, mask=mask, other=0).to(tl.int16)
    scale_byte = tl.load(pages_ptr + scale_at, mask=mask, other=0).to(tl.int16)
    # E4M3 is FP16's own layout, 2^8 times smaller.
    scale = (scale_byte << 7).to(tl.float16, bitcast=True) * 256.0
    scale = tl.where(scale_byte == 0x7F, float("nan"), scale).to(tl.float16)
    even = ((byte & 7) << 9) | ((byte & 8) << 12)
    odd = ((byte & 0x70) << 5) | ((byte & 0x80) << 8)
    return (
        even.to(tl.float16, bitcast=True) * scale,
        odd.to(tl.float16, bitcast=True) * scale,
    )


@triton.jit
def _store(
    output_ptr, query_at, is_row, even_out, odd_out, total, by, D: tl.constexpr, HALF: tl.constexpr
):
    half = tl.arange(0, HALF)
    mask = is_row[:, None] & (half < D // 2)[None, :]
    factor = (by / tl.where(is_row, total, 1.0))[:, None]
    at = output_ptr + query_at[:, None] + 2 * half[None, :]
    tl.store(at, (even_out * factor).to(output_ptr.dtype.element_ty), mask=mask)
    tl.store(at + 1, (odd_out * factor).to(output_ptr.dtype.element_ty), mask=mask)
