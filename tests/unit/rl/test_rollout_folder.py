"""A folder of samples, hints and rewards: what is trained on, what is left out, what is refused."""

import dataclasses
import json
import math

import pytest
import torch

from megatron_trace.hints.files_writer import HintFilesWriter
from megatron_trace.hints.settings_file import load_settings, save_settings, settings_record
from megatron_trace.hints.types import QuantizerSettings, Site
from megatron_trace.rl.exchange_folder import open_samples
from megatron_trace.rl.rollout_folder import Reward, RolloutFolder, commit_rollouts
from megatron_trace.rl.staleness import StaleSampleError
from megatron_trace.rl_config import LossConfig
from megatron_trace.testing.hint_samples import recorded_sample

# A third has no short binary fraction.
SETTINGS = QuantizerSettings({(0, Site.FC1): 1 / 3, (0, Site.K): 2.0**-7}, model_id="tiny")


def samples(*names, settings=SETTINGS):
    digest = "" if settings is None else settings.digest()
    return [
        dataclasses.replace(recorded_sample(name).sample, settings_digest=digest) for name in names
    ]


def rewards(values, *, group="g", size=None):
    size = size or len(values)
    return [Reward(name, group, size, value) for name, value in values.items()]


def commit(folder, values, *, settings=SETTINGS, **options):
    with HintFilesWriter(folder) as files:
        commit_rollouts(
            files, samples(*values, settings=settings), rewards(values, **options), settings
        )


def test_samples_come_back_with_rewards_advantages_and_settings(tmp_path):
    commit(tmp_path, {"a": 1.0, "b": 0.0})
    commit(tmp_path, {"c": 1.0, "d": 1.0}, group="h")
    folder = RolloutFolder(tmp_path, settle=False)
    assert [folder[i].sample.sample_id for i in range(len(folder))] == ["a", "b", "c", "d"]
    # (1 - 1/2) / (sqrt(1/2) + 1e-4); a group without spread has none.
    assert [folder[i].advantage for i in range(4)] == pytest.approx(
        [0.707007, -0.707007, 0, 0], abs=1e-6
    )
    assert [folder[i].reward for i in range(4)] == [1.0, 0.0, 1.0, 1.0]
    assert folder.settings == SETTINGS
    assert folder.hints.findings == ()


def test_a_folder_of_rollouts_that_is_not_there_is_named_with_what_writes_one(tmp_path):
    (tmp_path / "file").touch()
    for name, problem in (("nowhere", "nowhere does not exist"), ("file", "file is no folder")):
        with pytest.raises(ValueError, match=rf"{problem}; --trace-hint-dir .*--rollout-output"):
            open_samples(tmp_path / name, LossConfig(), quantised=True, drop_without_spread=False)


def test_the_most_probable_tokens_of_a_sample_come_back(tmp_path):
    (sample, other) = samples("a", "b")
    shape = (len(sample.response_tokens), 4)
    top = {
        "top_tokens": torch.arange(shape[0] * 4, dtype=torch.int32).view(shape),
        "top_logprobs": torch.full(shape, -torch.inf),
    }
    with HintFilesWriter(tmp_path) as files:
        written = [dataclasses.replace(sample, **top), other]
        commit_rollouts(files, written, rewards({"a": 1.0, "b": 0.0}), SETTINGS)
    folder = RolloutFolder(tmp_path, settle=False)
    for name, values in top.items():
        assert torch.equal(getattr(folder[0].sample, name), values)
        assert getattr(folder[1].sample, name) is None


def test_groups_without_spread_are_left_out_for_an_objective_that_drops_them(tmp_path):
    commit(tmp_path, {"a": 1.0, "b": 0.5, "c": 0.0})
    commit(tmp_path, {"d": 1.0, "e": 1.0}, group="h")
    folder = RolloutFolder(tmp_path)
    kept = folder.for_objective(LossConfig(), drop_without_spread=True)
    # b has an advantage of 0, but its group has spread.
    assert [kept[n].sample.sample_id for n in range(len(kept))] == ["a", "b", "c"]
    assert kept.without_spread == ("d", "e")
    assert [folder.has_spread(n) for n in range(5)] == [True] * 3 + [False] * 2
    assert len(folder.for_objective(LossConfig(), drop_without_spread=False)) == len(folder) == 5


def test_samples_older_than_the_bound_before_the_latest_version_are_left_out(tmp_path):
    old = [dataclasses.replace(of, policy_version=2) for of in samples("a", "b")]
    new = [dataclasses.replace(of, policy_version=5) for of in samples("c", "d")]
    with HintFilesWriter(tmp_path) as files:
        for group, committed in (("g", old), ("h", new)):
            values = {of.sample_id: float(n) for n, of in enumerate(committed)}
            commit_rollouts(files, committed, rewards(values, group=group), SETTINGS)
    folder = RolloutFolder(tmp_path)
    kept = folder.for_objective(LossConfig(max_lag=2), drop_without_spread=False)
    assert (len(kept), kept.stale) == (2, ("a", "b"))
    assert len(folder.for_objective(LossConfig(max_lag=3), drop_without_spread=False)) == 4
    refusing = LossConfig(max_lag=2, stale_samples="error")
    with pytest.raises(StaleSampleError, match="2 of 4 samples are more than max_lag=2"):
        folder.for_objective(refusing, drop_without_spread=False)


