"""Megatron's own training loop on recorded rollouts: the two examples, one after the other."""

import multiprocessing
import os
import re
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing

from megatron_trace.rl.html_report.page import page
from megatron_trace.rl.html_report.runs import find_runs, read_run
from megatron_trace.rl.metrics_log import read_metrics
from megatron_trace.rl.tasks import save_tasks
from megatron_trace.testing.programs import load_program, torchrun
from megatron_trace.testing.ranks import run_ranks
from megatron_trace.testing.single_process import TINY_MOE_FLAGS, single_process
from megatron_trace.testing.sums import ITEMS

ROOT = Path(__file__).parents[2]
MODEL = f"{TINY_MOE_FLAGS} --transformer-impl local --trace-hint-layers all"
TRAIN = """
    --global-batch-size 8 --train-iters 4 --lr 1e-4 --log-interval 1 --calculate-per-token-loss
    --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --eval-iters 0
"""
METRICS = ("log-prob gap", "importance weight", "grad norm")


def run(example, flags, folder, *, ranks=1, fails=False):
    """Runs an example under torchrun and gives what it printed."""
    done = torchrun(ROOT / "examples" / example, flags.split(), folder, ranks=ranks)
    output = done.stdout + done.stderr
    assert (done.returncode != 0) == fails, output[-6000:]
    return output


def forget_transformer_engine():
    """Unsets what Megatron set in the process that this one was forked from, building models."""
    for name in [name for name in os.environ if name.startswith("NVTE_")]:
        del os.environ[name]


def pretrain_on_rank(rank, flags, folder, ranks):
    """Runs Megatron's loop in a process that belongs to a group already."""
    path = ROOT / "examples" / "pretrain_trace.py"
    program = load_program(path)
    os.chdir(folder)
    forget_transformer_engine()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    sys.argv = [str(path), *flags.split()]
    program.main()
    sys.stdout.write(f"rank {rank} started {multiprocessing.active_children()}\n")


def fork_pretrain(flags, folder, *, ranks=1):
    """Runs examples/pretrain_trace.py on ranks that need not import Megatron; as `run` does."""
    lines = []
    run_ranks(
        __file__,
        "pretrain_on_rank",
        world_size=ranks,
        echo=lines.append,
        flags=flags,
        folder=str(folder),
        ranks=ranks,
    )
    return "\n".join(lines)


def iterations(output):
    """Gives the metrics of each iteration that Megatron logged."""
    found = {}
    for line in re.findall(r"iteration +\d+/ .*", output):
        number = int(re.match(r"iteration +(\d+)", line).group(1))
        found[number] = {
            name: float(re.search(rf"{name}: ([-+.\dE]+)", line).group(1)) for name in METRICS
        }
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with prompts, a checkpoint of a warm-started model, and its recorded rollouts."""
    folder = tmp_path_factory.mktemp("pretrain")
    save_tasks(folder / "tasks.jsonl", ITEMS)
    run(
        "record_rollouts.py",
        f"{MODEL} --rollout-tasks tasks.jsonl --rollout-output rollouts --rollout-warm-start 12 "
        "--rollout-prompts 10 --rollout-samples 4 --rollout-max-response-tokens 4 --save start",
        folder,
    )
    return folder


@pytest.fixture(scope="module")
def trained(folder):
    """What four iterations on two expert-parallel ranks print; checkpoints of the 2nd and 4th."""
    flags = training("start", "whole", "2", fresh=True, more="--trace-metrics-dir logs/whole")
    return run("pretrain_trace.py", flags, folder, ranks=2)


def training(load, save, expert_parallel, *, fresh=False, more=""):
    """Gives the flags of a training run."""
    start = "--finetune --no-load-optim --no-load-rng" if fresh else ""
    keep = f"--save {save} --save-interval 2" if save else ""
    return (
        f"{MODEL} {TRAIN} --trace-hint-dir rollouts --load {load} {start} {keep} "
        f"--expert-model-parallel-size {expert_parallel} {more}"
    )


def only_iteration_2(folder, name):
    """Gives a copy of the checkpoints that ends with the second iteration."""
    shutil.copytree(folder / "whole", folder / name)
    shutil.rmtree(folder / name / "iter_0000004")
    (folder / name / "latest_checkpointed_iteration.txt").write_text("2")
    return name


def tensors(checkpoint):
    """Gives the tensors of a checkpoint: parameters and the optimizer's state."""
    with single_process(seed=0):
        found = dist_checkpointing.load_plain_tensors(str(checkpoint))
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def test_a_rollout_is_trained_on_and_the_gap_starts_small(trained):
    found = iterations(trained)
    assert sorted(found) == [1, 2, 3, 4]
    assert all(metrics["grad norm"] > 0 for metrics in found.values())
    # Of the policy that rolled out: measured 0 to 1e-4; of rounding to nearest: 2e-2.
    assert found[1]["log-prob gap"] < 2e-3
    assert "TRACE ran: method trace, 40 samples" in trained


