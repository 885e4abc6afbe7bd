"""A folder through which rollout and training exchange samples, hints and rewards.

    settings.json                        the quantiser settings of all samples (none: BF16 rollouts)
    v00000007/                           samples and hints, see docs/hint_files.md
    rewards/v00000007.000000.jsonl       {"sample_id", "group", "group_size", "reward"} a line

A sample can be trained on once every sample of its group is committed and rewarded.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from megatron_trace.hints.durable import make_folder, write_file
from megatron_trace.hints.files import HintFiles
from megatron_trace.hints.files_writer import HintFilesWriter
from megatron_trace.hints.folder import version_folder
from megatron_trace.hints.settings_file import SETTINGS_FILE, load_settings, save_settings
from megatron_trace.hints.types import QuantizerSettings, RolloutSample
from megatron_trace.rl.advantages import group_advantages
from megatron_trace.rl.staleness import fresh_samples
from megatron_trace.rl_config import LossConfig

REWARDS_FOLDER = "rewards"


@dataclass(frozen=True)
class Reward:
    """The reward of one sample.

    Attributes:
        sample_id: The sample.
        group: Name of its prompt group, unique within the folder.
        group_size: Samples of the group, at least 2.
        reward: The reward, finite.
    """

    sample_id: str
    group: str
    group_size: int
    reward: float

    def __post_init__(self) -> None:
        """Raises ValueError on a reward from which no advantage follows."""
        if self.group_size < 2:
            raise ValueError(
                f"the group of sample {self.sample_id} needs at least 2 samples, as an advantage "
                f"is relative to the others; got {self.group_size}"
            )
        if not math.isfinite(self.reward):
            raise ValueError(
                f"the reward of sample {self.sample_id} must be finite; got {self.reward}"
            )


@dataclass(frozen=True)
class RewardedSample:
    """What training needs of one sample, beside its hints.

    Attributes:
        sample: Tokens, log-probs, routing.
        reward: Its reward.
        advantage: Relative to the other samples of its group.
    """

    sample: RolloutSample
    reward: float
    advantage: float


def rewarded_groups(
    samples: Sequence[RolloutSample], groups: Sequence[str], rewards: Sequence[float]
) -> tuple[list[RolloutSample], list[Reward]]:
    """Gives the samples that have a reward beside others of their group, and their rewards.

    Args:
        samples: Samples.
        groups: Name of the group of each.
        rewards: Reward of each; NaN where it has none.
    """
    sizes = Counter(
        group for group, reward in zip(groups, rewards, strict=True) if not math.isnan(reward)
    )
    kept = [
        (sample, Reward(sample.sample_id, group, sizes[group], reward))
        for sample, group, reward in zip(samples, groups, rewards, strict=True)
        if not math.isnan(reward) and sizes[group] > 1
    ]
    return [sample for sample, _ in kept], [reward for _, reward in kept]


def commit_rollouts(
    files: HintFilesWriter,
    samples: Sequence[RolloutSample],
    rewards: Sequence[Reward],
    settings: QuantizerSettings | None,
) -> None:
    """Writes samples whose hints are staged in `files`, then their rewards.

    Args:
        files: The folder's writer; the engine's `generate` put the hints into it.
        samples: Samples of one policy version.
        rewards: One reward for each sample, in the same order.
        settings: Quantiser settings of the engine; None for BF16.

    Raises:
        ValueError: Rewards and samples do not belong together, or the folder's samples were made
            under other settings.
    """
    if [reward.sample_id for reward in rewards] != [sample.sample_id for sample in samples]:
        raise ValueError(
            f"{len(rewards)} rewards must name the {len(samples)} samples in their order"
        )
    if not samples:
        return
    digest = "" if settings is None else settings.digest()
    for sample in samples:
        if sample.settings_digest != digest:
            raise ValueError(
                f"sample {sample.sample_id} was rolled out under quantiser settings "
                f"{sample.settings_digest or '(none: BF16)'}, but the settings given are "
                f"{digest or '(none: BF16)'}"
            )
    _require_one_method(files, settings)
    if settings is not None:
        save_settings(settings, files.folder)
    files.commit(samples)
    folder = files.folder / REWARDS_FOLDER
    make_folder(folder)
    prefix = version_folder(files.folder, samples[0].policy_version).name
    number = len(list(folder.glob(f"{prefix}.*.jsonl")))
    lines = "".join(json.dumps(asdict(reward)) + "\n" for reward in rewards)
    write_file(folder / f"{prefix}.{number:06d}.jsonl", lines.encode())


def _require_one_method(files: HintFilesWriter, settings: QuantizerSettings | None) -> None:
    """Raises ValueError where BF16 rollouts and quantised ones would share a folder."""
    of_quantised = (files.folder / SETTINGS_FILE).is_file()
    if settings is None and of_quantised:
        there, new = "quantised", "BF16"
    elif settings is not None and not of_quantised and files.sample_ids():
        there, new = "BF16", "quantised"
    else:
        return
    raise ValueError(
        f"{files.folder} has {there} rollouts, but these are {new}; write them to another folder"
    )


class RolloutFolder:
    """The samples of a folder that can be trained on, in the order of version and commit.

    Args:
        folder: The folder.
        settle: Whether samples without a reward, or of groups of which samples are missing, are
            left out and counted in `unsettled`; if not, they raise.

    Attributes:
        hints: The hints.
        settings: Quantiser settings of the samples; None for BF16.
        unsettled: Samples that were left out.
        without_spread: Samples that `for_objective` left out, as all rewards of their group are
            equal.
        stale: Samples that it left out as too old.

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: A reward file is damaged or contradicts another, or no sample can be trained on.
    """

    def __init__(self, folder: str | Path, *, settle: bool = True) -> None:
        self.hints = HintFiles(folder)
        self.folder = self.hints.folder
        has_settings = (self.folder / SETTINGS_FILE).is_file()
        self.settings = load_settings(self.folder) if has_settings else None
        rewards = _read_rewards(self.folder / REWARDS_FOLDER)
        committed = self.hints.sample_ids()
        present = Counter(rewards[name].group for name in committed if name in rewards)
        self._sample_ids = tuple(
            name
            for name in committed
            if name in rewards and present[rewards[name].group] == rewards[name].group_size
        )
        settled = set(self._sample_ids)
        self.unsettled = tuple(name for name in committed if name not in settled)
        if self.unsettled and not settle:
            raise ValueError(
                f"{self.folder}: {len(self.unsettled)} samples have no reward, or belong to groups "
                f"of which samples are missing (first: {self.unsettled[0]})"
            )
        if not self._sample_ids:
            raise ValueError(
                f"{self.folder} has no sample to train on: {len(committed)} are committed, "
                f"{len(rewards)} have a reward; a sample needs every sample of its group"
            )
        self._rewards = {name: rewards[name] for name in self._sample_ids}
        self._advantages = advantages_of(self._rewards)
        self._with_spread = groups_with_spread(self._rewards, self._advantages)
        self.without_spread: tuple[str, ...] = ()
        self.stale: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Samples that can be trained on."""
        return len(self._sample_ids)

    def __getitem__(self, index: int) -> RewardedSample:
        """Gives a sample.

        Raises:
            IndexError: There are fewer samples.
            ValueError: Its file is damaged.
        """
        name = self._sample_ids[index]
        return RewardedSample(
            self.hints.sample(name), self._rewards[name].reward, self._advantages[name]
        )

    def sample_id(self, index: int) -> str:
        """Gives the name of a sample, by which `hints` can read it, without reading its file."""
        return self._sample_ids[index]

    def advantage(self, index: int) -> float:
        """Gives a sample's advantage without reading its file."""
        return self._advantages[self._sample_ids[index]]

    def reward(self, index: int) -> float:
        """Gives a sample's reward without reading its file."""
        return self._rewards[self._sample_ids[index]].reward

    def has_spread(self, index: int) -> bool:
        """Says whether the rewards of a sample's group differ."""
        return self._rewards[self._sample_ids[index]].group in self._with_spread

    def lag(self, index: int) -> int | None:
        """Gives None: a sample of recorded rollouts belongs to no step of its own."""
        return None

    def for_objective(self, config: LossConfig, *, drop_without_spread: bool) -> RolloutFolder:
        """Gives the samples that an objective takes, with the advantages of their whole groups.

        Args:
            config: Bound of staleness: versions before the latest of the folder, as what is trained
                on recorded rollouts has no version of its own.
            drop_without_spread: Whether groups whose rewards are all equal are left out.

        Raises:
            StaleSampleError: A sample is too old, and is not to be left out.
            ValueError: No sample is left.
        """
        versions = {name: self.hints.policy_version(name) for name in self._sample_ids}
        fresh = set(fresh_samples(versions, max(versions.values()), config))
        of_groups = {
            name
            for name in self._sample_ids
            if self._rewards[name].group in self._with_spread or not drop_without_spread
        }
        other = copy.copy(self)
        other.stale = tuple(name for name in self._sample_ids if name not in fresh)
        other.without_spread = tuple(name for name in self._sample_ids if name not in of_groups)
        other._sample_ids = tuple(
            name for name in self._sample_ids if name in fresh and name in of_groups
        )
        if not other._sample_ids:
            raise ValueError(
                f"{self.folder} has no sample to train on: of {len(self)}, {len(other.stale)} are "
                f"too old and {len(other.without_spread)} are of groups with equal rewards"
            )
        return other

    def with_own_reader(self) -> RolloutFolder:
        """Gives the same samples, to be read by another thread."""
        other = copy.copy(self)
        other.hints = HintFiles(self.folder)
        return other


