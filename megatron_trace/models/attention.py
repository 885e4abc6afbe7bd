"""Core attention by torch's scaled-dot-product attention, for specs without Transformer Engine.

Legend: S positions, B sequences, N query heads, G key/value heads, D head dim, T packed tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch.nn.attention.bias import causal_lower_right

from megatron_trace.hints.sharding import cp_positions


class SDPACoreAttention(MegatronModule):
    """Causal attention over [S, B, N, D] or packed [T, N, D]; grouped key/value heads.

    Megatron's own `DotProductAttention` (0.19.2) refuses packed sequences and context parallelism.
    Sequences must be right-padded: a causal mask then keeps padding out of every real position.

    Under context parallelism a rank has two chunks of every sequence (`hints.sharding`), also of
    packed ones, and gathers the keys and values of all: as the caller gives them, so quantised if
    it quantised them.

    Raises:
        ValueError: Dropout or a mask other than causal is asked for.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        unsupported = {
            "attention_dropout": dropout > 0,
            "attn_mask_type": attn_mask_type != AttnMaskType.causal,
        }
        for name, present in unsupported.items():
            if present:
                raise ValueError(
                    "SDPACoreAttention supports causal attention without dropout; "
                    f"{name} asks for more (layer {layer_number})"
                )
        self.cp_group = pg_collection.cp if config.context_parallel_size > 1 else None
        assert config.kv_channels is not None, "TransformerConfig derives it from hidden_size"
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Gives the attention output, [S, B, N * D] or packed [T, 1, N * D]."""
        if packed_seq_params is not None:
            bounds = packed_seq_params.cu_seqlens_q.tolist()
            # As one sample of T positions, whose sequences attend to themselves only.
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        else:
            bounds = [0, query.shape[0] * (1 if self.cp_group is None else self.cp_group.size())]
        sequences = [part for part in itertools.pairwise(bounds) if part[1] > part[0]]
        if self.cp_group is not None:
            return self._attend_to_all_ranks(query, key, value, sequences, self.cp_group)
        outputs = [
            self._attend(*(x[start:end].permute(1, 2, 0, 3) for x in (query, key, value)))
            for start, end in sequences
        ]
        return torch.cat(outputs, dim=2).permute(2, 0, 1, 3).flatten(-2)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.scale, enable_gqa=True
        )

    def _attend_to_all_ranks(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sequences: Sequence[tuple[int, int]],
        group: torch.distributed.ProcessGroup,
    ) -> torch.Tensor:
        """Gives the output of this rank's positions; backward adds up the ranks' gradients."""
        size = group.size()
        arrived = [
            start + position
            for rank in range(size)
            for start, end in sequences
            for part in cp_positions(end - start, size, rank)
            for position in part
        ]
        gathered = gather_from_sequence_parallel_region(torch.cat((key, value), -1), group=group)
        order = torch.tensor(arrived, device=query.device).argsort()
        keys, values = gathered[order].permute(1, 2, 0, 3).chunk(2, dim=-1)
        queries = query.permute(1, 2, 0, 3)
        outputs, first = [], 0
        for start, end in sequences:
            for part in cp_positions(end - start, size, group.rank()):
                seen = slice(start, start + part.stop)
                outputs.append(
                    F.scaled_dot_product_attention(
                        queries[:, :, first : first + len(part)],
                        keys[:, :, seen],
                        values[:, :, seen],
                        attn_mask=causal_lower_right(len(part), part.stop),
                        scale=self.scale,
                        enable_gqa=True,
                    )
                )
                first += len(part)
        return torch.cat(outputs, dim=2).permute(2, 0, 1, 3).flatten(-2)


def packed_seq_params(bounds: Sequence[int], device: torch.device) -> PackedSeqParams:
    """Gives Megatron's description of packed sequences.

    Args:
        bounds: Where each sequence begins, and the end of the last one, over all ranks.
        device: Where the model is.
    """
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
    longest = max(end - start for start, end in itertools.pairwise(bounds))
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
