"""What the folders of RL runs say about methods: numbers of each run, and pairs over seeds.

The definitions are those that docs/results.md fixed before the runs. Seeds are few, so intervals of
numbers over seeds are Student's t; what is measured on held-out problems is resampled in two
levels, seeds and problems, with the same draws for all methods.

Legend: R resamples, S seeds, E evaluations, N held-out problems.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_trace.rl.html_report.runs import find_runs
from megatron_trace.rl.html_report.spread import Spread, spread_of
from megatron_trace.study.method_runs import HELD_OUT_FILE, read_held_out
from megatron_trace.study.statistics import Interval, draws_of, interval

WINDOW = 10
DRIFT_FACTOR = 2.0
COLLAPSE_SHARE = 0.5
CATCH_UP_MARGIN = 0.01
# Numbers of a step that are kept, by their path in its record.
COLUMNS = (
    "reward",
    "gap.mean",
    "gap.p99",
    "gap.max",
    "gap.kl",
    "kl_old",
    "rho_asym",
    "entropy",
    "importance_ratio_std",
    "clipped_share",
    "grad_norm",
    "response_tokens",
    "health.code_mismatch",
    "health.nearest_mismatch",
    "health.router_disagreement",
    "health.guard_rejections",
    "health.saturation",
    "health.lag_mean",
    "health.lag_max",
    "groups_with_spread",
    "unfinished",
    "seconds.rollout",
    "seconds.train",
)


@dataclass(frozen=True)
class RunLog:
    """What is kept of a run.

    Attributes:
        name: Its name, the same for all seeds.
        seed: Its seed.
        status: How far it is, in words.
        is_whole: Whether it finished with all of its steps.
        steps: Its steps by name of the column, NaN where a step has no number.
        held_out: Evaluations: `step`, `served`, `solved` (a character 0 or 1 a problem).
        settings: Settings by dotted name.
        versions: Versions by name.
    """

    name: str
    seed: int
    status: str
    is_whole: bool
    steps: dict[str, list[float]]
    held_out: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        """Steps that it logged."""
        return len(self.steps["reward"])

    def without_lag(self) -> RunLog:
        """Gives the log of the steps whose samples are all of the policy that they train.

        With rollouts ahead of the training these are few, one for each time that the run drains.
        """
        lags = self.steps["health.lag_max"]
        kept = [row for row, lag in enumerate(lags) if lag == 0]
        return replace(
            self, steps={name: [column[row] for row in kept] for name, column in self.steps.items()}
        )

    @property
    def is_of_one_policy(self) -> bool:
        """Whether it moved no weight: its learning rate is 0."""
        return self.settings.get("optimizer.learning_rate") == 0.0

    def averaged(self) -> RunLog:
        """Gives the log with every number the mean over all steps, as of a fixed policy."""
        means = {name: [_mean(column)] * len(column) for name, column in self.steps.items()}
        return replace(self, steps=means)

    def solved(self, served: str = "") -> dict[int, NDArray[np.float64]]:
        """Gives which problems were solved, [N] of 0 or 1, by steps done.

        Args:
            served: Precision; empty for the one that the run is deployed in.
        """
        return {
            row["step"]: np.array([float(one) for one in row["solved"]])
            for row in self.held_out
            if row["served"] == served
        }


def logs_of_folders(work: Path) -> list[RunLog]:
    """Gives the runs below a folder, complete or not; those without a seed are left out."""
    return [
        RunLog(
            name=run.name,
            seed=run.seed,
            status=run.status + (f": {run.reason}" if run.reason else ""),
            is_whole=run.is_whole,
            steps={path: [_number(record, path) for record in run.records] for path in COLUMNS},
            held_out=read_held_out(run.folder / HELD_OUT_FILE),
            settings=run.settings,
            versions=run.versions,
        )
        for run in find_runs([work])
        if run.seed is not None
    ]


def _number(record: Any, path: str) -> float:
    """Gives a number of a step's record; the largest where it has one for each site; or NaN."""
    for name in path.split("."):
        record = record.get(name) if isinstance(record, dict) else None
    if isinstance(record, dict):
        found = [value for value in record.values() if isinstance(value, int | float)]
        return float(max(found, default=math.nan))
    return float(record) if isinstance(record, int | float) else math.nan


