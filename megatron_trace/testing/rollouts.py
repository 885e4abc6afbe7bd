"""Assertions about finished rollouts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_trace.hints import HintKey, HintStore, RecordKind, RolloutSample, Site, SiteHint

Rollout = tuple[Sequence[RolloutSample], HintStore]


def record_of(
    store: HintStore,
    sample: RolloutSample,
    layer: int,
    site: Site,
    kind: RecordKind = RecordKind.HINT,
) -> SiteHint:
    """Gives the record of a sample at a place."""
    key = HintKey(sample.sample_id, layer, site, sample.policy_version, sample.settings_digest)
    return store.get(key, num_rows=sample.num_rows, kind=kind)


def records_of(
    store: HintStore, sample: RolloutSample
) -> dict[tuple[RecordKind, int, Site], SiteHint]:
    """Gives all records of a sample by kind and place."""
    return {
        (kind, layer, site): record_of(store, sample, layer, site, kind)
        for kind in RecordKind
        for layer, site in store.places(sample.sample_id, kind)
    }


def assert_same_rollout(first: Rollout, second: Rollout) -> None:
    """Asserts that two rollouts agree in every token, log-prob, expert and recorded byte.

    Samples are compared in order, whatever their names.
    """
    (samples, store), (others, other_store) = first, second
    for one, other in zip(samples, others, strict=True):
        assert one.tokens == other.tokens, f"tokens of sample {one.sample_id} differ"
        for name in ("logprobs", "routing"):
            same = torch.equal(getattr(one, name), getattr(other, name))
            assert same, f"{name} of sample {one.sample_id} differ"
        records, other_records = records_of(store, one), records_of(other_store, other)
        assert records.keys() == other_records.keys(), f"places of sample {one.sample_id} differ"
        for place, record in records.items():
            for name in ("payload", "scale_bytes"):
                same = torch.equal(getattr(record, name), getattr(other_records[place], name))
                assert same, f"{name} of sample {one.sample_id} at {place} differ"
