"""Tables of one study in Markdown, every number with its 95 % confidence interval."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_trace.study.cells import ALL_SITES
from megatron_trace.study.results import CellResult, Row, StudyResult
from megatron_trace.study.statistics import (
    Interval,
    count_at,
    draws_of,
    gap_of,
    gap_ratio,
    gradient_of,
    share,
)

DTYPES = ("bf16", "fp32")
POSITION_EDGES = (0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        title: Heading above it.
        note: A sentence below the heading, or empty.
        head: Names of the columns.
        lines: Cells of each line.
    """

    title: str
    note: str
    head: Sequence[str]
    lines: Sequence[Sequence[str]]

    def __str__(self) -> str:
        """Gives Markdown."""
        rows = [self.head, ["---"] * len(self.head), *self.lines]
        text = "\n".join("| " + " | ".join(row) + " |" for row in rows)
        return "\n\n".join(part for part in (f"### {self.title}", self.note, text) if part)


def number(value: float) -> str:
    """Gives a number with two or three significant digits."""
    if value != value:
        return "-"
    if value == 0:
        return "0"
    if abs(value) >= 0.001:
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return f"{value:.1e}"


def shown(found: Interval) -> str:
    """Gives an estimate with its interval."""
    if found.low == found.high == found.value or found.low != found.low:
        return number(found.value)
    return f"{number(found.value)} [{number(found.low)}, {number(found.high)}]"


def baseline_of(result: StudyResult, cell: CellResult) -> CellResult | None:
    """Gives the cell of plain QAT that a cell is compared with; None if it was not run."""
    fields, question = cell.cell, cell.name.partition("/")[0]
    name = f"method/qat/{fields['dtype']}"
    if question == "noise" or question == "lag":
        name = cell.name.rpartition("/")[0] + "/qat"
    elif question == "routing":
        name = f"routing/qat/{fields['dtype']}"
    elif fields["engine"] != "fp4" or question == "arithmetic":
        same = {
            "fp4-pow2": f"scales/pow2-qat/{fields['dtype']}",
            "fp4-batch-4": "arithmetic/engine-batch-4/qat",
        }
        name = same.get(fields["engine"], cell.name.rpartition("/")[0] + "/qat")
        if question == "format":
            name = cell.name.rpartition("/")[0] + "/qat"
    return result.cells.get(name)


def ratio_text(result: StudyResult, name: str) -> str:
    """Gives the mean gap of a cell over that of plain QAT; `-` if one was not run."""
    cell = result.cells.get(name)
    baseline = None if cell is None else baseline_of(result, cell)
    if cell is None or baseline is None:
        return "-"
    if [row["sample"] for row in cell.rows] != [row["sample"] for row in baseline.rows]:
        return "-"
    if cell.cell["engine"] != baseline.cell["engine"]:
        return "-"
    return shown(gap_ratio(cell.rows, baseline.rows, draws_of(len(cell.rows))))


def gap_table(result: StudyResult, title: str, names: Iterable[str]) -> Table | None:
    """Gives the gaps of some cells; None if none of them was run."""
    lines = []
    for name in names:
        cell = result.cells.get(name)
        if cell is None:
            continue
        gap = gap_of(cell.rows, draws_of(len(cell.rows)))
        lines.append(
            [
                name.partition("/")[2],
                shown(gap.mean),
                shown(gap.p99),
                number(gap.max),
                shown(gap.kl),
                shown(gap.weight_variance),
                ratio_text(result, name),
            ]
        )
    head = ["", "mean", "p99", "max", "KL", "weight variance", "mean / qat's"]
    return Table(title, "", head, lines) if lines else None


def names_of(result: StudyResult, question: str) -> list[str]:
    """Gives the cells of a question, in the order in which they were run."""
    return [name for name in result.cells if name.partition("/")[0] == question]


