"""A study from rollouts to report: resumed, partial, and with controls that notice."""

from __future__ import annotations

import contextlib
import dataclasses
import math

import pytest
import torch

from megatron_trace.study.cell_measurer import CellMeasurer
from megatron_trace.study.cells import Cell
from megatron_trace.study.controls import check_controls
from megatron_trace.study.gradients import group_of
from megatron_trace.study.locks import locked
from megatron_trace.study.report import write_report
from megatron_trace.study.results import StudyResult, save_study

QUESTIONS = ("floor", "method", "control", "gradient")


@pytest.fixture(scope="module")
def result(make_study):
    return make_study().run(QUESTIONS)


def test_a_killed_study_goes_on_with_the_missing_cells(make_study, result, tmp_path, monkeypatch):
    lines = []

    def killed(line):
        lines.append(line)
        if "method/qat/bf16" in line:
            raise KeyboardInterrupt

    some = ("floor", "method")
    with pytest.raises(KeyboardInterrupt):
        make_study(tmp_path, killed).run(some)
    measured = []
    measure = CellMeasurer.measure

    def noted(self, cell):
        measured.append(cell.name)
        return measure(self, cell)

    monkeypatch.setattr(CellMeasurer, "measure", noted)
    resumed = make_study(tmp_path).run(some)
    assert "method/bf16/bf16" not in measured
    assert "method/qat/fp32" in measured
    assert list(resumed.cells) == [name for name in result.cells if name.startswith(some)]
    for name, cell in resumed.cells.items():
        assert result.cells[name].rows == cell.rows, f"{name} after the kill"


def test_a_start_for_some_cells_keeps_the_others_in_the_result(make_study, tmp_path, monkeypatch):
    monkeypatch.setattr(CellMeasurer, "measure", lambda self, cell: ([{"cell": cell.name}], {}))
    first = make_study(tmp_path).run(["method/qat", "floor"])
    second = make_study(tmp_path).run(["method/bf16"])
    new = set(second.cells) - set(first.cells)
    assert set(first.cells) < set(second.cells)
    assert all(name.startswith("method/bf16/") for name in new)
    in_order = [cell.name for cell in make_study(tmp_path).cells if cell.name in second.cells]
    assert list(second.cells) == in_order


def test_a_name_of_no_cell_is_refused(make_study):
    with pytest.raises(ValueError, match=r"no cell is called metho; the questions are .*method"):
        make_study().run(["metho", "floor"])


def test_guidance_closes_the_gap_of_qat(result):
    mean = {
        name: sum(abs(d) for row in cell.rows for d in row["deltas"])
        for name, cell in result.cells.items()
        if name.startswith("method/")
    }
    for dtype in ("bf16", "fp32"):
        assert mean[f"method/full-codes/{dtype}"] < 0.5 * mean[f"method/qat/{dtype}"]
        assert mean[f"method/qat/{dtype}"] < mean[f"method/bf16/{dtype}"]
        assert mean[f"method/w4a16/{dtype}"] not in (
            mean[f"method/bf16/{dtype}"],
            mean[f"method/qat/{dtype}"],
        )


def test_counts_cover_every_value_of_every_sample(result, make_study):
    samples = {s.sample_id: s for s in make_study().measurer.rollouts("fp4").samples}
    for row in result.cells["method/trace-all-sites/bf16"].rows:
        num_rows = samples[row["sample"]].num_rows
        for site, width in (("fc1", 128), ("fc2", 4 * 64), ("k", 64), ("v", 64)):
            for layer in ("0", "1"):
                counts = row["codes"][site][layer]
                assert counts["values"] == counts["guided_values"] == num_rows * width
                assert counts["unexplained"] == 0


def test_controls_hold_where_the_cells_are_what_they_say(result):
    controls = {control.claim: control for control in check_controls(result)}
    assert controls["the guard rejects hints of other tokens of the sample"].holds
    assert controls["without the guard, hints of another sample are worse than none"].holds


def test_controls_notice_hints_that_were_not_damaged(result):
    sound = result.cells["method/trace-all-sites/bf16"]
    cells = {
        name: dataclasses.replace(cell, rows=sound.rows) if name.startswith("control/") else cell
        for name, cell in result.cells.items()
    }
    found = [control.holds for control in check_controls(StudyResult(result.header, cells))]
    assert found.count(False) == 6  # Rejected and harmful, of three kinds of damage.
    assert found.count(True) == 3  # Nothing is left of a harm that there was not.


