"""Bytes that a step of decoding moves, and what a sequence holds: what no kernel can avoid.

A step reads the dense weights, the experts that the batch's tokens chose, and every sequence's keys
and values once; states of Gated DeltaNet are read and written, hints written.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_trace.models.architecture import Architecture
from megatron_trace.models.parameter_counts import parameter_counts
from megatron_trace.planning.sizes import (
    BF16_BYTES,
    dense_bytes,
    expert_bytes,
    kv_bytes,
    state_bytes,
)


@dataclass(frozen=True)
class DecodeBytes:
    """Bytes of one step of decoding.

    Attributes:
        dense: Weights that every token needs: all but routed experts and embedding.
        experts: Routed experts that some token chose.
        cache: Keys and values.
        states: Those of Gated DeltaNet, read and written.
        hints: Hints, written.
    """

    dense: float
    experts: float
    cache: float
    states: float
    hints: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.dense + self.experts + self.cache + self.states + self.hints


def read_share_of_experts(architecture: Architecture, batch: int) -> float:
    """Gives the share of a layer's experts that some token of a batch chose, evenly routed."""
    miss = 1 - architecture.router_topk / architecture.num_experts
    return 1 - miss**batch


def decode_bytes(
    architecture: Architecture,
    *,
    batch: int,
    context: float,
    expert_format: str | None,
    kv_format: str | None,
    hint_bytes: float = 0,
) -> DecodeBytes:
    """Gives the bytes of one token of every sequence of a batch.

    Args:
        architecture: The model.
        batch: Sequences.
        context: Tokens that each has so far.
        expert_format: Formats in which experts are read; None in BF16.
        kv_format: Formats of the KV cache; None in BF16.
        hint_bytes: Hints of a token, over all layers.
    """
    a = architecture
    read = read_share_of_experts(a, batch)
    return DecodeBytes(
        dense=dense_bytes(a) - BF16_BYTES * parameter_counts(a).embedding,
        experts=read * expert_bytes(a, expert_format),
        cache=batch * context * kv_bytes(a, kv_format),
        states=batch * 2.0 * state_bytes(a),
        hints=batch * hint_bytes,
    )


def sequence_bytes(architecture: Architecture, *, tokens: int, kv_format: str | None) -> float:
    """Gives what an engine holds of a sequence: keys, values and states; hints go to the host.

    Args:
        architecture: The model.
        tokens: Its length.
        kv_format: Formats of the KV cache; None in BF16.
    """
    return tokens * kv_bytes(architecture, kv_format) + state_bytes(architecture)
