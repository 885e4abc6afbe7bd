"""What the paper claims, beside what a study measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_trace.study.cells import DEFAULT_SITES
from megatron_trace.study.results import StudyResult
from megatron_trace.study.statistics import (
    Interval,
    count_at,
    draws_of,
    gap_difference,
    gap_ratio,
    interval,
    ratio_of_sums,
)
from megatron_trace.study.tables import Table, code_path, shown

Found = tuple[str, bool]


def claims_table(results: Sequence[StudyResult]) -> Table:
    """Gives the claims, what was measured for each, and whether it holds, for every study."""
    lines = []
    for claim, check in CLAIMS.items():
        for result in results:
            for dtype in ("bf16", "fp32"):
                try:
                    measured, holds = check(result, dtype)
                except KeyError:
                    continue
                name = f"{result.header['model']}-{result.header['setting']}, {dtype}"
                lines.append([claim, name, measured, "yes" if holds else "no"])
    head = ["the paper", "study, trainer", "measured", "holds"]
    return Table("The paper's claims", "", head, lines)


def one_step_share(result: StudyResult, dtype: str, sites: Sequence[str]) -> Interval:
    """Gives the share of the codes differing under QAT that are one step off, over some sites."""
    cell = result.cells[f"method/qat/{dtype}"]
    counts = {
        name: [
            sum(count_at(row, (*code_path(cell, site), name)) for site in sites)
            for row in cell.rows
        ]
        for name in ("rtn_one_step", "rtn_different")
    }
    draws = draws_of(len(cell.rows))
    return interval(ratio_of_sums(counts["rtn_one_step"], counts["rtn_different"], draws))


def _one_step(result: StudyResult, dtype: str) -> Found:
    found = one_step_share(result, dtype, DEFAULT_SITES)
    fc2 = one_step_share(result, dtype, ("fc2",))
    text = f"{shown(found)} at fc1, k and v"
    if fc2.value == fc2.value:
        text += f"; {shown(fc2)} at fc2"
    return text, found.value > 0.99


def _latter_half(result: StudyResult, dtype: str) -> Found:
    half, all_layers, qat = (
        result.cells[f"{name}/{dtype}"].rows
        for name in ("layers/latter-0.5", "layers/latter-1", "method/qat")
    )
    draws = draws_of(len(half))
    of_half, of_all = gap_ratio(half, qat, draws), gap_ratio(all_layers, qat, draws)
    text = f"gap {shown(of_half)} of qat's with half, {shown(of_all)} with all layers"
    # Nearly enough: it closes at least nine tenths of what all layers close.
    return text, 1 - of_half.value >= 0.9 * (1 - of_all.value)


def _one_bit(result: StudyResult, dtype: str) -> Found:
    one, four, qat = (
        result.cells[f"{name}/{dtype}"].rows for name in ("bits/1", "bits/4", "method/qat")
    )
    draws = draws_of(len(one))
    difference = gap_difference(one, four, draws)
    of_one, of_four = gap_ratio(one, qat, draws), gap_ratio(four, qat, draws)
    text = (
        f"gap {shown(of_one)} of qat's with 1 bit, {shown(of_four)} with 4; difference "
        f"{shown(difference)} nats"
    )
    return text, 1 - of_one.value >= 0.99 * (1 - of_four.value)


def _rollout_scale(result: StudyResult, dtype: str) -> Found:
    rollout, own, no_bits, qat = (
        result.cells[f"{name}/{dtype}"].rows
        for name in ("scales/rollout", "scales/own", "scales/no-bits", "method/qat")
    )
    draws = draws_of(len(rollout))
    shares = [gap_ratio(rows, qat, draws) for rows in (rollout, own, no_bits)]
    text = (
        f"gap {shown(shares[0])} of qat's with bits and scales, {shown(shares[1])} with bits only, "
        f"{shown(shares[2])} with scales only"
    )
    return text, shares[0].value < min(shares[1].value, shares[2].value)


CLAIMS: dict[str, Callable[[StudyResult, str], Found]] = {
    "more than 99 % of code mismatches are one step": _one_step,
    "the latter half of the layers is nearly enough (we ask: 90 % of the benefit)": _latter_half,
    "1 bit is enough (we ask: 99 % of the benefit of 4 bits)": _one_bit,
    "training takes the rollout's scale, not its own": _rollout_scale,
}
