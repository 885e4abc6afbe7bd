"""Attention of the rollout engine: over the paged cache, or over a whole sequence to calibrate.

Legend: T tokens of a step (padded), N query heads, G key/value heads, D head dim, R requests
(padded), L new tokens of a request, M tokens of the longest request so far, P pages of a request.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from megatron.core.transformer.attention import SelfAttention

from megatron_trace.models.attention import SDPACoreAttention
from megatron_trace.rollout.kv_cache import Pages


class EngineCoreAttention(SDPACoreAttention):
    """Full attention over a sequence, with K/V quantisers attached by ModelOpt.

    The engine bypasses it: there K and V are quantised when the cache is written.
    """


class PagedSelfAttention(SelfAttention):
    """Self-attention whose keys and values are read from the paged cache, in prefill and decode."""

    def flash_decode_and_prefill(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        q: torch.Tensor,
        k: Pages,
        v: Pages,
        max_seqlen_q: int,
        max_seqlen_k: int,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        seqlens_k: torch.Tensor,
        block_table: torch.Tensor,
        is_decode_only: bool,
        softmax_offset: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Gives the attention output [T, 1, N, D] (Megatron's hook for dynamic batching)."""
        assert softmax_offset is None, "softmax_offset is not supported by PagedSelfAttention"
        scale = cast("EngineCoreAttention", self.core_attention).scale
        output = paged_attention(q.squeeze(1), k, v, cu_seqlens_q, seqlens_k, block_table, scale)
        return output.unsqueeze(1)


def paged_attention(
    query: torch.Tensor,
    keys: Pages,
    values: Pages,
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
