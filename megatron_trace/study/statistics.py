"""Estimates with confidence intervals from the rows of cells: samples are resampled, not tokens.

The tokens of a sample depend on one another, so a bootstrap draws whole samples with replacement.
All cells are drawn with the same numbers, which makes differences and ratios of cells paired.

Legend: R resamples, N samples (or chunks of samples), T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_trace.study.results import Row

NUM_RESAMPLES = 1000
Draws = NDArray[np.int64]


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % confidence interval.

    Attributes:
        value: The estimate from all samples.
        low: 2.5th percentile of the resamples.
        high: 97.5th percentile.
    """

    value: float
    low: float
    high: float


def draws_of(num_samples: int, *, num_resamples: int = NUM_RESAMPLES, seed: int = 0) -> Draws:
    """Gives how often each sample is drawn, int64 [1 + R, N]; in the first draw, once each."""
    generator = np.random.default_rng(seed)
    chances = np.full(num_samples, 1 / num_samples)
    drawn = generator.multinomial(num_samples, chances, size=num_resamples)
    return np.concatenate([np.ones((1, num_samples), dtype=np.int64), drawn])


def interval(values: NDArray[np.float64]) -> Interval:
    """Gives the interval from the values of all draws [1 + R]; draws of 0 / 0 are left out."""
    rest = values[1:][np.isfinite(values[1:])]
    if rest.size == 0:
        return Interval(float(values[0]), float("nan"), float("nan"))
    low, high = np.percentile(rest, [2.5, 97.5])
    return Interval(float(values[0]), float(low), float(high))


def ratio_of_sums(
    numerators: Sequence[float], denominators: Sequence[float], draws: Draws
) -> NDArray[np.float64]:
    """Gives sum of numerators over sum of denominators for every draw, [1 + R].

    Args:
        numerators: [N].
        denominators: [N].
        draws: [1 + R, N].
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        return (draws @ np.asarray(numerators, float)) / (draws @ np.asarray(denominators, float))


def token_mean(
    rows: Sequence[Row], draws: Draws, of: Callable[[NDArray[np.float64]], NDArray[np.float64]]
) -> NDArray[np.float64]:
    """Gives the mean over tokens of a function of their deltas, for every draw."""
    sums = [float(of(np.asarray(row["deltas"], float)).sum()) for row in rows]
    return ratio_of_sums(sums, [len(row["deltas"]) for row in rows], draws)


def token_quantile(rows: Sequence[Row], draws: Draws, share: float) -> NDArray[np.float64]:
    """Gives, for every draw, the smallest |delta| that a share of the tokens do not exceed."""
    sizes = np.concatenate([np.abs(row["deltas"]) for row in rows])
    sample_of_token = np.repeat(np.arange(len(rows)), [len(row["deltas"]) for row in rows])
    order = np.argsort(sizes, kind="stable")
    counts = draws[:, sample_of_token[order]].cumsum(axis=1)
    reached = counts >= np.ceil(share * counts[:, -1:])
    return sizes[order][reached.argmax(axis=1)]


@dataclass(frozen=True)
class Gap:
    """How far training's log-probs are from the rollout's, in nats.

    Attributes:
        mean: Mean of |delta|.
        p99: Its 99th percentile.
        max: Its largest.
        kl: Mean of exp(delta) - 1 - delta, an estimate of KL(rollout, train).
        weight_variance: Variance of the importance weight exp(delta).
        num_tokens: Tokens.
    """

    mean: Interval
    p99: Interval
    max: float
    kl: Interval
    weight_variance: Interval
    num_tokens: int


def gap_of(rows: Sequence[Row], draws: Draws) -> Gap:
    """Gives the gap of a cell."""
    weight = token_mean(rows, draws, np.exp)
    squared = token_mean(rows, draws, lambda deltas: np.exp(2 * deltas))
    sizes = np.concatenate([np.abs(row["deltas"]) for row in rows])
    return Gap(
        mean=interval(token_mean(rows, draws, np.abs)),
        p99=interval(token_quantile(rows, draws, 0.99)),
        max=float(sizes.max()),
        kl=interval(token_mean(rows, draws, lambda deltas: np.expm1(deltas) - deltas)),
        weight_variance=interval(squared - weight**2),
        num_tokens=sizes.size,
    )


def gap_ratio(rows: Sequence[Row], baseline: Sequence[Row], draws: Draws) -> Interval:
    """Gives the mean |delta| of a cell over that of another on the same samples.

    Raises:
        ValueError: The cells scored other samples.
    """
    _require_paired(rows, baseline)
    with np.errstate(invalid="ignore", divide="ignore"):
        return interval(token_mean(rows, draws, np.abs) / token_mean(baseline, draws, np.abs))


def gap_difference(rows: Sequence[Row], other: Sequence[Row], draws: Draws) -> Interval:
    """Gives the mean |delta| of a cell minus that of another on the same samples.

    Raises:
        ValueError: The cells scored other samples.
    """
    _require_paired(rows, other)
    return interval(token_mean(rows, draws, np.abs) - token_mean(other, draws, np.abs))


def share(
    rows: Sequence[Row], draws: Draws, numerator: Sequence[str], denominator: Sequence[str]
) -> Interval:
    """Gives a share of counts, each named by its path in a row, such as codes, fc1, values."""
    return interval(
        ratio_of_sums(
            [count_at(row, numerator) for row in rows],
            [count_at(row, denominator) for row in rows],
            draws,
        )
    )


def count_at(row: Row, path: Sequence[str]) -> float:
    """Gives a count by its path; `*` sums over all keys; 0 where there is none."""
    found: list[Any] = [row]
    for part in path:
        found = [
            value
            for place in found
            if isinstance(place, dict)
            for key, value in place.items()
            if part in ("*", key)
        ]
    return float(sum(value for value in found if not isinstance(value, dict)))


def gradient_of(row: Row, draws: Draws) -> tuple[Interval, Interval]:
    """Gives cosine with the reference's gradient, and norm of the difference over its norm.

    Args:
        row: Inner products [C, C] of a group of parameters.
        draws: int64 [1 + R, C] of the chunks.
    """
    dd, dr, rr = (
        np.einsum("ra,ab,rb->r", draws, np.asarray(row[key], float), draws)
        for key in ("dd", "dr", "rr")
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        own = np.sqrt(np.maximum(rr + 2 * dr + dd, 0.0))
        cosine = (rr + dr) / (own * np.sqrt(rr))
        error = np.sqrt(np.maximum(dd, 0.0) / rr)
    return interval(cosine), interval(error)


def _require_paired(rows: Sequence[Row], others: Sequence[Row]) -> None:
    mine, theirs = ([row["sample"] for row in part] for part in (rows, others))
    if mine != theirs:
        raise ValueError(
            f"cells of other samples cannot be compared pairwise: {len(mine)} samples from "
            f"{mine[0]}, and {len(theirs)} from {theirs[0]}"
        )
