"""The log of a run inside Megatron's loop: what each step leaves, and how the run went on."""

import argparse
import dataclasses
import json
import math

import pytest
import torch
import torch.distributed as dist

from megatron_trace.compat import StepOutcome
from megatron_trace.config import RecordedConfig, TraceConfig
from megatron_trace.rl.loop_log import LoopLog
from megatron_trace.rl.metrics_log import read_metrics
from megatron_trace.rl.run_record import RunRecord
from megatron_trace.testing.ranks import join_group


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    """All ranks that agree, whatever number the flags say."""
    join_group(tmp_path_factory.mktemp("store") / "store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def flags_of(**others):
    """Gives Megatron's flags of the last rank of two."""
    return argparse.Namespace(
        **{
            "rank": 1,
            "world_size": 2,
            "seed": 7,
            "train_iters": 9,
            "lr": 1e-6,
            "iteration": 0,
            "trace_method": "trace",
            "params_dtype": torch.bfloat16,
            "loss_func": print,
        }
        | others
    )


@pytest.fixture
def log_of(tmp_path):
    """Makes the log of a rank of two, which writes to `run` within the test's folder."""

    def log_of(folder="run", **flags):
        of_run = folder and str(tmp_path / folder)
        return LoopLog(of_run, flags_of(**flags), {"trace": TraceConfig()})

    return log_of


@pytest.fixture
def process(tmp_path):
    """Runs a process that does some iterations, and gives the flags that its checkpoint holds."""

    def process(*iterations, after=None, folder="run", **flags):
        args = flags_of(**flags)
        log = LoopLog(folder and str(tmp_path / folder), args, {"trace": TraceConfig()})
        with log.running():
            if after is not None:
                log.goes_on_from(after)
            args.iteration = iterations[0] - 1
            log.begin()
            for iteration in iterations:
                log.step(outcome(iteration, loss=args.lr), health(0.25 * iteration))
        return args

    return process


def outcome(iteration, *, skipped=False, loss=0.5):
    return StepOutcome(iteration, {"policy loss": loss, "clipped": 0.0}, 2.0, 1e-6, skipped)


def health(nearest):
    return {"health": {"nearest_mismatch": {"k": nearest}}, "alarms": []}


def logged(tmp_path, folder="run"):
    """Gives the steps in a folder, each with its learning rate."""
    records = read_metrics(tmp_path / folder / "metrics.jsonl")
    return [(record["step"], record["loss"]) for record in records]


def run_json(tmp_path):
    return json.loads((tmp_path / "run" / "run.json").read_text())


def test_the_last_rank_writes_what_both_say_of_a_step(log_of, tmp_path):
    log = log_of()
    with log.running():
        log.begin()
        log.step(outcome(1), health(0.25))
    (record,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert record.pop("process")
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
        log.begin()
        log.step(outcome(1), health(0.25))
        log.leave_off("asked to")
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_goes_on_replaces_the_steps_that_it_does_again(process, tmp_path):
    flags = process(1, 2, 3)
    process(2, after=flags, lr=2e-6)
    assert logged(tmp_path) == [(0, 1e-6), (1, 2e-6)]
    # Growth is that since the run's first step, which another process did.
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert records[1]["health"]["nearest_growth"] == 2.0


def test_the_folder_of_another_run_than_the_checkpoints_is_refused_and_left_as_it_is(
    process, tmp_path
):
    process(1, 2, 3)
    files = [tmp_path / "run" / name for name in ("metrics.jsonl", "run.json")]
    before = [file.read_bytes() for file in files]
    other = process(1, 2, folder="other")
    with pytest.raises(
        ValueError,
        match=r"--trace-metrics-dir \S+/run has the steps 0 to 2 of another run than the one whose"
        r" checkpoint goes on with step 2: step 0 was done by process \w{12} there, and by \w{12}",
    ):
        process(3, after=other)
    assert [file.read_bytes() for file in files] == before


def test_steps_that_went_another_way_from_the_same_checkpoint_are_refused(process):
    first = process(1, 2, 3, 4)
    branch = process(2, 3, after=first, folder="branch")
    process(2, 3, after=first)
    with pytest.raises(ValueError, match=r"step 1 was done by process"):
        process(4, after=first)  # The folder has the second process's way to there.
    with pytest.raises(ValueError, match=r"step 1 was done by process"):
        process(4, after=branch)


def test_a_run_that_others_went_on_with_is_continued(process, tmp_path):
    flags = process(1, 2)
    for iteration in (3, 4):
        flags = process(iteration, after=flags, lr=iteration * 1e-6)
    assert logged(tmp_path) == [(0, 1e-6), (1, 1e-6), (2, 3e-6), (3, 4e-6)]


def test_a_process_without_a_folder_leaves_a_gap_and_no_doubt(process, tmp_path):
    flags = process(2, after=process(1), folder="")
    process(3, after=flags)
    assert logged(tmp_path) == [(0, 1e-6), (2, 1e-6)]


def test_a_run_from_before_processes_had_names_is_continued(process, tmp_path):
    process(1, 2)
    path = tmp_path / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    old = [{name: of for name, of in line.items() if name != "process"} for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in old))
    process(3, after=argparse.Namespace())
    assert [step for step, _ in logged(tmp_path)] == [0, 1, 2]


def test_a_run_that_began_and_saved_nothing_begins_again(process, tmp_path):
    process(1, 2)
    process(1)
    assert logged(tmp_path) == [(0, 1e-6)]


def test_a_run_that_begins_again_may_have_other_flags_that_decide_no_step(process, tmp_path):
    process(1, 2, exit_duration_in_mins=None, tensorboard_dir="logs/monday", save_interval=9)
    process(1, exit_duration_in_mins=60, tensorboard_dir="logs/tuesday", save_interval=1)
    assert logged(tmp_path) == [(0, 1e-6)]


@pytest.mark.parametrize(
    ("begin", "name"),
    [(1, "megatron.lr was 1e-06 there and is 0.5 here"), (2, "megatron.lr was 1e-06 there")],
)
def test_a_run_of_other_settings_does_not_replace_an_earlier_ones_steps(
    process, tmp_path, begin, name
):
    process(*range(begin, 4))
    before = run_json(tmp_path)
    with pytest.raises(
        ValueError, match=rf"has the steps {begin - 1} to 2 of another run, which .*: {name}"
    ):
        process(begin, after=argparse.Namespace(), lr=0.5)
    assert run_json(tmp_path) == before


def test_steps_without_a_record_of_their_run_are_not_replaced(process, tmp_path):
    process(1)
    (tmp_path / "run" / "run.json").write_text("{")
    with pytest.raises(ValueError, match=r"this one would replace.*: its run.json is missing"):
        process(1)


def test_a_process_that_ends_before_its_first_step_leaves_the_folder_as_it_is(
    process, log_of, tmp_path
):
    process(1)
    before = run_json(tmp_path)
    with pytest.raises(LookupError), log_of().running():
        raise LookupError("no such rollouts")
    assert before["status"] == "finished"
    assert run_json(tmp_path) == before


def test_a_skipped_step_is_counted_and_its_nan_kept(log_of, tmp_path):
    log = log_of()
    with log.running():
        log.begin()
        alarm = {"alarms": [{"alarm": "non_finite"}]}
        log.step(outcome(1, skipped=True, loss=math.nan), alarm)
    (record,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert (record["updates"], record["skipped_updates"]) == (0, 1)
    assert math.isnan(record["loss"])


def test_a_run_tells_its_settings_without_what_is_of_one_process(log_of, tmp_path):
    log = log_of()
    with log.running():
        log.begin()
        found = run_json(tmp_path)
    assert (found["name"], found["seed"], found["steps"]) == ("run", 7, 9)
    assert found["status"] == "running"
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
        log.begin()
        log.leave_off("asked to")
    assert (run_json(tmp_path)["status"], run_json(tmp_path)["reason"]) == ("left off", "asked to")


@pytest.mark.parametrize("other", ["hint_dir", "valid_hint_dir"])
def test_a_folder_of_rollouts_is_refused_as_that_of_metrics(other):
    with pytest.raises(ValueError, match=rf"metrics_dir=a/../b is {other}, whose run.json"):
        dataclasses.replace(RecordedConfig(metrics_dir="a/../b"), **{other: "b"})


def test_a_folder_that_cannot_be_made_is_named_with_its_flag(log_of, tmp_path):
    (tmp_path / "run").write_text("a file")
    log = log_of()
    with (
        pytest.raises(
            OSError, match=r"--trace-metrics-dir \S+/run cannot be read and written: .*exists"
        ),
        log.running(),
    ):
        log.begin()


def test_the_folder_of_an_rl_run_is_refused_and_left_as_it_is(log_of, tmp_path):
    rl_run = RunRecord(tmp_path / "run", name="qat", seed=0, settings={"trace": {}}, steps=3)
    with rl_run.running():
        before = run_json(tmp_path)
        with pytest.raises(
            ValueError, match=r"--trace-metrics-dir \S+/run has the run.json of som"
        ):
            log_of()
    assert run_json(tmp_path)["name"] == before["name"] == "qat"