@pytest.fixture(scope="module")
def resumed(folder, trained):
    """What two fresh processes print that go on from the second checkpoint."""
    # As if another process had done the two steps that are done again, and was killed amid a line.
    shutil.copytree(folder / "logs" / "whole", folder / "logs" / "resumed")
    path = folder / "logs" / "resumed" / "metrics.jsonl"
    first, second, *_ = path.read_text().splitlines(keepends=True)
    path.write_text(first + second + '{"step": 2}\n{"step": 3}\n{"step": 4, "ga')
    more = "--trace-metrics-dir logs/resumed"
    flags = training(only_iteration_2(folder, "resumed"), "resumed", "2", more=more)
    return fork_pretrain(flags, folder, ranks=2)


def test_a_fresh_process_resumes_the_distributed_optimizer_exactly(folder, trained, resumed):
    # Megatron's line of the second iteration after a start averages over both.
    assert iterations(resumed)[3] == iterations(trained)[3]
    states = [tensors(folder / name / "iter_0000004") for name in ("whole", "resumed")]
    assert states[0].keys() == states[1].keys()
    assert any("exp_avg" in name for name in states[0])
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name


def test_steps_that_are_done_again_are_logged_once(folder, resumed):
    logs = [logged(folder / "logs" / name) for name in ("whole", "resumed")]
    assert logs[0] == logs[1]


def test_lines_say_which_process_did_a_step(folder, resumed):
    first, second, third, last = (
        record["process"] for record in read_metrics(folder / "logs" / "resumed" / "metrics.jsonl")
    )
    assert first == second != third == last


@pytest.mark.slow
def test_metrics_of_another_run_stay_as_they_are_and_the_run_does_not_begin(folder, trained):
    """Of a run that goes on from another's checkpoint, one that starts, one without rollouts."""
    log = folder / "logs" / "own"
    fresh = training("start", "own", "1", fresh=True, more=f"--trace-metrics-dir {log}")
    run("pretrain_trace.py", f"{fresh} --train-iters 2", folder)
    before = {path.name: path.read_bytes() for path in log.iterdir()}
    taken = only_iteration_2(folder, "taken")
    resumed = training(taken, "", "2", more=f"--trace-metrics-dir {log}")
    for flags, ranks, message in (
        (resumed, 2, "has the steps 0 to 1 of another run than the one whose checkpoint"),
        (f"{fresh} --lr 2e-4", 1, "as it begins with step 0: megatron.lr was 0.0001 there and is"),
        (f"{fresh} --trace-hint-dir nowhere", 1, "nowhere"),
    ):
        output = run("pretrain_trace.py", flags, folder, ranks=ranks, fails=True)
        assert message in output
        assert {path.name: path.read_bytes() for path in log.iterdir()} == before
    # The same run from its start is begun again, as a job is that saved nothing before it ended.
    run("pretrain_trace.py", f"{fresh} --train-iters 2", folder)
    assert read_run(log).status == "finished, 2 of 2 steps"


def logged(folder):
    """Gives a log's records, without what a process that goes on has otherwise."""
    records = read_metrics(folder / "metrics.jsonl")
    for record in records:
        record["seconds"] = sorted(record["seconds"])
        del record["process"]
        del record["quantisers"]["weights_quantised"]  # All of them, in its first step.
    return records


