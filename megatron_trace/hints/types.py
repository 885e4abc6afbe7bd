"""What rollout and training exchange: sites, quantiser settings, hints, samples.

Legend: T tokens of a sample (prompt + response), R = T - 1 rows (the last token is never
forwarded), K values of a row, B blocks of a row.
"""

from __future__ import annotations

import enum
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch

from megatron_trace.formats import residue_bytes
from megatron_trace.formats.number_format import (
    NUMBER_FORMATS,
    FormatSet,
    NumberFormat,
    format_set,
)

ScaleForm = Literal["raw", "residue"]
QuantisedParts = Literal["experts_and_kv", "experts", "kv"]
# Bits that a run may ask for; 4 stands for whole codes, which FP8 activations have 8 bits of.
HINT_BITS = (1, 2, 4)


class Site(enum.StrEnum):
    """A place in a decoder layer whose values are quantised."""

    FC1 = "fc1"
    FC2 = "fc2"
    K = "k"
    V = "v"

    @property
    def is_cached(self) -> bool:
        """Whether its values are keys or values, which the KV cache holds."""
        return self in (Site.K, Site.V)


@dataclass(frozen=True)
class QuantizerSettings:
    """Everything that decides which codes a quantiser gives for the same values.

    Attributes:
        global_scales: Decode-side FP32 scale of each (decoder layer, site); value = code *
            block scale * global scale. Static: calibrated once, fixed until recalibrated. Empty
            where the formats have no global scales: then there is nothing to calibrate.
        number_format: Name of the formats of weights, activations and KV cache (`FORMAT_SETS`).
        quantised_parts: What is quantised: the routed experts, the KV cache, or both.
        prefill_attends_to: Whether a prompt attends to `quantized` K/V or to the `fresh` chunk.
        operand_dtype: dtype in which dequantised operands are rounded before a product.
        power_of_two_scales: Whether global scales, of weights too, are powers of two.
        model_id: Name of the model whose activations were calibrated.
        residual_share: Share of the experts' input channels whose residual is quantised too and
            multiplied beside them (method quads); 0 for none.
    """

    global_scales: Mapping[tuple[int, Site], float]
    number_format: str = "nvfp4"
    quantised_parts: QuantisedParts = "experts_and_kv"
    prefill_attends_to: str = "quantized"
    operand_dtype: str = "bfloat16"
    power_of_two_scales: bool = False
    model_id: str = ""
    residual_share: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError on unknown names, and on global scales that cannot be."""
        if self.quantised_parts not in get_args(QuantisedParts):
            raise ValueError(
                f"quantised_parts must be {', '.join(get_args(QuantisedParts))}; got "
                f"{self.quantised_parts!r}"
            )
        if not self.has_global_scales and (self.global_scales or self.power_of_two_scales):
            raise ValueError(
                f"number_format {self.number_format} has no global scales; got "
                f"{len(self.global_scales)} of them, power_of_two_scales={self.power_of_two_scales}"
            )
        for (layer, site), scale in self.global_scales.items():
            if not (math.isfinite(scale) and scale > 0):
                raise ValueError(
                    f"global scale of layer {layer}, site {site} must be finite and > 0; "
                    f"got {scale}"
                )

    @property
    def formats(self) -> FormatSet:
        """Formats of weights, activations and KV cache."""
        return format_set(self.number_format)

    @property
    def has_global_scales(self) -> bool:
        """Whether the formats have global scales, which are calibrated."""
        return self.formats.weights.has_global_scale

    @property
    def quantises_experts(self) -> bool:
        """Whether weights and inputs of the routed experts are quantised."""
        return self.quantised_parts != "kv"

    @property
    def quantises_kv(self) -> bool:
        """Whether keys and values are quantised."""
        return self.quantised_parts != "experts"

    def quantises(self, site: Site) -> bool:
        """Whether the values of a site are quantised."""
        return self.quantises_kv if site.is_cached else self.quantises_experts

    def global_scale(self, layer: int, site: Site) -> float | None:
        """Gives the static decode-side scale of a place; None if its format has none.

        Raises:
            LookupError: The place was not calibrated.
        """
        if not self.has_global_scales:
            return None
        try:
            return self.global_scales[layer, site]
        except KeyError:
            raise LookupError(
                f"no global scale for layer {layer}, site {site}: the engine was not calibrated "
                "there; calibrate it with tokens that reach this place"
            ) from None

    def digest(self) -> str:
        """Gives 16 hexadecimal digits that differ whenever any setting differs."""
        scales = sorted(
            (layer, str(site), float(scale).hex())
            for (layer, site), scale in self.global_scales.items()
        )
        decisive: list[object] = [
            self.number_format,
            self.quantised_parts,
            self.prefill_attends_to,
            self.operand_dtype,
            self.power_of_two_scales,
            self.model_id,
            scales,
        ]
        if self.residual_share:  # Without it, digests are those of earlier versions.
            decisive.append(self.residual_share)
        text = json.dumps(decisive)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class HintKey:
    """Where a hint belongs and which quantiser and weights made it.

    Attributes:
        sample_id: Name of the sample, unique within a run.
        layer: Decoder layer of the checkpoint (attention + MoE), from 0.
        site: Place within the layer.
        policy_version: Version of the weights that the rollout used.
        settings_digest: `QuantizerSettings.digest()` of the rollout.
    """

    sample_id: str
    layer: int
    site: Site
    policy_version: int
    settings_digest: str

    def __str__(self) -> str:
        """Names the place for error messages."""
        return (
            f"sample {self.sample_id}, layer {self.layer}, site {self.site}, "
            f"policy version {self.policy_version}, settings {self.settings_digest}"
        )


@dataclass(frozen=True)
class SiteHint:
    """What the rollout's quantiser did with every row of one sample at one place.

    A row is a token. At fc2 it is the token's expert slots side by side, in the order of the
    sample's routing record, so that K is top-k times the experts' hidden size.

    Attributes:
        key: Where it belongs.
        num_bits: 1 or 2 (lowest bits of the code), or those of a whole code, per value.
        payload: uint8 [R, K * num_bits / 8]; packed lowest bits or packed codes.
        scale_bytes: uint8 [R, B], block scales (raw); or their packed residues modulo 8, uint8
            [R, 3 bytes for every 8 blocks] (residue).
        global_scale: FP32 decode-side scale of the place; None if the format has none.
        scale_form: `raw` or `residue`; what `scale_bytes` holds.
        number_format: Name of the format of the values (`NUMBER_FORMATS`).
    """

    key: HintKey
    num_bits: int
    payload: torch.Tensor
    scale_bytes: torch.Tensor
    global_scale: float | None
    scale_form: ScaleForm = "raw"
    number_format: str = "nvfp4"

    def __post_init__(self) -> None:
        """Raises ValueError when dtypes or shapes contradict each other."""
        for name, tensor in (("payload", self.payload), ("scale_bytes", self.scale_bytes)):
            if tensor.dtype != torch.uint8 or tensor.dim() != 2:
                raise ValueError(
                    f"{name} must be uint8 [rows, bytes]; got {tensor.dtype} "
                    f"{tuple(tensor.shape)} ({self.key})"
                )
        if self.number_format not in NUMBER_FORMATS:
            raise ValueError(
                f"number_format must be one of {', '.join(NUMBER_FORMATS)}; got "
                f"{self.number_format!r} ({self.key})"
            )
        require_hint_bits(self.num_bits, self.format, self.key)
        require_scale_form(self.scale_form, self.format, self.key)
        if self.scale_form == "residue":
            self._require_residues()
            return
        rows, num_blocks = self.scale_bytes.shape
        expected = (rows, num_blocks * self.format.block_size * self.num_bits // 8)
        if tuple(self.payload.shape) != expected:
            raise ValueError(
                f"payload must be {expected} for {rows} rows of {num_blocks} blocks at "
                f"{self.num_bits} bit; got {tuple(self.payload.shape)} ({self.key})"
            )

    def _require_residues(self) -> None:
        rows, num_bytes = self.payload.shape
        block_bytes = self.format.block_size * self.num_bits // 8
        expected = (rows, residue_bytes(self.num_blocks))
        if num_bytes % block_bytes or tuple(self.scale_bytes.shape) != expected:
            raise ValueError(
                f"residues must be {expected} for {rows} rows of {num_bytes} payload bytes at "
                f"{self.num_bits} bit, {block_bytes} a block; got {tuple(self.scale_bytes.shape)} "
                f"({self.key})"
            )

    @property
    def format(self) -> NumberFormat:
        """Format of the values."""
        return NUMBER_FORMATS[self.number_format]

    @property
    def num_rows(self) -> int:
        """Rows (token positions) of the hint."""
        return self.scale_bytes.shape[0]

    @property
    def num_values(self) -> int:
        """Values of a row."""
        return self.num_blocks * self.format.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks of a row."""
        return self.payload.shape[1] * 8 // (self.format.block_size * self.num_bits)

    @property
    def num_bytes(self) -> int:
        """Bytes of the payload and the block scales."""
        return self.payload.numel() + self.scale_bytes.numel()


