"""The log of a run inside Megatron's loop: what each step leaves, and how the run went on."""

import argparse
import dataclasses
import json
import math

import pytest
import torch

from megatron_trace.compat import StepOutcome
from megatron_trace.config import RecordedConfig, TraceConfig
from megatron_trace.rl.loop_log import LoopLog
from megatron_trace.rl.metrics_log import read_metrics
from megatron_trace.rl.run_record import RunRecord


@pytest.fixture
def log_of(tmp_path):
    """Makes the log of a rank of two, which writes to `run` within the test's folder."""

    def log_of(rank=1, folder="run"):
        args = argparse.Namespace(
            rank=rank,
            world_size=2,
            seed=7,
            train_iters=9,
            lr=1e-6,
            iteration=3,
            trace_method="trace",
            params_dtype=torch.bfloat16,
            loss_func=print,
        )
        return LoopLog(folder and str(tmp_path / folder), args, {"trace": TraceConfig()})

    return log_of


def outcome(iteration, *, skipped=False, loss=0.5):
    return StepOutcome(iteration, {"policy loss": loss, "clipped": 0.0}, 2.0, 1e-6, skipped)


def health(nearest):
    return {"health": {"nearest_mismatch": {"k": nearest}}, "alarms": []}


def run_json(tmp_path):
    return json.loads((tmp_path / "run" / "run.json").read_text())


def test_the_last_rank_writes_what_both_say_of_a_step(log_of, tmp_path):
    log_of().step(outcome(1), health(0.25))
    (record,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert record == {
        "step": 0,
        "loss": 0.5,
        "grad_norm": 2.0,
        "learning_rate": 1e-6,
        "updates": 1,
        "skipped_updates": 0,
        "health": {"nearest_mismatch": {"k": 0.25}, "nearest_growth": 1.0},
        "alarms": [],
    }


@pytest.mark.parametrize("which", [{"rank": 0}, {"folder": ""}])
def test_another_rank_and_a_run_without_a_folder_write_nothing(log_of, tmp_path, which):
    log = log_of(**which)
    with log.running():
        log.step(outcome(1), health(0.25))
        log.leave_off("asked to")
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_goes_on_replaces_the_steps_that_it_does_again(log_of, tmp_path):
    first = log_of()
    for iteration, nearest in enumerate((0.25, 0.5, 0.75), start=1):
        first.step(outcome(iteration), health(nearest))
    log_of().step(outcome(2, loss=3.0), health(1.0))
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [(record["step"], record["loss"]) for record in records] == [(0, 0.5), (1, 3.0)]
    # Growth is that since the run's first step, which another process did.
    assert records[1]["health"]["nearest_growth"] == 4.0


def test_a_skipped_step_is_counted_and_its_nan_kept(log_of, tmp_path):
    log_of().step(outcome(1, skipped=True, loss=math.nan), {"alarms": [{"alarm": "non_finite"}]})
    (record,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert (record["updates"], record["skipped_updates"]) == (0, 1)
    assert math.isnan(record["loss"])


def test_a_run_tells_its_settings_without_what_is_of_one_process(log_of, tmp_path):
    with log_of().running():
        found = run_json(tmp_path)
    assert (found["name"], found["seed"], found["steps"]) == ("run", 7, 9)
    assert found["settings"]["trace"]["method"] == "trace"
    assert found["settings"]["megatron"] == {
        "lr": 1e-6,
        "params_dtype": "torch.bfloat16",
        "train_iters": 9,
        "world_size": 2,
    }


def test_a_run_that_others_will_go_on_with_says_so(log_of, tmp_path):
    log = log_of()
    with log.running():
        log.leave_off("asked to")
    assert (run_json(tmp_path)["status"], run_json(tmp_path)["reason"]) == ("left off", "asked to")


@pytest.mark.parametrize("other", ["hint_dir", "valid_hint_dir"])
def test_a_folder_of_rollouts_is_refused_as_that_of_metrics(other):
    with pytest.raises(ValueError, match=rf"metrics_dir=a/../b is {other}, whose run.json"):
        dataclasses.replace(RecordedConfig(metrics_dir="a/../b"), **{other: "b"})


def test_a_folder_that_cannot_be_made_is_named_with_its_flag(log_of, tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(OSError, match=r"--trace-metrics-dir \S+/run cannot be written: .*exists"):
        log_of().running().__enter__()


def test_the_folder_of_an_rl_run_is_refused_and_left_as_it_is(log_of, tmp_path):
    rl_run = RunRecord(tmp_path / "run", name="qat", seed=0, settings={"trace": {}}, steps=3)
    with rl_run.running():
        before = run_json(tmp_path)
        with pytest.raises(
            ValueError, match=r"--trace-metrics-dir \S+/run has the run.json of som"
        ):
            log_of()
    assert run_json(tmp_path)["name"] == before["name"] == "qat"


def test_the_folder_of_an_earlier_run_of_the_loop_is_taken_again(log_of, tmp_path):
    with log_of().running():
        pass
    with log_of().running():
        assert run_json(tmp_path)["status"] == "running"