def test_controls_without_cells_are_not_run(result):
    cells = {name: cell for name, cell in result.cells.items() if name.startswith("floor")}
    assert {c.holds for c in check_controls(StudyResult(result.header, cells))} == {None}


def test_the_report_is_written_from_whatever_is_there(result, tmp_path):
    kept = ("floor/bf16", "method/qat/bf16", "method/trace/bf16")
    partial = StudyResult(result.header, {name: result.cells[name] for name in kept})
    text = write_report([partial], tmp_path / "study").read_text()
    assert "random-test, bf16" in text
    assert "the guard rejects" not in text
    page = (tmp_path / "study" / "random-test.md").read_text()
    assert "trace/bf16" in page
    assert "fp32" not in page.partition("## Methods")[2].partition("###")[0]


def test_the_same_rows_give_the_same_report(result, tmp_path):
    texts = [
        write_report([result], tmp_path / name / "study").read_text() for name in ("one", "two")
    ]
    assert texts[0] == texts[1]
    save_study(tmp_path / "x.jsonl.gz", result)


def test_the_gradient_of_full_codes_is_its_own_reference(result):
    for row in result.cells["gradient/full-codes"].rows:
        assert torch.tensor(row["dd"]).abs().max() == 0
    groups = {row["group"] for row in result.cells["gradient/qat"].rows}
    assert {"router", "experts fc1", "experts fc2", "attention", "norms", "all"} <= groups


def test_a_parameter_of_no_group_is_an_error():
    with pytest.raises(ValueError, match="belongs to no group"):
        group_of("mystery.weight")


def test_a_cell_of_the_trainers_own_scales_reads_the_bits_only(make_study):
    study = make_study()
    rows = {
        scales: study.measurer.measure(
            Cell("x", scales=scales, guard=False, codes="site", dtype="fp32")
        )[0]
        for scales in ("rollout", "own", "nearest")
    }
    different = {
        scales: sum(row["codes"]["fc1"]["guided_different"] for row in found)
        for scales, found in rows.items()
    }
    assert different["rollout"] < different["own"]
    assert different["rollout"] < different["nearest"]


@pytest.mark.parametrize("codes", ["no", "site"])
def test_rows_that_the_guard_rejects_are_counted_whether_or_not_codes_are_compared(
    make_study, codes
):
    rows = make_study().measurer.measure(Cell("x", damage="shuffled", codes=codes))[0]
    for site in ("fc1", "k", "v"):
        counts = [row["rows"][site] for row in rows]
        assert sum(of["guided"] for of in counts) < 0.1 * sum(of["present"] for of in counts)


def test_processes_take_what_no_other_has_begun(make_study, tmp_path, monkeypatch):
    """Another process holds the first cell for a while, and finishes it."""
    monkeypatch.setattr(CellMeasurer, "measure", lambda self, cell: ([{"cell": cell.name}], {}))
    study, other = make_study(tmp_path), make_study(tmp_path)
    for engine in ("fp4", "bf16"):
        study.measurer.rollouts(engine)
    lines = []
    study._say = lines.append
    first = Cell("floor/bf16", engine="bf16", method="bf16", dtype="bf16")
    with contextlib.ExitStack() as held:
        assert held.enter_context(locked(study._locks / "floor__bf16.lock"))

        def finish(seconds):
            assert len(lines) == 4, "everything but the cell that is held"
            other._computed([first], math.inf)
            held.close()

        monkeypatch.setattr("time.sleep", finish)
        found = study.run(["floor", "method/bf16", "method/qat/bf16"])
    assert [line.partition(":")[0] for line in lines] == [
        "floor/fp32", "method/bf16/bf16", "method/bf16/fp32", "method/qat/bf16",
    ]  # fmt: skip
    assert "floor/bf16" in found.cells


def test_a_cell_that_fails_does_not_lose_the_others(make_study, tmp_path, monkeypatch):
    """Also of those that one process computes together, as gradients."""

    def measure(self, cell):
        if cell.name in ("floor/fp32", "gradient/bf16"):
            raise ArithmeticError("as it happens")
        self.rollouts(cell.engine)
        return [{"cell": cell.name}], {}

    monkeypatch.setattr(CellMeasurer, "measure", measure)
    with pytest.raises(ExceptionGroup, match="2 of the study's cells failed") as raised:
        make_study(tmp_path).run(["floor", "gradient/bf16", "gradient/qat"])
    assert raised.group_contains(ArithmeticError, match="as it happens")
    assert set(make_study(tmp_path).result().cells) == {
        "floor/bf16", "gradient/bf16/fp32", "gradient/qat", "gradient/qat/fp32",
    }  # fmt: skip
