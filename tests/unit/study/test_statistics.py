"""Estimates and intervals against values by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_trace.study.statistics import (
    count_at,
    draws_of,
    gap_difference,
    gap_of,
    gap_ratio,
    gradient_of,
    interval,
    ratio_of_sums,
    share,
    token_quantile,
)

ROWS = [
    {"sample": "a", "deltas": [0.0, -0.5]},
    {"sample": "b", "deltas": [1.0]},
]


def test_the_first_draw_is_every_sample_once_and_others_draw_as_many():
    draws = draws_of(7, num_resamples=20)
    assert draws.shape == (21, 7)
    assert (draws[0] == 1).all()
    assert (draws.sum(axis=1) == 7).all()
    assert (draws[1:] != 1).any()


def test_a_gap_is_that_of_its_tokens():
    gap = gap_of(ROWS, draws_of(2, num_resamples=4))
    assert gap.num_tokens == 3
    assert gap.mean.value == pytest.approx(0.5)
    assert gap.max == 1.0
    kl = (0 + (math.exp(-0.5) - 1 + 0.5) + (math.e - 2)) / 3
    assert gap.kl.value == pytest.approx(kl)
    weights = np.exp([0.0, -0.5, 1.0])
    assert gap.weight_variance.value == pytest.approx(weights.var())


def test_draws_weigh_samples_by_their_tokens():
    draws = np.array([[1, 1], [2, 0], [0, 2]])
    assert ratio_of_sums([0.5, 1.0], [2, 1], draws).tolist() == [0.5, 0.25, 1.0]


def test_tokens_of_a_sample_are_drawn_together():
    """With one sample of a thousand tokens there is nothing to draw, however many tokens."""
    rows = [{"sample": "a", "deltas": list(np.linspace(0, 1, 1000))}]
    mean = gap_of(rows, draws_of(1)).mean
    assert mean.low == mean.value == mean.high


def test_an_interval_holds_the_middle_95_percent_of_the_draws():
    found = interval(np.array([7.0, *range(101)], dtype=float))
    assert (found.value, found.low, found.high) == (7.0, 2.5, 97.5)


def test_the_interval_of_a_mean_is_about_two_standard_errors_each_way():
    values = np.random.default_rng(1).normal(size=400)
    rows = [{"sample": str(i), "deltas": [float(v)]} for i, v in enumerate(np.exp(values))]
    found = gap_of(rows, draws_of(400)).mean
    error = np.exp(values).std() / 20
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.12)


def test_a_quantile_is_the_smallest_value_that_reaches_it():
    rows = [{"deltas": [-float(size)]} for size in range(1, 101)]
    draws = draws_of(100, num_resamples=1)
    assert token_quantile(rows, draws, 0.99)[0] == 99
    assert token_quantile(rows, draws, 1.0)[0] == 100
    nothing_but_the_first = np.zeros((1, 100), dtype=np.int64)
    nothing_but_the_first[0, 0] = 100
    assert token_quantile(rows, nothing_but_the_first, 0.99)[0] == 1


def test_pairing_takes_the_noise_of_the_samples_out():
    sizes = np.random.default_rng(0).exponential(size=50)
    rows = [{"sample": str(i), "deltas": [float(v)]} for i, v in enumerate(sizes)]
    tenth = [{"sample": row["sample"], "deltas": [0.1 * row["deltas"][0]]} for row in rows]
    draws = draws_of(50)
    ratio = gap_ratio(tenth, rows, draws)
    assert (ratio.low, ratio.high) == pytest.approx((0.1, 0.1))
    assert gap_difference(rows, rows, draws) == interval(np.zeros(3))


def test_cells_of_other_samples_are_not_compared():
    others = [{**row, "sample": "x"} for row in ROWS]
    with pytest.raises(ValueError, match="other samples"):
        gap_ratio(ROWS, others, draws_of(2))


def test_counts_are_found_by_their_path():
    row = {"codes": {"fc1": {"0": {"values": 3}, "1": {"values": 4}}, "k": {"0": {"values": 5}}}}
    assert count_at(row, ("codes", "fc1", "1", "values")) == 4
    assert count_at(row, ("codes", "fc1", "*", "values")) == 7
    assert count_at(row, ("codes", "*", "*", "values")) == 12
    assert count_at(row, ("codes", "v", "*", "values")) == 0
    found = share([row], draws_of(1), ("codes", "k", "*", "values"), ("codes", "*", "*", "values"))
    assert found.value == pytest.approx(5 / 12)


def test_cosine_and_error_of_a_gradient_follow_from_inner_products():
    reference = np.array([[1.0, 2.0], [0.5, -1.0]])  # Two chunks, two parameters.
    gradients = np.array([[1.5, 2.0], [0.0, -1.5]])
    difference = gradients - reference
    row = {
        "dd": difference @ difference.T,
        "dr": difference @ reference.T,
        "rr": reference @ reference.T,
    }
    cosine, error = gradient_of(row, draws_of(2, num_resamples=3))
    r, g = reference.sum(0), gradients.sum(0)
    assert cosine.value == pytest.approx(r @ g / np.linalg.norm(r) / np.linalg.norm(g))
    assert error.value == pytest.approx(np.linalg.norm(g - r) / np.linalg.norm(r))