def save_logs(path: Path, logs: Iterable[RunLog]) -> None:
    """Writes one run a line, compressed; the same logs give the same bytes."""
    text = "".join(json.dumps(_rounded(asdict(log))) + "\n" for log in logs)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def load_logs(path: Path) -> list[RunLog]:
    """Reads what `save_logs` wrote; a column that it did not keep yet has no numbers."""
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    logs = [RunLog(**json.loads(line)) for line in lines]
    unknown = [dict.fromkeys(COLUMNS, [math.nan] * log.num_steps) for log in logs]
    return [replace(log, steps=none | log.steps) for log, none in zip(logs, unknown, strict=True)]


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(part) for part in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def trailing_means(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Gives the mean of each step and the ones before it, from the first full window on.

    Args:
        values: One a step; those that are NaN are left out of their windows.
        window: Steps of a window.

    Returns:
        One for each of the steps window - 1, window, and so on.
    """
    windows = (values[end - window : end] for end in range(window, len(values) + 1))
    return [_mean(one) for one in windows]


def drift_step(gaps: Sequence[float], *, window: int = WINDOW) -> int | None:
    """Gives the first step from which the gap is for good beyond twice that of the run's start.

    Args:
        gaps: Mean gap of each step.
        window: Steps of a window.

    Returns:
        The step at which the first such window ends; None if the last window is not beyond, or no
        two windows that do not overlap exist.
    """
    means = trailing_means(gaps, window)
    if len(means) <= window:
        return None
    found = None
    for step, mean in reversed(list(enumerate(means, start=window - 1))[window:]):
        if not mean > DRIFT_FACTOR * means[0]:
            break
        found = step
    return found


def collapse_step(rewards: Sequence[float], *, window: int = WINDOW) -> int | None:
    """Gives the first step at which the reward is below half of what it was at best.

    Args:
        rewards: Mean reward of each step.
        window: Steps of a window.
    """
    best = -math.inf
    for step, mean in enumerate(trailing_means(rewards, window), start=window - 1):
        if mean < COLLAPSE_SHARE * best:
            return step
        best = max(best, mean)
    return None


def fifth(values: Sequence[float], *, last: bool) -> float:
    """Gives the mean of the first or last fifth of the steps, at least one; NaN of no step."""
    size = max(1, len(values) // 5)
    return _mean(values[-size:] if last else values[:size])


def fifths(values: Sequence[float]) -> list[float]:
    """Gives the means of the five fifths of the steps, as even as they can be."""
    ends = [len(values) * part // 5 for part in range(6)]
    return [_mean(values[start:end]) for start, end in itertools.pairwise(ends)]


def _mean(values: Sequence[float]) -> float:
    found = [value for value in values if math.isfinite(value)]
    return math.fsum(found) / len(found) if found else math.nan


def paired_difference(
    method: Sequence[RunLog], other: Sequence[RunLog], column: str, *, last: bool = True
) -> Spread:
    """Gives method - other of a column's fifth over the seeds that both have."""
    return spread_of([a - b for a, b in pairs_of(method, other, column, last=last)])


def paired_log_ratio(
    method: Sequence[RunLog], other: Sequence[RunLog], column: str, *, last: bool = True
) -> Spread:
    """Gives log(method / other) of a column's fifth over the seeds that both have."""
    pairs = pairs_of(method, other, column, last=last)
    return spread_of([math.log(a / b) for a, b in pairs if a > 0 and b > 0])


def pairs_of(
    method: Sequence[RunLog], other: Sequence[RunLog], column: str, *, last: bool = True
) -> list[tuple[float, float]]:
    """Gives the fifths of a column of both, for each seed that both have finished."""
    by_seed = {log.seed: log for log in other if log.is_whole}
    return [
        (fifth(log.steps[column], last=last), fifth(by_seed[log.seed].steps[column], last=last))
        for log in method
        if log.is_whole and log.seed in by_seed
    ]


@dataclass(frozen=True)
class CatchUp:
    """When a method's policies are as good as another's for good.

    Attributes:
        step: Steps after which the held-out accuracy, mean over seeds, is never again more than
            `CATCH_UP_MARGIN` below the other's at the same step; None if it is at the end.
        low: 2.5th percentile of the resamples; None is never.
        high: 97.5th percentile; None is never.
        num_seeds: Pairs of runs.
    """

    step: int | None
    low: int | None
    high: int | None
    num_seeds: int


def catch_up(method: Sequence[RunLog], other: Sequence[RunLog]) -> CatchUp | None:
    """Gives when a method catches up; None if no pair of finished runs was evaluated alike."""
    paired = _paired_solved(method, other)
    if paired is None:
        return None
    steps, differences = paired
    curves = _two_level(differences)
    behind = curves < -CATCH_UP_MARGIN
    # Index of the first evaluation after the last one that is behind; E is never.
    indices = np.where(
        behind.any(axis=1),
        len(steps) - behind[:, ::-1].argmax(axis=1),
        0,
    )
    low, high = np.percentile(indices[1:], [2.5, 97.5], method="inverted_cdf")
    named = [*steps, None]
    return CatchUp(named[int(indices[0])], named[int(low)], named[int(high)], differences.shape[0])


def held_out_accuracy(logs: Sequence[RunLog], *, last: bool, served: str = "") -> Interval | None:
    """Gives the accuracy after the last evaluation, or at the first; None if there is none.

    Args:
        logs: Runs of one name.
        last: Whether after all steps.
        served: Precision, where it is not the one that the runs are deployed in.
    """
    found = [log.solved(served) for log in logs if log.is_whole]
    rows = [solved[(max if last else min)(solved)] for solved in found if solved]
    return interval(_two_level(np.stack(rows)[:, None])[:, 0]) if rows else None


def held_out_difference(
    method: Sequence[RunLog], other: Sequence[RunLog], *, served_other: str = ""
) -> Interval | None:
    """Gives the final accuracy of a method minus another's, on the same problems and seeds."""
    paired = _paired_solved(method, other, served_other)
    return None if paired is None else interval(_two_level(paired[1][:, -1:])[:, 0])


def held_out_differences(
    method: Sequence[RunLog], other: Sequence[RunLog], *, served_other: str = ""
) -> list[float]:
    """Gives `held_out_difference` of each seed alone."""
    paired = _paired_solved(method, other, served_other)
    return [] if paired is None else paired[1][:, -1].mean(axis=1).tolist()


def held_out_change(
    logs: Sequence[RunLog], other: Sequence[RunLog] | None = None
) -> Interval | None:
    """Gives the accuracy after all steps minus that at the first evaluation, of the same runs.

    Args:
        logs: Runs of one name.
        other: Runs of another, whose change on the same problems and seeds is subtracted.
    """
    changes = _changes(logs, other)
    return interval(_two_level(np.stack(changes)[:, None])[:, 0]) if changes else None


def held_out_changes(logs: Sequence[RunLog], other: Sequence[RunLog] | None = None) -> list[float]:
    """Gives `held_out_change` of each seed alone."""
    return [float(change.mean()) for change in _changes(logs, other)]


def _changes(logs: Sequence[RunLog], other: Sequence[RunLog] | None) -> list[NDArray[np.float64]]:
    mine = {log.seed: _change(log) for log in logs if log.is_whole and log.solved()}
    if other is None:
        return list(mine.values())
    theirs = {log.seed: _change(log) for log in other if log.is_whole and log.solved()}
    return [mine[seed] - theirs[seed] for seed in mine if seed in theirs]


def _change(log: RunLog) -> NDArray[np.float64]:
    solved = log.solved()
    return solved[max(solved)] - solved[min(solved)]


def _paired_solved(
    method: Sequence[RunLog], other: Sequence[RunLog], served_other: str = ""
) -> tuple[list[int], NDArray[np.float64]] | None:
    """Gives the steps of evaluations that all have, and method - other, [S, E, N]."""
    by_seed = {log.seed: log for log in other if log.is_whole}
    pairs = [
        (log.solved(), by_seed[log.seed].solved(served_other))
        for log in method
        if log.is_whole and log.seed in by_seed
    ]
    shared = [set(mine) & set(theirs) for mine, theirs in pairs]
    steps = sorted(set.intersection(*shared)) if shared else []
    if not steps:
        return None
    return steps, np.stack(
        [np.stack([mine[step] - theirs[step] for step in steps]) for mine, theirs in pairs]
    )


def _two_level(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Gives means over seeds and problems of [S, E, N] for all draws: [1 + R, E]."""
    seeds, _, problems = values.shape
    seed_draws = draws_of(seeds, seed=1)
    problem_draws = draws_of(problems, seed=2)
    sums = np.einsum("rs,rn,sen->re", seed_draws, problem_draws, values, optimize=True)
    return sums / (seeds * problems)
