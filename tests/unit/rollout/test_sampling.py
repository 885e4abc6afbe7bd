"""The sampling distribution, the random numbers of a sample, and the engine's sampler."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_trace.rollout.row_sampler import RowSampler, require_finite_logits
from megatron_trace.rollout.sampling import (
    SamplingSettings,
    draw,
    sample_seed,
    sampling_logprobs,
    uniform_numbers,
)

# Probabilities .4, .3, .2, .1 at temperature 1.
LOGITS = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()


def _probabilities(**settings) -> list[float]:
    kept = sampling_logprobs(LOGITS, SamplingSettings(max_new_tokens=1, **settings))
    return [round(value, 5) for value in kept.exp()[0].tolist()]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0.5}, [0.53333, 0.3, 0.13333, 0.03333]),
        ({"top_k": 2}, [0.57143, 0.42857, 0.0, 0.0]),
        ({"top_k": 9}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_p": 0.41}, [0.57143, 0.42857, 0.0, 0.0]),
        ({"top_p": 0.39}, [1.0, 0.0, 0.0, 0.0]),
        ({"top_p": 1.0}, [0.4, 0.3, 0.2, 0.1]),
        # of the three that top_k keeps, the first two reach .7 / .9 = .78
        ({"top_k": 3, "top_p": 0.75}, [0.57143, 0.42857, 0.0, 0.0]),
    ],
    ids=str,
)
def test_the_distribution_after_temperature_top_k_and_top_p(settings, expected):
    assert _probabilities(**settings) == pytest.approx(expected, abs=2e-5)


def test_tokens_as_probable_as_the_last_one_kept_are_kept():
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]])
    for settings in ({"top_k": 1}, {"top_p": 0.2}):
        kept = sampling_logprobs(logits, SamplingSettings(max_new_tokens=1, **settings))
        assert kept.exp()[0].tolist() == [0.0, 0.5, 0.5, 0.0]


def test_a_token_is_drawn_where_the_distribution_passes_the_number():
    numbers = torch.tensor([0.0, 0.39, 0.41, 0.71, 0.91, 1 - 2.0**-50], dtype=torch.float64)
    tokens = draw(LOGITS.expand(6, -1), numbers)
    assert tokens.tolist() == [0, 0, 1, 2, 3, 3]


def test_a_token_without_probability_is_never_drawn():
    logprobs = torch.tensor([[-torch.inf, 0.0, -torch.inf]]).expand(2, -1)
    tokens = draw(logprobs, torch.tensor([0.0, 1 - 2.0**-50], dtype=torch.float64))
    assert tokens.tolist() == [1, 1]


def test_chunks_of_rows_draw_what_all_rows_at_once_draw(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    logprobs = torch.randn(7, 11, generator=generator).log_softmax(-1)
    numbers = torch.rand(7, generator=generator, dtype=torch.float64)
    expected = draw(logprobs, numbers)
    monkeypatch.setattr("megatron_trace.rollout.sampling._CHUNK_VALUES", 2 * 11)
    assert torch.equal(draw(logprobs, numbers), expected)


def test_random_numbers_are_uniform_and_unrelated_between_samples_and_positions():
    seeds = [sample_seed(0, f"s{n}") for n in range(200)]
    drawn = np.stack([uniform_numbers(seeds, np.full(200, p)) for p in range(50)])
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert len(np.unique(drawn)) == drawn.size
    counts, _ = np.histogram(drawn, bins=20, range=(0, 1))
    assert np.abs(counts - 500).max() < 5 * 500**0.5
    # 5 standard deviations of a correlation of 10,000 pairs
    for one, other in ((drawn[1:], drawn[:-1]), (drawn[:, 1:], drawn[:, :-1])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.05


def test_seeds_may_be_numpys_and_negative():
    positions = np.arange(3)
    expected = uniform_numbers([7, 2**64 - 1, 2**63], positions)
    seeds = np.array([7, -1, -(2**63)])
    assert np.array_equal(uniform_numbers(seeds, positions), expected)


def test_finite_logits_at_the_least_temperature_have_finite_logprobs():
    settings = SamplingSettings(max_new_tokens=1, temperature=1e-6)
    logprobs = sampling_logprobs(torch.tensor([[1e4, -1e4, 3.0]]), settings)
    assert logprobs[0].tolist() == pytest.approx([0.0, -2e10, -1e10], rel=1e-3)


def test_a_seed_is_of_the_rollout_and_the_name():
    seeds = {sample_seed(seed, name) for seed in (0, 1) for name in ("a", "b")}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**64 for seed in seeds)
    # Another value would change the samples of a run that is resumed.
    assert sample_seed(0, "a") == 0xD3216B8DC7C46489


def _context(request_ids, *, offsets, chunked=-1):
    return SimpleNamespace(
        paused_request_count=1,
        total_request_count=1 + len(request_ids),
        request_ids=torch.tensor([99, *request_ids, 98]),
        request_kv_length_offsets=torch.tensor([50, *offsets, 50]),
        request_query_lengths=torch.ones(2 + len(request_ids), dtype=torch.int64),
        chunked_prefill_request_id=chunked,
    )


def _sampler(seeds, **settings) -> RowSampler:
    sampler = RowSampler()
    sampler.begin(SamplingSettings(max_new_tokens=4, **settings), seeds)
    return sampler


def test_what_was_sampled_returns_to_its_request_in_order():
    logits = torch.full((3, 8), -100.0)
    sampler = _sampler({7: 1, 5: 2, 6: 3}, top_logprobs=2)
    for step, ids in enumerate(([7, 5, 6], [5, 7], [7])):
        rows = logits[: len(ids)].clone()
        for row, request_id in enumerate(ids):
            rows[row, request_id - step] = 100.0
        output = torch.zeros(len(ids), dtype=torch.int64)
        sampler.sample_kernel(rows, len(ids), _context(ids, offsets=[0] * len(ids)), output=output)
        assert output.tolist() == [request_id - step for request_id in ids]
    sampled = sampler.sampled()
    assert {name: one.tokens.tolist() for name, one in sampled.items()} == {
        5: [5, 4],
        6: [6],
        7: [7, 6, 5],
    }
    assert sampled[7].top_tokens.dtype == torch.int32
    assert sampled[7].top_tokens[:, 0].tolist() == [7, 6, 5]
    assert sampled[7].top_logprobs[:, 0].tolist() == [0.0, 0.0, 0.0]


def test_the_token_of_a_prompt_that_goes_on_is_not_kept():
    sampler = _sampler({7: 1, 5: 2})
    sampler.sample_kernel(torch.zeros(2, 8), 2, _context([7, 5], offsets=[0, 0], chunked=5))
    assert list(sampler.sampled()) == [7]


def test_the_row_of_a_sample_in_the_batch_changes_nothing():
    logits = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    sampler = _sampler({n: n for n in range(4)})
    tokens = sampler.sample_kernel(logits, 4, _context([0, 1, 2, 3], offsets=[3, 9, 4, 1]))
    order = [2, 0, 3]
    moved = sampler.sample_kernel(logits[order], 3, _context(order, offsets=[4, 3, 1]))
    assert moved.tolist() == tokens[order].tolist()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_not_finite_are_refused_once_their_tokens_are_read(value):
    logits = torch.zeros(2, 16)
    require_finite_logits(
        _sampler({0: 1, 1: 2}).sample_kernel(logits, 2, _context([0, 1], offsets=[0, 0]))
    )
    logits[1, 3] = value
    tokens = _sampler({0: 1, 1: 2}).sample_kernel(logits, 2, _context([0, 1], offsets=[0, 0]))
    assert tokens[0] >= 0
    with pytest.raises(RuntimeError, match="NaN or Inf logits"):
        require_finite_logits(tokens)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_new_tokens": 2.5},
        {"max_new_tokens": 2.0},
        {"max_new_tokens": True},
        {"top_k": 1.5},
        {"top_logprobs": "2"},
        {"samples_per_prompt": 2.0},
        {"stop_tokens": (1, 2.5)},
    ],
    ids=str,
)
def test_counts_and_tokens_that_are_no_integers_are_refused(fields):
    (name,) = fields
    with pytest.raises(ValueError, match=rf"{name} must be (an integer|integers); got"):
        SamplingSettings(**{"max_new_tokens": 4} | fields)


def test_counts_may_be_numpys():
    settings = SamplingSettings(max_new_tokens=np.int64(4), top_k=np.int32(2))
    assert (settings.max_new_tokens, settings.top_k) == (4, 2)
