"""How the jobs' scripts deal with signals, losses and failures, with programs that only wait."""

import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
# In place of Python: three batches and three versions, in files as of a run.
PROGRAMS = """#!/bin/bash
version() { cat "$RUN/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0; }
paused() { [[ -e $RUN/paused ]]; }
case $1 in
tools/exchange.py) mkdir -p "$3"/{batches,checkpoints} ;;
examples/rollout_worker.py)
    [[ -z ${WORKERS_FAIL:-} ]] || exit 1
    for batch in 0 1 2; do
        until (($(version) >= batch)); do paused && exit 75; sleep 0.1; done
        [[ -e $RUN/batches/b$batch.json ]] || echo "attempt $SLURM_RESTART_COUNT" >"$RUN/batches/b$batch.json"
    done ;;
examples/pretrain_trace.py)
    stopped=0
    trap 'stopped=1' USR1
    [[ -z ${TRAINER_FAILS:-} ]] || exit 3
    for ((step = $(version); step < 3; step++)); do
        until [[ -e $RUN/batches/b$step.json ]]; do paused && exit 1; sleep 0.1; done
        for _ in 1 2 3 4 5 6 7 8 9 10; do sleep 0.3; done
        echo $((step + 1)) >"$RUN/checkpoints/latest_checkpointed_iteration.txt"
        ((stopped)) && exit 0
    done ;;
esac
exit 0
"""  # noqa: E501
RUN = """RUN={run}
START={run}-start TASKS=prompts STEPS_OF_RUN=3 ROLLOUT_NODES=1 WORKERS_PER_NODE=2
MODEL_FLAGS=() TRAIN_FLAGS=() ROLLOUT_FLAGS=()
export RESPAWN_S=0 MAX_LOSSES=1 {more}
"""


class Runs:
    """Starts runs whose programs only wait."""

    def __init__(self, cluster, folder, submit):
        self.cluster, self.folder, self.submit = cluster, folder, submit

    def start(self, kind, more=""):
        """Submits a job, and gives its number and the run's folder."""
        run = self.folder / "run"
        (self.folder / "run.env").write_text(RUN.format(run=run, more=more))
        done = self.submit(kind, self.folder / "run.env")
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.split()[-1], run

    def ends(self, job, state, timeout_s=120):
        """Waits for the end of a job in a state."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.cluster.wait(
            lambda: self.cluster.state(job) in ends, f"the end of job {job}", timeout_s=timeout_s
        )
        assert self.cluster.state(job) == state, said(self.folder / "run", job)


def said(run, job):
    """Gives what a job's script wrote."""
    return (run / "logs" / f"job-{job}.txt").read_text()


@pytest.fixture
def runs(cluster, tmp_path, site_without_model):
    """A site with such programs."""
    programs = tmp_path / "programs"
    programs.write_text(PROGRAMS)
    programs.chmod(0o755)
    made = site_without_model(tmp_path, cluster, python=programs)
    return Runs(cluster, tmp_path, made.submit)


def first_version(run):
    return (run / "checkpoints" / "latest_checkpointed_iteration.txt").is_file()


def test_a_disaggregated_run_is_told_to_save_and_goes_on_when_it_is_requeued(runs):
    job, run = runs.start("disaggregated")
    runs.cluster.wait(lambda: first_version(run), "the first version", timeout_s=120)
    runs.cluster.run("scancel", "-b", "--signal=USR1", job)
    runs.ends(job, "COMPLETED", timeout_s=400)
    told = said(run, job)
    assert "signal ahead of the time limit: saving" in told
    assert "attempt 1: disaggregated" in told
    assert (run / "batches" / "b0.json").read_text().strip() == "attempt"


def test_a_disaggregated_run_goes_on_after_a_node_that_rolled_out_failed(runs):
    job, run = runs.start("disaggregated")
    runs.cluster.wait(lambda: first_version(run), "the first version", timeout_s=120)
    components = runs.cluster.run("squeue", "-h", "-o", "%i %N").stdout.splitlines()
    (node,) = (line.split()[1] for line in components if line.startswith(f"{job}+1 "))
    runs.cluster.run("scontrol", "update", f"nodename={node}", "state=DOWN", "reason=test")
    runs.ends(job, "COMPLETED", timeout_s=400)
    assert "attempt 1: disaggregated" in said(run, job)


def test_a_trainer_that_fails_ends_the_workers_and_the_job(runs):
    job, run = runs.start("disaggregated", more="TRAINER_FAILS=1")
    runs.ends(job, "FAILED")
    assert "ends with status 3" in said(run, job)


def test_a_run_without_workers_ends_instead_of_waiting(runs):
    job, run = runs.start("disaggregated", more="WORKERS_FAIL=1")
    runs.ends(job, "FAILED")
    worker = (run / "logs" / f"job-{job}" / "attempt-0" / "rollout.0.log").read_text()
    assert "worker 0 was lost 2 times, the last time with status 1: giving up" in worker
