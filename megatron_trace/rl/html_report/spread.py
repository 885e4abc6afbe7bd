"""Repetitions of a run under other seeds: means over them, and intervals.

An interval is that of Student's t at 95 %: with two or three seeds it is wide, and rightly so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_trace.rl.html_report.measures import Curve
from megatron_trace.rl.html_report.runs import RunFolder

LEVEL = 0.95


@dataclass(frozen=True)
class Spread:
    """A number over seeds.

    Attributes:
        mean: Mean of those that have it; NaN if none has.
        half_width: Half of the confidence interval of the mean; NaN with fewer than two seeds.
        num_seeds: How many have it.
    """

    mean: float
    half_width: float
    num_seeds: int


@dataclass(frozen=True)
class Group:
    """Runs of one name, under different seeds.

    Attributes:
        name: The name.
        runs: Its runs.
    """

    name: str
    runs: tuple[RunFolder, ...]

    @property
    def has_steps(self) -> bool:
        """Whether any of its runs logged a step."""
        return any(run.records for run in self.runs)


@dataclass(frozen=True)
class Point:
    """A curve at one step.

    Attributes:
        step: The step.
        mean: Mean over the runs that have it there.
        low: The smallest of them.
        high: The largest of them.
        num_runs: How many they are.
    """

    step: int
    mean: float
    low: float
    high: float
    num_runs: int


def groups_of(runs: Sequence[RunFolder]) -> list[Group]:
    """Gives the runs by name, in the order in which names first come."""
    by_name: dict[str, list[RunFolder]] = {}
    for run in runs:
        by_name.setdefault(run.name, []).append(run)
    return [Group(name, tuple(same)) for name, same in by_name.items()]


def spread_of(values: Sequence[float]) -> Spread:
    """Gives mean and interval of one number per seed; those that are NaN count as missing."""
    found = [value for value in values if math.isfinite(value)]
    if not found:
        return Spread(math.nan, math.nan, 0)
    mean = _mean(found)
    if len(found) < 2:
        return Spread(mean, math.nan, 1)
    # Squares of what a collapsed run logs may be beyond FP64; `hypot` takes none.
    distance = math.hypot(*(value - mean for value in found))
    error = distance / math.sqrt((len(found) - 1) * len(found))
    return Spread(mean, _t(len(found) - 1) * error, len(found))


def points_of(group: Group, curve: Curve) -> list[Point]:
    """Gives a curve over the steps at which at least one run has a value."""
    by_step: dict[int, list[float]] = {}
    for run in group.runs:
        for record in run.records:
            value = curve.of(record)
            if math.isfinite(value):
                by_step.setdefault(int(record["step"]), []).append(value)
    return [
        Point(step, _mean(found), min(found), max(found), len(found))
        for step, found in sorted(by_step.items())
    ]


def mean_of_last_fifth(run: RunFolder, curve: Curve) -> float:
    """Gives the mean of a curve over the last fifth of the run's steps, at least one; or NaN."""
    last = run.records[-max(1, len(run.records) // 5) :]
    found = [value for record in last if math.isfinite(value := curve.of(record))]
    return _mean(found) if found else math.nan


def mean_of_all(run: RunFolder, curve: Curve) -> float:
    """Gives the mean of a curve over all steps of the run; or NaN."""
    found = [value for record in run.records if math.isfinite(value := curve.of(record))]
    return _mean(found) if found else math.nan


def _mean(values: Sequence[float]) -> float:
    """Gives the mean, also of values whose sum is beyond FP64."""
    return math.fsum(value / len(values) for value in values)


def _t(degrees: int) -> float:
    # Only here: it is slow to import, and a report of single runs needs it not.
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 0.5 + LEVEL / 2))
