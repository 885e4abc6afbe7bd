"""From the recorder's rows of a rollout to hints and diagnostics in the store."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_trace.hints import (
    HintKey,
    HintSink,
    QuantizerSettings,
    RecordKind,
    RolloutSample,
    ScaleForm,
    Site,
    SiteHint,
    site_format,
    stored_bits,
)
from megatron_trace.hints.codec import encode_hints
from megatron_trace.hints.row_groups import groups_of_rows
from megatron_trace.hints.types import HINT_BITS
from megatron_trace.rollout.recorder import Place

SampleRecords = Mapping[Place, tuple[torch.Tensor, torch.Tensor]]


def store_records(
    store: HintSink,
    samples: Sequence[RolloutSample],
    records: Sequence[SampleRecords],
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
    for rows in groups_of_rows([sample.num_rows for sample in samples]):
        group = list(zip(samples[rows], records[rows], strict=True))
        coded = [one for one in group if is_diagnostic(one[0].sample_id, diagnostic_share)]
        # Nearly always all samples have all places.
        for place in dict.fromkeys(place for _, places in group for place in places):
            (_, site), scale = place, settings.global_scale(*place)
            number_format = site_format(settings.formats, site)
            bits, all_bits = (stored_bits(number_format, asked) for asked in (hint_bits, 4))
            if site in hint_sites:
                form = scale, bits, hint_scales, number_format
                are_narrowed = kept_bits != HINT_BITS[-1]
                for hint in _encoded(group, place, *form, are_narrowed=are_narrowed):
                    store.put(hint)
            for codes in _encoded(coded, place, scale, all_bits, "raw", number_format):
                store.put(codes, RecordKind.CODES)


def _encoded(
    samples: Sequence[tuple[RolloutSample, SampleRecords]], place: Place, *form: Any, **options: Any
) -> list[SiteHint]:
    """Gives the hints of those samples that have records at a place; `encode_hints` says how."""
    found = [(sample, places[place]) for sample, places in samples if place in places]
    if not found:
        return []
    keys = [
        HintKey(sample.sample_id, *place, sample.policy_version, sample.settings_digest)
        for sample, _ in found
    ]
    codes, scales = ([rows[part] for _, rows in found] for part in (0, 1))
    return encode_hints(keys, codes, scales, *form, **options)


def is_diagnostic(sample_id: str, share: float) -> bool:
    """Whether a sample keeps full codes; depends on nothing but its name and the share."""
    number = int.from_bytes(hashlib.sha256(sample_id.encode()).digest()[:8], "big")
    return number < share * 2**64
