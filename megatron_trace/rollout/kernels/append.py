"""Triton kernel of `append`: quantises keys and values, writes pages and records in one launch.

Legend: N tokens of a step, G key/value heads, D head dim, S tokens of a page. An octet is 8
neighbouring values, half a block; a program has T octets, one for each thread. NVFP4 only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_trace.formats import NVFP4
from megatron_trace.formats import kernels_bf16 as bf16
from megatron_trace.formats import kernels_octets as octets
from megatron_trace.formats.checks import require_num_bits
from megatron_trace.formats.kernels_inputs import INTERPRETED, WORDS
from megatron_trace.rollout.kernels.reference import Record
from megatron_trace.rollout.pages import PackedPages

_NUM_WARPS = 2


def append(
    key: torch.Tensor,
    value: torch.Tensor,
    key_pages: PackedPages,
    value_pages: PackedPages,
    block: torch.Tensor,
    offset: torch.Tensor,
    *,
    num_bits: int | None,
) -> tuple[Record | None, Record | None]:
    """Gives `reference.append`.

    Args:
        key: BF16 [N, G, D] on a GPU; the heads of a token must lie side by side.
        value: BF16 [N, G, D].
        key_pages: Pages of keys; changed in place.
        value_pages: Pages of values; changed in place.
        block: integer [N], page of each token.
        offset: integer [N], its place in the page.
        num_bits: Bits a value of the hint that is given: 1, 2 or 4; None gives none.

    Returns:
        Of keys and of values: hint uint8 [N, G D num_bits / 8] and block scales uint8 [N, G B].

    Raises:
        ValueError: The pages are not in NVFP4, num_bits is none of a hint, or x is not on a GPU.
    """
    layout = key_pages.layout
    if layout.number_format is not NVFP4:
        raise ValueError(
            f"the append kernel quantises to nvfp4; got pages in {layout.number_format.name}; use "
            "implementation torch"
        )
    if not (key.is_cuda or INTERPRETED):
        raise ValueError(f"implementation triton needs keys on a GPU; got {key.device}")
    if num_bits is not None:
        require_num_bits(num_bits)
    num_tokens, num_heads, head_dim = key.shape
    key, value = (_with_heads_side_by_side(x) for x in (key, value))
    records: list[Record | None] = [None, None]
    if num_bits is not None:
        records = [_new_record(x, num_bits) for x in (key, value)]
    if num_tokens == 0:
        return records[0], records[1]
    num_octets = num_tokens * num_heads * head_dim // 8
    octets_of_program = 32 * _NUM_WARPS
    # Without a record the pages' own bytes stand in for pointers that are not used.
    hints = [
        pages.stored if record is None else record[0].view(-1).view(WORDS[num_bits or 1])
        for record, pages in zip(records, (key_pages, value_pages), strict=True)
    ]
    scales = [
        pages.stored if record is None else record[1]
        for record, pages in zip(records, (key_pages, value_pages), strict=True)
    ]
    with torch.cuda.device_of(key):
        _append_kernel[(triton.cdiv(num_octets, octets_of_program), 2)](
            key,
            value,
            key_pages.stored,
            value_pages.stored,
            hints[0],
            hints[1],
            scales[0],
            scales[1],
            key_pages.global_scale,
            value_pages.global_scale,
            block,
            offset,
            num_octets,
            key.stride(0),
            value.stride(0),
            NUM_BITS=num_bits or 0,
            HEADS=num_heads,
            D=head_dim,
            LINES=layout.lines,
            LINE_TOKENS=layout.tokens_per_line,
            LINE_BYTES=layout.line_bytes,
            PAIRS=_goes_in_pairs(key),
            T=octets_of_program,
            num_warps=_NUM_WARPS,
        )
    return records[0], records[1]


def _goes_in_pairs(x: torch.Tensor) -> bool:
    return x.dtype == torch.bfloat16 and not INTERPRETED


def _with_heads_side_by_side(x: torch.Tensor) -> torch.Tensor:
    """Gives x, or a copy if heads are apart or pairs of values cannot be loaded at once."""
    _, _, head_dim = x.shape
    apart = x.stride(2) != 1 or x.stride(1) != head_dim
    if apart or x.stride(0) % 2 or x.data_ptr() % 4:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def _new_record(x: torch.Tensor, num_bits: int) -> Record:
    num_tokens, width = x.shape[0], x.shape[1] * x.shape[2]
    hint = x.new_empty((num_tokens, width * num_bits // 8), dtype=torch.uint8)
    return hint, x.new_empty((num_tokens, width // NVFP4.block_size), dtype=torch.uint8)


@triton.jit(do_not_specialize=["num_octets"])
def _append_kernel(
    key_ptr,
    value_ptr,
    key_pages_ptr,
    value_pages_ptr,
    key_hint_ptr,
    value_hint_ptr,
    key_bytes_ptr,
    value_bytes_ptr,
    key_scale_ptr,
    value_scale_ptr,
    block_ptr,
    offset_ptr,
    num_octets,
    key_stride,
    value_stride,
    NUM_BITS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    LINES: tl.constexpr,
    LINE_TOKENS: tl.constexpr,
    LINE_BYTES: tl.constexpr,
    PAIRS: tl.constexpr,
    T: tl.constexpr,
):
    if tl.program_id(1) == 0:
        _append(
            key_ptr,
            key_pages_ptr,
            key_hint_ptr,
            key_bytes_ptr,
            key_scale_ptr,
            block_ptr,
            offset_ptr,
            num_octets,
            key_stride,
            NUM_BITS,
            HEADS,
            D,
            LINES,
            LINE_TOKENS,
            LINE_BYTES,
            PAIRS,
            T,
        )
    else:
        _append(
            value_ptr,
            value_pages_ptr,
            value_hint_ptr,
            value_bytes_ptr,
            value_scale_ptr,
            block_ptr,
            offset_ptr,
            num_octets,
            value_stride,
            NUM_BITS,
            HEADS,
            D,
            LINES,
            LINE_TOKENS,
            LINE_BYTES,
            PAIRS,
            T,
        )


@triton.jit
def _append(
    x_ptr,
    pages_ptr,
    hint_ptr,
    bytes_ptr,
    scale_ptr,
    block_ptr,
    offset_ptr,
    num_octets,
    stride,
    NUM_BITS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    LINES: tl.constexpr,
    LINE_TOKENS: tl.constexpr,
    LINE_BYTES: tl.constexpr,
    PAIRS: tl.constexpr,
    T: tl.constexpr,
):
    octet = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    mask = octet < num_octets
    token = octet // (HEADS * D // 8)
    head = octet // (D // 8) % HEADS
    part = octet % (D // 8)
    x_at = token * stride + octet % (HEADS * D // 8) * 8
    global_scale = tl.load(scale_ptr)
    codes, byte = _quantised(x_ptr, x_at, mask, global_scale, PAIRS, T)

    page = tl.load(block_ptr + token, mask=mask, other=0).to(tl.int64)
    offset = tl.load(offset_ptr + token, mask=mask, other=0).to(tl.int64)
    line = ((page * HEADS + head) * LINES + offset // LINE_TOKENS) * LINE_BYTES
    place = offset % LINE_TOKENS
    code_at = line + place * (D // 2) + part * 4
    if LINE_BYTES % 4 == 0:
        tl.store((pages_ptr + code_at).to(tl.pointer_type(tl.int32)), codes, mask=mask)
    else:
        for i in tl.static_range(4):
            tl.store(pages_ptr + code_at + i, (codes >> (8 * i)).to(tl.uint8), mask=mask)
    first = mask & (part % 2 == 0)
    scale_at = line + LINE_TOKENS * (D // 2) + place * (D // 16) + part // 2
    tl.store(pages_ptr + scale_at, byte.to(tl.uint8), mask=first)
    if NUM_BITS > 0:
        word = codes
        if NUM_BITS == 2:
            word = word & 0x33333333
            word = ((word >> 2) | word) & 0x0F0F0F0F
            word = ((word >> 4) | word) & 0x00FF00FF
            word = ((word >> 8) | word) & 0x0000FFFF
        elif NUM_BITS == 1:
            word = word & 0x11111111
            word = ((word >> 3) | word) & 0x03030303
            word = ((word >> 6) | word) & 0x000F000F
            word = ((word >> 12) | word) & 0x000000FF
        tl.store(hint_ptr + octet, word.to(hint_ptr.dtype.element_ty), mask=mask)
        tl.store(bytes_ptr + octet // 2, byte.to(tl.uint8), mask=first)


@triton.jit
def _quantised(x_ptr, x_at, mask, global_scale, PAIRS: tl.constexpr, T: tl.constexpr):
    """Gives the codes of octets and the scale bytes of their blocks, int32 [T] each."""
    if PAIRS:
        if bf16.is_usual(global_scale):
            at = x_at[:, None] // 2 + tl.arange(0, 4)[None, :]
            pairs = tl.load(bf16.as_pairs(x_ptr) + at, mask=mask[:, None], other=0)
            _, codes, byte = bf16.recorded(pairs, global_scale, 4, T)
        else:
            codes, byte = _quantised_octets(x_ptr, x_at, mask, global_scale, T)
    else:
        codes, byte = _quantised_octets(x_ptr, x_at, mask, global_scale, T)
    return codes, byte


@triton.jit
def _quantised_octets(x_ptr, x_at, mask, global_scale, T: tl.constexpr):
    at = x_at[:, None] + tl.arange(0, 8)[None, :]
    x = tl.load(x_ptr + at, mask=mask[:, None], other=0.0)
    _, codes, byte = octets.rounded_octets(x, global_scale, 4, T)
    return codes, byte
