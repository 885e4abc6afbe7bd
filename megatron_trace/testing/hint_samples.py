"""Samples with records that follow from their name, so that anyone can say what a file must hold.

Legend: T tokens of a sample, R = T - 1 rows, K values of a row, B = K / 16 blocks of a row.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from megatron_trace.hints import (
    HintKey,
    RecordKind,
    RolloutSample,
    ScaleForm,
    Site,
    SiteHint,
    encode_hint,
)
from megatron_trace.hints.files import HintFiles
from megatron_trace.hints.files_writer import HintFilesWriter

# K of the sites that are recorded.
NUM_VALUES = {Site.FC1: 64, Site.K: 32, Site.V: 32}
NUM_BITS = {Site.FC1: 1, Site.K: 1, Site.V: 2}
SCALE_FORMS: dict[Site, ScaleForm] = {Site.FC1: "raw", Site.K: "raw", Site.V: "residue"}
LAYERS = (2, 3)


@dataclass(frozen=True)
class RecordedSample:
    """A sample and what the rollout recorded of it."""

    sample: RolloutSample
    records: Mapping[tuple[RecordKind, int, Site], SiteHint]


def recorded_sample(
    sample_id: str,
    policy_version: int = 7,
    *,
    run: str = "",
    prompt_tokens: int = 3,
    response_tokens: int = 4,
    layers: Iterable[int] = LAYERS,
    full_codes: bool = True,
) -> RecordedSample:
    """Gives the same sample and records for the same arguments, others for others.

    Args:
        sample_id: Name of the sample.
        policy_version: Version of the weights.
        run: Name of the run; decides the quantiser settings.
        prompt_tokens: Tokens of the prompt.
        response_tokens: Tokens of the response.
        layers: Layers that have records.
        full_codes: Whether fc1 has full codes too.
    """
    text = f"{sample_id} {policy_version} {run}"
    generator = torch.Generator().manual_seed(zlib.crc32(text.encode()))
    tokens = torch.randint(99, (prompt_tokens + response_tokens,), generator=generator).tolist()
    rows = len(tokens) - 1
    sample = RolloutSample(
        sample_id=sample_id,
        prompt_tokens=tuple(tokens[:prompt_tokens]),
        response_tokens=tuple(tokens[prompt_tokens:]),
        logprobs=-torch.rand(response_tokens, generator=generator),
        routing=torch.randint(8, (rows, 4, 2), generator=generator).to(torch.int16),
        policy_version=policy_version,
        settings_digest=f"settings{run}",
        finish_reason="stop",
    )
    records = {}
    for layer in layers:
        for site, num_values in NUM_VALUES.items():
            key = HintKey(sample_id, layer, site, policy_version, sample.settings_digest)
            codes = torch.randint(16, (rows, num_values), generator=generator).to(torch.uint8)
            scales = torch.randint(127, (rows, num_values // 16), generator=generator)
            scales = scales.to(torch.uint8)
            form = NUM_BITS[site], SCALE_FORMS[site]
            hint = encode_hint(key, codes, scales, 0.01 * (layer + 1), *form)
            records[RecordKind.HINT, layer, site] = hint
            if full_codes and site is Site.FC1:
                full = encode_hint(key, codes, scales, 0.01 * (layer + 1), 4)
                records[RecordKind.CODES, layer, site] = full
    return RecordedSample(sample, records)


def commit_recorded(files: HintFilesWriter, recorded: Iterable[RecordedSample]) -> None:
    """Stages and commits samples in one commit."""
    recorded = list(recorded)
    for one in recorded:
        for (kind, _, _), hint in one.records.items():
            files.put(hint, kind)
    files.commit([one.sample for one in recorded])


def require_same(files: HintFiles, recorded: RecordedSample) -> None:
    """Raises AssertionError unless the folder holds exactly this sample and these records.

    Raises:
        LookupError: Something is not there.
        ValueError: Something is damaged.
    """
    expected = recorded.sample
    for kind in RecordKind:
        places = tuple(sorted((layer, site) for k, layer, site in recorded.records if k is kind))
        found_places = files.places(expected.sample_id, kind)
        assert found_places == places, f"{expected.sample_id}: {kind} at {found_places}"
    for (kind, _, _), hint in recorded.records.items():
        found = files.get(hint.key, num_rows=expected.num_rows, kind=kind)
        same = (
            (found.key, found.num_bits, found.scale_form, found.global_scale)
            == (hint.key, hint.num_bits, hint.scale_form, hint.global_scale)
            and torch.equal(found.payload, hint.payload)
            and torch.equal(found.scale_bytes, hint.scale_bytes)
        )
        assert same, f"{kind} record differs from what was committed ({hint.key})"
    sample = files.sample(expected.sample_id)
    for name in vars(expected):
        value, wanted = getattr(sample, name), getattr(expected, name)
        if isinstance(wanted, torch.Tensor):
            same = value.dtype == wanted.dtype and torch.equal(value, wanted)
        else:
            same = value == wanted
        assert same, f"{name} of sample {expected.sample_id} differs from what was committed"