def site_format(formats: FormatSet, site: Site) -> NumberFormat:
    """Gives the format of the values of a site."""
    return formats.kv_cache if site.is_cached else formats.activations


def stored_bits(number_format: NumberFormat, hint_bits: int) -> int:
    """Gives the bits per value of a hint where a run asks for some of `HINT_BITS`."""
    return number_format.code_bits if hint_bits == HINT_BITS[-1] else hint_bits


def require_hint_bits(
    num_bits: int, number_format: NumberFormat, key: HintKey | None = None
) -> None:
    """Raises ValueError unless num_bits is that of a hint of the format."""
    if num_bits not in number_format.hint_bits:
        where = "" if key is None else f" ({key})"
        one, two, code = number_format.hint_bits
        raise ValueError(f"num_bits must be {one}, {two} or {code}; got {num_bits}{where}")


def require_scale_form(scale_form: str, number_format: NumberFormat, key: HintKey) -> None:
    """Raises ValueError unless scale_form is that of a hint of the format."""
    if scale_form not in get_args(ScaleForm):
        raise ValueError(f"scale_form must be raw or residue; got {scale_form!r} ({key})")
    if scale_form == "residue" and not number_format.has_residues:
        raise ValueError(
            f"block scales of {number_format.name} have no residues; keep them raw ({key})"
        )


