"""Sizes of a Qwen3.5-like MoE model, and all that follows from them: pattern, flags, parameters.

A decoder layer is a token mixer and a MoE. Every fourth mixer is gated full attention, the others
are Gated DeltaNet, so that four layers are `GEGEGE*E` of a hybrid pattern.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

# Fields that `Architecture.reduced` makes small, keeping their ratios: see there.
_SMALL_HEAD_DIM = 16


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model of the Qwen3.5 MoE family.

    Attributes:
        name: Name of the published model.
        num_layers: Decoder layers, without those of multi-token prediction.
        hidden_size: Width of the residual stream.
        num_query_heads: Query heads of full attention.
        num_kv_heads: Key/value heads of full attention.
        num_experts: Routed experts of a layer.
        router_topk: Routed experts that see a token.
        expert_hidden_size: Width between fc1 and fc2 of a routed expert.
        shared_expert_hidden_size: The same of the shared expert.
        gdn_key_heads: Query and key heads of Gated DeltaNet.
        gdn_value_heads: Value heads of Gated DeltaNet.
        head_dim: Width of a head of full attention.
        gdn_key_head_dim: Width of a query or key head of Gated DeltaNet.
        gdn_value_head_dim: Width of a value head of Gated DeltaNet.
        gdn_conv_width: Positions that its causal convolution sees.
        attention_interval: Every how many layers one has full attention.
        mtp_layers: Layers of multi-token prediction, 0 or 1; each has full attention and a MoE.
        vocab_size: Rows of the embedding, which the output layer does not share.
        rope_base: Base period of RoPE.
        rope_share: Share of the head dim that RoPE rotates.
        norm_eps: Added to the mean square in every RMSNorm.
        advertised_parameters: What the publisher says, all parameters; None if unknown.
        advertised_active: What the publisher says, those that see a token; None if unknown.
        inferred: Fields whose value is that of the family or follows from the number of parameters,
            and was not read in a published configuration.
        left_out: Parts of the published model that Megatron-Core cannot express.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_query_heads: int
    num_kv_heads: int
    num_experts: int
    router_topk: int
    expert_hidden_size: int
    shared_expert_hidden_size: int
    gdn_key_heads: int
    gdn_value_heads: int
    head_dim: int = 256
    gdn_key_head_dim: int = 128
    gdn_value_head_dim: int = 128
    gdn_conv_width: int = 4
    attention_interval: int = 4
    mtp_layers: int = 1
    vocab_size: int = 248_320
    rope_base: int = 10_000_000
    rope_share: float = 0.25
    norm_eps: float = 1e-6
    advertised_parameters: float | None = None
    advertised_active: float | None = None
    inferred: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError on sizes that no model of the family can have."""
        for name, whole, part in (
            ("num_layers", self.num_layers, self.attention_interval),
            ("num_query_heads", self.num_query_heads, self.num_kv_heads),
            ("gdn_value_heads", self.gdn_value_heads, self.gdn_key_heads),
        ):
            if whole < 1 or part < 1 or whole % part:
                raise ValueError(f"{self.name}: {name}={whole} must be a multiple of {part}")
        if not 1 <= self.router_topk <= self.num_experts:
            raise ValueError(
                f"{self.name}: router_topk={self.router_topk} of num_experts={self.num_experts}"
            )
        if self.mtp_layers not in (0, 1):
            raise ValueError(f"{self.name}: mtp_layers={self.mtp_layers} must be 0 or 1")

    @property
    def num_attention_layers(self) -> int:
        """Decoder layers with full attention."""
        return self.num_layers // self.attention_interval

    @property
    def num_gdn_layers(self) -> int:
        """Decoder layers with Gated DeltaNet."""
        return self.num_layers - self.num_attention_layers

    @property
    def gdn_key_width(self) -> int:
        """Width of all query heads, or all key heads, of Gated DeltaNet."""
        return self.gdn_key_heads * self.gdn_key_head_dim

    @property
    def gdn_value_width(self) -> int:
        """Width of all value heads of Gated DeltaNet."""
        return self.gdn_value_heads * self.gdn_value_head_dim

    def mixers(self) -> tuple[str, ...]:
        """Gives the pattern letter of every decoder layer's mixer: `G` or `*`."""
        every = self.attention_interval
        return tuple("*" if (n + 1) % every == 0 else "G" for n in range(self.num_layers))

    def pattern(self, *, num_stages: int = 1, mtp: bool = False) -> str:
        """Gives the hybrid layer pattern.

        Args:
            num_stages: Pipeline stages times virtual stages; the earlier ones get one decoder layer
                more where they do not divide the layers.
            mtp: Whether the layer of multi-token prediction is built.

        Raises:
            ValueError: There are more stages than decoder layers, or no such layer to build.
        """
        if not 1 <= num_stages <= self.num_layers:
            raise ValueError(f"{self.num_layers} decoder layers cannot make {num_stages} stages")
        if mtp and not self.mtp_layers:
            raise ValueError(f"{self.name} has no layer of multi-token prediction")
        layers = [f"{mixer}E" for mixer in self.mixers()]
        stages, start = [], 0
        for stage in range(num_stages):
            size = self.num_layers // num_stages + (stage < self.num_layers % num_stages)
            stages.append("".join(layers[start : start + size]))
            start += size
        return "|".join(stages) + ("/*E" if mtp else "")

    def transformer_fields(self, *, mtp: bool = False) -> dict[str, Any]:
        """Gives the fields of Megatron's TransformerConfig that this model decides.

        Args:
            mtp: Whether the layer of multi-token prediction is built.
        """
        return {
            "num_layers": 2 * self.num_layers,
            "hidden_size": self.hidden_size,
            "ffn_hidden_size": self.expert_hidden_size,
            "num_attention_heads": self.num_query_heads,
            "num_query_groups": self.num_kv_heads,
            "kv_channels": self.head_dim,
            "attention_output_gate": True,
            "layernorm_zero_centered_gamma": True,
            "layernorm_epsilon": self.norm_eps,
            "num_moe_experts": self.num_experts,
            "moe_router_topk": self.router_topk,
            "moe_ffn_hidden_size": self.expert_hidden_size,
            "moe_shared_expert_intermediate_size": self.shared_expert_hidden_size,
            "moe_shared_expert_gate": True,
            "moe_router_score_function": "softmax",
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": self.attention_interval,
            "linear_conv_kernel_dim": self.gdn_conv_width,
            "linear_key_head_dim": self.gdn_key_head_dim,
            "linear_value_head_dim": self.gdn_value_head_dim,
            "linear_num_key_heads": self.gdn_key_heads,
            "linear_num_value_heads": self.gdn_value_heads,
            "mtp_num_layers": 1 if mtp else None,
        }

    def arguments(self, *, num_stages: int = 1, mtp: bool = False) -> dict[str, object]:
        """Gives Megatron's arguments of this model by the names of their flags, with `-` inside.

        Args:
            num_stages: See `pattern`.
            mtp: See `pattern`.
        """
        values: dict[str, object] = {
            "hybrid-layer-pattern": self.pattern(num_stages=num_stages, mtp=mtp),
            "hidden-size": self.hidden_size,
            "ffn-hidden-size": self.expert_hidden_size,
            "num-attention-heads": self.num_query_heads,
            "group-query-attention": True,
            "num-query-groups": self.num_kv_heads,
            "kv-channels": self.head_dim,
            "qk-layernorm": True,
            "attention-output-gate": True,
            "experimental-attention-variant": "gated_delta_net",
            "linear-attention-freq": self.attention_interval,
            "linear-conv-kernel-dim": self.gdn_conv_width,
            "linear-key-head-dim": self.gdn_key_head_dim,
            "linear-value-head-dim": self.gdn_value_head_dim,
            "linear-num-key-heads": self.gdn_key_heads,
            "linear-num-value-heads": self.gdn_value_heads,
            "normalization": "RMSNorm",
            "apply-layernorm-1p": True,
            "norm-epsilon": self.norm_eps,
            "position-embedding-type": "rope",
            "rotary-base": self.rope_base,
            "rotary-percent": self.rope_share,
            "swiglu": True,
            "disable-bias-linear": True,
            "untie-embeddings-and-output-weights": True,
            "vocab-size": self.vocab_size,
            # Times the tensor-parallel ranks, a divisor of the vocabulary: no padding.
            "make-vocab-size-divisible-by": 8,
            "num-experts": self.num_experts,
            "moe-router-topk": self.router_topk,
            "moe-router-score-function": "softmax",
            "moe-router-dtype": "fp32",
            "moe-ffn-hidden-size": self.expert_hidden_size,
            "moe-shared-expert-intermediate-size": self.shared_expert_hidden_size,
            "moe-shared-expert-gate": True,
        }
        if mtp:
            values["mtp-num-layers"] = 1
        return values

    def flags(self, *, num_stages: int = 1, mtp: bool = False) -> list[str]:
        """Gives Megatron's flags of this model, `--name` or `--name=value` each.

        Args:
            num_stages: See `pattern`.
            mtp: See `pattern`.
        """
        values = self.arguments(num_stages=num_stages, mtp=mtp)
        return [f"--{n}" if v is True else f"--{n}={v}" for n, v in values.items()]

    def reduced(self) -> Architecture:
        """Gives a model of one block of layers that a CPU trains, of the same structure.

        The ratios of query to key/value heads and of value to key heads, top-k, gates, norms and
        the share that RoPE rotates are those of the model; all widths are small.
        """
        kv_heads, key_heads = min(self.num_kv_heads, 2), 2
        return dataclasses.replace(
            self,
            num_layers=self.attention_interval,
            hidden_size=64,
            num_query_heads=kv_heads * (self.num_query_heads // self.num_kv_heads),
            num_kv_heads=kv_heads,
            head_dim=_SMALL_HEAD_DIM,
            num_experts=2 * self.router_topk,
            expert_hidden_size=32,
            shared_expert_hidden_size=32,
            gdn_key_heads=key_heads,
            gdn_value_heads=key_heads * (self.gdn_value_heads // self.gdn_key_heads),
            gdn_key_head_dim=_SMALL_HEAD_DIM,
            gdn_value_head_dim=_SMALL_HEAD_DIM,
            vocab_size=64,
        )


# Not of the sizes of a model.
_NOT_SIZES = (
    "name",
    "mtp_layers",
    "advertised_parameters",
    "advertised_active",
    "inferred",
    "left_out",
)


def size_differences(one: Architecture, other: Architecture) -> list[str]:
    """Gives the sizes in which two models differ, with both values."""
    return [
        f"{field.name}={getattr(one, field.name)}, not {getattr(other, field.name)}"
        for field in dataclasses.fields(Architecture)
        if field.name not in _NOT_SIZES and getattr(one, field.name) != getattr(other, field.name)
    ]
