"""Files of results."""

from __future__ import annotations

import pytest

from megatron_trace.study.cells import Cell
from megatron_trace.study.results import ResultFolder, StudyResult, load_study, save_study

CELL = Cell("sites/k/bf16", sites=("k",))
ROWS = [{"cell": "sites/k/bf16", "sample": "s0", "first": 3, "deltas": [0.25, -1e-9]}]


def test_a_result_is_found_again_by_its_cell_only(tmp_path):
    folder = ResultFolder(tmp_path, {"weights": "a"})
    assert folder.read(CELL) is None
    folder.write(CELL, ROWS, seconds=1.5, facts={"x": 1})
    found = folder.read(CELL)
    assert (found.rows, found.seconds, found.facts) == (ROWS, 1.5, {"x": 1})
    assert folder.read(Cell("sites/k/bf16", sites=("v",))) is None


def test_a_result_of_other_weights_is_not_taken(tmp_path):
    ResultFolder(tmp_path, {"weights": "a"}).write(CELL, ROWS, seconds=0, facts={})
    assert ResultFolder(tmp_path, {"weights": "b"}).read(CELL) is None


def test_an_unfinished_file_is_no_result(tmp_path):
    folder = ResultFolder(tmp_path, {})
    folder.write(CELL, ROWS, seconds=0, facts={})
    (file,) = tmp_path.iterdir()
    file.rename(file.with_name(file.name + ".tmp"))
    assert folder.read(CELL) is None


def test_a_study_is_read_as_it_was_written_and_has_the_same_bytes_again(tmp_path):
    folder = ResultFolder(tmp_path / "cells", {})
    cell = folder.write(CELL, ROWS, seconds=2, facts={})
    result = StudyResult({"model": "m"}, {cell.name: cell})
    first, second = tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl.gz"
    save_study(first, result)
    found = load_study(first)
    assert found.header == {"model": "m"}
    assert found.cells[CELL.name].rows[0]["deltas"] == [0.25, -1e-9]
    assert found.cells[CELL.name].cell["sites"] == ["k"]
    save_study(second, found)
    assert first.read_bytes() == second.read_bytes()


def test_a_file_without_a_header_is_refused(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    save_study(path, StudyResult({}, {}))
    with pytest.raises(ValueError, match="no header"):
        load_study(path)
