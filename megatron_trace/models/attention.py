"""Core attention by torch's scaled-dot-product attention, for specs without Transformer Engine.

Legend: S positions, B sequences, N query heads, G key/value heads, D head dim, T packed tokens.
"""

from __future__ import annotations

import itertools
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

    Under context parallelism a rank has two chunks of every sequence (`hints.sharding`), and
    gathers the keys and values of all: as the caller gives them, so quantised if it quantised them.

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
        """Gives the attention output, [S, B, N * D] or packed [T, 1, N * D].

        Raises:
            ValueError: Packed sequences are given under context parallelism.
        """
        if self.cp_group is not None:
            if packed_seq_params is not None:
                raise ValueError(
                    "SDPACoreAttention supports packed sequences without context parallelism only"
                )
            return self._attend_to_all_ranks(query, key, value, self.cp_group)
        if packed_seq_params is None:
            output = self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value)))
            return output.permute(2, 0, 1, 3).flatten(-2)
        ends = packed_seq_params.cu_seqlens_q.tolist()
        segments = [
            self._attend(*(x[start:end].transpose(0, 1)[None] for x in (query, key, value)))
            for start, end in itertools.pairwise(ends)
            if end > start
        ]
        return torch.cat(segments, dim=2)[0].transpose(0, 1).flatten(-2).unsqueeze(1)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.scale, enable_gqa=True
        )

    def _attend_to_all_ranks(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        group: torch.distributed.ProcessGroup,
    ) -> torch.Tensor:
        """Gives the output of this rank's positions; backward adds up the ranks' gradients."""
        size = group.size()
        num_positions = query.shape[0] * size
        chunks = [cp_positions(num_positions, size, rank) for rank in range(size)]
        gathered = gather_from_sequence_parallel_region(torch.cat((key, value), -1), group=group)
        arrived = [p for parts in chunks for part in parts for p in part]
        order = torch.tensor(arrived, device=query.device).argsort()
        keys, values = gathered[order].permute(1, 2, 0, 3).chunk(2, dim=-1)
        queries = query.permute(1, 2, 0, 3).chunk(2, dim=2)
        outputs = [
            F.scaled_dot_product_attention(
                part_query,
                keys[:, :, : part.stop],
                values[:, :, : part.stop],
                attn_mask=causal_lower_right(len(part), part.stop),
                scale=self.scale,
                enable_gqa=True,
            )
            for part_query, part in zip(queries, chunks[group.rank()], strict=True)
        ]
        return torch.cat(outputs, dim=2).permute(2, 0, 1, 3).flatten(-2)
