"""launch/local.sh: a job on one machine without Slurm, with programs that only write and wait."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    len(list(Path("/dev").glob("nvidia[0-9]*"))) == 1,
    reason="a node with one GPU is refused for jobs of two ranks",
)

ROOT = Path(__file__).parents[3]
PATIENCE_S = 300
# In place of Python: a version for each time that both ranks trained.
PROGRAMS = """#!/bin/bash
case $1 in
tools/exchange.py) mkdir -p "$3"/{batches,checkpoints} ;;
examples/rollout_worker.py) echo "rolls out ${!#}" ;;
examples/pretrain_trace.py)
    echo "rank $RANK of $WORLD_SIZE at $MASTER_ADDR"
    trap 'echo saved; exit 0' USR1
    [[ $RANK != 1 || -z ${RANK_1_FAILS:-} ]] || exit 3
    [[ -z ${WAITS:-} ]] || { touch "$RUN/waits.$RANK"; for _ in {1..6000}; do sleep 0.1; done; }
    tracker=$RUN/checkpoints/latest_checkpointed_iteration.txt
    if ((RANK == 0)); then echo $(($(cat "$tracker" 2>/dev/null || echo 0) + 1)) >"$tracker.new"; mv "$tracker.new" "$tracker"; fi ;;
esac
exit 0
"""  # noqa: E501
RUN_FILE = """RUN={run}
START={folder} TASKS={folder} STEPS_OF_RUN=2 PROMPTS_PER_BATCH=2 SAMPLES_PER_PROMPT=4
MODEL_FLAGS=('--hybrid-layer-pattern=*E') TRAIN_FLAGS=() ROLLOUT_FLAGS=()
"""


@pytest.fixture
def job(tmp_path):
    """Gives how a job of two ranks is started, and the run's folder."""
    programs, run = tmp_path / "programs", tmp_path / "run"
    programs.write_text(PROGRAMS)
    programs.chmod(0o755)
    (tmp_path / "cluster.env").write_text(f"PYTHON={programs} GPUS_PER_NODE=2 TIME_LIMIT_MIN=9\n")
    (tmp_path / "run.env").write_text(RUN_FILE.format(run=run, folder=tmp_path))

    def job(kind="colocated", **variables):
        return subprocess.Popen(
            [ROOT / "launch" / "local.sh", kind, tmp_path / "cluster.env", tmp_path / "run.env"],
            env={k: v for k, v in os.environ.items() if not k.startswith("SLURM_")} | variables,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    return job, run


def logged(run, name):
    return "".join(path.read_text() for path in sorted(run.glob(f"logs/*/attempt-0/{name}.log")))


def test_a_job_takes_turns_on_one_machine_to_its_end(job):
    start, run = job
    job = start()
    told, _ = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 0, told
    for rank in range(2):
        assert logged(run, f"trainer.{rank}") == f"rank {rank} of 2 at 127.0.0.1\n" * 2
        assert logged(run, f"rollout.{rank}") == f"rolls out --rollout-worker={rank}\n" * 2


def test_a_rank_that_fails_ends_the_others_and_the_job(job):
    start, _ = job
    job = start(RANK_1_FAILS="1", WAITS="1")
    told, _ = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 1, told
    assert "ends with status 1" in told


@pytest.mark.parametrize("told", [signal.SIGUSR1, signal.SIGINT])
def test_a_job_that_is_told_to_end_saves_and_goes_on_with_the_same_command(job, told):
    start, run = job
    waiting = start(WAITS="1")
    while not all((run / f"waits.{rank}").exists() for rank in range(2)):
        assert waiting.poll() is None
        time.sleep(0.05)
    waiting.send_signal(told)
    output, _ = waiting.communicate(timeout=PATIENCE_S)
    assert waiting.returncode == 143, output
    assert [logged(run, f"trainer.{rank}").splitlines()[1:] for rank in range(2)] == [["saved"]] * 2
    again = start()
    output, _ = again.communicate(timeout=PATIENCE_S)
    assert (again.returncode, (run / "paused").exists()) == (0, False), output


def test_a_job_of_two_components_is_refused(job):
    start, _ = job
    told, _ = start("disaggregated").communicate(timeout=PATIENCE_S)
    assert "on one machine, take colocated" in told