class VersionSpan(NamedTuple):
    """A piece of a sample that one version of the weights made; it ends where the next begins.

    Attributes:
        start: Its first response token, or its first row, from 0.
        policy_version: Version of the weights.
        weights_digest: Digest that the push of them gave.
    """

    start: int
    policy_version: int
    weights_digest: str


@dataclass(frozen=True)
class RolloutSample:
    """One finished rollout.

    Attributes:
        sample_id: Name of the sample, unique within a run.
        prompt_tokens: Token ids of the prompt.
        response_tokens: Token ids that were sampled.
        logprobs: FP32 [len(response_tokens)]; log-probability of each sampled token under the
            distribution it was sampled from (or the model's own, if the rollout was asked for
            that); 0 where a token was given.
        routing: int16 [T - 1, MoE layers, top-k]; expert ids of every forwarded token.
        policy_version: Version of the weights; of several, the oldest.
        settings_digest: Digest of the quantiser settings; empty for a BF16 rollout.
        finish_reason: `stop` (end token sampled), `length`, or `abort`.
        top_tokens: int32 [len(response_tokens), K]; the K most probable tokens of the distribution
            that each token was sampled from, most probable first; None if not asked for.
        top_logprobs: FP32, like top_tokens; their log-probabilities, -inf for tokens that the
            sampling had filtered out (top-k, top-p).
        given: uint8 [len(response_tokens)]; 1 where a response token was given between two turns
            (by a tool, a user), not sampled. None if all were sampled.
        degeneration: `loop` or `garbled` if the rollout found the sample to be one; else None.
        version_spans: Which version sampled which response tokens, where weights were pushed amid
            the sample; None if one version made all of it.
        record_spans: Which version computed which rows, and so their hints, keys and values; None
            if one version made all of the sample. Another one than sampled the tokens where a push
            made the engine compute rows anew.
    """

    sample_id: str
    prompt_tokens: tuple[int, ...]
    response_tokens: tuple[int, ...]
    logprobs: torch.Tensor
    routing: torch.Tensor
    policy_version: int
    settings_digest: str
    finish_reason: str
    top_tokens: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None
    given: torch.Tensor | None = None
    degeneration: str | None = None
    version_spans: tuple[VersionSpan, ...] | None = None
    record_spans: tuple[VersionSpan, ...] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError when lengths contradict each other."""
        if tuple(self.logprobs.shape) != (len(self.response_tokens),):
            raise ValueError(
                f"sample {self.sample_id}: {len(self.response_tokens)} response tokens, but "
                f"log-probs of shape {tuple(self.logprobs.shape)}"
            )
        if self.routing.dim() != 3 or self.routing.shape[0] != self.num_rows:
            raise ValueError(
                f"sample {self.sample_id}: routing must be [{self.num_rows}, layers, top-k]; got "
                f"{tuple(self.routing.shape)}"
            )
        self._require_top()
        given = self.given
        if given is not None and (
            given.dtype != torch.uint8 or tuple(given.shape) != (len(self.response_tokens),)
        ):
            raise ValueError(
                f"sample {self.sample_id}: given must be uint8 [{len(self.response_tokens)}]; got "
                f"{given.dtype} {tuple(given.shape)}"
            )
        self._require_spans()

    def _require_spans(self) -> None:
        if (self.version_spans is None) != (self.record_spans is None):
            raise ValueError(
                f"sample {self.sample_id}: version_spans and record_spans must be given together"
            )
        for name, end in (
            ("version_spans", len(self.response_tokens)),
            ("record_spans", self.num_rows),
        ):
            spans: tuple[VersionSpan, ...] | None = getattr(self, name)
            if spans is None:
                continue
            starts = [span.start for span in spans]
            if not spans or starts[0] or starts != sorted(set(starts)) or starts[-1] >= end:
                raise ValueError(
                    f"sample {self.sample_id}: {name} must begin at 0 and rise below {end}; got "
                    f"{starts}"
                )
            if min(span.policy_version for span in spans) < self.policy_version:
                raise ValueError(
                    f"sample {self.sample_id}: policy_version must be the oldest of {name} "
                    f"{[span.policy_version for span in spans]}; got {self.policy_version}"
                )

    def _require_top(self) -> None:
        tops = {"top_tokens": torch.int32, "top_logprobs": torch.float32}
        shapes: set[tuple[int, ...] | None] = set()
        for name, dtype in tops.items():
            top: torch.Tensor | None = getattr(self, name)
            shapes.add(None if top is None else tuple(top.shape))
            if top is not None and (
                top.dtype != dtype or top.dim() != 2 or len(top) != len(self.response_tokens)
            ):
                raise ValueError(
                    f"sample {self.sample_id}: {name} must be {dtype} [{len(self.response_tokens)},"
                    f" K]; got {top.dtype} {tuple(top.shape)}"
                )
        if len(shapes) > 1:
            raise ValueError(
                f"sample {self.sample_id}: top_tokens and top_logprobs must have one shape or be "
                f"None together; got {', '.join(map(str, shapes))}"
            )

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and response."""
        return self.prompt_tokens + self.response_tokens

    @property
    def num_sampled(self) -> int:
        """Response tokens that were sampled, not given."""
        return len(self.response_tokens) - (0 if self.given is None else int(self.given.sum()))

    @property
    def token_versions(self) -> torch.Tensor:
        """Version that sampled each response token, int64 [len(response_tokens)]."""
        return _versions(self.version_spans, len(self.response_tokens), self.policy_version)

    @property
    def row_versions(self) -> torch.Tensor:
        """Version that computed each row, int64 [T - 1]."""
        return _versions(self.record_spans, self.num_rows, self.policy_version)

    @property
    def num_rows(self) -> int:
        """Token positions that the rollout forwarded: all but the last."""
        return len(self.prompt_tokens) + len(self.response_tokens) - 1


def version_spans(
    versions: torch.Tensor, weights_digests: Mapping[int, str]
) -> tuple[VersionSpan, ...]:
    """Gives the spans of versions in a row.

    Args:
        versions: integer [n], of tokens or rows.
        weights_digests: Digest of the weights of each version.
    """
    numbers = versions.tolist()
    starts = [n for n, version in enumerate(numbers) if n == 0 or version != numbers[n - 1]]
    return tuple(VersionSpan(n, numbers[n], weights_digests[numbers[n]]) for n in starts)


def _versions(spans: tuple[VersionSpan, ...] | None, count: int, only: int) -> torch.Tensor:
    versions = torch.full((count,), only, dtype=torch.int64)
    for span in spans or ():
        versions[span.start :] = span.policy_version
    return versions
