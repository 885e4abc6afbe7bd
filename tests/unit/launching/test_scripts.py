"""The scripts that srun starts on the nodes, without Slurm: what they set, and what they refuse."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[3] / "launch"
SHOW = 'echo "$RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $CUDA_VISIBLE_DEVICES"'


def script(name, *arguments, **variables):
    """Runs a script as the third of four tasks of one of two nodes, and gives its result."""
    task = {
        "SLURM_JOB_ID": "7",
        "SLURM_PROCID": "6",
        "SLURM_NTASKS": "8",
        "SLURM_LOCALID": "2",
        "SLURM_NTASKS_PER_NODE": "4(x2)",
        "SLURMD_NODENAME": "n2",
        "GPUS_PER_NODE": "4",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHON": sys.executable,
    }
    return subprocess.run(
        [str(LAUNCH / name), *map(str, arguments)],
        env=os.environ | task | {name: str(value) for name, value in variables.items()},
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    ("visible", "told"),
    [
        ("", "6 8 2 4 "),  # A whole node.
        ("4,5,6,7", "6 8 2 4 4,5,6,7"),
        ("0", "6 8 0 4 0"),  # Slurm has bound one to each task.
    ],
)
def test_a_rank_finds_itself_and_its_gpu(visible, told):
    done = script("rank.sh", "bash", "-c", SHOW, CUDA_VISIBLE_DEVICES=visible)
    assert done.stdout.rstrip("\n") == told, done.stderr


@pytest.mark.parametrize(
    ("visible", "own"),
    [("", "2"), ("4,5,6,7", "6"), ("0", "0"), ("0,1", "0"), ("MIG-a,MIG-b,MIG-c,MIG-d", "MIG-c")],
)
def test_a_worker_sees_one_gpu_only(visible, own, tmp_path):
    show = 'echo "$RANK $WORLD_SIZE $LOCAL_RANK $CUDA_VISIBLE_DEVICES $0"'
    done = script(
        *("worker.sh", "--number", "bash", "-c", show),
        CUDA_VISIBLE_DEVICES=visible,
        PAUSED=tmp_path / "paused",
    )
    assert done.stdout.strip() == f"0 1 0 {own} --number=6", done.stderr


def test_a_worker_is_begun_anew_until_it_was_lost_too_often(tmp_path):
    lost = f"echo life >>{tmp_path}/lives; kill -KILL $$"
    done = script(
        *("worker.sh", "--number", "bash", "-c", lost),
        PAUSED=tmp_path / "paused",
        MAX_LOSSES=2,
        RESPAWN_S=0,
    )
    assert done.returncode == 137
    assert (tmp_path / "lives").read_text().count("life") == 3
    assert "worker 6 was lost 3 times, the last time with status 137: giving up" in done.stdout


@pytest.mark.parametrize(("status", "paused", "ends_with"), [(2, False, 2), (75, True, 0)])
def test_a_worker_is_not_begun_anew_after(status, paused, ends_with, tmp_path):
    """After a flag that the program does not know, and when the job was told to end."""
    if paused:
        (tmp_path / "paused").touch()
    program = ("bash", "-c", f"echo life; exit {status}")
    done = script("worker.sh", "--number", *program, PAUSED=tmp_path / "paused")
    assert (done.returncode, done.stdout) == (ends_with, "life\n")


def started_rank(*program):
    """Starts a program as the only rank of a job; what it prints is read from its pipe."""
    return subprocess.Popen(
        [str(LAUNCH / "rank.sh"), *program],
        env=os.environ
        | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}
        | {"SLURM_NTASKS_PER_NODE": "1"},
        text=True,
        stdout=subprocess.PIPE,
    )


def test_a_rank_that_ends_at_once_on_the_signal_has_its_own_status():
    """One of eight was gone before the script looked whether it lives: hence as many tries."""
    program = (
        "import os, signal; signal.signal(signal.SIGUSR1, lambda *_: os._exit(3)); "
        "print('ready', flush=True)\nwhile True: signal.pause()"
    )
    for _ in range(20):
        with started_rank(sys.executable, "-S", "-c", program) as rank:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n"
            rank.send_signal(signal.SIGUSR1)
            assert rank.wait(timeout=300) == 3


def test_a_rank_hands_the_signal_on_and_waits_for_what_it_saves(tmp_path):
    program = "trap 'echo saving; sleep 0.2; echo saved; exit 3' USR1; echo ready; sleep 30 & wait"
    with started_rank("bash", "-c", program) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
        time.sleep(0.1)  # Both are in `wait`, most likely; what comes before is handed on too.
        rank.send_signal(signal.SIGUSR1)
        # The sleep that the trap leaves behind would hold the pipe open.
        told = [rank.stdout.readline() for _ in range(2)]
        assert rank.wait(timeout=300) == 3
        assert told == ["saving\n", "saved\n"]
        rank.stdout.close()


def test_a_node_that_has_everything_is_not_refused(tmp_path):
    (tmp_path / "logs").mkdir()
    for name in ("nvidiactl", "nvidia0", "nvidia1", "nvidia2", "nvidia3"):
        (tmp_path / name).touch()
    assert script("node.sh", tmp_path, RUN=tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("reason", "variables"),
    [
        ("node n2: cannot write to", {"RUN": "/nowhere"}),
        ("node n2: has no /no/python: set PYTHON", {"PYTHON": "/no/python"}),
        ("node n2: shows 1 GPUs, but GPUS_PER_NODE=4", {"GPUS_OPTION": "--gres=gpu:4"}),
    ],
)
def test_a_node_that_lacks_something_is_refused(reason, variables, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "nvidia0").touch()
    done = script("node.sh", tmp_path, **({"RUN": tmp_path} | variables))
    assert done.returncode == 1
    assert reason in done.stdout


@pytest.mark.parametrize(("status", "refused"), [(0, False), (1, True)])
def test_a_node_that_cannot_train_the_model_is_refused_with_the_reason(status, refused, tmp_path):
    (tmp_path / "logs").mkdir()
    for name in ("nvidiactl", *(f"nvidia{number}" for number in range(4))):
        (tmp_path / name).touch()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho warning; echo "preflight: asked $*" >&2; exit {status}\n')
    python.chmod(0o755)
    flags = ("--hybrid-layer-pattern=GE", "--hidden-size=8")
    done = script("node.sh", tmp_path, *flags, RUN=tmp_path, PYTHON=python)
    assert done.returncode == status
    asked = f"asked tools/preflight.py --this-node -- {' '.join(flags)}"
    assert (f"node n2: preflight: {asked}" in done.stdout) == refused


@pytest.mark.parametrize(
    ("states", "refused"), [("RUNNING", True), ("", False), ("COMPLETING", False)]
)
def test_a_run_that_another_job_trains_is_refused(states, refused, tmp_path):
    run, programs = tmp_path / "run", tmp_path / "programs"
    run.mkdir()
    programs.mkdir()
    (run / "job").write_text("71\n")
    # What is told once is over at the next question.
    once = f"[ -e {tmp_path}/asked ] || echo {states}; touch {tmp_path}/asked"
    (programs / "squeue").write_text(f"#!/bin/sh\n{once}\n")
    (programs / "squeue").chmod(0o755)
    (tmp_path / "run.env").write_text(f"RUN={run} START=x TASKS=x STEPS_OF_RUN=1\n")
    done = subprocess.run(
        ["bash", "-c", 'source "$ROOT/launch/common.sh"; own_run; echo "goes on"'],
        env=os.environ
        | {"PATH": f"{programs}:{os.environ['PATH']}", "ROOT": str(LAUNCH.parent)}
        | {"KIND": "colocated", "CLUSTER": str(LAUNCH / "clusters" / "cpu.env")}
        | {"RUN_FILE": str(tmp_path / "run.env"), "SLURM_JOB_ID": "72"},
        text=True,
        capture_output=True,
        check=False,
    )
    assert (done.returncode == 1) == refused, done.stderr
    assert (f"job 71 trains {run} already" in done.stdout) == refused
    assert (run / "job").read_text().strip() == ("71" if refused else "72")
