"""The file that says what a run is and how it ended."""

import contextlib
import json

import pytest

from megatron_trace.rl.html_report.runs import read_run
from megatron_trace.rl.run_record import RunRecord


@pytest.fixture
def record(tmp_path):
    return RunRecord(tmp_path / "run", name="qat", seed=2, settings={"a": {"b": 1}}, steps=3)


def written(record):
    return json.loads(record.path.read_text())


def test_a_run_that_goes_on_says_so_with_versions_and_settings(record):
    with record.running():
        found = written(record)
    assert (found["status"], found["steps"], found["seed"]) == ("running", 3, 2)
    assert found["settings"] == {"a": {"b": 1}}
    assert found["versions"]["torch"].startswith("2.")


def test_a_run_that_ends_says_what_was_held_out(record):
    with record.running():
        record.held_out["after"] = 0.5
    assert written(record)["status"] == "finished"
    assert written(record)["held_out"] == {"after": 0.5}


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (RuntimeError("bad scale"), "crashed", "RuntimeError: bad scale"),
        (SystemExit("\nstopped after step 3"), "stopped", "stopped after step 3"),
        (
            OSError(
                "ranks: 0\nTraceback (most recent call last): (RANK 0)\n  File\n\nKeyError: x\n"
            ),
            "crashed",
            "OSError: ranks: 0\nKeyError: x",
        ),
        (ValueError("a" * 2000), "crashed", "ValueError: " + "a" * 988 + " ..."),
    ],
)
def test_a_run_that_fails_says_why_and_still_fails(record, error, status, reason):
    with pytest.raises(type(error)), record.running():
        raise error
    assert (written(record)["status"], written(record)["reason"]) == (status, reason)


def test_the_report_reads_what_is_written(record):
    with record.running():
        pass
    run = read_run(record.path.parent)
    assert (run.name, run.seed, run.planned_steps, run.settings) == ("qat", 2, 3, {"a.b": 1})
    assert run.status == "finished, but steps are missing, 0 of 3 steps"


@pytest.mark.parametrize("error", [None, SystemExit(0), RuntimeError("paused")])
def test_a_run_that_is_left_off_in_order_is_neither_finished_nor_crashed(record, error):
    with contextlib.suppress(SystemExit, RuntimeError), record.running():
        record.left_off = "asked to"
        if error is not None:
            raise error
    assert (written(record)["status"], written(record)["reason"]) == ("left off", "asked to")
