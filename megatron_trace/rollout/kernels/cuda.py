"""Decode attention in CUDA C++: built at first use, called on torch's current stream.

Legend: T tokens of a step, N query heads, G key/value heads, D head dim, R requests, P pages.
"""

from __future__ import annotations

import ctypes
import math

import torch

from megatron_trace.rollout.kernels.attention import require_e2m1_e4m3
from megatron_trace.rollout.kernels.library import (
    FOLDER,
    current_stream,
    library,
    pointers,
    why_no_compiler,
)
from megatron_trace.rollout.pages import LINE_VALUES, PackedPages

SOURCE = FOLDER / "decode_attention.cu"
HEAD_DIMS = (64, 128, 256)
MAX_RATIO = 16
# As in decode_attention.cu: lines of a tile, and query heads of a group.
_LINES = 32
_LINE_BYTES = 144
_HEADS_OF_GROUP = 8


def why_not(keys: PackedPages, num_query_heads: int, device: torch.device) -> str | None:
    """Says why `paged_attention` cannot run; None if it can.

    Args:
        keys: Pages that would be read.
        num_query_heads: N.
        device: Where they lie.
    """
    layout = keys.layout
    number_format = layout.number_format
    ratio, rest = divmod(num_query_heads, keys.num_heads)
    if device.type != "cuda":
        return f"it needs a GPU, and the pages lie on {device}"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return "it needs compute capability 9.0 (bulk copies to shared memory)"
    if (number_format.element.code_bits, number_format.scale_encoding) != (4, "e4m3"):
        return f"it reads nvfp4 and nvfp4_4over6, not {number_format.name}"
    if layout.head_dim not in HEAD_DIMS:
        return f"head_dim must be one of {HEAD_DIMS}, not {layout.head_dim}"
    if rest or not 1 <= ratio <= MAX_RATIO:
        return (
            f"1 to {MAX_RATIO} query heads must share a key/value head; got {num_query_heads} "
            f"query heads and {keys.num_heads} key/value heads"
        )
    # A tile is copied from one page, or by one lane of a warp from each of its pages.
    page, tile = layout.page_tokens, _LINES * LINE_VALUES // layout.head_dim
    if page % tile and tile % page:
        return f"the tokens of a page must divide {tile}, or be a multiple; got {page}"
    if layout.line_bytes != _LINE_BYTES:
        return f"pages of {page} tokens do not have whole lines of {LINE_VALUES} values"
    return why_no_compiler()


def paged_attention(
    query: torch.Tensor,
    keys: PackedPages,
    values: PackedPages,
    cu_query_lengths: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Gives `reference.paged_attention` of one new token a request, without waiting for the GPU.

    Args:
        query: BF16 [T, N, D], the new token of one request after that of another.
        keys: Pages of keys; the new tokens are in them already.
        values: Pages of values.
        cu_query_lengths: int32 [R + 1], where each request's row is.
        lengths: int32 [R], tokens of each request so far, the new one included; 0 is padding.
        block_table: int32 [R, >= P], pages of each request.
        scale: Factor of the logits.

    Returns:
        BF16 [T, N, D]; 0 in padding rows.

    Raises:
        ValueError: A tensor has another dtype.
        RuntimeError: CUDA refused the launch, or the kernel cannot be built.
    """
    require_e2m1_e4m3(keys, "cuda")
    for name, tensor, dtype in (
        ("query", query, torch.bfloat16),
        ("cu_query_lengths", cu_query_lengths, torch.int32),
        ("lengths", lengths, torch.int32),
        ("block_table", block_table, torch.int32),
    ):
        if tensor.dtype != dtype:
            raise ValueError(f"{name} must be {dtype} for implementation cuda; got {tensor.dtype}")
    query, lengths = query.contiguous(), lengths.contiguous()
    num_requests, num_rows = len(lengths), len(query)
    if num_requests == 0:
        return torch.zeros_like(query)
    output = torch.empty_like(query)
    heads, head_dim = keys.num_heads, query.shape[-1]
    ratio = query.shape[1] // heads
    num_blocks = torch.cuda.get_device_properties(query.device).multi_processor_count
    padded = math.ceil(ratio / _HEADS_OF_GROUP) * _HEADS_OF_GROUP
    slots = num_requests * heads + num_blocks
    partial = query.new_empty((slots, padded, head_dim), dtype=torch.float32)
    sums = query.new_empty((slots, padded, 2), dtype=torch.float32)
    ranges = query.new_empty((num_requests * heads, 2), dtype=torch.int32)
    tensors = (
        query,
        output,
        keys.stored,
        values.stored,
        keys.global_scale,
        values.global_scale,
        block_table,
        cu_query_lengths,
        lengths,
        partial,
        sums,
        ranges,
    )
    numbers = (
        num_requests,
        num_rows,
        heads,
        ratio,
        head_dim,
        keys.page_tokens,
        block_table.stride(0),
    )
    with torch.cuda.device_of(query):
        error = library(SOURCE).trace_decode_attention(
            *pointers(tensors),
            *(ctypes.c_int(number) for number in numbers),
            ctypes.c_float(scale),
            ctypes.c_int(num_blocks),
            current_stream(query.device),
        )
    if error:
        raise RuntimeError(
            f"decode attention with {numbers} (requests, rows, key/value heads, query heads of "
            "each, head dim, tokens of a page, pages of a request) was refused by CUDA: error "
            f"{error}"
        )
    return output
