"""Rows of a shared prefix are those of the request that computed them, on any device.

Nothing is compared with another rollout: products of other batches may round elsewhere.
"""

from __future__ import annotations

import pytest
import torch

from megatron_trace.hints import RecordKind, Site
from megatron_trace.testing.rollouts import record_of, records_of
from megatron_trace.testing.tiny_rollout import random_prompts, roll_out, tiny_engine

PROMPT = random_prompts(1, shortest=40, longest=40)[0]
SITES = (Site.FC1, Site.FC2, Site.K, Site.V)


@pytest.fixture(scope="module")
def engine(weights):
    return tiny_engine(
        weights,
        hint_layers="all",
        hint_sites=SITES,
        diagnostic_share=1.0,
        max_requests=6,
        limits={"prefix_caching": True, "cache_tokens": 12 * 16, "max_step_tokens": 64},
    )


@pytest.fixture(scope="module")
def rollout(engine):
    """Eight samples of one prompt, and its continuations by other tokens."""
    others = [PROMPT[:32] + other for other in random_prompts(4, shortest=4, longest=12, seed=2)]
    return roll_out(engine, [PROMPT] * 8 + others, max_new_tokens=16)


def test_all_samples_of_a_prefix_have_the_rows_of_the_first(engine, rollout):
    samples, store = rollout
    assert engine.report.prefix_tokens == 11 * 32
    first = records_of(store, samples[0])
    for sample in samples[1:]:
        assert torch.equal(sample.routing[:32], samples[0].routing[:32])
        for place, record in records_of(store, sample).items():
            for name in ("payload", "scale_bytes"):
                rows, expected = (getattr(one, name)[:32] for one in (record, first[place]))
                assert torch.equal(rows, expected), (sample.sample_id, place, name)


def test_evictions_and_chunks_leave_no_gap(engine, rollout):
    samples, store = rollout
    assert engine.report.num_evictions > 0
    for sample in samples:
        for record in records_of(store, sample).values():
            assert record.num_rows == len(sample.tokens) - 1
            # A row that nobody wrote has scale bytes 0 throughout.
            assert (record.scale_bytes != 0).any(-1).all()


def test_experts_of_fc2_rows_are_those_of_the_routing(rollout):
    samples, store = rollout
    for sample in samples:
        codes = record_of(store, sample, 1, Site.FC2, RecordKind.CODES)
        assert codes.num_values == 4 * 64
        assert all(len(set(row.tolist())) == 4 for row in sample.routing[:, 1])
