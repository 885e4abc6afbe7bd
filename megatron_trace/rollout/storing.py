"""From the recorder's rows of a rollout to hints and diagnostics in the store."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from megatron_trace.hints import (
    HintKey,
    HintStore,
    RecordKind,
    RolloutSample,
    ScaleForm,
    Site,
    encode_packed_hint,
)
from megatron_trace.rollout.recorder import Place


def store_records(
    store: HintStore,
    samples: Sequence[RolloutSample],
    records: Mapping[Place, tuple[torch.Tensor, torch.Tensor]],
    global_scales: Mapping[Place, float],
    *,
    hint_bits: int,
    hint_scales: ScaleForm = "raw",
    hint_sites: Sequence[Site],
    diagnostic_share: float,
) -> None:
    """Encodes what was recorded of each sample.

    Args:
        store: Gets a hint per sample and place, and full codes of the diagnostic samples.
        samples: The samples in the order of the records.
        records: By place: packed codes uint8 [sum of R, K / 2], scale bytes [sum of R, B].
        global_scales: FP32 decode-side scale of each place.
        hint_bits: Bits per value of a hint.
        hint_scales: How a hint keeps block scales; full codes always keep them raw.
        hint_sites: Sites that guide training; the others are recorded for diagnostics only.
        diagnostic_share: Share of the samples that keep full codes.
    """
    diagnostic = [is_diagnostic(sample.sample_id, diagnostic_share) for sample in samples]
    num_rows = [sample.num_rows for sample in samples]
    for (layer, site), (packed_codes, scale_bytes) in records.items():
        scale = global_scales[layer, site]
        rows = zip(packed_codes.split(num_rows), scale_bytes.split(num_rows), strict=True)
        for sample, keeps_codes, (codes, scales) in zip(samples, diagnostic, rows, strict=True):
            key = HintKey(
                sample.sample_id, layer, site, sample.policy_version, sample.settings_digest
            )
            if site in hint_sites:
                store.put(encode_packed_hint(key, codes, scales, scale, hint_bits, hint_scales))
            if keeps_codes:
                store.put(encode_packed_hint(key, codes, scales, scale, 4), RecordKind.CODES)


def is_diagnostic(sample_id: str, share: float) -> bool:
    """Whether a sample keeps full codes; depends on nothing but its name and the share."""
    number = int.from_bytes(hashlib.sha256(sample_id.encode()).digest()[:8], "big")
    return number < share * 2**64
