"""Numbers of parameters of an `Architecture`, without building it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from megatron_trace.models.architecture import Architecture


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters of a model, by the parts that are stored or sharded differently.

    Attributes:
        embedding: Word embedding.
        output: Output layer and final norm.
        attention: All full-attention layers, with the norms before them.
        gdn: All Gated DeltaNet layers, with the norms before them.
        routed_experts: All routed experts.
        moe_rest: Routers, shared experts and their gates, and the norms before MoE layers.
        mtp: Layers of multi-token prediction.
        inactive_experts: Those of `routed_experts` that do not see a token.
    """

    embedding: int
    output: int
    attention: int
    gdn: int
    routed_experts: int
    moe_rest: int
    mtp: int
    inactive_experts: int

    @property
    def total(self) -> int:
        """All parameters, without multi-token prediction."""
        return (
            self.embedding
            + self.output
            + self.attention
            + self.gdn
            + self.routed_experts
            + self.moe_rest
        )

    @property
    def active(self) -> int:
        """Those that see a token, embedding and output layer included."""
        return self.total - self.inactive_experts


@functools.cache
def parameter_counts(architecture: Architecture) -> ParameterCounts:
    """Gives the numbers of parameters of a model.

    Args:
        architecture: The model.
    """
    a, hidden = architecture, architecture.hidden_size
    query, kv = a.num_query_heads * a.head_dim, a.num_kv_heads * a.head_dim
    # Queries and their gates, keys, values, output; norms of queries, keys and input.
    attention = hidden * (2 * query + 2 * kv + query) + 2 * a.head_dim + hidden
    qkv = 2 * a.gdn_key_width + a.gdn_value_width
    gdn = (
        # q, k, v, gate, and the two gates of each value head.
        hidden * (qkv + a.gdn_value_width + 2 * a.gdn_value_heads)
        + qkv * a.gdn_conv_width
        # A_log and dt_bias; the norms of a value head and of the input.
        + 2 * a.gdn_value_heads
        + a.gdn_value_head_dim
        + hidden
        + a.gdn_value_width * hidden
    )
    expert = 3 * hidden * a.expert_hidden_size
    moe_rest = (a.num_experts + 3 * a.shared_expert_hidden_size + 2) * hidden
    # Projection of hidden state and embedding, their norms and the final one.
    mtp = 2 * hidden * hidden + 3 * hidden + attention + moe_rest + a.num_experts * expert
    return ParameterCounts(
        embedding=a.vocab_size * hidden,
        output=a.vocab_size * hidden + hidden,
        attention=a.num_attention_layers * attention,
        gdn=a.num_gdn_layers * gdn,
        routed_experts=a.num_layers * a.num_experts * expert,
        moe_rest=a.num_layers * moe_rest,
        mtp=a.mtp_layers * mtp,
        inactive_experts=a.num_layers * (a.num_experts - a.router_topk) * expert,
    )