def test_a_run_leaves_a_line_a_step_as_rl_runs_do(folder, trained):
    found, records = iterations(trained), logged(folder / "logs" / "whole")
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    for record, metrics in zip(records, found.values(), strict=True):
        assert record["grad_norm"] == pytest.approx(metrics["grad norm"], abs=1e-3)
        if record["step"] != 1:  # Megatron's second line after a start averages over both.
            assert record["gap"]["mean"] == pytest.approx(metrics["log-prob gap"], rel=1e-4)
            assert record["importance_weight_mean"] == pytest.approx(metrics["importance weight"])
        assert record["gap"]["mean"] <= record["gap"]["p99"] <= record["gap"]["max"]
        assert (record["health"]["coverage"] > 0.9, record["samples"]) == (True, 8)
        assert (record["updates"], record["skipped_updates"], record["alarms"]) == (1, 0, [])
        assert 0.0 <= record["reward"] <= 1.0
        assert 0.0 <= record["health"]["router_disagreement"] < 0.3  # Measured 0 to .125.
        assert record["response_tokens"] <= record["response_tokens_max"] <= 4
        assert record["loss"] != 0.0
        assert record["seconds"] == ["train", "wait"]
    # Rewards and losses are those of the step's samples.
    assert len({record["reward"] for record in records}) > 1


def test_the_report_shows_a_run_of_megatrons_loop(folder, trained):
    (log,) = find_runs([folder / "logs" / "whole"])
    assert (log.title, log.status) == ("whole, seed 1234", "finished, 4 of 4 steps")
    assert log.problems == []
    assert log.settings["megatron.expert_model_parallel_size"] == 2
    assert log.settings["trace.hint_layers"] == "all"
    html = page([log], title="Runs", made=datetime(2026, 11, 30, tzinfo=UTC))
    for curve in ("Reward", "rho_asym", "Learning rate", "Waiting for micro-batches"):
        assert f"<b>{curve}" in html, curve


def test_a_checkpoint_is_written_without_a_process_that_imports_the_program_again(resumed):
    assert resumed.count("successfully saved checkpoint from iteration       4") == 1
    assert sorted(re.findall(r"rank \d started .*", resumed)) == [
        "rank 0 started []",
        "rank 1 started []",
    ]


def test_a_checkpoint_of_two_expert_parallel_ranks_loads_into_one(folder, trained):
    flags = training(only_iteration_2(folder, "one"), "", "1", more="--no-load-optim")
    one = iterations(fork_pretrain(flags, folder))
    # The optimizer starts anew, so that only the forward pass of iteration 3 is the same.
    expected = iterations(trained)[3]
    assert one[3]["log-prob gap"] == pytest.approx(expected["log-prob gap"], rel=1e-4)
    assert one[3]["importance weight"] == pytest.approx(expected["importance weight"], rel=1e-5)


@pytest.mark.slow
def test_an_alarm_stops_megatrons_loop_with_a_checkpoint_that_goes_on(folder, trained):
    """The entropy is below any such threshold, so that the first step raises it."""
    log = folder / "logs" / "stopped"
    more = f"--trace-metrics-dir {log}"
    flags = training("start", "stopped", "2", fresh=True, more=more)
    flags += " --trace-alarms entropy=99:stop"
    output = run("pretrain_trace.py", flags, folder, ranks=2, fails=True)
    assert output.count("stopped after iteration 1, as entropy is ") == 1
    assert "(threshold 99); the checkpoint is in stopped" in output
    assert sorted(iterations(output)) == [1]
    assert sorted(path.name for path in (folder / "stopped").glob("iter_*")) == ["iter_0000001"]
    stopped = read_run(log)
    assert stopped.status == "stopped after 1 of 4 steps"
    assert stopped.reason.startswith("stopped after iteration 1, as entropy is ")
    assert [alarm["alarm"] for alarm in stopped.records[0]["alarms"]] == ["entropy"]
    run("pretrain_trace.py", training("stopped", "stopped", "2", more=more), folder, ranks=2)
    assert read_run(log).status == "finished, 4 of 4 steps"
    states = [tensors(folder / name / "iter_0000004") for name in ("whole", "stopped")]
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name