def _read_rewards(folder: Path) -> dict[str, Reward]:
    rewards: dict[str, Reward] = {}
    groups: Counter[str] = Counter()
    sizes: dict[str, int] = {}
    for path in sorted(folder.glob("*.jsonl")) if folder.is_dir() else ():
        if not re.fullmatch(r"v\d{8,}\.\d{6,}\.jsonl", path.name):
            raise ValueError(f"{path} is no file of rewards; move it elsewhere")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                reward = Reward(**json.loads(line))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: no reward ({error})") from error
            if reward.sample_id in rewards:
                raise ValueError(
                    f"{path}, line {number}: sample {reward.sample_id} has a reward already"
                )
            groups[reward.group] += 1
            size = sizes.setdefault(reward.group, reward.group_size)
            if reward.group_size != size or groups[reward.group] > size:
                raise ValueError(
                    f"{path}, line {number}: sample {reward.sample_id} is the "
                    f"{groups[reward.group]}. of a group {reward.group} of {reward.group_size}, "
                    f"which has {size} samples; give every group of the folder its own name"
                )
            rewards[reward.sample_id] = reward
    return rewards


def advantages_of(rewards: Mapping[str, Reward]) -> dict[str, float]:
    """Gives the advantage of each sample within its group, by sample id."""
    groups: dict[str, list[Reward]] = {}
    for reward in rewards.values():
        groups.setdefault(reward.group, []).append(reward)
    advantages: dict[str, float] = {}
    for members in groups.values():
        values = group_advantages(torch.tensor([[member.reward for member in members]]))[0]
        advantages |= {
            member.sample_id: value for member, value in zip(members, values.tolist(), strict=True)
        }
    return advantages


def groups_with_spread(
    rewards: Mapping[str, Reward], advantages: Mapping[str, float]
) -> frozenset[str]:
    """Gives the groups whose rewards differ; a sample of one may have exactly the mean reward."""
    return frozenset(rewards[name].group for name, advantage in advantages.items() if advantage)