def code_table(result: StudyResult, names: Iterable[str]) -> Table | None:
    """Gives how often codes differ from the rollout's, by site."""
    lines = []
    for name in names:
        cell = result.cells.get(name)
        if cell is None or not any("codes" in row for row in cell.rows):
            continue
        draws = draws_of(len(cell.rows))
        for site in ALL_SITES:
            if not any(site in row.get("codes", {}) for row in cell.rows):
                continue
            path = code_path(cell, site)
            different = shared_counts(cell.rows, draws, path, "rtn_different", "values")
            one_step = shared_counts(cell.rows, draws, path, "rtn_one_step", "rtn_different")
            if cell.cell["fresh"] and not cell.cell["lag"]:
                one_step = "-"  # Two records of the engine: their distance was not counted.
            scales = shared_counts(cell.rows, draws, path, "scale_bytes_different", "blocks")
            guided = shared_counts(cell.rows, draws, path, "guided_different", "guided_values")
            outside = shared_counts(cell.rows, draws, path, "out_of_bracket", "guided_values")
            sign = shared_counts(cell.rows, draws, path, "sign_flip", "guided_values")
            causes = f"{outside} / {sign}" if guided != "-" else "-"
            label = f"{name.partition('/')[2]}: {site}"
            lines.append([label, different, one_step, scales, guided, causes])
    head = [
        "",
        "code, to nearest",
        "of these one step",
        "block scale, own",
        "code, guided",
        "out of bracket / sign",
    ]
    note = "Shares that differ from the rollout's codes, in the forward of each trainer."
    return Table("Code and scale mismatch", note, head, lines) if lines else None


def code_path(cell: CellResult, site: str) -> tuple[str, ...]:
    """Gives where the counts of a site are in a row."""
    return ("codes", site, "*") if cell.cell["codes"] == "layer" else ("codes", site)


def shared_counts(
    rows: Sequence[Row], draws: np.ndarray, path: tuple[str, ...], part: str, whole: str
) -> str:
    """Gives a share of the counts at a path; `-` if they were not counted."""
    if not any(count_at(row, (*path, whole)) for row in rows):
        return "-"
    return shown(share(rows, draws, (*path, part), (*path, whole)))


def rejection_table(result: StudyResult) -> Table | None:
    """Gives the share of the hint rows that the guard rejected, by site."""
    lines = []
    for name, cell in result.cells.items():
        if not cell.cell["guard"] or not any("rows" in row for row in cell.rows):
            continue
        if name.partition("/")[0] not in ("method", "control", "noise", "lag", "format"):
            continue
        draws = draws_of(len(cell.rows))
        kept = [
            share(cell.rows, draws, ("rows", site, "guided"), ("rows", site, "present"))
            for site in ALL_SITES
        ]
        rejected = [Interval(1 - k.value, 1 - k.high, 1 - k.low) for k in kept]
        lines.append([name, *map(shown, rejected)])
    note = "Hints of intact cells should be accepted, those of other rows rejected."
    return Table("Rejected hint rows", note, ["", *ALL_SITES], lines) if lines else None


def routing_table(result: StudyResult) -> Table | None:
    """Gives how often the live router sends a token to another expert set."""
    lines = []
    for name in names_of(result, "routing"):
        rows = result.cells[name].rows
        flips = share(rows, draws_of(len(rows)), ("routing", "different"), ("routing", "compared"))
        gap = gap_of(rows, draws_of(len(rows)))
        lines.append([name.partition("/")[2], shown(flips), shown(gap.mean), shown(gap.p99)])
    head = ["", "other expert set, share of (token, layer)", "mean gap", "p99 gap"]
    title = "Router flips without replay"
    return Table(title, "", head, lines) if lines else None


def gradient_table(result: StudyResult) -> Table | None:
    """Gives cosine and error of the policy gradient, by method and group."""
    lines = []
    for name in names_of(result, "gradient"):
        for row in result.cells[name].rows:
            cosine, error = gradient_of(row, draws_of(len(row["dd"])))
            lines.append([name.partition("/")[2], row["group"], shown(cosine), shown(error)])
    head = ["method", "parameters", "cosine with full codes", "relative error"]
    note = (
        "Gradient of the GRPO loss over all samples (fixed synthetic advantages; BF16 trainer, or "
        "FP32 where it says so) against the same trainer with full codes at all places; resampled "
        "by chunks of samples."
    )
    return Table("Policy gradient", note, head, lines) if lines else None


LAG_VARIANTS = ("bf16", "qat", "fresh", "stale", "stale-no-guard", "stale-full-codes")


