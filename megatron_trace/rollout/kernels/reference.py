"""Append and attention over the paged cache in plain torch: the specification of the kernels.

Legend: T tokens of a step (padded), N query heads, G key/value heads, D head dim, R requests
(padded), L new tokens of a request, M tokens of the longest request so far, P pages of a request.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron_trace.formats import ops
from megatron_trace.formats.ops import Implementation
from megatron_trace.rollout.pages import PackedPages, ReadablePages

Record = tuple[torch.Tensor, torch.Tensor]


def append(
    key: torch.Tensor,
    value: torch.Tensor,
    key_pages: PackedPages,
    value_pages: PackedPages,
    block: torch.Tensor,
    offset: torch.Tensor,
    *,
    num_bits: int | None,
    implementation: Implementation = "torch",
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
        implementation: Of the number format.

    Returns:
        Of keys and of values: hint uint8 [T, G D num_bits / 8] and block scales uint8 [T, G B].
    """
    records: list[Record | None] = []
    for x, pages in ((key, key_pages), (value, value_pages)):
        number_format = pages.layout.number_format
        packed_codes, scale_bytes = ops.encode(
            x, pages.global_scale, number_format=number_format, implementation=implementation
        )
        pages.write(block.long(), offset.long(), packed_codes, scale_bytes)
        if num_bits is None:
            records.append(None)
            continue
        hint = ops.narrowed(
            packed_codes, num_bits, number_format=number_format, implementation=implementation
        )
        records.append((hint.flatten(1), scale_bytes.flatten(1)))
    return records[0], records[1]


def paged_attention(
    query: torch.Tensor,
    keys: ReadablePages,
    values: ReadablePages,
    cu_query_lengths: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Gives causal attention of each request's new tokens to all its tokens so far.

    Requests with equally many new tokens share one call of torch's attention.

    Args:
        query: [T, N, D], the new tokens of one request after those of another.
        keys: Pages of keys; the new tokens are in them already.
        values: Pages of values.
        cu_query_lengths: integer [R + 1], where each request's rows begin.
        lengths: integer [R], tokens of each request so far, new ones included; 0 is padding.
        block_table: integer [R, >= P], pages of each request.
        scale: Factor of the logits.

    Returns:
        [T, N, D]; 0 in padding rows.
    """
    output = torch.zeros_like(query)
    starts = cu_query_lengths[:-1].long()
    query_lengths = torch.where(lengths > 0, cu_query_lengths[1:] - cu_query_lengths[:-1], 0)
    for num_new in query_lengths.unique().tolist():
        if num_new == 0:
            continue
        group = (query_lengths == num_new).nonzero()[:, 0]
        group_lengths = lengths[group].long()
        longest = int(group_lengths.max())
        new = torch.arange(num_new, device=query.device)
        rows = starts[group, None] + new
        # The i-th of L new tokens of a request with M tokens sees positions 0 to M - L + i.
        last_seen = group_lengths[:, None] - num_new + new
        mask = torch.arange(longest, device=query.device) <= last_seen[..., None]
        attended = F.scaled_dot_product_attention(
            query[rows].transpose(1, 2),
            keys.read(block_table[group], group_lengths, longest).transpose(1, 2),
            values.read(block_table[group], group_lengths, longest).transpose(1, 2),
            attn_mask=mask[:, None],
            scale=scale,
            enable_gqa=True,
        )
        output[rows.flatten()] = attended.transpose(1, 2).flatten(0, 1)
    return output
