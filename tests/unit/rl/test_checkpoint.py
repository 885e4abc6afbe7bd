"""Save and resume of RL runs."""

import contextlib
import json
import shutil
from unittest.mock import Mock

import pytest
import torch

from megatron_trace.rl import checkpoint
from megatron_trace.rl.step import rl_step, roll_out

IDENTITY = {"method": "trace", "seed": 0, "sites": ("fc1", "k")}


def comparable(metrics):
    return {**metrics, "seconds": None}


@pytest.fixture
def saved(one_saved, tmp_path):
    """The path of a checkpoint after one step, which a test may damage."""
    return shutil.copytree(one_saved, tmp_path / one_saved.name)


@pytest.fixture(scope="module")
def one_saved(started, tmp_path_factory):
    run = started("trace")
    rl_step(run)
    return checkpoint.save(run, tmp_path_factory.mktemp("saved"), identity=IDENTITY)


@pytest.mark.parametrize(
    ("method", "trainer_dtype", "saved_after", "steps"),
    [
        ("bf16", "bf16", 1, 2),
        ("quads", "bf16", 1, 2),
        ("score_centering", "bf16", 1, 2),
        ("trace", "bf16", 2, 4),
        ("trace", "fp32", 1, 2),
    ],
)
def test_saved_and_resumed_steps_equal_those_in_one_go(
    build, started, tmp_path, method, trainer_dtype, saved_after, steps
):
    through = started(method, trainer_dtype=trainer_dtype)
    metrics = [comparable(rl_step(through)) for _ in range(steps)]

    first = started(method, trainer_dtype=trainer_dtype)
    for _ in range(saved_after):
        rl_step(first)
    path = checkpoint.save(first, tmp_path, identity=IDENTITY)

    second = build(method, trainer_dtype=trainer_dtype)
    torch.manual_seed(99)
    checkpoint.resume(second, path, identity=IDENTITY)
    later = [comparable(rl_step(second)) for _ in range(steps - saved_after)]
    assert later == metrics[saved_after:]
    assert second.progress == through.progress
    for name, value in through.named_weights().items():
        assert torch.equal(value, second.named_weights()[name]), name


def test_a_run_before_its_first_step_is_not_saved(started, tmp_path):
    with pytest.raises(ValueError, match="no optimizer state to save before its first step"):
        checkpoint.save(started("trace"), tmp_path, identity=IDENTITY)
    assert not list(tmp_path.iterdir())


def test_a_run_whose_step_failed_resumes_exactly(started, monkeypatch, tmp_path):
    run, reference = started("trace"), started("trace")
    rl_step(run)
    rl_step(reference)
    checkpoint.save(run, tmp_path, identity=IDENTITY)
    with monkeypatch.context() as patch:
        patch.setattr(run.optimizer, "step", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            rl_step(run)
    checkpoint.resume(run, checkpoint.latest(tmp_path), identity=IDENTITY)
    assert comparable(rl_step(run)) == comparable(rl_step(reference))
    for name, value in reference.named_weights().items():
        assert torch.equal(run.named_weights()[name], value), name


def test_only_the_checkpoint_is_left_in_the_folder(one_saved):
    assert [path.name for path in one_saved.parent.iterdir()] == ["step-000001"]


def test_saving_a_step_again_replaces_it(saved, started):
    run = started("trace")
    rl_step(run)
    assert checkpoint.save(run, saved.parent, identity=IDENTITY) == saved
    assert checkpoint.latest(saved.parent) == saved


def test_random_states_are_resumed(saved, build):
    torch.manual_seed(5)
    run = build("trace")
    checkpoint.resume(run, saved, identity=IDENTITY)
    first = torch.rand(3)
    checkpoint.resume(run, saved, identity=IDENTITY)
    assert torch.equal(torch.rand(3), first)


def test_latest_is_the_highest_step_that_is_complete(tmp_path):
    for name in ("step-000009", "step-000010", "step-1000000", "step-9999999.tmp-1", "other"):
        (tmp_path / name).mkdir()
    assert checkpoint.latest(tmp_path).name == "step-1000000"


def test_others_are_dropped_but_nothing_else(tmp_path):
    for name in ("step-000009", "step-000010", "step-000011.tmp-1", "other"):
        (tmp_path / name).mkdir()
    checkpoint.drop_others(tmp_path / "step-000010")
    assert {path.name for path in tmp_path.iterdir()} == {
        "step-000010",
        "step-000011.tmp-1",
        "other",
    }


@pytest.mark.parametrize("exists", [True, False])
def test_folder_without_checkpoint_raises(tmp_path, exists):
    folder = tmp_path if exists else tmp_path / "none"
    with pytest.raises(ValueError, match="has no checkpoint"):
        checkpoint.latest(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed was 0, now it is 1"),
        ({"extra": 2}, "extra was None, now it is 2"),
        ({"method": "qat"}, "method was 'trace', now it is 'qat'"),
    ],
)
def test_checkpoint_of_another_run_is_refused(saved, change, message):
    with pytest.raises(ValueError, match=f"is of another run: {message}"):
        checkpoint.resume(None, saved, identity=IDENTITY | change)


