"""One figure a study: layers kept, mismatch by depth, gap by position, dose of noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_trace.study.cells import ALL_SITES, NOISES
from megatron_trace.study.results import StudyResult
from megatron_trace.study.statistics import Interval, draws_of, gap_of, gap_ratio
from megatron_trace.study.tables import depth_curve, position_curves

# Darker and lighter of one hue for related lines; distinguishable in grey.
COLOURS = ("#4053d3", "#ddb310", "#b51d14", "#00beff", "#00b25d")


def save_plots(result: StudyResult, path: Path) -> Path | None:
    """Draws the figure into a PNG; gives its path, or None if there is nothing to draw."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    drawn = [
        _layers(axes[0][0], result),
        _depth(axes[0][1], result),
        _positions(axes[1][0], result),
        _doses(axes[1][1], result),
    ]
    if not any(drawn):
        return None
    figure.savefig(path, dpi=85)
    return path


def _line(axes: Any, points: dict[float, Interval], label: str, colour: str, style: str) -> bool:
    if not points:
        return False
    xs = list(points)
    axes.plot(xs, [points[x].value for x in xs], style, label=label, color=colour, markersize=4)
    axes.fill_between(
        xs, [points[x].low for x in xs], [points[x].high for x in xs], color=colour, alpha=0.15
    )
    return True


def _layers(axes: Any, result: StudyResult) -> bool:
    drawn = False
    for dtype, style in (("bf16", "o-"), ("fp32", "s--")):
        qat = result.cells.get(f"method/qat/{dtype}")
        if qat is None:
            continue
        draws = draws_of(len(qat.rows), num_resamples=300)
        for end, colour in (("latter", COLOURS[0]), ("first", COLOURS[2])):
            points = {
                100 * share: gap_ratio(cell.rows, qat.rows, draws)
                for share in (0.125, 0.25, 0.5, 1.0)
                if (cell := result.cells.get(f"layers/{end}-{share:g}/{dtype}"))
            }
            drawn |= _line(axes, points, f"{end}, {dtype} trainer", colour, style)
    axes.set(xlabel="% of the layers guided", ylabel="gap / gap of qat", title="Layers kept")
    axes.set_ylim(bottom=0)
    return _legend(axes, drawn)


def _depth(axes: Any, result: StudyResult) -> bool:
    drawn = False
    for name, style in (("method/qat/bf16", "o-"), ("method/qat/fp32", "s--")):
        cell = result.cells.get(name)
        if cell is None:
            continue
        for site, colour in zip(ALL_SITES, COLOURS, strict=False):
            points = {
                float(layer): found
                for layer, found in depth_curve(cell, site, "rtn_different", "values").items()
                if found.low > 0  # The axis is logarithmic.
            }
            label = f"{site}, {name.rpartition('/')[2]} trainer"
            drawn |= _line(axes, points, label, colour, style)
    axes.set(xlabel="decoder layer", ylabel="share of codes", title="Other codes under qat")
    axes.set_yscale("log")
    return _legend(axes, drawn)


def _positions(axes: Any, result: StudyResult) -> bool:
    drawn = False
    for (method, curve), colour in zip(position_curves(result).items(), COLOURS, strict=False):
        points = {float(max(at, 8)): found for at, found in curve.items()}
        drawn |= _line(axes, points, method, colour, "o-")
    axes.set(xlabel="position of the token", ylabel="mean gap (nats)", title="Position")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    return _legend(axes, drawn)


def _doses(axes: Any, result: StudyResult) -> bool:
    drawn = False
    for kind, style in (("activations", "o-"), ("weights", "s--")):
        for method, colour in (
            ("qat", COLOURS[2]),
            ("trace", COLOURS[0]),
            ("full-codes", COLOURS[4]),
        ):
            points = {
                size: gap_of(cell.rows, draws_of(len(cell.rows), num_resamples=300)).mean
                for size in NOISES
                if (cell := result.cells.get(f"noise/{kind}-{size:g}/{method}"))
            }
            drawn |= _line(axes, points, f"{method}, noise on {kind}", colour, style)
    axes.set(
        xlabel="relative noise in the trainer", ylabel="mean gap (nats)", title="Dose of noise"
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    return _legend(axes, drawn)


def _legend(axes: Any, drawn: bool) -> bool:
    if drawn:
        axes.legend(fontsize=7)
    return drawn
