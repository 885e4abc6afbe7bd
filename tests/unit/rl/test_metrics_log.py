"""Metrics files."""

import json
import math

import pytest

from megatron_trace.rl.html_report.runs import read_run
from megatron_trace.rl.metrics_log import MetricsLog, read_metrics


def log_steps(path, *steps, first_step=0):
    log = MetricsLog(path, first_step=first_step)
    for step in steps:
        log.append({"step": step, "gap": {"mean": step / 2}})


def test_one_line_per_step(tmp_path):
    log_steps(tmp_path / "new" / "m.jsonl", 0, 1)
    assert (tmp_path / "new" / "m.jsonl").read_text() == (
        '{"step": 0, "gap": {"mean": 0.0}}\n{"step": 1, "gap": {"mean": 0.5}}\n'
    )


def test_resumed_run_replaces_later_steps_and_the_cut_line(tmp_path):
    path = tmp_path / "m.jsonl"
    log_steps(path, 0, 1, 2)
    with path.open("a") as file:
        file.write('{"step": 3, "ga')
    log_steps(path, 1, first_step=1)
    assert [record["step"] for record in read_metrics(path)] == [0, 1]


def test_new_run_starts_a_new_file(tmp_path):
    log_steps(tmp_path / "m.jsonl", 0, 1)
    log_steps(tmp_path / "m.jsonl", 0)
    assert [record["step"] for record in read_metrics(tmp_path / "m.jsonl")] == [0]


def test_file_of_another_run_is_refused(tmp_path):
    log_steps(tmp_path / "m.jsonl", 0)
    with pytest.raises(ValueError, match=r"must hold the steps 0 to 2 .* it holds \[0\]"):
        MetricsLog(tmp_path / "m.jsonl", first_step=3)


def test_a_log_that_may_lack_steps_goes_on_anywhere_without_what_is_damaged(tmp_path, caplog):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 7}\nnot json\n{"step": 8}\n{"step": 9}\n{"step": 1')
    log = MetricsLog(path, first_step=9, lacks=True)
    assert [record["step"] for record in log.kept] == [7, 8]
    assert "2 damaged lines are left out" in caplog.text
    log.append({"step": 9, "again": True})
    assert read_metrics(path) == [{"step": 7}, {"step": 8}, {"step": 9, "again": True}]


def test_missing_file_has_no_records(tmp_path):
    assert read_metrics(tmp_path / "none.jsonl") == []


NOT_FINITE = {"step": 0, "norm": math.inf, "gap": {"mean": math.nan, "all": [-math.inf, 0.5]}}


def test_numbers_that_are_not_finite_stand_as_strings_of_strict_json(tmp_path):
    MetricsLog(tmp_path / "m.jsonl", first_step=0).append(NOT_FINITE)
    assert (tmp_path / "m.jsonl").read_text() == (
        '{"step": 0, "norm": "Infinity", "gap": {"mean": "NaN", "all": ["-Infinity", 0.5]}}\n'
    )


def test_numbers_that_are_not_finite_are_numbers_again_after_a_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    # A line as files had it before.
    path.write_text(json.dumps(NOT_FINITE) + "\n")
    MetricsLog(path, first_step=1).append({"step": 1, "norm": 2.0})
    assert "Infinity" not in path.read_text().replace('"Infinity"', "").replace('"-Infinity"', "")
    for records in (read_metrics(path), read_run(tmp_path).records):
        # NaN is not equal to itself, its text is.
        assert repr(records) == repr([NOT_FINITE, {"step": 1, "norm": 2.0}])


def tensorboard_numbers(folder):
    """Gives (step, value) by name, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder / "tensorboard"))
    shown.Reload()
    return {
        name: [(event.step, event.value) for event in shown.Scalars(name)]
        for name in shown.Tags()["scalars"]
    }


def test_tensorboard_shows_the_numbers_of_every_step(tmp_path):
    log = MetricsLog(tmp_path / "m.jsonl", first_step=0, tensorboard=True)
    for step in (0, 1):
        log.append(
            {"step": step, "reward": 0.25, "gap": {"mean": step / 2, "by": {"fc1": 3}}, "at": "now"}
        )
    log.close()
    assert tensorboard_numbers(tmp_path) == {
        "reward": [(0, 0.25), (1, 0.25)],
        "gap/mean": [(0, 0.0), (1, 0.5)],
        "gap/by/fc1": [(0, 3.0), (1, 3.0)],
    }


def test_tensorboard_shows_a_resumed_step_once(tmp_path):
    for first_step, steps in ((0, (0, 1, 2)), (1, (1,))):
        log = MetricsLog(tmp_path / "m.jsonl", first_step=first_step, tensorboard=True)
        for step in steps:
            log.append({"step": step, "reward": float(10 * first_step + step)})
        log.close()
    assert tensorboard_numbers(tmp_path) == {"reward": [(0, 0.0), (1, 11.0)]}
    assert [record["reward"] for record in read_metrics(tmp_path / "m.jsonl")] == [0.0, 11.0]


def test_without_tensorboard_no_folder_is_made(tmp_path):
    log_steps(tmp_path / "m.jsonl", 0)
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.jsonl"]
