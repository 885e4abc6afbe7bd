"""A sample has the same tokens and records however the engine came to compute its rows.

Pages have 16 tokens. What is compared is the rollout of an engine with room for everything, which
computes every prompt at once and shares nothing. Products accumulate in FP64 here: else their last
bit depends on the other requests of a step, in any engine, and so do some of the codes.
"""

from __future__ import annotations

from typing import Any

import pytest

from megatron_trace.rollout import SamplingSettings
from megatron_trace.testing.rollouts import assert_same_rollout, records_of
from megatron_trace.testing.tiny_rollout import random_prompts, roll_out, tiny_engine

pytestmark = pytest.mark.usefixtures("exact_products")

RECORDED = {"hint_layers": "all", "hint_sites": ("fc1", "fc2", "k", "v"), "diagnostic_share": 0.5}
# Two whole pages and a part, whole pages alone, less than a page.
PROMPTS = [
    random_prompts(1, shortest=length, longest=length, seed=length)[0]
    for length in (40, 32, 35, 7, 48)
]
# Of two prompts the first page is the same, and of two others the first two.
SAMPLES = 2
SHARED = [*PROMPTS, PROMPTS[0][:16] + PROMPTS[2][16:], PROMPTS[4][:34] + PROMPTS[1][:5]]

# Prompt tokens of one sample of each that a cache which has all of them gives.
FOUND = 32 + 16 + 32 + 0 + 32 + 32 + 32


def _engine(weights, *, max_requests: int = 64, **limits: Any):
    return tiny_engine(weights, limits=limits, max_requests=max_requests, **RECORDED)


@pytest.fixture(scope="module")
def expected(weights, exact_products):
    """Two samples of each prompt, without anything that this module is about."""
    prompts = [prompt for prompt in SHARED for _ in range(SAMPLES)]
    return roll_out(_engine(weights), prompts, max_new_tokens=14)


def _ids():
    return [f"s{n}" for n in range(SAMPLES * len(SHARED))]


def _again(engine):
    return roll_out(engine, SHARED, max_new_tokens=14, samples_per_prompt=SAMPLES)


def test_all_places_are_compared(expected):
    samples, store = expected
    places = {place for sample in samples for place in records_of(store, sample)}
    assert len(places) == 2 * 2 * 4, "hints and codes, two layers, four sites"


def test_a_prefix_that_is_found_has_the_records_of_one_that_is_computed(weights, expected):
    engine = _engine(weights, prefix_caching=True)
    assert_same_rollout(_again(engine), expected)
    # The second samples of 40, 32, 35, 7 and 48 tokens find 32, 16, 32, 0 and 32: of a prompt of
    # whole pages the last is computed. The two others find 16 and 32, their second samples 32.
    assert engine.report.prefix_tokens == (32 + 16 + 32 + 0 + 32) + (16 + 32) + (32 + 32)


def test_a_prefix_is_found_by_the_next_rollout(weights, expected):
    engine = _engine(weights, prefix_caching=True)
    _again(engine)
    assert_same_rollout(_again(engine), expected)
    assert engine.report.prefix_tokens == SAMPLES * FOUND


def test_a_prefix_that_was_dropped_for_others_and_computed_again_has_its_records(weights, expected):
    engine = _engine(weights, prefix_caching=True, max_requests=4, cache_tokens=12 * 16)
    for _ in range(2):
        assert_same_rollout(_again(engine), expected)
    assert 0 < engine.report.prefix_tokens < SAMPLES * FOUND


@pytest.mark.parametrize("max_requests", [1, 2])
def test_pages_that_only_the_prefix_cache_holds_go_to_running_requests(weights, max_requests):
    """Each request ends in its third page, while the cache holds the first page of earlier ones."""
    prompts = random_prompts(6, shortest=30, longest=30)
    small = _engine(
        weights, prefix_caching=True, max_requests=max_requests, cache_tokens=max_requests * 64
    )
    found = roll_out(small, prompts, max_new_tokens=6, greedy=True)
    assert small.report.num_evictions == 0
    assert_same_rollout(found, roll_out(_engine(weights), prompts, max_new_tokens=6, greedy=True))


def test_prefixes_are_forgotten_when_weights_are_pushed(weights, other_weights, expected):
    engine = _engine(weights, prefix_caching=True)
    _again(engine)
    engine.push_weights(other_weights, 1)
    others = _again(engine)
    assert [s.tokens for s in others[0]] != [s.tokens for s in expected[0]]
    engine.push_weights(weights, 0)
    assert_same_rollout(_again(engine), expected)
    assert engine.report.prefix_tokens < SAMPLES * FOUND


def test_prefixes_that_were_not_recorded_are_computed_again_for_records(weights, expected):
    engine = _engine(weights, prefix_caching=True)
    sampling = SamplingSettings(max_new_tokens=14, samples_per_prompt=SAMPLES)
    engine.generate(SHARED, _ids(), store=None, sampling=sampling, seed=0)
    assert_same_rollout(_again(engine), expected)


def test_requests_that_are_evicted_come_back_with_their_records(weights, expected):
    engine = _engine(weights, cache_tokens=22 * 16)
    assert_same_rollout(_again(engine), expected)
    report = engine.report
    assert report.num_evictions > 0
    assert report.restored_tokens >= 16 * report.num_evictions
    assert report.prefix_tokens == 0


@pytest.mark.parametrize("max_requests", [7, 64])
def test_prompts_that_are_computed_in_chunks_have_the_same_records(weights, expected, max_requests):
    engine = _engine(weights, max_step_tokens=64, max_requests=max_requests)
    assert_same_rollout(_again(engine), expected)


def test_everything_at_once(weights, expected):
    engine = _engine(
        weights, prefix_caching=True, max_step_tokens=64, cache_tokens=12 * 16, max_requests=14
    )
    for _ in range(2):
        assert_same_rollout(_again(engine), expected)
        assert engine.report.num_evictions > 0
        assert engine.report.prefix_tokens > 0
