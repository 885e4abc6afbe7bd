"""One curve of several groups of runs as inline SVG, whose colours the page's style gives.

A line is the mean over a group's runs, a band reaches from the smallest to the largest of them.
Lines also differ in their dashes, so that they can be told apart in grey.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from megatron_trace.rl.html_report.measures import Curve
from megatron_trace.rl.html_report.spread import Point

NUM_COLOURS = 8
DASHES = ("", "7 3", "2 2", "9 3 2 3")
_WIDTH, _HEIGHT = 380, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 12, 10, 32
_MOST_POINTS, _MOST_MARKS = 400, 40
# Below this quotient of its ends, a logarithmic axis would have hardly a tick.
_LEAST_LOG_SPAN = 20.0


@dataclass(frozen=True)
class _Axis:
    """An axis: where values lie on it, 0 to 1, and its ticks with their labels."""

    place: Callable[[float], float]
    ticks: Sequence[tuple[float, str]]


def line_style(number: int) -> str:
    """Gives the attributes of the lines of a group."""
    dash = DASHES[(number + number // NUM_COLOURS) % len(DASHES)]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'class="line c{number % NUM_COLOURS}"{dashes}'


def chart(curve: Curve, lines: Sequence[tuple[str, list[Point]]], last_step: int) -> str:
    """Gives the SVG of one curve.

    Args:
        curve: What is drawn.
        lines: Name and points of every group, without points where it has no such number.
        last_step: Right end of the axis of steps, the same for all charts.

    Returns:
        The element; empty if no group has a point.
    """
    values = [v for _, points in lines for p in points for v in (p.low, p.high)]
    if not values:
        return ""
    y_axis, x_axis = _value_axis(curve, values), _step_axis(last_step)
    parts = [*_grid(x_axis, y_axis)]
    for number, (name, points) in enumerate(lines):
        parts += _group(number, name, _thinned(points), curve, x_axis, y_axis)
    label = f"{curve.title}{f' in {curve.unit}' if curve.unit else ''} over the steps"
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">'
        + "".join(parts)
        + "</svg>"
    )


def number_text(value: float) -> str:
    """Gives a number with three significant digits, as short as it goes; – for NaN."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        digits = max(0, 2 - math.floor(math.log10(abs(value))))
        text = f"{value:.{digits}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def _group(
    number: int, name: str, points: list[Point], curve: Curve, x_axis: _Axis, y_axis: _Axis
) -> Iterator[str]:
    def at(step: int, value: float) -> str:
        return f"{_x(x_axis.place(step)):.1f},{_y(y_axis.place(value)):.1f}"

    for run in _unbroken(points):
        if any(point.num_runs > 1 for point in run):
            edge = [at(p.step, p.high) for p in run] + [at(p.step, p.low) for p in reversed(run)]
            colour = number % NUM_COLOURS
            yield f'<polygon class="band c{colour}" points="{" ".join(edge)}"/>'
        middle = " ".join(at(p.step, p.mean) for p in run)
        yield f'<polyline {line_style(number)} points="{middle}"/>'
    every = max(1, math.ceil(len(points) / _MOST_MARKS))
    last = len(points) - 1
    for place, point in enumerate(points):
        if place % every and place != last:
            continue
        x, y = at(point.step, point.mean).split(",")
        spread = (
            f" ({number_text(point.low)} to {number_text(point.high)}, {point.num_runs} seeds)"
            if point.num_runs > 1
            else ""
        )
        told = f"{name}, step {point.step}: {number_text(point.mean)}{spread} {curve.unit}".strip()
        lone = " lone" if len(points) == 1 else ""
        yield (
            f'<circle class="mark c{number % NUM_COLOURS}{lone}" cx="{x}" cy="{y}" r="3">'
            f"<title>{escape(told)}</title></circle>"
        )


def _unbroken(points: list[Point]) -> Iterator[list[Point]]:
    """Yields stretches of points that follow each other as closely as points do elsewhere."""
    usual = min((b.step - a.step for a, b in itertools.pairwise(points)), default=1)
    stretch: list[Point] = []
    for point in points:
        if stretch and point.step - stretch[-1].step > usual:
            yield stretch
            stretch = []
        stretch.append(point)
    if stretch:
        yield stretch


def _thinned(points: list[Point]) -> list[Point]:
    """Merges neighbours of a long curve: mean of means, smallest and largest."""
    every = math.ceil(len(points) / _MOST_POINTS)
    if every <= 1:
        return points
    parts = [points[first : first + every] for first in range(0, len(points), every)]
    return [
        Point(
            part[0].step,
            math.fsum(p.mean for p in part) / len(part),
            min(p.low for p in part),
            max(p.high for p in part),
            max(p.num_runs for p in part),
        )
        for part in parts
    ]


def _grid(x_axis: _Axis, y_axis: _Axis) -> Iterator[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    for value, label in y_axis.ticks:
        y = _y(y_axis.place(value))
        yield f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        place = f'x="{_LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end"'
        yield f'<text class="tick" {place}>{label}</text>'
    for value, label in x_axis.ticks:
        x = _x(x_axis.place(value))
        yield f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>'
        yield (
            f'<text class="tick" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{label}</text>'
        )
    yield f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>'
    yield f'<text class="tick" x="{right}" y="{bottom + 28}" text-anchor="end">step</text>'


def _x(place: float) -> float:
    return _LEFT + place * (_WIDTH - _LEFT - _RIGHT)


def _y(place: float) -> float:
    return _HEIGHT - _BOTTOM - place * (_HEIGHT - _TOP - _BOTTOM)


def _step_axis(last_step: int) -> _Axis:
    end = max(last_step, 1)
    step = max(1, round(_nice_step(end / 5)))
    ticks = [(float(at), str(at)) for at in range(0, end + 1, step)]
    return _Axis(lambda value: value / end, ticks)


def _value_axis(curve: Curve, values: Sequence[float]) -> _Axis:
    positive = [value for value in values if value > 0]
    wants_log = curve.axis == "log" and positive
    if wants_log and max(positive) > _LEAST_LOG_SPAN * min(positive):
        return _log_axis(positive, has_zero=len(positive) < len(values))
    low, high = min(values), max(values)
    if 0 < low < high / 2 or curve.axis != "linear":
        low = min(low, 0.0)
    if high == low:
        low, high = low - (abs(low) / 2 or 0.5) * (low != 0), high + (abs(high) / 2 or 0.5)
    step = _nice_step((high - low) / 4)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    start, span = first * step, (last - first) * step
    ticks = [(n * step, number_text(round(n * step, 12))) for n in range(first, last + 1)]
    return _Axis(lambda value: (value - start) / span, ticks)


def _log_axis(positive: Sequence[float], *, has_zero: bool) -> _Axis:
    """Gives an axis of decades; below the least, 0 has a place of its own."""
    first = math.floor(math.log10(min(positive)) + 1e-9)
    last = max(math.ceil(math.log10(max(positive)) - 1e-9), first + 1)
    bottom = first - (1 if has_zero else 0)

    def place(value: float) -> float:
        exponent = math.log10(value) if value > 0 else bottom
        return (exponent - bottom) / (last - bottom)

    every = math.ceil((last - first) / 5)
    ticks = [(10.0**n, number_text(10.0**n)) for n in range(first, last + 1, every)]
    return _Axis(place, [(0.0, "0"), *ticks] if has_zero else ticks)


def _nice_step(step: float) -> float:
    """Gives the next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))
