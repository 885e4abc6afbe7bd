"""Attention of the rollout engine: over the paged cache, or over a whole sequence to calibrate.

Legend: T tokens of a step (padded), N query heads, D head dim.
"""

from __future__ import annotations

from typing import cast

import torch
from megatron.core.transformer.attention import SelfAttention

from megatron_trace.config import KVKernels
from megatron_trace.models.attention import SDPACoreAttention
from megatron_trace.rollout.kernels import ops
from megatron_trace.rollout.pages import AnyPages


class EngineCoreAttention(SDPACoreAttention):
    """Full attention over a sequence, with K/V quantisers attached by ModelOpt.

    The engine bypasses it: there K and V are quantised when the cache is written.
    """


class PagedSelfAttention(SelfAttention):
    """Self-attention whose keys and values are read from the paged cache, in prefill and decode.

    Attributes:
        kv_attention: Kernels that read packed pages; `build_engine_model` sets them.
    """

    kv_attention: KVKernels = "auto"

    def flash_decode_and_prefill(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        q: torch.Tensor,
        k: AnyPages,
        v: AnyPages,
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
        output = ops.paged_attention(
            q.squeeze(1),
            k,
            v,
            cu_seqlens_q,
            seqlens_k,
            block_table,
            scale,
            max_new_tokens=max_seqlen_q,
            implementation=self.kv_attention,
        )
        return output.unsqueeze(1)
