"""Core attention whose keys and values are fake-quantised as the rollout stored them.

Legend: S positions, B samples, G key/value heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention

from megatron_trace.hints.types import Site
from megatron_trace.models.attention import SDPACoreAttention
from megatron_trace.training.sites import TraceSites


@dataclass(frozen=True)
class AttentionPlace:
    """Where a core attention stands.

    Attributes:
        sites: The model's `TraceSites`.
        layer: Decoder layer of the checkpoint.
    """

    sites: TraceSites
    layer: int


class _QuantisedKeysAndValues:
    """Quantises K and V after RoPE, in blocks along the head dim, per token and KV head.

    Without a place (the layers of MTP) the core attention below it sees them as they are.
    """

    place: AttentionPlace | None = None

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Gives attention [S, B, heads * D] over quantised key and value [S, B, G, D].

        Packed ones are [T, G, D], and give [T, 1, heads * D].
        """
        if self.place is not None:
            key = self._quantised(key, Site.K, self.place)
            value = self._quantised(value, Site.V, self.place)
        return super().forward(query, key, value, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def _quantised(self, x: torch.Tensor, site: Site, place: AttentionPlace) -> torch.Tensor:
        if x.dim() == 4:
            return place.sites.quantise_rows(x, (place.layer, site))
        return place.sites.quantise_rows(x.unsqueeze(1), (place.layer, site)).squeeze(1)


class GuidedCoreAttention(_QuantisedKeysAndValues, SDPACoreAttention):
    """The engine's attention arithmetic, torch's, over quantised K and V."""


class GuidedDotProductAttention(_QuantisedKeysAndValues, DotProductAttention):
    """Megatron's own unfused attention over quantised K and V; rounds scores and probabilities."""
