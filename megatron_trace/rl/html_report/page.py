"""The page: what the runs are, what they show, where they differ, what went wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from html import escape

from megatron_trace.rl.html_report import tables
from megatron_trace.rl.html_report.chart import chart, line_style
from megatron_trace.rl.html_report.measures import CURVES, SECTIONS
from megatron_trace.rl.html_report.runs import RunFolder
from megatron_trace.rl.html_report.spread import Group, groups_of, points_of
from megatron_trace.rl.html_report.style import CSS

# Nothing is loaded, and no script runs, whatever a run's folder holds.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(runs: Sequence[RunFolder], *, title: str, made: datetime) -> str:
    """Gives the report as one HTML document that needs no other file.

    Args:
        runs: The runs, at least one, whatever state they are in.
        title: Heading of the page.
        made: When it is made.

    Raises:
        ValueError: There is no run.
    """
    if not runs:
        raise ValueError("a report needs at least one run; got none")
    groups = groups_of(runs)
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{_counted(len(runs), "run")} of {_counted(len(groups), "name")}; made '
        f"{made:%Y-%m-%d %H:%M} UTC by megatron_trace. It needs no network.</p>",
        *_warnings(runs),
        tables.runs_table(runs),
        *_numbers(groups),
        *_curves(groups),
        *tables.sites_section(groups),
        *tables.events_section(runs),
        *tables.settings_section(groups),
        *tables.versions_section(groups),
        _READING,
    ]
    text = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # Without an icon of its own, a browser asks the server for one.
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )
    # Names of files, and what a run's file holds, may be no Unicode.
    return text.encode("utf-8", errors="replace").decode("utf-8")


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _warnings(runs: Sequence[RunFolder]) -> Iterator[str]:
    bad = [run for run in runs if not run.is_whole]
    if bad:
        items = "".join(
            f"<li><b>{escape(run.title)}</b>: {escape(run.status)}"
            + (f" ({escape(run.reason)})" if run.reason else "")
            + "</li>"
            for run in bad
        )
        yield (
            f'<div class="note"><b>{len(bad)} of {_counted(len(runs), "run")} '
            f"{'is' if len(bad) == 1 else 'are'} not known to be whole.</b> Their numbers stand "
            f"below for the steps that they have.<ul>{items}</ul></div>"
        )


def _numbers(groups: Sequence[Group]) -> Iterator[str]:
    if not any(group.has_steps for group in groups):
        yield "<h2>Numbers</h2><p>No run logged a step, so that there are no numbers.</p>"
        return
    yield "<h2>Numbers</h2>"
    yield (
        '<p class="soft">Means over seeds, ± half of the 95 % interval of the mean '
        "(Student&#8217;s t), which needs two seeds; over the last fifth of the steps that each "
        "run has.</p>"
    )
    yield tables.numbers_table(groups)
    yield f"<details><summary>All numbers</summary>{tables.all_numbers_table(groups)}</details>"


def _curves(groups: Sequence[Group]) -> Iterator[str]:
    drawn = [group for group in groups if group.has_steps]
    if not drawn:
        return
    last_step = max(int(run.records[-1]["step"]) for g in drawn for run in g.runs if run.records)
    yield "<h2>Over the steps</h2>"
    yield (
        '<p class="soft">Lines are means over seeds, bands reach from the smallest to the largest '
        "seed. A line that breaks has no such number there. Point at a line for its numbers.</p>"
    )
    legend = "".join(
        f'<li><svg viewBox="0 0 34 10" aria-hidden="true"><line x1="0" x2="34" y1="5" y2="5" '
        f"{line_style(number)}/></svg>{escape(group.name)} "
        f'<span class="soft">({_seeds(group)})</span></li>'
        for number, group in enumerate(drawn)
    )
    for section in SECTIONS:
        figures = []
        for curve in (curve for curve in CURVES if curve.section == section):
            svg = chart(curve, [(g.name, points_of(g, curve)) for g in drawn], last_step)
            if svg:
                figures.append(
                    f"<figure><figcaption><b>{tables.titled(curve)}</b>"
                    f"<p>{escape(curve.meaning)}</p></figcaption>{svg}</figure>"
                )
        if figures:
            yield f"<h3>{escape(section)}</h3>"
            yield f'<ul class="legend">{legend}</ul><div class="charts">{"".join(figures)}</div>'


def _seeds(group: Group) -> str:
    with_steps = sum(bool(run.records) for run in group.runs)
    of_all = f"{with_steps} of " if with_steps < len(group.runs) else ""
    return of_all + _counted(len(group.runs), "seed")


_READING = """<h2>How to read this</h2>
<p>The fields are those of <code>docs/metrics.md</code>. A small log-prob gap is no proof of a
healthy trainer: hints pull it to the rollout that made them. What is not pulled is the mismatch to
nearest, which is drawn beside the one as trained. Runs of one name under different seeds are
repetitions; an interval of two or three seeds is wide, and one seed has none.</p>"""
