"""From the recorder's rows of a rollout to hints and diagnostics in the store."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from megatron_trace.formats import unpack_codes
from megatron_trace.hints import HintKey, HintStore, RecordKind, RolloutSample, Site, encode_hint
from megatron_trace.rollout.recorder import Place


def store_records(
    store: HintStore,
    samples: Sequence[RolloutSample],
    records: Mapping[Place, Sequence[tuple[torch.Tensor, torch.Tensor]]],
    global_scales: Mapping[Place, float],
    *,
    hint_bits: int,
    hint_sites: Sequence[Site],
    diagnostic_share: float,
) -> None:
    """Encodes what was recorded of each sample.

    Args:
        store: Gets a hint per sample and place, and full codes of the diagnostic samples.
        samples: The samples in the order of the records.
        records: By place, for each sample: packed codes uint8 [R, K / 2], scale bytes [R, B].
        global_scales: FP32 decode-side scale of each place.
        hint_bits: Bits per value of a hint.
        hint_sites: Sites that guide training; the others are recorded for diagnostics only.
        diagnostic_share: Share of the samples that keep full codes.
    """
    diagnostic = [is_diagnostic(sample.sample_id, diagnostic_share) for sample in samples]
    for (layer, site), rows_of_samples in records.items():
        scale = global_scales[layer, site]
        for sample, keeps_codes, (packed_codes, scale_bytes) in zip(
            samples, diagnostic, rows_of_samples, strict=True
        ):
            codes = unpack_codes(packed_codes)
            key = HintKey(
                sample.sample_id, layer, site, sample.policy_version, sample.settings_digest
            )
            if site in hint_sites:
                store.put(encode_hint(key, codes, scale_bytes, scale, hint_bits))
            if keeps_codes:
                store.put(encode_hint(key, codes, scale_bytes, scale, 4), RecordKind.CODES)


def is_diagnostic(sample_id: str, share: float) -> bool:
    """Whether a sample keeps full codes; depends on nothing but its name and the share."""
    number = int.from_bytes(hashlib.sha256(sample_id.encode()).digest()[:8], "big")
    return number < share * 2**64
