"""ModelShape: the sizes of a trainer model that samples, hints and settings must fit."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_trace.hints.sharding import kv_heads
from megatron_trace.hints.types import Site
from megatron_trace.training.layout import RankLayout

Place = tuple[int, Site]
ExpertMatrix = tuple[int, int, str]


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a trainer model, and what this chunk of it holds (with pipelining: a stage).

    Attributes:
        num_layers: Decoder layers of the whole model.
        model_sites: Sites that any decoder layer of the whole model has.
        model_moe_layers: Decoder layers of the whole model with a MoE, as in routing records.
        attention_layers: Decoder layers whose attention, full attention, is here.
        moe_layers: Decoder layers whose MoE is here.
        expert_matrices: (layer, global expert, `fc1` or `fc2`) held by this rank.
        num_experts: Routed experts of a MoE layer, over all ranks; 0 without MoE layers.
        top_k: Experts of a token; 0 without MoE layers.
        hidden_size: Values of an fc1 row.
        expert_values: Values of one expert slot at fc2: the experts' hidden size; 0 without.
        num_kv_heads: KV heads of an attention layer, over all ranks.
        kv_values: Values of a k or v row: KV heads times head dim.
        max_sequence_length: Longest sequence in tokens.
        vocab_size: Rows of the embedding.
        layout: Which part of all this the rank has.
    """

    num_layers: int
    model_sites: tuple[str, ...]
    model_moe_layers: tuple[int, ...]
    attention_layers: tuple[int, ...]
    moe_layers: tuple[int, ...]
    expert_matrices: tuple[ExpertMatrix, ...]
    num_experts: int
    top_k: int
    hidden_size: int
    expert_values: int
    num_kv_heads: int
    kv_values: int
    max_sequence_length: int
    vocab_size: int
    layout: RankLayout

    @property
    def places(self) -> tuple[Place, ...]:
        """Every (decoder layer, site) of this chunk that the methods qat and trace quantise."""
        moe = [(layer, site) for layer in self.moe_layers for site in (Site.FC1, Site.FC2)]
        attention = [(layer, site) for layer in self.attention_layers for site in (Site.K, Site.V)]
        return tuple(sorted(moe + attention))

    @property
    def routing_records(self) -> list[int]:
        """Places of this chunk's MoE layers in a sample's routing record of the whole model."""
        return [self.model_moe_layers.index(layer) for layer in self.moe_layers]

    @property
    def has_all_experts(self) -> bool:
        """Whether this rank has every expert of its MoE layers, whole."""
        experts = {expert for _, expert, _ in self.expert_matrices}
        return self.layout.etp_size == 1 and len(experts) == self.num_experts

    def row_width(self, site: Site) -> int:
        """Gives the values of a token's row at a site; at fc2 its expert slots side by side.

        A rank may have some of its columns only, see `columns`.
        """
        if site is Site.FC2:
            return self.top_k * self.expert_values
        return self.hidden_size if site is Site.FC1 else self.kv_values

    def columns(self, site: Site) -> range | None:
        """Gives the columns of a token's row that this rank quantises; None for all.

        These are its KV heads. A row of fc2 is read whole by the rank of its token, and cut to the
        columns of an expert-tensor-parallel rank once it has arrived there.
        """
        if site not in (Site.K, Site.V) or self.layout.tp_size == 1:
            return None
        heads = kv_heads(self.num_kv_heads, self.layout.tp_size, self.layout.tp_rank)
        size = self.kv_values // self.num_kv_heads
        return range(heads.start * size, heads.stop * size)

    @property
    def slot_columns(self) -> range | None:
        """Columns of an expert slot that this rank quantises at fc2; None for all."""
        if self.layout.etp_size == 1:
            return None
        size = self.expert_values // self.layout.etp_size
        return range(self.layout.etp_rank * size, (self.layout.etp_rank + 1) * size)


def place_name(place: Place) -> str:
    """Names a place for messages."""
    return f"layer {place[0]}, site {place[1]}"
