"""Folders of runs as programs leave them: whole, killed, crashed, damaged, empty."""

import json

import pytest


def record(step, reward, gap, **fields):
    return {
        "step": step,
        "reward": reward,
        "gap": {"mean": gap, "p99": 10 * gap, "max": None, "kl": gap / 10, "num_tokens": 9},
        "health": {
            "code_mismatch": {"fc1": gap, "k": gap / 2},
            "nearest_mismatch": {"fc1": 2 * gap, "k": gap},
            "scale_mismatch": {"fc1": gap / 4},
            "coverage": 1.0,
        },
        "skipped_updates": 0,
        "alarms": [],
        "seconds": {"rollout": 1.0, "train": 2.0, "record": 0.1, "push": 0.2},
    } | fields


@pytest.fixture
def write_run(tmp_path):
    """Writes a run's folder below `tmp_path` and gives it."""

    def write_run(place, records, *, tail="", **fields):
        folder = tmp_path / place
        folder.mkdir(parents=True)
        text = "".join(json.dumps(one) + "\n" for one in records)
        (folder / "metrics.jsonl").write_text(text + tail)
        if fields:
            (folder / "run.json").write_text(json.dumps({"format": "megatron_trace run"} | fields))
        return folder

    return write_run


@pytest.fixture
def every_state(tmp_path, write_run):
    """One folder above runs in every state that a report must survive."""
    for seed, reward in ((0, 0.25), (1, 0.75)):
        write_run(
            f"seed-{seed}/trace",
            [record(0, 0.0, 1e-3), record(1, reward, 1e-3, skipped_updates=1)],
            name="trace",
            seed=seed,
            steps=2,
            status="finished",
            held_out={"before": 0.125, "after": reward},
            settings={"trace": {"method": "trace", "hint_bits": 1}, "seed": seed},
            versions={"torch": "2.11.0", "commit": "abc"},
        )
    alarm = {"alarm": "gap_mean", "value": 0.5, "threshold": 0.25, "action": "warn"}
    write_run(
        "seed-0/qat",
        [record(0, 0.5, 0.5, alarms=[alarm])],
        name="qat",
        seed=0,
        steps=2,
        status="crashed",
        reason="RuntimeError: <boom> & more",
        settings={"trace": {"method": "qat", "hint_bits": 1}, "seed": 0},
        versions={"torch": "2.10.0", "commit": "abc"},
    )
    write_run("seed-0/killed", [record(0, 0.5, 0.1)], tail='{"step": 1, "rew', steps=9)
    write_run("seed-0/odd", [], tail='[]\nnot json\n{"step": "x"}\n{"step": 3, "gap": 7}\n')
    write_run("seed-0/nothing_logged", [], name="nothing_logged", seed=0, status="running")
    (tmp_path / "seed-0" / "empty").mkdir()
    return tmp_path


@pytest.fixture
def exchange(tmp_path, write_run):
    """The folder of an exchange, with its own run.json, in which Megatron's loop left a log."""
    steps = [record(step, 0.5, 1e-3, learning_rate=1e-6, samples=8) for step in range(2)]
    for one in steps:
        one["seconds"] = {"train": 3.0, "wait": 1.0}
    write_run(
        "loops/moe/training",
        steps,
        name="moe",
        seed=1234,
        steps=9,
        status="left off",
        reason="asked to",
        settings={"megatron": {"lr": 1e-6}, "trace": {"method": "trace"}},
        versions={"torch": "2.11.0"},
    )
    folder = tmp_path / "loops" / "moe"
    (folder / "run.json").write_text('{"steps": 9, "batches_per_step": 1}')
    (folder / "batches").mkdir()
    return folder
