"""What one RL run showed, from the metrics of its steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_trace.config import DEFAULT_HINT_SITES
from megatron_trace.hints.types import Site

SITES = tuple(str(site) for site in Site)
MetricsRecord = Mapping[str, Any]


@dataclass(frozen=True)
class SiteMismatch:
    """Codes of training that differ from the rollout's full codes, over a run.

    Attributes:
        nearest: Share of values that rounding to nearest would give another code.
        guided: Share of guided values that got another code; NaN if none was guided.
        num_out_of_bracket: Of those, where the rollout's magnitude is neither candidate.
        num_sign_flip: Where it has the other sign.
        num_unexplained: Neither.
    """

    nearest: float
    guided: float
    num_out_of_bracket: int
    num_sign_flip: int
    num_unexplained: int

    @property
    def is_guided(self) -> bool:
        """Whether training guided the values of this site."""
        return not math.isnan(self.guided)

    @property
    def as_trained(self) -> float:
        """Share of values with another code under the rounding that training used."""
        return self.guided if self.is_guided else self.nearest


@dataclass(frozen=True)
class RunSummary:
    """What one run showed. Log-probs are in nats; gaps are of the sampled tokens.

    Attributes:
        name: Name of the run.
        seed: Its seed.
        reward_first: Mean reward over the first fifth of the steps.
        reward_last: Mean reward over the last fifth.
        held_out_first: Greedy accuracy on held-out problems before the first step.
        held_out_last: The same after the last step.
        gap_mean: Mean of |log-prob rollout - train| over all tokens.
        gap_p99: Mean over the steps of its 99th percentile.
        gap_max: Largest of all.
        kl: Estimate of KL(rollout || train) per token.
        mismatch: By site; only sites with full-code diagnostics.
        coverage: Share of the rows that were guided, of fc1, k, v, and of fc2 where it has hints.
        guard_rejections: Hint rows that the guard refused.
        hint_bytes_per_token: Bytes of the hints of one token.
        kv_bytes_per_token: Bytes of one token's keys and values in the cache.
        kv_bytes_per_token_bf16: What they would take in BF16.
        rollout_s: Seconds in rollouts, recording included.
        record_s: Seconds in recording.
        train_s: Seconds in rewards, batches, forward, backward, optimizer.
        push_s: Seconds in pushing weights and comparing digests.
    """

    name: str
    seed: int
    reward_first: float
    reward_last: float
    held_out_first: float
    held_out_last: float
    gap_mean: float
    gap_p99: float
    gap_max: float
    kl: float
    mismatch: Mapping[str, SiteMismatch]
    coverage: float
    guard_rejections: int
    hint_bytes_per_token: int
    kv_bytes_per_token: int
    kv_bytes_per_token_bf16: int
    rollout_s: float
    record_s: float
    train_s: float
    push_s: float


def summarise(
    name: str, seed: int, records: Sequence[MetricsRecord], held_out: tuple[float, float]
) -> RunSummary:
    """Summarises the metrics of a run's steps.

    Args:
        name: Name of the run.
        seed: Its seed.
        records: Metrics of every step, as `rl_step` gives them.
        held_out: Held-out accuracy before the first step and after the last.

    Raises:
        ValueError: There is no step.
    """
    if not records:
        raise ValueError(f"run {name}, seed {seed}: no step to summarise")
    fifth = max(1, len(records) // 5)
    # A step of which every sample was left out has no gap.
    gaps = [record["gap"] for record in records if record["gap"]["num_tokens"]]
    tokens = [gap["num_tokens"] for gap in gaps]
    counts = _site_counts(records)
    return RunSummary(
        name=name,
        seed=seed,
        reward_first=_mean([record["reward"] for record in records[:fifth]]),
        reward_last=_mean([record["reward"] for record in records[-fifth:]]),
        held_out_first=held_out[0],
        held_out_last=held_out[1],
        gap_mean=_mean([gap["mean"] for gap in gaps], tokens),
        gap_p99=_mean([gap["p99"] for gap in gaps]),
        gap_max=max((gap["max"] for gap in gaps), default=math.nan),
        kl=_mean([gap["kl"] for gap in gaps], tokens),
        mismatch=_mismatch(records),
        coverage=ratio(
            counts["guided"],
            sum(counts[kind] for kind in ("guided", "rejected", "missing", "not_recorded")),
        ),
        guard_rejections=counts["rejected"],
        hint_bytes_per_token=records[-1]["hint_bytes_per_token"],
        kv_bytes_per_token=records[-1]["kv_bytes_per_token"],
        kv_bytes_per_token_bf16=records[-1]["kv_bytes_per_token_bf16"],
        **{
            f"{part}_s": sum(record["seconds"][part] for record in records)
            for part in ("rollout", "record", "train", "push")
        },
    )


def _mean(values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    weights = weights or [1.0] * len(values)
    return ratio(sum(v * w for v, w in zip(values, weights, strict=True)), sum(weights))


def ratio(part: float, whole: float) -> float:
    """Gives part / whole; NaN if whole is 0."""
    return part / whole if whole else math.nan


def _site_counts(records: Sequence[MetricsRecord]) -> dict[str, int]:
    rows = [
        of_site
        for record in records
        for site, of_site in record["quantisers"]["sites"].items()
        if site in DEFAULT_HINT_SITES or of_site["guided"] + of_site["rejected"]
    ]
    return {
        kind: sum(row[kind] for row in rows)
        for kind in ("guided", "rejected", "missing", "not_recorded")
    }


def _mismatch(records: Sequence[MetricsRecord]) -> dict[str, SiteMismatch]:
    found = {}
    for site in SITES:
        steps = [r["quantisers"]["code_mismatch"].get(site) for r in records]
        counts = {
            name: sum(step[name] for step in steps if step)
            for name in next((step for step in steps if step), {})
        }
        if counts:
            found[site] = SiteMismatch(
                nearest=ratio(counts["rtn_different"], counts["values"]),
                guided=ratio(counts["guided_different"], counts["guided_values"]),
                num_out_of_bracket=counts["out_of_bracket"],
                num_sign_flip=counts["sign_flip"],
                num_unexplained=counts["unexplained"],
            )
    return found