@pytest.mark.slow
def test_steps_with_nan_are_skipped_until_there_are_too_many(folder):
    """A learning rate that leaves weights of about 1e30: all steps after the first are NaN."""
    flags = training("start", "", "1", fresh=True, more="--lr 1e30 --trace-max-skipped-steps 1")
    flags += " --train-iters 9 --save broken --save-interval 1 --trace-metrics-dir logs/broken"
    output = run("pretrain_trace.py", flags, folder, fails=True)
    assert "stopped after iteration 3, as non_finite is 2 (threshold 1)" in output
    first, last = (tensors(folder / "broken" / f"iter_000000{n}") for n in (1, 3))
    assert first.keys() == last.keys()
    changed = [name for name, tensor in first.items() if not torch.equal(tensor, last[name])]
    assert [name for name in changed if "rng" not in name] == []
    records = read_run(folder / "logs" / "broken").records
    assert [record["skipped_updates"] for record in records] == [0, 1, 1]
    assert [record["alarms"][0]["action"] for record in records[1:]] == ["warn", "stop"]


@pytest.mark.slow
def test_reading_ahead_changes_nothing_that_megatron_logs(folder):
    """Four micro-batches a pass, evaluation in between."""
    flags = training("start", "", "1", fresh=True, more="--micro-batch-size 2 --train-iters 2")
    flags += " --eval-iters 1 --eval-interval 1 --trace-valid-hint-dir rollouts"
    plain, ahead = (
        run("pretrain_trace.py", f"{flags} {more}", folder)
        for more in ("", "--trace-prefetch --trace-hint-memory-mb 1")
    )
    assert iterations(plain) == iterations(ahead)
    losses = [re.findall(r"validation loss.*?policy loss.*", text) for text in (plain, ahead)]
    assert losses[0] == losses[1] != []


@pytest.mark.slow
def test_a_missing_checkpoint_to_roll_out_from_is_named(folder):
    flags = (
        f"{MODEL} --rollout-tasks tasks.jsonl --rollout-prompts 10 --rollout-output other "
        "--load nowhere"
    )
    output = run("record_rollouts.py", flags, folder, fails=True)
    assert "--load nowhere has no checkpoint: there is no nowhere/latest_checkpointed_" in output
    assert not (folder / "other").exists()


@pytest.mark.slow
def test_prompts_that_are_rolled_out_again_into_the_same_folder_are_refused(folder):
    flags = f"{MODEL} --rollout-tasks tasks.jsonl --rollout-output rollouts --load start"
    output = run("record_rollouts.py", f"{flags} --rollout-prompts 3", folder, fails=True)
    assert "rollouts has samples of 3 of these 3 prompts and of policy version 0 already" in output


@pytest.mark.slow
def test_random_weights_instead_of_the_rollouts_stop_after_the_first_step(folder):
    """Megatron trains on from random weights where --load has no checkpoint."""
    flags = training("nowhere", "", "1", fresh=True, more="--trace-metrics-dir logs/random")
    output = run("pretrain_trace.py", flags, folder, fails=True)
    assert "the guard rejected" in output
    assert "--trace-guard-max-rejected-rows" in output
    crashed = read_run(folder / "logs" / "random")
    assert crashed.status == "crashed after 1 of 4 steps"
    assert crashed.reason.startswith("RuntimeError: the last training or evaluation step")
    assert crashed.records[0]["health"]["guard_rejections"] > 0.5
    assert sorted(iterations(output)) == [1]


@pytest.mark.slow
def test_a_run_that_is_left_off_goes_on_and_then_has_nothing_to_do(folder):
    log = folder / "logs" / "left"
    more = f"--trace-metrics-dir {log} --exit-interval 3"
    for load, fresh, status in (
        ("start", True, "left off after 3 of 4 steps"),
        ("left", False, "finished, 4 of 4 steps"),
        ("left", False, "finished, 4 of 4 steps"),
    ):
        output = run(
            "pretrain_trace.py", training(load, "left", "1", fresh=fresh, more=more), folder
        )
        assert read_run(log).status == status
    assert "all 4 iterations were done before" in output