def test_a_setting_that_did_not_exist_yet_had_its_default(saved, build):
    checkpoint.resume(build("trace"), saved, identity=IDENTITY | {"cuda_graphs": False})
    with pytest.raises(ValueError, match="cuda_graphs was None, now it is True"):
        checkpoint.resume(None, saved, identity=IDENTITY | {"cuda_graphs": True})


ALARMS = {"alarms": ("lag=0:stop", "kl=1:drop"), "max_skipped_steps": 3}


def test_alarms_that_decide_no_number_may_change(saved, build):
    """So that a run that one stopped can go on."""
    record = json.loads((saved / "run.json").read_text())
    record["identity"]["health"] = ALARMS
    (saved / "run.json").write_text(json.dumps(record))
    weaker = {"alarms": ("lag=9:stop", "kl=1:drop", "gap_mean=1:warn"), "max_skipped_steps": 9}
    checkpoint.resume(build("trace"), saved, identity=IDENTITY | {"health": weaker})
    for alarm in ("kl=2:drop", "kl=1:bf16", "none"):
        others = {"alarms": (alarm,), "max_skipped_steps": 3}
        with pytest.raises(ValueError, match="is of another run: health was"):
            checkpoint.resume(None, saved, identity=IDENTITY | {"health": others})


def cut(path):
    path.write_bytes(path.read_bytes()[:-7])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [cut, flip_a_bit, lambda path: path.unlink()])
def test_damaged_tensors_are_named(saved, damage):
    damage(next(saved.glob("*.distcp")))
    with pytest.raises(ValueError, match=r"\.distcp is truncated or damaged: expected"):
        checkpoint.resume(None, saved, identity=IDENTITY)


def test_truncated_record_is_named(saved):
    cut(saved / "run.json")
    with pytest.raises(ValueError, match=r"run\.json is truncated or damaged"):
        checkpoint.resume(None, saved, identity=IDENTITY)


@pytest.mark.parametrize("content", ["[]", "{}", json.dumps({"format": "other"})])
def test_record_of_another_program_is_refused(tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(ValueError, match="it is of another program or version"):
        checkpoint.resume(None, tmp_path, identity=IDENTITY)


def test_folder_of_something_else_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"is no RL checkpoint: it has no run\.json"):
        checkpoint.resume(None, tmp_path, identity=IDENTITY)


def test_a_run_that_was_killed_in_its_first_step_begins_again(started, tmp_path):
    """Its samples are named as those that it rolled out before."""
    killed = started("trace", hint_folder=tmp_path)
    samples, _ = roll_out(killed)
    killed.close()
    again = started("trace", hint_folder=tmp_path)
    with contextlib.closing(again):
        assert len(again.store.sample_ids()) == len(samples)  # Nothing is removed unasked.
        again.drop_hints()
        assert [sample.sample_id for sample in roll_out(again)[0]] == [
            sample.sample_id for sample in samples
        ]


def test_more_steps_than_a_run_is_to_have_are_refused(build, saved):
    run = build("trace")
    with pytest.raises(ValueError, match=r"step-000001 has done 1 steps, more than the 0 that"):
        checkpoint.resume(run, saved, identity=IDENTITY, num_steps=0)
    assert run.progress.step == 0
