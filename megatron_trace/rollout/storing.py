"""From the recorder's rows of a rollout to hints and diagnostics in the store."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from megatron_trace.hints import (
    HintKey,
    HintSink,
    QuantizerSettings,
    RecordKind,
    RolloutSample,
    ScaleForm,
    Site,
    encode_packed_hint,
    site_format,
    stored_bits,
)
from megatron_trace.hints.codec import encode_narrowed_hint
from megatron_trace.hints.types import HINT_BITS
from megatron_trace.rollout.recorder import Place


def store_records(
    store: HintSink,
    samples: Sequence[RolloutSample],
    records: Sequence[Mapping[Place, tuple[torch.Tensor, torch.Tensor]]],
    settings: QuantizerSettings,
    *,
    kept_bits: int = HINT_BITS[-1],
    hint_bits: int,
    hint_scales: ScaleForm = "raw",
    hint_sites: Sequence[Site],
    diagnostic_share: float,
) -> None:
    """Encodes what was recorded of each sample.

    Args:
        store: Gets a hint per sample and place, and full codes of the diagnostic samples.
        samples: The samples.
        records: Of each sample by place: codes of `kept_bits` uint8 [R, bytes] and scale bytes
            uint8 [R, B].
        settings: Settings of the quantisers that were recorded.
        kept_bits: Bits per value that the recorder kept: 4 for whole codes, else `hint_bits`.
        hint_bits: Bits per value of a hint, of 1, 2, and 4 for whole codes.
        hint_scales: How a hint keeps block scales; full codes always keep them raw.
        hint_sites: Sites that guide training; the others are recorded for diagnostics only.
        diagnostic_share: Share of the samples that keep full codes.
    """
    for sample, places in zip(samples, records, strict=True):
        keeps_codes = is_diagnostic(sample.sample_id, diagnostic_share)
        for (layer, site), (codes, scales) in places.items():
            scale = settings.global_scale(layer, site)
            number_format = site_format(settings.formats, site)
            bits, all_bits = (stored_bits(number_format, asked) for asked in (hint_bits, 4))
            key = HintKey(
                sample.sample_id, layer, site, sample.policy_version, sample.settings_digest
            )
            if site in hint_sites:
                form = bits, hint_scales, number_format
                are_whole = kept_bits == HINT_BITS[-1]
                encode = encode_packed_hint if are_whole else encode_narrowed_hint
                store.put(encode(key, codes, scales, scale, *form))
            if keeps_codes:
                form = all_bits, "raw", number_format
                store.put(encode_packed_hint(key, codes, scales, scale, *form), RecordKind.CODES)


def is_diagnostic(sample_id: str, share: float) -> bool:
    """Whether a sample keeps full codes; depends on nothing but its name and the share."""
    number = int.from_bytes(hashlib.sha256(sample_id.encode()).digest()[:8], "big")
    return number < share * 2**64
