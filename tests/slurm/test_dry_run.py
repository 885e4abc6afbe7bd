"""launch/submit.sh without Slurm: what it would do, and what it refuses."""

import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

STEPS = ("export", "evaluate")
NAME = "model.safetensors"


def published(folder):
    """Makes a folder with one tensor of an expert."""
    folder.mkdir()
    save_file({"model.layers.0.mlp.experts.0.up.weight": torch.zeros(16, 16)}, folder / NAME)


def components(sbatch):
    return [word for word in sbatch if word.startswith("--nodes") or word == ":"]


def test_a_dry_run_prints_the_lines_of_both_components_and_submits_nothing(desk):
    path, run = desk.run_file("dry", max_lag=1, more="ROLLOUT_NODES=2 TRAIN_NODES=1")
    done = desk.submit("disaggregated", path, "--dry-run")
    assert done.returncode == 0, done.stderr
    lines = list(map(shlex.split, done.stdout.splitlines()))
    sbatch, on_training, on_rollout, create, trainer, rollout = lines
    assert {"--requeue", "--signal=B:USR1@60"} <= set(sbatch)
    assert components(sbatch) == ["--nodes=1", ":", "--nodes=2"]
    for words, group, nodes in ((on_training, 0, 1), (on_rollout, 1, 2)):
        asked = {f"--het-group={group}", f"--nodes={nodes}", f"--ntasks={nodes}", "launch/node.sh"}
        assert asked <= set(words)
    assert create[1:5] == ["tools/exchange.py", "create", str(run), "--steps"]
    assert {"srun", "--het-group=0", "--kill-on-bad-exit=1", "--ntasks=1"} <= set(trainer)
    assert {"--exit-signal=SIGUSR1", "--global-batch-size=8"} <= set(trainer)
    assert f"--trace-metrics-dir={run}/training" in trainer
    assert {"srun", "--het-group=1", "--kill-on-bad-exit=0", "--ntasks=2"} <= set(rollout)
    assert not run.exists()


def test_a_container_is_given_to_every_step(desk):
    more = "CONTAINER_IMAGE=/images/trace.sqsh CONTAINER_MOUNTS=/data:/data"
    path, run = desk.run_file("contained", more=more)
    done = desk.submit("colocated", path, "--dry-run")
    lines = [line for line in done.stdout.splitlines() if line.startswith("srun")]
    assert len(lines) == 3, done.stderr
    for words in map(shlex.split, lines):
        assert "--container-image=/images/trace.sqsh" in words
        mounts = next(word for word in words if word.startswith("--container-mounts="))
        assert f"{run}:{run},/data:/data" in mounts


def test_a_job_that_cannot_run_is_refused_before_it_is_submitted(desk):
    wrong = "TRAIN_FLAGS+=(--expert-model-parallel-size=3) TASKS=/nowhere"
    path, run = desk.run_file("refused", more=wrong)
    done = desk.submit("colocated", path)
    assert done.returncode == 1
    assert "--num-experts 8 cannot be divided over 3" in done.stderr
    assert "TASKS=/nowhere does not exist" in done.stderr
    assert not run.exists()


def test_a_run_in_two_parts_can_be_trained_by_turns(desk):
    path, _ = desk.run_file("two_parts", more="ROLLOUT_NODES=2 TRAIN_NODES=2")
    done = desk.submit("colocated", path, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert components(shlex.split(done.stdout.splitlines()[0])) == ["--nodes=2"]


def test_post_training_quantisation_exports_and_evaluates_each_recipe(desk):
    published(desk.folder / "published")
    asked = f"EVALUATE_TASKS={desk.folder / 'tasks.jsonl'} PUBLISHED={desk.folder / 'published'}"
    path, run = desk.run_file(
        "quantised", more=asked + " PTQ_RECIPES='4over6 h_scale' ROLLOUT_NODES=2"
    )
    done = desk.submit("ptq", path, "--dry-run")
    assert done.returncode == 0, done.stderr
    lines = list(map(shlex.split, done.stdout.splitlines()))
    assert components(lines[0]) == ["--nodes=1"]
    names = [
        Path(word.partition("=")[2]).name.partition(".")[0]
        for words in lines[1:]
        for word in words
        if word.startswith("--output=")
    ]
    recipes = [f"{step}-{recipe}" for recipe in ("4over6", "h_scale") for step in STEPS]
    assert names == ["nodes", "convert", "evaluate-bf16", *recipes, "compare"]
    folder = run / "ptq" / "version-latest"
    evaluated = next(words for words in lines if "--trace-method=qat" in words)
    assert f"--evaluate-export={folder}/4over6" in evaluated
    assert not run.exists()


def test_a_recipe_that_is_not_known_is_refused(desk):
    published(desk.folder / "like")
    asked = f"EVALUATE_TASKS={desk.folder / 'tasks.jsonl'} PUBLISHED={desk.folder / 'like'}"
    path, _ = desk.run_file("unknown", more=asked + " PTQ_RECIPES=5over7")
    done = desk.submit("ptq", path)
    assert done.returncode == 1
    assert "there is no recipe 5over7; PTQ_RECIPES may name vanilla, 4over6" in done.stderr


@pytest.mark.parametrize(
    ("kind", "setting"), [("evaluate", "EVALUATE_TASKS"), ("disaggregated", "ROLLOUT_NODES")]
)
def test_a_setting_that_a_job_needs_is_asked_for(desk, kind, setting):
    path, _ = desk.run_file(f"missing_{kind}")
    done = desk.submit(kind, path)
    assert done.returncode == 1
    assert f"the job {kind} needs {setting} in" in done.stderr
