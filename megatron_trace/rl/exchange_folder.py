"""The samples of a running exchange, as training on recorded rollouts reads them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

from megatron_trace.hints.folders import HintFolders
from megatron_trace.hints.settings_file import load_settings
from megatron_trace.rl.exchange import RUN_FILE, Batch, Exchange
from megatron_trace.rl.rollout_folder import (
    Reward,
    RewardedSample,
    RolloutFolder,
    advantages_of,
    groups_with_spread,
)
from megatron_trace.rl_config import LossConfig


def open_samples(
    folder: str | Path, loss: LossConfig, *, quantised: bool, drop_without_spread: bool
) -> Samples:
    """Gives the samples of a folder of rollouts, or of a running exchange.

    Args:
        folder: The folder.
        loss: The bound of staleness.
        quantised: Whether the rollouts are quantised; an exchange waits for their settings.
        drop_without_spread: Whether groups whose rewards are all equal are left out.

    Raises:
        ValueError: There is no such folder, it has no sample, or settings contradict it.
    """
    if not Path(folder).is_dir():
        raise ValueError(
            f"{folder} {'is no folder' if Path(folder).exists() else 'does not exist'}; "
            "--trace-hint-dir and --trace-valid-hint-dir name what record_rollouts.py wrote "
            "(--rollout-output), or the folder of a run"
        )
    if not (Path(folder) / RUN_FILE).is_file():
        return RolloutFolder(folder).for_objective(loss, drop_without_spread=drop_without_spread)
    return ExchangeFolder(
        Exchange(folder), loss, quantised=quantised, drop_without_spread=drop_without_spread
    )


@dataclass(frozen=True)
class _ScoredBatch:
    """A complete batch, with the advantages of its samples and its groups whose rewards differ."""

    batch: Batch
    advantages: dict[str, float]
    with_spread: frozenset[str]


class ExchangeFolder:
    """Samples of a run in the order of its steps; asking for one waits until it is there.

    Sample n is sample n % samples_per_batch of batch n // samples_per_batch: which samples a step
    trains on does not depend on who rolled them out, and a trainer that begins again gets the same.

    Args:
        exchange: The run.
        loss: Its bound of staleness, if given, must be that of the run.
        quantised: Whether the rollouts are quantised.
        drop_without_spread: See `open_samples`; an exchange cannot.

    Attributes:
        hints: The hints.
        settings: Quantiser settings of the samples; None for BF16.

    Raises:
        ValueError: A setting contradicts the run.
        PausedError: The run was paused before there were settings.
    """

    unsettled: tuple[str, ...] = ()
    without_spread: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()

    def __init__(
        self, exchange: Exchange, loss: LossConfig, *, quantised: bool, drop_without_spread: bool
    ) -> None:
        if drop_without_spread:
            raise ValueError(
                "objective=dapo leaves groups out, but a step of an exchange has a fixed number of "
                "samples; choose another --trace-objective"
            )
        bound = exchange.settings.max_lag
        if loss.max_lag not in (None, bound):
            raise ValueError(
                f"--trace-max-lag {loss.max_lag} contradicts max_lag={bound} of {exchange.folder}; "
                "leave it out"
            )
        self.exchange = exchange
        self.folder = exchange.folder
        self.settings = load_settings(exchange.wait_for_settings()) if quantised else None
        self.hints = HintFolders()
        self._batches: dict[int, _ScoredBatch] = {}

    def __len__(self) -> int:
        """Samples of the whole run."""
        return self.exchange.settings.num_batches * self.exchange.settings.samples_per_batch

    def __getitem__(self, index: int) -> RewardedSample:
        """Gives a sample; waits until its batch is complete.

        Raises:
            PausedError: The run was paused meanwhile.
            RuntimeError: The sample is of a version beyond the bound, or of a later one.
            ValueError: A file is damaged.
        """
        name = self.sample_id(index)
        return RewardedSample(self.hints.sample(name), self.reward(index), self.advantage(index))

    def sample_id(self, index: int) -> str:
        """Gives the name of a sample, by which `hints` can read it; waits for its batch.

        Raises:
            PausedError: See `__getitem__`, as the next one.
            RuntimeError: The sample is of a version beyond the bound, or of a later one.
        """
        batch, name = self._scored(index).batch, self._reward_of(index).sample_id
        self.hints.sources[name] = self.exchange.folder / batch.folder
        return name

    def advantage(self, index: int) -> float:
        """Gives a sample's advantage without reading its file."""
        return self._scored(index).advantages[self._reward_of(index).sample_id]

    def reward(self, index: int) -> float:
        """Gives a sample's reward without reading its file."""
        return self._reward_of(index).reward

    def has_spread(self, index: int) -> bool:
        """Says whether the rewards of a sample's group differ."""
        return self._reward_of(index).group in self._scored(index).with_spread

    def lag(self, index: int) -> int:
        """Gives by how many versions a sample is older than the weights that its step trains."""
        batch = self._scored(index).batch
        return batch.number // self.exchange.settings.batches_per_step - batch.policy_version

    def require_fitting(
        self,
        *,
        global_batch_size: int,
        train_iters: int,
        save: str | None,
        load: str | None,
        save_interval: int | None,
    ) -> None:
        """Checks that Megatron's flags are those of the run.

        Raises:
            ValueError: They are not: workers would wait for ever, or roll out from other weights.
        """
        run = self.exchange.settings
        for flag, given, expected in (
            ("--global-batch-size", global_batch_size, run.samples_per_step),
            ("--train-iters", train_iters, run.steps),
            ("--save-interval", save_interval, run.publish_every),
        ):
            if given != expected:
                raise ValueError(f"{flag} must be {expected} in {self.folder}; got {given}")
        own = self.exchange.checkpoints.resolve()
        for flag, path in (("--save", save), ("--load", load)):
            if path is None or Path(path).resolve() != own:
                raise ValueError(
                    f"{flag} must be {own}, where workers find new weights; got {path} (give the "
                    "checkpoint to start from as --pretrained-checkpoint)"
                )

    def weights_digests(self, version: int) -> set[str]:
        """Gives the digests of the weights of a version that rolled out for its own step."""
        run = self.exchange.settings
        numbers = range(version * run.batches_per_step, (version + 1) * run.batches_per_step)
        batches = [self.exchange.wait_for_batch(number) for number in numbers]
        digests = {b.weights_digest for b in batches if b.policy_version == version}
        return {digest for digest in digests if digest is not None}

    def with_own_reader(self) -> ExchangeFolder:
        """Gives the same samples, to be read by another thread."""
        other = copy.copy(self)
        other.hints, other._batches = HintFolders(), {}
        return other

    def _reward_of(self, index: int) -> Reward:
        rewards = self._scored(index).batch.rewards
        return rewards[index % self.exchange.settings.samples_per_batch]

    def _scored(self, index: int) -> _ScoredBatch:
        """Gives the batch of a sample; waits for it."""
        number = index // self.exchange.settings.samples_per_batch
        if number not in self._batches:
            batch = self.exchange.wait_for_batch(number)
            step = number // self.exchange.settings.batches_per_step
            if not 0 <= step - batch.policy_version <= self.exchange.settings.max_lag:
                raise RuntimeError(
                    f"batch {number} of {self.folder} is of policy version {batch.policy_version}, "
                    f"but step {step} trains on {step - self.exchange.settings.max_lag} to {step}; "
                    "was a checkpoint removed, or the folder changed by hand?"
                )
            for old in [n for n in self._batches if n < number - 2 * self._batches_kept]:
                del self._batches[old]
            rewards = {reward.sample_id: reward for reward in batch.rewards}
            advantages = advantages_of(rewards)
            spread = groups_with_spread(rewards, advantages)
            self._batches[number] = _ScoredBatch(batch, advantages, spread)
        return self._batches[number]

    @property
    def _batches_kept(self) -> int:
        return self.exchange.settings.batches_per_step


Samples = RolloutFolder | ExchangeFolder
