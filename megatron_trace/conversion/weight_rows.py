"""Which rows of published tensors make each parameter of our HybridModel.

Every parameter is rows of published tensors one after another: nothing is computed, so that both
directions are exact. What differs is the order:

* `linear_qkv`: for each key/value head its query heads, their gates, its key, its value. Published
  `q_proj` has each query head's rows before its gate's.
* `in_proj` of Gated DeltaNet: query, key, value, output gate, then two gates of each value head.
  The published tensors of Qwen3.5 have that order, parted; those of Qwen3-Next have it by key head.
* `linear_fc1`: gate above up.

Position 2 n of the pattern is decoder layer n's mixer, position 2 n + 1 its MoE.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from megatron_trace.models.architecture import Architecture


@dataclass(frozen=True)
class Rows:
    """Rows of a published tensor.

    Attributes:
        name: The tensor.
        start: First row.
        stop: Row after the last.
        expert: Expert whose rows they are, where a tensor holds all experts.
    """

    name: str
    start: int
    stop: int
    expert: int | None = None


@dataclass(frozen=True)
class PublishedNames:
    """How a published checkpoint names and parts its tensors.

    Attributes:
        prefix: Before the decoder's names: that of a text model, or of a model that also sees.
        stacked_experts: Whether a layer's experts are one tensor, gate and up in one.
        stacked_mtp_experts: The same of multi-token prediction.
        gdn_by_key_head: Whether Gated DeltaNet's input projection is two tensors ordered by key
            head, as in Qwen3-Next, and not four.
    """

    prefix: str
    stacked_experts: bool
    stacked_mtp_experts: bool
    gdn_by_key_head: bool

    @staticmethod
    def of(names: Collection[str]) -> PublishedNames:
        """Gives how these tensors are named.

        Args:
            names: All tensors of a checkpoint.

        Raises:
            ValueError: There is no word embedding under a name that is known.
        """
        for prefix in ("model.language_model.", "model."):
            if f"{prefix}embed_tokens.weight" in names:
                break
        else:
            raise ValueError(
                "no tensor is called model.embed_tokens.weight or "
                "model.language_model.embed_tokens.weight: not a checkpoint of the Qwen family"
            )
        return PublishedNames(
            prefix,
            stacked_experts=f"{prefix}layers.0.mlp.experts.gate_up_proj" in names,
            stacked_mtp_experts="mtp.layers.0.mlp.experts.gate_up_proj" in names,
            gdn_by_key_head=f"{prefix}layers.0.linear_attn.in_proj_qkvz.weight" in names,
        )


def weight_rows(
    architecture: Architecture, names: PublishedNames, *, mtp: bool
) -> dict[str, tuple[Rows, ...]]:
    """Gives the published rows of every parameter of a HybridModel.

    Args:
        architecture: The model.
        names: How the checkpoint names its tensors.
        mtp: Whether the layer of multi-token prediction is built.
    """
    a, hidden, prefix = architecture, architecture.hidden_size, names.prefix
    rows = {
        "embedding.word_embeddings.weight": whole(f"{prefix}embed_tokens.weight", a.vocab_size),
        "decoder.final_norm.weight": whole(f"{prefix}norm.weight", hidden),
        "output_layer.weight": whole("lm_head.weight", a.vocab_size),
    }
    for layer, mixer in enumerate(a.mixers()):
        published = f"{prefix}layers.{layer}."
        own = f"decoder.layers.{2 * layer}."
        if mixer == "*":
            rows |= _attention(a, own, published)
        else:
            rows |= _gated_delta_net(a, own, published, by_key_head=names.gdn_by_key_head)
        own = f"decoder.layers.{2 * layer + 1}."
        rows |= _moe(a, own, published, stacked=names.stacked_experts)
    if mtp:
        own = "mtp.layers.0."
        rows |= {
            f"{own}enorm.weight": whole("mtp.pre_fc_norm_embedding.weight", hidden),
            f"{own}hnorm.weight": whole("mtp.pre_fc_norm_hidden.weight", hidden),
            f"{own}eh_proj.weight": whole("mtp.fc.weight", hidden),
            f"{own}final_layernorm.weight": whole("mtp.norm.weight", hidden),
        }
        layers, published = f"{own}mtp_model_layer.layers.", "mtp.layers.0."
        rows |= _attention(a, f"{layers}0.", published)
        rows |= _moe(a, f"{layers}1.", published, stacked=names.stacked_mtp_experts)
    return rows


def whole(name: str, num_rows: int) -> tuple[Rows, ...]:
    """Gives all rows of a tensor."""
    return (Rows(name, 0, num_rows),)


def _attention(a: Architecture, own: str, published: str) -> dict[str, tuple[Rows, ...]]:
    attention = f"{published}self_attn."
    return {
        f"{own}input_layernorm.weight": whole(f"{published}input_layernorm.weight", a.hidden_size),
        f"{own}self_attention.linear_qkv.weight": tuple(_qkv(a, attention)),
        f"{own}self_attention.q_layernorm.weight": whole(f"{attention}q_norm.weight", a.head_dim),
        f"{own}self_attention.k_layernorm.weight": whole(f"{attention}k_norm.weight", a.head_dim),
        f"{own}self_attention.linear_proj.weight": whole(
            f"{attention}o_proj.weight", a.hidden_size
        ),
    }


def _qkv(a: Architecture, attention: str) -> Iterator[Rows]:
    dim, queries = a.head_dim, a.num_query_heads // a.num_kv_heads
    for kv_head in range(a.num_kv_heads):
        heads = range(kv_head * queries, (kv_head + 1) * queries)
        for part in (0, 1):
            for head in heads:
                start = (2 * head + part) * dim
                yield Rows(f"{attention}q_proj.weight", start, start + dim)
        for projection in ("k_proj", "v_proj"):
            start = kv_head * dim
            yield Rows(f"{attention}{projection}.weight", start, start + dim)


def _gated_delta_net(
    a: Architecture, own: str, published: str, *, by_key_head: bool
) -> dict[str, tuple[Rows, ...]]:
    linear = f"{published}linear_attn."
    channels = 2 * a.gdn_key_width + a.gdn_value_width
    projection = _projection_by_key_head if by_key_head else _projection
    mixer = f"{own}self_attention."
    return {
        f"{own}input_layernorm.weight": whole(f"{published}input_layernorm.weight", a.hidden_size),
        f"{mixer}in_proj.weight": tuple(projection(a, linear)),
        f"{mixer}conv1d.weight": whole(f"{linear}conv1d.weight", channels),
        f"{mixer}A_log": whole(f"{linear}A_log", a.gdn_value_heads),
        f"{mixer}dt_bias": whole(f"{linear}dt_bias", a.gdn_value_heads),
        f"{mixer}out_norm.weight": whole(f"{linear}norm.weight", a.gdn_value_head_dim),
        f"{mixer}out_proj.weight": whole(f"{linear}out_proj.weight", a.hidden_size),
    }


def _projection(a: Architecture, linear: str) -> Iterator[Rows]:
    yield Rows(f"{linear}in_proj_qkv.weight", 0, 2 * a.gdn_key_width + a.gdn_value_width)
    yield Rows(f"{linear}in_proj_z.weight", 0, a.gdn_value_width)
    yield Rows(f"{linear}in_proj_b.weight", 0, a.gdn_value_heads)
    yield Rows(f"{linear}in_proj_a.weight", 0, a.gdn_value_heads)


def _projection_by_key_head(a: Architecture, linear: str) -> Iterator[Rows]:
    values_of_key = a.gdn_value_heads // a.gdn_key_heads
    key_dim, value_dim = a.gdn_key_head_dim, values_of_key * a.gdn_value_head_dim
    for name, sizes in (
        ("in_proj_qkvz", (key_dim, key_dim, value_dim, value_dim)),
        ("in_proj_ba", (values_of_key, values_of_key)),
    ):
        for part, size in enumerate(sizes):
            for head in range(a.gdn_key_heads):
                start = head * sum(sizes) + sum(sizes[:part])
                yield Rows(f"{linear}{name}.weight", start, start + size)


def _moe(
    a: Architecture, own: str, published: str, *, stacked: bool
) -> dict[str, tuple[Rows, ...]]:
    mlp, hidden, shared = f"{published}mlp.", a.hidden_size, a.shared_expert_hidden_size
    rows = {
        f"{own}pre_mlp_layernorm.weight": whole(
            f"{published}post_attention_layernorm.weight", hidden
        ),
        f"{own}mlp.router.weight": whole(f"{mlp}gate.weight", a.num_experts),
        f"{own}mlp.shared_experts.gate_weight": whole(f"{mlp}shared_expert_gate.weight", 1),
        f"{own}mlp.shared_experts.linear_fc1.weight": (
            Rows(f"{mlp}shared_expert.gate_proj.weight", 0, shared),
            Rows(f"{mlp}shared_expert.up_proj.weight", 0, shared),
        ),
        f"{own}mlp.shared_experts.linear_fc2.weight": whole(
            f"{mlp}shared_expert.down_proj.weight", hidden
        ),
    }
    width = a.expert_hidden_size
    for expert in range(a.num_experts):
        linear = f"{own}mlp.experts.local_experts.{expert}.linear_"
        if stacked:
            rows[f"{linear}fc1.weight"] = (
                Rows(f"{mlp}experts.gate_up_proj", 0, 2 * width, expert),
            )
            rows[f"{linear}fc2.weight"] = (Rows(f"{mlp}experts.down_proj", 0, hidden, expert),)
        else:
            published_expert = f"{mlp}experts.{expert}."
            rows[f"{linear}fc1.weight"] = (
                Rows(f"{published_expert}gate_proj.weight", 0, width),
                Rows(f"{published_expert}up_proj.weight", 0, width),
            )
            rows[f"{linear}fc2.weight"] = whole(f"{published_expert}down_proj.weight", hidden)
    return rows