def lag_tables(result: StudyResult) -> list[Table]:
    """Gives gaps under older hints, to an engine with the trainer's weights and to the rollout."""
    prefixes = list(dict.fromkeys(name.rpartition("/")[0] for name in names_of(result, "lag")))
    now, old = [], []
    for prefix in prefixes:
        fresh = result.cells.get(f"{prefix}/fresh")
        if fresh is None:
            continue
        drift = {row["sample"]: np.asarray(row["drift"]) for row in fresh.rows}
        cells = [result.cells.get(f"{prefix}/{variant}") for variant in LAG_VARIANTS]
        draws = draws_of(len(fresh.rows))
        moved = gap_of([{"deltas": deltas} for deltas in drift.values()], draws).mean
        head = [prefix.partition("/")[2], number(fresh.facts["weight_change"]), shown(moved)]
        to_engine, to_rollout = [], []
        for cell in cells:
            rows = [] if cell is None else cell.rows
            shifted = [{"deltas": np.asarray(row["deltas"]) + drift[row["sample"]]} for row in rows]
            to_engine.append(shown(gap_of(rows, draws).mean) if rows else "-")
            to_rollout.append(shown(gap_of(shifted, draws).mean) if rows else "-")
        now.append([*head, *to_engine, _rejected(result.cells.get(f"{prefix}/stale"), draws)])
        old.append([head[0], *to_rollout])
    if not now:
        return []
    return [
        Table(
            "Hints of an older policy: gap to an engine with the trainer's weights",
            "Mean gap to the log-probs of an engine that holds the trainer's weights (read through "
            "a trainer with its full codes). `weights moved`: relative norm. `policy moved`: mean "
            "gap between that engine and the rollout.",
            ["rate x steps", "weights moved", "policy moved", *LAG_VARIANTS, "rejected"],
            now,
        ),
        Table(
            "Hints of an older policy: gap to the rollout that made them",
            "What the importance weight sees: the policy's own change, and the arithmetic's. "
            "`fresh` shows the former alone.",
            ["rate x steps", *LAG_VARIANTS],
            old,
        ),
    ]


def _rejected(cell: CellResult | None, draws: np.ndarray) -> str:
    if cell is None:
        return "-"
    guided = share(cell.rows, draws, ("rows", "*", "guided"), ("rows", "*", "present"))
    return number(1 - guided.value)


def position_curves(result: StudyResult) -> dict[str, dict[int, Interval]]:
    """Gives the mean gap by position of the token, of short and long prompts, by method."""
    curves = {}
    for method in ("floor", "bf16", "qat", "trace", "full-codes"):
        names = (
            "floor/bf16" if method == "floor" else f"method/{method}/bf16",
            f"position/{method}",
        )
        rows = [row for name in names if name in result.cells for row in result.cells[name].rows]
        if rows:
            curves[method] = position_curve(rows)
    return curves


def position_table(result: StudyResult) -> Table | None:
    """Gives the mean gap by position of the response token."""
    curves = position_curves(result)
    edges = sorted({edge for curve in curves.values() for edge in curve})
    if not edges:
        return None
    lines = [
        [
            f"from {edge}",
            *(shown(curve[edge]) if edge in curve else "-" for curve in curves.values()),
        ]
        for edge in edges
    ]
    note = "Mean |gap| in nats, BF16 trainer."
    return Table("Gap by token position", note, ["position", *curves], lines)


def position_curve(rows: Sequence[Row]) -> dict[int, Interval]:
    """Gives the mean |delta| of the tokens in each range of positions, by its first position."""
    curve = {}
    for low, high in zip(POSITION_EDGES, (*POSITION_EDGES[1:], 1 << 30), strict=True):
        kept = []
        for row in rows:
            first, deltas = row["first"], row["deltas"]
            part = deltas[max(0, low - first) : max(0, high - first)]
            if part:
                kept.append({"deltas": part})
        if kept:
            curve[low] = gap_of(kept, draws_of(len(kept), num_resamples=300)).mean
    return curve


def depth_curve(cell: CellResult, site: str, part: str, whole: str) -> dict[int, Interval]:
    """Gives a share of counts by decoder layer."""
    if cell.cell["codes"] != "layer":
        return {}
    layers = sorted({int(layer) for row in cell.rows for layer in row["codes"].get(site, {})})
    draws = draws_of(len(cell.rows), num_resamples=300)
    return {
        layer: share(
            cell.rows, draws, ("codes", site, str(layer), part), ("codes", site, str(layer), whole)
        )
        for layer in layers
    }


def depth_table(result: StudyResult, name: str, part: str, whole: str, title: str) -> Table | None:
    """Gives a share of counts by layer and site."""
    cell = result.cells.get(name)
    if cell is None:
        return None
    curves = {site: depth_curve(cell, site, part, whole) for site in ALL_SITES}
    curves = {site: curve for site, curve in curves.items() if curve}
    layers = sorted({layer for curve in curves.values() for layer in curve})
    lines = [[str(layer), *_texts(curves.values(), layer)] for layer in layers]
    return Table(title, "", ["layer", *curves], lines) if lines else None


def _texts(curves: Iterable[Mapping[int, Interval]], at: int) -> list[str]:
    return [shown(curve[at]) if at in curve else "-" for curve in curves]
