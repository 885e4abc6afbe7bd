"""Bytes that a model and its number formats decide: weights, cache, states, hints, routing."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_trace.formats import residue_bytes
from megatron_trace.formats.number_format import FORMAT_SETS, NumberFormat
from megatron_trace.hints.types import Site, site_format, stored_bits
from megatron_trace.models.architecture import Architecture
from megatron_trace.models.parameter_counts import parameter_counts

BF16_BYTES = 2
FP32_BYTES = 4
# Megatron's engine records expert ids so.
ROUTING_ID_BYTES = 2


@dataclass(frozen=True)
class HintChoice:
    """Which hints a run records.

    Attributes:
        sites: Of fc1, fc2, k and v.
        layers: All layers, or the latter half.
        bits: 1, 2 or 4 a value.
        scales: Block scales as bytes, or 3 bits each.
    """

    sites: tuple[str, ...] = ("fc1", "k", "v")
    layers: Literal["all", "latter_half"] = "all"
    bits: int = 1
    scales: Literal["raw", "residue"] = "raw"

    def __post_init__(self) -> None:
        """Raises ValueError on sites that there are not, or that are named twice."""
        known = [str(site) for site in Site]
        unknown = [site for site in self.sites if site not in known]
        if unknown or not self.sites or len(set(self.sites)) < len(self.sites):
            raise ValueError(
                f"sites must be some of {', '.join(known)}, each once; got "
                f"{' '.join(self.sites) or 'none'}"
            )

    def __str__(self) -> str:
        """The choice as flags."""
        return (
            f"--trace-hint-sites {' '.join(self.sites)} --trace-hint-layers {self.layers} "
            f"--trace-hint-bits {self.bits} --trace-hint-scales {self.scales}"
        )


def row_values(architecture: Architecture, site: str) -> int:
    """Gives the values of a hint row, those of one token in one layer.

    Args:
        architecture: The model.
        site: fc1, fc2, k or v.
    """
    if site == "fc1":
        return architecture.hidden_size
    if site == "fc2":
        return architecture.router_topk * architecture.expert_hidden_size
    return architecture.num_kv_heads * architecture.head_dim


def packed_bytes(num_values: int, number_format: NumberFormat) -> int:
    """Gives the bytes of codes and block scales of a row."""
    blocks = num_values // number_format.block_size
    return num_values * number_format.code_bits // 8 + blocks


def hint_row_bytes(num_values: int, number_format: NumberFormat, *, bits: int, scales: str) -> int:
    """Gives the bytes of a hint row: bits and block scales."""
    blocks = num_values // number_format.block_size
    payload = num_values * stored_bits(number_format, bits) // 8
    return payload + (residue_bytes(blocks) if scales == "residue" else blocks)


def hint_bytes_by_site(
    architecture: Architecture, choice: HintChoice, number_format: str = "nvfp4"
) -> dict[str, int]:
    """Gives the hint bytes of a token, over all recorded layers, by site.

    Args:
        architecture: The model.
        choice: Which hints.
        number_format: Formats of the run.
    """
    formats = FORMAT_SETS[number_format]
    first = architecture.num_layers // 2 if choice.layers == "latter_half" else 0
    mixers = architecture.mixers()[first:]
    layers = {"fc1": len(mixers), "fc2": len(mixers)}
    layers["k"] = layers["v"] = mixers.count("*")
    return {
        site: layers[site]
        * hint_row_bytes(
            row_values(architecture, site),
            site_format(formats, Site(site)),
            bits=choice.bits,
            scales=choice.scales,
        )
        for site in choice.sites
    }


@functools.cache
def hint_bytes(architecture: Architecture, choice: HintChoice, number_format: str = "nvfp4") -> int:
    """Gives the hint bytes of a token, over all recorded layers and sites."""
    return sum(hint_bytes_by_site(architecture, choice, number_format).values())


def routing_bytes(architecture: Architecture) -> int:
    """Gives the bytes of a token's expert ids."""
    return architecture.num_layers * architecture.router_topk * ROUTING_ID_BYTES


def kv_bytes(architecture: Architecture, number_format: str | None) -> int:
    """Gives the bytes of a token in the KV cache.

    Args:
        architecture: The model.
        number_format: Formats of the run; None for a cache in BF16.
    """
    values = row_values(architecture, "k")
    row = BF16_BYTES * values
    if number_format is not None:
        row = packed_bytes(values, FORMAT_SETS[number_format].kv_cache)
    return 2 * architecture.num_attention_layers * row


def state_bytes(architecture: Architecture) -> int:
    """Gives the bytes of a sequence's Gated DeltaNet states: recurrent in FP32, inputs in BF16."""
    a = architecture
    recurrent = a.gdn_value_heads * a.gdn_key_head_dim * a.gdn_value_head_dim * FP32_BYTES
    channels = 2 * a.gdn_key_width + a.gdn_value_width
    return a.num_gdn_layers * (recurrent + channels * a.gdn_conv_width * BF16_BYTES)


def expert_bytes(architecture: Architecture, number_format: str | None) -> int:
    """Gives the bytes of all routed experts, in BF16 or packed."""
    experts = parameter_counts(architecture).routed_experts
    if number_format is None:
        return BF16_BYTES * experts
    return packed_bytes(experts, FORMAT_SETS[number_format].weights)


def dense_bytes(architecture: Architecture) -> int:
    """Gives the bytes of all other weights, in BF16; without multi-token prediction."""
    counts = parameter_counts(architecture)
    return BF16_BYTES * (counts.total - counts.routed_experts)


def rollout_weight_bytes(architecture: Architecture, number_format: str | None) -> int:
    """Gives the bytes of the weights of one rollout engine."""
    return dense_bytes(architecture) + expert_bytes(architecture, number_format)


def hint_choices() -> Sequence[HintChoice]:
    """Gives the choices worth recording, the best first.

    Our study (docs/study.md): half the layers keep .11 to .71 of the gap of plain QAT where all
    layers keep .03 to .09; fc2 adds little to fc1, K and V. Residues tell the guard less.
    """
    every, default = ("fc1", "fc2", "k", "v"), ("fc1", "k", "v")
    return (
        HintChoice(every),
        HintChoice(every, scales="residue"),
        HintChoice(default),
        HintChoice(default, scales="residue"),
        HintChoice(default, "latter_half"),
        HintChoice(("fc1",), "latter_half"),
        HintChoice(("k", "v")),
    )
