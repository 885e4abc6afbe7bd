"""Controls of the study: what must fail if its numbers mean anything, and whether it did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron_trace.study.cells import LAGS, NOISES
from megatron_trace.study.results import StudyResult
from megatron_trace.study.statistics import draws_of, gap_ratio, share

DAMAGES = {
    "shuffled": "hints of other tokens of the sample",
    "wrong_scales": "right bits with block scales of other tokens",
    "other_sample": "hints of another sample",
}
# Damaged hints are noticed if nine of ten rows are rejected and nineteen twentieths of what they do
# without the guard is prevented; they are harmful if, without it, the gap is larger than qat's.
MIN_REJECTED = 0.9
MAX_HARM_LEFT = 0.05
# Guidance helps if it leaves less than this share of qat's gap, and no more if it leaves more.
HELPS_BELOW = 0.5
HELPS_NO_MORE = 0.8


@dataclass(frozen=True)
class Control:
    """One control.

    Attributes:
        claim: What must be so.
        numbers: What was measured.
        holds: Whether it is so; None if its cells were not run.
    """

    claim: str
    numbers: str
    holds: bool | None

    def __str__(self) -> str:
        """Gives one line for a terminal."""
        state = {True: "as it must be", False: "FAILED", None: "not run"}[self.holds]
        return f"{state}: {self.claim} ({self.numbers})"


def check_controls(result: StudyResult) -> list[Control]:
    """Gives every control of a study; those whose cells are missing are `not run`."""
    controls = [*_damaged(result), *_doses(result), *_ages(result)]
    return [Control(claim, *_evaluated(check)) for claim, check in controls]


Check = Callable[[], tuple[str, bool]]


def _evaluated(check: Check) -> tuple[str, bool | None]:
    try:
        return check()
    except KeyError as missing:
        return f"no cell {missing}", None


def ratio_to_qat(result: StudyResult, name: str, qat: str = "method/qat/bf16") -> float:
    """Gives the mean gap of a cell over that of plain QAT.

    Raises:
        KeyError: A cell was not run.
    """
    rows, baseline = result.cells[name].rows, result.cells[qat].rows
    return gap_ratio(rows, baseline, draws_of(len(rows), num_resamples=1)).value


def rejected_share(result: StudyResult, name: str, site: str = "*") -> float:
    """Gives the share of the hint rows that the guard rejected, of one site or all.

    Raises:
        KeyError: The cell was not run.
    """
    rows = result.cells[name].rows
    draws = draws_of(len(rows), num_resamples=1)
    return 1 - share(rows, draws, ("rows", site, "guided"), ("rows", site, "present")).value


def _damaged(result: StudyResult) -> Iterator[tuple[str, Check]]:
    for damage, words in DAMAGES.items():
        guarded, bare = f"control/{damage}/guard", f"control/{damage}/no-guard"

        def rejected(name: str = guarded) -> tuple[str, bool]:
            found = rejected_share(result, name)
            return f"{found:.1%} of the rows rejected", found >= MIN_REJECTED

        def prevented(name: str = guarded, bare: str = bare) -> tuple[str, bool]:
            left, whole = ratio_to_qat(result, name), ratio_to_qat(result, bare)
            text = f"gap {left:.2f} of qat's with the guard, {whole:.2f} without"
            return text, left - 1 <= MAX_HARM_LEFT * (whole - 1)

        def harmful(name: str = bare) -> tuple[str, bool]:
            found = ratio_to_qat(result, name)
            return f"gap {found:.2f} of qat's", found >= 1.0

        yield f"the guard rejects {words}", rejected
        yield f"the guard prevents nearly all harm of {words}", prevented
        yield f"without the guard, {words} are worse than none", harmful


def _doses(result: StudyResult) -> Iterator[tuple[str, Check]]:
    for kind in ("activations", "weights"):
        for size, must_help in ((NOISES[0], True), (NOISES[-1], False)):
            name = f"noise/{kind}-{size:g}"

            def check(name: str = name, must_help: bool = must_help) -> tuple[str, bool]:
                found = ratio_to_qat(result, f"{name}/full-codes", f"{name}/qat")
                ok = found < HELPS_BELOW if must_help else found > HELPS_NO_MORE
                return f"gap {found:.2f} of qat's", ok

            words = "help" if must_help else "do not help"
            yield f"full codes {words} a trainer with noise of {size:g} on its {kind}", check


def _ages(result: StudyResult) -> Iterator[tuple[str, Check]]:
    rate, steps = max(LAGS)
    name = f"lag/{rate:g}x{steps}"

    def fresh() -> tuple[str, bool]:
        found = ratio_to_qat(result, f"{name}/fresh", f"{name}/qat")
        return f"gap {found:.2f} of qat's", found < HELPS_BELOW

    def stale() -> tuple[str, bool]:
        found = ratio_to_qat(result, f"{name}/stale-no-guard", f"{name}/qat")
        return f"gap {found:.2f} of qat's", found > HELPS_NO_MORE

    where = f"{steps} steps at a rate of {rate:g} later"
    yield f"fresh hints help a policy {where}", fresh
    yield f"hints of the policy {where} do not, without the guard", stale