def test_a_folder_of_groups_without_spread_is_refused_where_they_are_dropped(tmp_path):
    commit(tmp_path, {"a": 1.0, "b": 1.0})
    with pytest.raises(ValueError, match="2 are of groups with equal rewards"):
        RolloutFolder(tmp_path).for_objective(LossConfig(), drop_without_spread=True)


def test_groups_of_which_samples_are_missing_are_left_out_and_named(tmp_path):
    commit(tmp_path, {"a": 1.0, "b": 0.0})
    commit(tmp_path, {"c": 1.0}, group="h", size=2)
    assert RolloutFolder(tmp_path).unsettled == ("c",)
    with pytest.raises(ValueError, match=r"1 samples have no reward, or .* missing .first: c"):
        RolloutFolder(tmp_path, settle=False)
    commit(tmp_path, {"d": 0.0}, group="h", size=2)
    assert len(RolloutFolder(tmp_path, settle=False)) == 4


def test_a_folder_without_a_sample_to_train_on_is_refused(tmp_path):
    commit(tmp_path, {"a": 1.0}, size=2)
    with pytest.raises(ValueError, match="no sample to train on: 1 are committed, 1 have a reward"):
        RolloutFolder(tmp_path)


def test_rewards_of_other_samples_are_refused_and_nothing_is_written(tmp_path):
    with (
        HintFilesWriter(tmp_path) as files,
        pytest.raises(ValueError, match="1 rewards must name the 2 samples"),
    ):
        commit_rollouts(files, samples("a", "b"), rewards({"a": 1.0}, size=2), SETTINGS)
    assert not (tmp_path / "settings.json").exists()


def test_samples_of_other_settings_are_refused(tmp_path):
    other = dataclasses.replace(SETTINGS, model_id="other")
    with (
        HintFilesWriter(tmp_path) as files,
        pytest.raises(ValueError, match="was rolled out under quantiser settings"),
    ):
        commit_rollouts(files, samples("a"), rewards({"a": 1.0}, size=2), other)
    commit(tmp_path, {"a": 1.0, "b": 0.0})
    with pytest.raises(ValueError, match="write samples of other settings to another folder"):
        commit(tmp_path, {"c": 1.0, "d": 0.0}, settings=other)


def test_bf16_rollouts_have_no_settings(tmp_path):
    commit(tmp_path, {"a": 1.0, "b": 0.0}, settings=None)
    assert RolloutFolder(tmp_path).settings is None


def test_bf16_and_quantised_rollouts_do_not_share_a_folder(tmp_path):
    for name, first, second in (("a", None, SETTINGS), ("b", SETTINGS, None)):
        commit(tmp_path / name, {"a": 1.0, "b": 0.0}, settings=first)
        with pytest.raises(ValueError, match=r"but these are .*; write them to another"):
            commit(tmp_path / name, {"c": 1.0, "d": 0.0}, settings=second)
        assert len(RolloutFolder(tmp_path / name, settle=False)) == 2


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused(reward):
    with pytest.raises(ValueError, match="the reward of sample a must be finite"):
        Reward("a", "g", 2, reward)


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match="group of sample a needs at least 2 samples"):
        Reward("a", "g", 1, 0.0)


@pytest.mark.parametrize("size", [2, 3])
def test_two_groups_of_one_name_are_refused(tmp_path, size):
    commit(tmp_path, {"a": 1.0, "b": 0.0})
    commit(tmp_path, {"c": 1.0, "d": 0.0}, size=size)
    with pytest.raises(ValueError, match=r"line 1: sample c is the 3. of a group g of .* has 2"):
        RolloutFolder(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        '{"sample_id": "c"}',
        "half a li",
        "[1, 2]",
        '{"sample_id": "c", "group": "h", "group_size": 2, "reward": NaN}',
        '{"sample_id": "c", "group": "h", "group_size": 2, "reward": "1"}',
    ],
)
def test_a_damaged_line_of_rewards_is_named(tmp_path, line):
    commit(tmp_path, {"a": 1.0, "b": 0.0})
    (path,) = (tmp_path / "rewards").iterdir()
    path.write_text(path.read_text() + line)
    with pytest.raises(ValueError, match=rf"{path.name}, line 3: no reward"):
        RolloutFolder(tmp_path)


def test_a_second_reward_of_a_sample_is_refused(tmp_path):
    commit(tmp_path, {"a": 1.0, "b": 0.0})
    (path,) = (tmp_path / "rewards").iterdir()
    path.write_text(path.read_text() * 2)
    with pytest.raises(ValueError, match="sample a has a reward already"):
        RolloutFolder(tmp_path)


def test_settings_keep_every_bit_and_are_not_overwritten(tmp_path):
    save_settings(SETTINGS, tmp_path)
    assert load_settings(tmp_path) == SETTINGS
    save_settings(SETTINGS, tmp_path)
    with pytest.raises(ValueError, match="write samples of other settings"):
        save_settings(dataclasses.replace(SETTINGS, model_id="x"), tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is damaged"),
        ("[]", "must hold an object; got list"),
        (json.dumps(settings_record(SETTINGS) | {"new": 1}), "written by another version"),
        (
            json.dumps(settings_record(SETTINGS) | {"global_scales": [[0, "fc9", "0x1p-3"]]}),
            "must be .layer, site, hexadecimal float.",
        ),
    ],
)
def test_settings_of_a_damaged_file_are_refused(tmp_path, text, message):
    (tmp_path / "settings.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_settings(tmp_path)
