"""The page of a comparison of methods: tables in Markdown, made from the logs alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from megatron_trace.rl.html_report.spread import Spread, spread_of
from megatron_trace.study.comparison import (
    RunLog,
    catch_up,
    collapse_step,
    drift_step,
    fifth,
    fifths,
    held_out_accuracy,
    held_out_change,
    held_out_changes,
    held_out_difference,
    held_out_differences,
    paired_difference,
    paired_log_ratio,
    pairs_of,
)
from megatron_trace.study.statistics import Interval

REFERENCE, BASELINE = "bf16", "qat"
FP4 = "NVFP4 W4A4 + KV4"
_NOTES = """
Definitions and hypotheses: [results.md](../results.md), written before the runs. Numbers in
brackets and behind ± are 95 % intervals: held-out accuracy by resampling seeds and problems, the
others by Student's t over seeds. First and last are the first and last fifth of the steps. Only
finished runs count in numbers; *drift* and *collapse* name the step in each seed, also of runs that
ended early.
""".strip()
_FIXED = (
    "The policy is fixed (learning rate 0): first, last and each fifth are means over all steps."
)


def write_page(path: Path, title: str, logs: Sequence[RunLog], *, command: str) -> None:
    """Writes the page.

    Args:
        path: Markdown file.
        title: Its heading.
        logs: All runs.
        command: What makes the runs.
    """
    parts = [f"# {title}", _NOTES, _origin(logs, command)]
    if all(log.is_of_one_policy for log in logs):
        logs = [log.averaged() for log in logs]
        parts.insert(2, _FIXED)
    for suffix in dict.fromkeys(_suffix(log.name) for log in logs):
        chosen = [log for log in logs if _suffix(log.name) == suffix]
        if suffix:
            parts.append(f"## Trainer perturbed by {suffix.removeprefix('-perturb-')}")
        groups = _groups(chosen)
        parts += [
            f"### Methods\n\n{_methods(groups, suffix)}",
            f"### Gap between rollout and training\n\n{_gaps(groups, suffix)}",
        ]
        if any(log.is_whole for log in chosen):
            parts.append(f"### Over the run\n\n{_over_the_run(groups)}\n\n{_evaluations(groups)}")
        if len(groups) > 1:
            parts.append(f"### Pairs, and each seed alone\n\n{_pairs(groups)}")
        if any(lag > 0 for log in chosen for lag in log.steps["health.lag_max"]):
            parts.append(f"### Steps without lag\n\n{_without_lag(groups, suffix)}")
        if f"{REFERENCE}{suffix}" in groups:
            parts.append(f"### Final policies served in {FP4}\n\n{_served(groups, suffix)}")
    parts.append(f"## Runs\n\n{_runs(logs)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(parts) + "\n")


def _suffix(name: str) -> str:
    _, found, size = name.partition("-perturb-")
    return found + size


def _groups(logs: Sequence[RunLog]) -> dict[str, list[RunLog]]:
    groups: dict[str, list[RunLog]] = {}
    for log in sorted(logs, key=lambda log: log.seed):
        groups.setdefault(log.name, []).append(log)
    return groups


def _methods(groups: dict[str, list[RunLog]], suffix: str) -> str:
    reference = groups.get(f"{REFERENCE}{suffix}", [])
    head = (
        "method",
        "runs",
        "reward, first",
        "reward, last",
        "held-out, before",
        "held-out, after",
        "after, minus before",
        "after, minus bf16's",
        "drift at step",
        "collapse at step",
        "caught up with bf16 after",
    )
    rows = []
    for name, logs in groups.items():
        whole = [log for log in logs if log.is_whole]
        is_other = name != f"{REFERENCE}{suffix}"
        rows.append(
            (
                name,
                f"{len(whole)} of {len(logs)}",
                _over_seeds(whole, "reward", last=False),
                _over_seeds(whole, "reward", last=True),
                _interval(held_out_accuracy(logs, last=False)),
                _interval(held_out_accuracy(logs, last=True)),
                _interval(held_out_change(logs)),
                _interval(held_out_difference(logs, reference)) if is_other else "-",
                _steps(logs, "gap.mean", drift_step),
                _steps(logs, "reward", collapse_step),
                _catch_up(logs, reference) if is_other else "-",
            )
        )
    return _table(head, rows)


def _gaps(groups: dict[str, list[RunLog]], suffix: str) -> str:
    baseline = groups.get(f"{BASELINE}{suffix}", [])
    head = (
        "method",
        "gap, first (nats)",
        "gap, last (nats)",
        "gap / qat's, last",
        "p99, last",
        "KL, last",
        "rho_asym, last",
        "rho_asym, minus qat's",
        "importance ratio's spread, last",
        "codes that differ, to nearest, last",
        "router disagreement, last",
    )
    rows = []
    for name, logs in groups.items():
        whole = [log for log in logs if log.is_whole]
        is_other = name != f"{BASELINE}{suffix}"
        rows.append(
            (
                name,
                _over_seeds(whole, "gap.mean", last=False),
                _over_seeds(whole, "gap.mean", last=True),
                _ratio(paired_log_ratio(logs, baseline, "gap.mean")) if is_other else "1",
                _over_seeds(whole, "gap.p99", last=True),
                _over_seeds(whole, "gap.kl", last=True),
                _over_seeds(whole, "rho_asym", last=True),
                _spread(paired_difference(logs, baseline, "rho_asym")) if is_other else "-",
                _over_seeds(whole, "importance_ratio_std", last=True),
                _over_seeds(whole, "health.nearest_mismatch", last=True),
                _over_seeds(whole, "health.router_disagreement", last=True),
            )
        )
    return _table(head, rows)


def _over_the_run(groups: dict[str, list[RunLog]]) -> str:
    """Gives the gap of each fifth of the steps."""
    rows = []
    for name, logs in groups.items():
        by_seed = [fifths(log.steps["gap.mean"]) for log in logs if log.is_whole]
        if by_seed:
            rows.append((name, *(_spread(spread_of(part)) for part in zip(*by_seed, strict=True))))
    return _table(("gap (nats)", *(f"fifth {part} of the steps" for part in range(1, 6))), rows)


def _evaluations(groups: dict[str, list[RunLog]]) -> str:
    """Gives the held-out accuracy after each number of steps, mean over seeds and problems."""
    solved = {name: [log.solved() for log in logs if log.is_whole] for name, logs in groups.items()}
    steps = sorted({step for found in solved.values() for of_seed in found for step in of_seed})
    rows = []
    for name, found in solved.items():
        answers = [[of_seed[step] for of_seed in found if step in of_seed] for step in steps]
        if any(answers):
            cells = (f"{np.concatenate(one).mean():.3f}" if one else "-" for one in answers)
            rows.append((name, *cells))
    return _table(("held-out after", *(f"{step} steps" for step in steps)), rows)


def _pairs(groups: dict[str, list[RunLog]]) -> str:
    head = ("pair", "gap, last", "reward, last", "held-out, after", "held-out, after minus before")
    rows = []
    for name, logs in groups.items():
        for other, others in groups.items():
            if name <= other:
                continue
            gaps = _quotients(pairs_of(logs, others, "gap.mean"))
            rewards = [mine - theirs for mine, theirs in pairs_of(logs, others, "reward")]
            rows.append(
                (
                    f"{name}, {other}",
                    f"× {_ratio(paired_log_ratio(logs, others, 'gap.mean'))}{_each(gaps, '.3g')}",
                    f"{_spread(paired_difference(logs, others, 'reward'))}{_each(rewards)}",
                    f"{_interval(held_out_difference(logs, others))}"
                    f"{_each(held_out_differences(logs, others))}",
                    f"{_interval(held_out_change(logs, others))}"
                    f"{_each(held_out_changes(logs, others))}",
                )
            )
    return _table(head, rows)


def _quotients(pairs: Sequence[tuple[float, float]]) -> list[float]:
    return [one / other for one, other in pairs if other > 0]


def _each(values: Sequence[float], form: str = "+.3f") -> str:
    return "; " + " / ".join(format(value, form) for value in values) if values else ""


def _without_lag(groups: dict[str, list[RunLog]], suffix: str) -> str:
    """Gives what the arithmetic alone does: these gaps have no part of an older policy."""
    fresh = {
        name: [log.without_lag() for log in logs if log.is_whole] for name, logs in groups.items()
    }
    baseline = fresh.get(f"{BASELINE}{suffix}", [])
    head = (
        "method",
        "lag, last (versions)",
        "steps without lag",
        "their gap, first fifth (nats)",
        "last fifth",
        "last / first",
        "last fifth / qat's",
    )
    rows = []
    for name, logs in fresh.items():
        gaps = [log.steps["gap.mean"] for log in logs]
        grown = _quotients([(fifth(gap, last=True), fifth(gap, last=False)) for gap in gaps])
        ratios = _quotients(pairs_of(logs, baseline, "gap.mean"))
        compared = f"{_ratio(paired_log_ratio(logs, baseline, 'gap.mean'))}{_each(ratios, '.3g')}"
        lags = [fifth(log.steps["health.lag_mean"], last=True) for log in groups[name]]
        rows.append(
            (
                name,
                _spread(spread_of(lags)),
                " / ".join(str(log.num_steps) for log in logs) or "-",
                _over_seeds(logs, "gap.mean", last=False),
                _over_seeds(logs, "gap.mean", last=True),
                _each(grown, ".3g").removeprefix("; ") or "-",
                compared if name != f"{BASELINE}{suffix}" else "1",
            )
        )
    return _table(head, rows)


def _served(groups: dict[str, list[RunLog]], suffix: str) -> str:
    reference = groups[f"{REFERENCE}{suffix}"]
    quantised = _interval(held_out_accuracy(reference, last=True, served=FP4))
    rows = [("bf16, quantised to nearest after RL", quantised, "-")]
    for name, logs in groups.items():
        # Compensated activations are another precision than the one compared here.
        if name not in (f"{REFERENCE}{suffix}", f"quads{suffix}"):
            accuracy = held_out_accuracy(logs, last=True)
            difference = _interval(held_out_difference(logs, reference, served_other=FP4))
            each = _each(held_out_differences(logs, reference, served_other=FP4))
            rows.append((name, _interval(accuracy), difference + each))
    return _table(("policy", "held-out", "minus the first row"), rows)


def _origin(logs: Sequence[RunLog], command: str) -> str:
    versions: dict[str, set[str]] = {}
    for log in logs:
        for name, version in log.versions.items():
            versions.setdefault(name, set()).add(version)
    told = "; ".join(f"{name} {', '.join(sorted(found))}" for name, found in versions.items())
    return f"`{command}`\n\n{told}"


def _runs(logs: Sequence[RunLog]) -> str:
    rows = [(log.name, str(log.seed), log.status) for log in logs]
    return _table(("run", "seed", "how it ended"), rows)


def _steps(
    logs: Sequence[RunLog], column: str, step_of: Callable[[Sequence[float]], int | None]
) -> str:
    found = [step_of(log.steps[column]) for log in logs]
    return " / ".join("no" if step is None else str(step) for step in found)


def _catch_up(logs: Sequence[RunLog], reference: Sequence[RunLog]) -> str:
    found = catch_up(logs, reference)
    if found is None:
        return "-"
    step, low, high = (
        "never" if s is None else str(s) for s in (found.step, found.low, found.high)
    )
    return f"{step} [{low}, {high}]"


def _over_seeds(logs: Sequence[RunLog], column: str, *, last: bool) -> str:
    return _spread(spread_of([fifth(log.steps[column], last=last) for log in logs]))


def _spread(spread: Spread) -> str:
    if not spread.num_seeds:
        return "-"
    half = "" if math.isnan(spread.half_width) else f" ± {spread.half_width:.2g}"
    return f"{spread.mean:.3g}{half}"


def _ratio(spread: Spread) -> str:
    if not spread.num_seeds:
        return "-"
    if math.isnan(spread.half_width):
        return f"{math.exp(spread.mean):.3g}"
    low, high = (math.exp(spread.mean + sign * spread.half_width) for sign in (-1, 1))
    return f"{math.exp(spread.mean):.3g} [{low:.3g}, {high:.3g}]"


def _interval(found: Interval | None) -> str:
    return "-" if found is None else f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
