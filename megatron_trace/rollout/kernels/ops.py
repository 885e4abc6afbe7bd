"""Append and attention over the paged cache: torch, Triton or CUDA C++.

Legend: T tokens of a step, N query heads, G key/value heads, D head dim, R requests, P pages.
"""

from __future__ import annotations

from typing import get_args

import torch

from megatron_trace.config import KVKernels
from megatron_trace.formats import NVFP4
from megatron_trace.rollout.kernels import reference
from megatron_trace.rollout.kernels.reference import Record
from megatron_trace.rollout.pages import AnyPages, PackedPages, Pages


def append(
    key: torch.Tensor,
    value: torch.Tensor,
    key_pages: PackedPages,
    value_pages: PackedPages,
    block: torch.Tensor,
    offset: torch.Tensor,
    *,
    num_bits: int | None,
    implementation: KVKernels = "auto",
) -> tuple[Record | None, Record | None]:
    """Quantises the keys and values of a step and writes them into their pages.

    Args:
        key: BF16 [T, G, D], after RoPE.
        value: BF16 [T, G, D].
        key_pages: Pages of keys; changed in place.
        value_pages: Pages of values; changed in place.
        block: integer [T], page of each token.
        offset: integer [T], its place in the page.
        num_bits: Bits a value of the hint that is given; None gives none.
        implementation: `torch`; `triton` or `cuda` (one Triton kernel, of NVFP4 on a GPU); or
            `auto` (that kernel where it can run, else the kernels of the number format).

    Returns:
        Of keys and of values: hint uint8 [T, G D num_bits / 8] and block scales uint8 [T, G B].

    Raises:
        ValueError: The implementation cannot run on these pages.
    """
    _require_known(implementation)
    arguments = (key, value, key_pages, value_pages, block, offset)
    has_kernel = key.is_cuda and key_pages.layout.number_format is NVFP4
    if implementation == "torch":
        return reference.append(*arguments, num_bits=num_bits)
    if implementation == "auto" and not has_kernel:
        return reference.append(*arguments, num_bits=num_bits, implementation="auto")
    # Only here: Triton looks for a GPU driver when it is imported.
    from megatron_trace.rollout.kernels import append as kernel

    return kernel.append(*arguments, num_bits=num_bits)


def paged_attention(
    query: torch.Tensor,
    keys: AnyPages,
    values: AnyPages,
    cu_query_lengths: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    *,
    max_new_tokens: int,
    implementation: KVKernels = "auto",
) -> torch.Tensor:
    """Gives causal attention of each request's new tokens to all its tokens so far.

    Args:
        query: BF16 [T, N, D], the new tokens of one request after those of another.
        keys: Pages of keys; the new tokens are in them already.
        values: Pages of values.
        cu_query_lengths: int32 [R + 1], where each request's rows begin.
        lengths: int32 [R], tokens of each request so far, new ones included; 0 is padding.
        block_table: int32 [R, >= P], pages of each request.
        scale: Factor of the logits.
        max_new_tokens: No request has more new tokens.
        implementation: `torch`; `triton`; `cuda` (requests of one new token in CUDA C++, others
            in Triton); or `auto` (the last of these that can run). Plain pages are read by Triton
            where every request has one new token, otherwise by torch.

    Returns:
        [T, N, D]; 0 in padding rows.

    Raises:
        ValueError: The implementation cannot run on these pages; says why.
    """
    chosen = _attention_implementation(implementation, query, keys, max_new_tokens)
    if chosen == "torch":
        return reference.paged_attention(
            query, keys, values, cu_query_lengths, lengths, block_table, scale
        )
    if isinstance(keys, Pages) and isinstance(values, Pages):
        from megatron_trace.rollout.kernels import plain_attention

        return plain_attention.paged_attention(
            query, keys, values, cu_query_lengths, lengths, block_table, scale
        )
    assert isinstance(keys, PackedPages), "keys and values are stored alike"
    assert isinstance(values, PackedPages), "keys and values are stored alike"
    from megatron_trace.rollout.kernels import attention, cuda

    def by_triton(lengths: torch.Tensor) -> torch.Tensor:
        tensors = (query, keys, values, cu_query_lengths, lengths, block_table)
        return attention.paged_attention(*tensors, scale, max_new_tokens=max_new_tokens)

    def by_cuda(lengths: torch.Tensor) -> torch.Tensor:
        tensors = (query, keys, values, cu_query_lengths, lengths, block_table)
        return cuda.paged_attention(*tensors, scale)

    if chosen == "triton":
        return by_triton(lengths)
    if max_new_tokens == 1:
        return by_cuda(lengths)
    # Each gives 0 to the requests of the other, which it takes for padding.
    decodes = cu_query_lengths.diff() == 1
    return by_triton(lengths.masked_fill(decodes, 0)) + by_cuda(lengths.masked_fill(~decodes, 0))


def _attention_implementation(
    name: KVKernels, query: torch.Tensor, keys: AnyPages, max_new_tokens: int = 1
) -> KVKernels:
    _require_known(name)
    if name == "torch":
        return name
    if not isinstance(keys, PackedPages):
        return _implementation_of_plain(name, query, keys, max_new_tokens)
    layout = keys.layout
    if name == "auto" and (
        not query.is_cuda
        or layout.number_format.scale_encoding != "e4m3"
        or layout.number_format.code_bits != 4
    ):
        return "torch"
    if name == "triton":
        return name
    from megatron_trace.rollout.kernels import cuda

    reason = cuda.why_not(keys, query.shape[1], query.device)
    if reason is None:
        return "cuda"
    if name == "auto":
        return "triton"
    raise ValueError(f"implementation cuda cannot run: {reason}; use triton or auto")


def _implementation_of_plain(
    name: KVKernels, query: torch.Tensor, keys: Pages, max_new_tokens: int
) -> KVKernels:
    reason = "it reads packed pages only" if name == "cuda" else None
    if max_new_tokens != 1:
        reason = reason or f"a request has {max_new_tokens} new tokens, and plain pages take one"
    elif reason is None and query.is_cuda:
        # Only here: Triton looks for a GPU driver when it is imported.
        from megatron_trace.rollout.kernels import plain_attention

        reason = plain_attention.why_not(query.shape[-1], keys.stored.dtype, query.device)
    elif reason is None:
        reason = f"it needs a GPU, and the query lies on {query.device}"
    if reason is None:
        return "triton"
    if name == "auto":
        return "torch"
    raise ValueError(f"implementation {name} cannot run: {reason}; use torch or auto")


def _require_known(name: str) -> None:
    if name not in get_args(KVKernels):
        known = ", ".join(get_args(KVKernels))
        raise ValueError(f"implementation must be one of {known}; got {name!r}")
