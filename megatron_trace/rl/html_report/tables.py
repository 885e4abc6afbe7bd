"""The tables of the page: runs, numbers, sites, events, settings, versions."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from megatron_trace.rl.html_report.chart import number_text
from megatron_trace.rl.html_report.measures import CURVES, Curve
from megatron_trace.rl.html_report.runs import RunFolder
from megatron_trace.rl.html_report.spread import (
    Group,
    Spread,
    mean_of_all,
    mean_of_last_fifth,
    spread_of,
)

_MOST_SHOWN = 40
_NOT_COMPARED = ("seed",)


def runs_table(runs: Sequence[RunFolder]) -> str:
    """Gives a row for each run: how far it is, held-out accuracy, what was raised."""
    rows = []
    for run in runs:
        status = escape(run.status) if run.is_whole else _warned(run.status)
        skipped, alarms = _skipped(run), sum(len(_alarms(record)) for record in run.records)
        notes = [run.reason, *run.problems]
        rows.append(
            [
                f"{escape(run.name)}<br><code>{escape(str(run.folder))}</code>",
                "–" if run.seed is None else str(run.seed),
                status + "".join(f'<br><span class="soft">{escape(n)}</span>' for n in notes if n),
                number_text(run.held_out.get("before", math.nan)),
                number_text(run.held_out.get("after", math.nan)),
                _warned(str(alarms)) if alarms else "0",
                _warned(str(skipped)) if skipped else "0",
            ]
        )
    heads = ["Run", "Seed", "State", "Held-out before", "after", "Alarms", "Skipped updates"]
    return "<h2>Runs</h2>" + _table(heads, rows, numeric={1, 3, 4, 5, 6})


def numbers_table(groups: Sequence[Group]) -> str:
    """Gives a row for each main measure and a column for each group that has steps."""
    groups = [group for group in groups if group.has_steps]
    rows = [["Steps", *(_lengths(group) for group in groups)]]
    for when in ("before", "after"):
        values = [[run.held_out.get(when, math.nan) for run in group.runs] for group in groups]
        if any(math.isfinite(value) for of_group in values for value in of_group):
            cells = [_spread(spread_of(of_group), len(of_group)) for of_group in values]
            rows.append([f"Held-out accuracy, {when}", *cells])
    for curve in CURVES:
        cells = _cells(groups, curve, mean_of_last_fifth) if curve.is_main else []
        if cells:
            rows.append([titled(curve), *cells])
    heads = ["", *(escape(group.name) for group in groups)]
    return _table(heads, rows, numeric=set(range(1, len(heads))), row_heads=True)


def all_numbers_table(groups: Sequence[Group]) -> str:
    """Gives two rows for each measure, over the last fifth and over all steps."""
    groups = [group for group in groups if group.has_steps]
    rows = []
    for curve in CURVES:
        for span, of_run in (("last fifth", mean_of_last_fifth), ("all steps", mean_of_all)):
            cells = _cells(groups, curve, of_run)
            if cells:
                rows.append([titled(curve), span, *cells])
    heads = ["", "", *(escape(group.name) for group in groups)]
    return _table(heads, rows, numeric=set(range(2, len(heads))), row_heads=True)


def sites_section(groups: Sequence[Group]) -> Iterator[str]:
    """Yields codes and scales that differ, by site, where runs have diagnostics."""
    kinds = {
        "code_mismatch": "codes, as trained",
        "nearest_mismatch": "codes, to nearest",
        "scale_mismatch": "block scales",
    }
    groups = [group for group in groups if group.has_steps]
    sites = sorted(
        {
            str(site)
            for group in groups
            for run in group.runs
            for record in run.records
            for site in _of(record, "health", "code_mismatch")
        }
    )
    rows = []
    for site in sites:
        for kind, label in kinds.items():
            curve = Curve(("health", kind, site), "", "", "")
            cells = _cells(groups, curve, mean_of_last_fifth)
            if cells:
                rows.append([escape(site), label, *cells])
    if rows:
        heads = ["Site", "Share that differs", *(escape(group.name) for group in groups)]
        yield "<h2>By site</h2>"
        yield (
            '<p class="soft">Rollout against training, over the last fifth of the steps, of the '
            "samples that carry full codes.</p>"
        )
        yield _table(heads, rows, numeric=set(range(2, len(heads))))


def events_section(runs: Sequence[RunFolder]) -> Iterator[str]:
    """Yields what alarms were raised and which steps skipped updates."""
    yield "<h2>Alarms and skipped steps</h2>"
    rows = []
    for run in runs:
        by_name: dict[tuple[str, str], list[tuple[int, Mapping[str, Any]]]] = {}
        for record in run.records:
            for alarm in _alarms(record):
                key = str(alarm.get("alarm")), str(alarm.get("action"))
                by_name.setdefault(key, []).append((record["step"], alarm))
        for (name, action), raised in by_name.items():
            values = [_float(alarm.get("value")) for _, alarm in raised]
            steps = [step for step, _ in raised]
            rows.append(
                [
                    escape(run.title),
                    escape(name),
                    escape(action),
                    str(len(raised)),
                    _steps(steps),
                    number_text(values[0]),
                    number_text(values[-1]),
                    number_text(_float(raised[-1][1].get("threshold"))),
                ]
            )
        skipped = [int(r["step"]) for r in run.records if _float(r.get("skipped_updates")) > 0]
        if skipped:
            count = str(_skipped(run))
            cells = ["updates skipped for NaN or Inf", "–", count, _steps(skipped), "–", "–", "–"]
            rows.append([escape(run.title), *cells])
    if not rows:
        yield "<p>None was raised, and no update was skipped, in the steps that were logged.</p>"
        return
    heads = ["Run", "What", "Action", "Times", "Steps", "First value", "Last", "Threshold"]
    yield _table(heads, rows, numeric={3, 5, 6, 7})


def settings_section(groups: Sequence[Group]) -> Iterator[str]:
    """Yields the settings that differ between the groups, and all of them folded away."""
    known = [group for group in groups if any(run.settings for run in group.runs)]
    yield "<h2>Settings that differ</h2>"
    unknown = [group.name for group in groups if group not in known]
    if unknown:
        yield f'<p class="soft">Not known of: {escape(", ".join(unknown))}.</p>'
    if not known:
        return
    names = list(dict.fromkeys(n for g in known for run in g.runs for n in run.settings))
    names = [name for name in names if name not in _NOT_COMPARED]
    values = {name: [_setting(group, name) for group in known] for name in names}
    differing = [name for name in names if len(set(values[name])) > 1]
    heads = ["Setting", *(escape(group.name) for group in known)]
    if differing:
        yield _table(heads, [_setting_row(name, values[name]) for name in differing])
    elif len(known) > 1:
        yield "<p>None: the groups have the same settings.</p>"
    else:
        yield "<p>There is nothing to compare with.</p>"
    for group in known:
        yield from _differences_within(group, names)
    everything = _table(heads, [_setting_row(name, values[name]) for name in names])
    yield f"<details><summary>All {len(names)} settings</summary>{everything}</details>"


def versions_section(groups: Sequence[Group]) -> Iterator[str]:
    """Yields the versions of every group, those that differ marked."""
    known = [group for group in groups if any(run.versions for run in group.runs)]
    yield "<h2>Versions</h2>"
    if not known:
        yield "<p>No run tells its versions.</p>"
        return
    names = dict.fromkeys(name for g in known for run in g.runs for name in run.versions)
    rows = []
    for name in names:
        cells = [
            ", ".join(dict.fromkeys(run.versions.get(name, "–") for run in g.runs)) for g in known
        ]
        head = escape(name) if len(set(cells)) == 1 else _warned(f"{name} (differs)")
        rows.append([head, *map(escape, cells)])
    yield _table(["", *(escape(group.name) for group in known)], rows, row_heads=True)


def _table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numeric: set[int] | None = None,
    row_heads: bool = False,
) -> str:
    """Gives a table of cells that are HTML already."""
    numeric = numeric or set()

    def kind(column: int) -> str:
        return ' class="number"' if column in numeric else ""

    head = "".join(f"<th{kind(n)}>{cell}</th>" for n, cell in enumerate(heads))
    body = "".join(
        "<tr>"
        + "".join(
            f'<th scope="row">{cell}</th>' if row_heads and n == 0 else f"<td{kind(n)}>{cell}</td>"
            for n, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        "</div>"
    )


def _cells(
    groups: Sequence[Group], curve: Curve, of_run: Callable[[RunFolder, Curve], float]
) -> list[str]:
    """Gives a cell for each group; none if no group has the number."""
    spreads = [spread_of([of_run(run, curve) for run in group.runs]) for group in groups]
    if not any(spread.num_seeds for spread in spreads):
        return []
    return [_spread(s, len(group.runs)) for s, group in zip(spreads, groups, strict=True)]


def _spread(spread: Spread, num_runs: int) -> str:
    if not spread.num_seeds:
        return "–"
    notes = "" if math.isnan(spread.half_width) else f" ± {number_text(spread.half_width)}"
    if spread.num_seeds < num_runs:
        notes += f" ({spread.num_seeds} of {num_runs})"
    return number_text(spread.mean) + (f'<span class="soft">{notes}</span>' if notes else "")


def titled(curve: Curve) -> str:
    """Gives the title of a curve with its unit."""
    unit = f' <span class="soft">({escape(curve.unit)})</span>' if curve.unit else ""
    return escape(curve.title) + unit


def _lengths(group: Group) -> str:
    lengths = sorted({len(run.records) for run in group.runs})
    return str(lengths[0]) if len(lengths) == 1 else _warned(f"{lengths[0]} to {lengths[-1]}")


def _setting(group: Group, name: str) -> str:
    """Gives the value of a setting in a group; of repetitions that differ, all of them."""
    return " / ".join(_setting_values(group, name)) or "–"


def _setting_values(group: Group, name: str) -> list[str]:
    shown = [json.dumps(run.settings[name]) for run in group.runs if name in run.settings]
    return list(dict.fromkeys(shown))


def _differences_within(group: Group, names: Sequence[str]) -> Iterator[str]:
    """Yields what runs of one name have otherwise beside their seed, if there is any."""
    within = [name for name in names if len(_setting_values(group, name)) > 1]
    if within:
        told = "; ".join(f"{name} {_setting(group, name)}" for name in within[:_MOST_SHOWN])
        yield f"<p>{_warned(f'Runs named {group.name} are no repetitions, by')} {escape(told)}</p>"


def _setting_row(name: str, values: Sequence[str]) -> list[str]:
    return [f"<code>{escape(name)}</code>", *(f"<code>{escape(v)}</code>" for v in values)]


def _alarms(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    alarms = record.get("alarms")
    return [a for a in alarms if isinstance(a, Mapping)] if isinstance(alarms, list) else []


def _skipped(run: RunFolder) -> int:
    values = [_float(record.get("skipped_updates")) for record in run.records]
    return sum(int(value) for value in values if math.isfinite(value))


def _steps(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:_MOST_SHOWN]))
    return shown + (f" and {len(steps) - _MOST_SHOWN} more" if steps[_MOST_SHOWN:] else "")


def _of(record: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    value: Any = record
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def _float(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else math.nan


def _warned(text: str) -> str:
    return f'<span class="warn">{escape(text)}</span>'
