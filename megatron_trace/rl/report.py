"""RL runs side by side: a table, the ratio of their gaps, a figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from megatron_trace.rl.summary import SITES, MetricsRecord, RunSummary, ratio


def format_table(runs: Sequence[RunSummary]) -> str:
    """Gives a table of one column per run and one line per quantity."""
    sites = _compared_sites(runs)
    lines: list[tuple[str, Callable[[RunSummary], str]]] = [
        ("reward, first / last fifth of steps", lambda r: _pair(r.reward_first, r.reward_last)),
        ("held-out accuracy, before / after", lambda r: _pair(r.held_out_first, r.held_out_last)),
        ("|log-prob gap| mean", lambda r: _small(r.gap_mean)),
        ("|log-prob gap| p99", lambda r: _small(r.gap_p99)),
        ("|log-prob gap| max", lambda r: _small(r.gap_max)),
        ("KL(rollout, train) per token", lambda r: _small(r.kl)),
        *[
            (f"code mismatch {site}, as trained", partial(_mismatch, site=site, share="as_trained"))
            for site in sites
        ],
        *[
            (f"code mismatch {site}, to nearest", partial(_mismatch, site=site, share="nearest"))
            for site in sites
        ],
        ("out of bracket / sign flip / other", _causes),
        ("hint coverage", lambda r: f"{r.coverage:.3f}" if r.hint_bytes_per_token else "-"),
        ("guard rejections", lambda r: str(r.guard_rejections) if r.hint_bytes_per_token else "-"),
        ("hint bytes / token", lambda r: str(r.hint_bytes_per_token or "-")),
        (
            "KV bytes / token, BF16 / this run",
            lambda r: f"{r.kv_bytes_per_token_bf16} / {r.kv_bytes_per_token}",
        ),
        (
            "seconds in rollout / record / train",
            lambda r: f"{r.rollout_s:.0f} / {r.record_s:.1f} / {r.train_s:.0f}",
        ),
    ]
    cells = [["", *(run.name for run in runs)]]
    cells += [[label, *(show(run) for run in runs)] for label, show in lines]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )


def _compared_sites(runs: Sequence[RunSummary]) -> list[str]:
    return [site for site in SITES if any(site in run.mismatch for run in runs)]


def _pair(first: float, last: float) -> str:
    return f"{first:.3f} / {last:.3f}"


def _small(value: float) -> str:
    return f"{value:.2e}"


def _mismatch(run: RunSummary, *, site: str, share: str) -> str:
    return _small(getattr(run.mismatch[site], share)) if site in run.mismatch else "-"


def _causes(run: RunSummary) -> str:
    guided = [found for found in run.mismatch.values() if found.is_guided]
    if not guided:
        return "-"
    kinds = ("num_out_of_bracket", "num_sign_flip", "num_unexplained")
    return " / ".join(str(sum(getattr(found, kind) for found in guided)) for kind in kinds)


def format_ratios(runs: Sequence[RunSummary], *, baseline: str, guided: Sequence[str]) -> str:
    """Gives the gap of guided runs as a share of the baseline's, for every seed.

    Args:
        runs: Summaries of all seeds.
        baseline: Name of the run to compare with.
        guided: Names of the runs to compare.

    Returns:
        One line per guided run and seed; no line where one of the two is missing.
    """
    by_place = {(run.name, run.seed): run for run in runs}
    lines = []
    for name in guided:
        for seed in sorted({run.seed for run in runs}):
            run, other = by_place.get((name, seed)), by_place.get((baseline, seed))
            if run and other:
                lines.append(
                    f"gap {name} / gap {baseline}, seed {seed}: "
                    f"mean {ratio(run.gap_mean, other.gap_mean):.4f}, "
                    f"p99 {ratio(run.gap_p99, other.gap_p99):.4f}"
                )
    return "\n".join(lines)


def save_figure(
    path: str | Path, runs: Sequence[RunSummary], records: Mapping[str, Sequence[MetricsRecord]]
) -> None:
    """Draws gap and reward over the steps, and the code mismatch per site, into a PNG.

    Args:
        path: File to write.
        runs: Summaries of one seed.
        records: Metrics of every step, by name of the run.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.3), layout="constrained")
    FigureCanvasAgg(figure)
    gap_axes, reward_axes, mismatch_axes = figure.subplots(1, 3)
    width = 0.8 / len(runs)
    sites = _compared_sites(runs)
    for number, run in enumerate(runs):
        style = {"color": f"C{number}", "label": run.name}
        gaps = [record["gap"]["mean"] for record in records[run.name]]
        gap_axes.plot([math.nan if gap is None else gap for gap in gaps], **style)
        reward_axes.plot([record["reward"] for record in records[run.name]], **style)
        places = [place for place, site in enumerate(sites) if site in run.mismatch]
        shares = [run.mismatch[sites[place]].as_trained for place in places]
        lefts = [place + (number - (len(runs) - 1) / 2) * width for place in places]
        bars = mismatch_axes.bar(lefts, shares, width, **style)
        mismatch_axes.bar_label(bars, [f"{s:.0e}" if s else "0" for s in shares], fontsize=7)
    if any((record["gap"]["mean"] or 0) > 0 for steps in records.values() for record in steps):
        gap_axes.set_yscale("log")
    gap_axes.set(
        title="mean |log-prob gap|, rollout against training", xlabel="step", ylabel="nats"
    )
    reward_axes.set(title="mean reward of the samples", xlabel="step", ylim=(0, 1))
    mismatch_axes.set(title="share of codes that differ from the rollout's")
    mismatch_axes.set_xticks(range(len(sites)), sites)
    figure.legend(
        *gap_axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(runs)
    )
    figure.savefig(path, dpi=110)
