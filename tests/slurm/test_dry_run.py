"""launch/submit.sh without Slurm: what it would do, and what it refuses."""

import shlex


def test_a_dry_run_prints_the_lines_of_both_components_and_submits_nothing(desk):
    path, run = desk.run_file("dry", max_lag=1, more="ROLLOUT_NODES=2 TRAIN_NODES=1")
    done = desk.submit("disaggregated", path, "--dry-run")
    assert done.returncode == 0, done.stderr
    sbatch, create, trainer, rollout = map(shlex.split, done.stdout.splitlines())
    assert {"--requeue", "--signal=B:USR1@60"} <= set(sbatch)
    assert [word for word in sbatch if word.startswith("--nodes") or word == ":"] == [
        "--nodes=1",
        ":",
        "--nodes=2",
    ]
    assert create[1:5] == ["tools/exchange.py", "create", str(run), "--steps"]
    assert {"srun", "--het-group=0", "--kill-on-bad-exit=1", "--ntasks=1"} <= set(trainer)
    assert {"--exit-signal=SIGUSR1", "--global-batch-size=8"} <= set(trainer)
    assert {"srun", "--het-group=1", "--kill-on-bad-exit=0", "--ntasks=2"} <= set(rollout)
    assert not run.exists()


def test_a_container_is_given_to_every_step(desk):
    more = "CONTAINER_IMAGE=/images/trace.sqsh CONTAINER_MOUNTS=/data:/data"
    path, run = desk.run_file("contained", more=more)
    done = desk.submit("colocated", path, "--dry-run")
    lines = [line for line in done.stdout.splitlines() if line.startswith("srun")]
    assert len(lines) == 2, done.stderr
    for words in map(shlex.split, lines):
        assert "--container-image=/images/trace.sqsh" in words
        mounts = next(word for word in words if word.startswith("--container-mounts="))
        assert f"{run}:{run},/data:/data" in mounts


def test_a_job_that_cannot_run_is_refused_before_it_is_submitted(desk):
    path, _ = desk.run_file("refused", more="TRAIN_FLAGS+=(--expert-model-parallel-size=3)")
    done = desk.submit("colocated", path)
    assert done.returncode == 1
    assert "--num-experts 8 cannot be divided over 3" in done.stderr
