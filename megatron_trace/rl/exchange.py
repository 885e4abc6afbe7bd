"""What rollout workers and the trainer of one run exchange through a shared folder.

    run.json               ExchangeSettings; the same for everybody
    checkpoints/           Megatron's, by the trainer; policy version v is iteration v
    settings.json          quantiser settings of the run, of the worker that calibrated first
    rollouts/NAME.LIFE/    folder of rollouts (rl/rollout_folder.py) of one life of one worker
    claims/b00000012.json  who rolls batch 12 out; its modification time is a sign of life
    batches/b00000012.json batch 12 is complete: folder, policy version, samples and rewards
    paused                 present while nobody may begin anything

Batch b belongs to step b // batches_per_step, whoever rolls it out, and nobody begins it before
version step - max_lag is published. So no sample is trained at a lag above the bound, and none is
ever thrown away for its age. A batch is complete when its file is there, as a whole or not at all;
of two workers that roll out the same one, the first wins. What a lost worker had claimed is taken
over when its signs of life are too old; what was complete stays, also over restarts of the trainer.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megatron_trace.hints.durable import create_file, make_folder
from megatron_trace.hints.folder import version_folders
from megatron_trace.hints.settings_file import SETTINGS_FILE, settings_record
from megatron_trace.hints.types import QuantizerSettings
from megatron_trace.rl.rollout_folder import Reward
from megatron_trace.rl.staleness import batches_in_reach

RUN_FILE = "run.json"
CHECKPOINTS = "checkpoints"
_ROLLOUTS, _CLAIMS, _BATCHES, _PAUSED = "rollouts", "claims", "batches", "paused"
# Megatron's name of the file that says which checkpoint is complete.
_TRACKER = "latest_checkpointed_iteration.txt"


class PausedError(RuntimeError):
    """The run is paused: stop here, and begin nothing."""


@dataclass(frozen=True, kw_only=True)
class ExchangeSettings:
    """What everybody who takes part must agree on.

    Attributes:
        steps: Optimizer steps of the run.
        batches_per_step: Batches that a step trains on.
        prompts_per_batch: Prompt groups that a worker rolls out at a time.
        samples_per_prompt: Samples of a group.
        max_lag: Most steps that the policy of a sample may be older than the one it trains.
        publish_every: Steps from one published version (checkpoint) to the next.
        lease_s: Seconds without a sign of life after which a worker's claim is taken over.
        batch_timeout_s: Seconds after which a worker gives no more signs of life for a batch.
    """

    steps: int
    batches_per_step: int = 1
    prompts_per_batch: int = 32
    samples_per_prompt: int = 8
    max_lag: int = 0
    publish_every: int = 1
    lease_s: float = 60.0
    batch_timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        """Raises ValueError on settings with which the run could not go on."""
        for name, least in (
            ("steps", 1),
            ("batches_per_step", 1),
            ("prompts_per_batch", 1),
            ("samples_per_prompt", 2),
            ("max_lag", 0),
            ("publish_every", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be >= {least}; got {getattr(self, name)}")
        for name in ("lease_s", "batch_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be > 0; got {getattr(self, name)}")
        if self.max_lag < self.publish_every - 1:
            raise ValueError(
                f"max_lag={self.max_lag} contradicts publish_every={self.publish_every}: the last "
                f"step before a new version trains on samples {self.publish_every - 1} steps old; "
                "raise the one or lower the other"
            )

    @property
    def samples_per_step(self) -> int:
        """Samples of a step, which must be Megatron's global batch."""
        return self.batches_per_step * self.prompts_per_batch * self.samples_per_prompt

    @property
    def samples_per_batch(self) -> int:
        """Samples of a batch."""
        return self.prompts_per_batch * self.samples_per_prompt

    @property
    def num_batches(self) -> int:
        """Batches of the run."""
        return self.steps * self.batches_per_step


@dataclass(frozen=True)
class Batch:
    """A complete batch.

    Attributes:
        number: Its number in the run.
        folder: Folder of its samples and hints, relative to the run's.
        policy_version: Version that rolled it out.
        rewards: Reward of each sample, in their order.
        weights_digest: Digest of the engine's quantised weights; None if it has none.
    """

    number: int
    folder: str
    policy_version: int
    rewards: tuple[Reward, ...]
    weights_digest: str | None = None


@dataclass(frozen=True)
class Claim:
    """The right to roll a batch out.

    Attributes:
        batch: The batch.
        policy_version: Latest published version when it was claimed.
        path: Its file.
    """

    batch: int
    policy_version: int
    path: Path


class Exchange:
    """One participant's view of the folder; all that it changes appears as a whole.

    Attributes:
        folder: The folder.
        settings: Settings of the run.
    """

    def __init__(self, folder: str | Path) -> None:
        """Opens the folder of a run that `create` made.

        Raises:
            ValueError: There is none, or its settings are damaged or of another version.
        """
        self.folder = Path(folder)
        path = self.folder / RUN_FILE
        if not path.is_file():
            raise ValueError(
                f"{folder} is no run: it has no {RUN_FILE}; tools/exchange.py makes it"
            )
        self.settings = _read(path, lambda record: ExchangeSettings(**record))

    @classmethod
    def create(cls, folder: str | Path, settings: ExchangeSettings) -> Exchange:
        """Makes the folder of a run, or opens it if it is there.

        Raises:
            ValueError: It is there with other settings.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name in (_ROLLOUTS, _CLAIMS, _BATCHES, CHECKPOINTS):
            make_folder(folder / name)
        create_file(folder / RUN_FILE, json.dumps(asdict(settings), indent=1).encode())
        exchange = cls(folder)
        for field in fields(settings):
            there, asked = getattr(exchange.settings, field.name), getattr(settings, field.name)
            if there != asked:
                raise ValueError(
                    f"{folder} is a run with {field.name}={there}, but {asked} is asked for; take "
                    "another folder, or the settings of the run"
                )
        return exchange

    @property
    def checkpoints(self) -> Path:
        """Folder of Megatron's checkpoints."""
        return self.folder / CHECKPOINTS

    @property
    def paused(self) -> bool:
        """Whether nobody may begin anything."""
        return (self.folder / _PAUSED).exists()

    def pause(self) -> None:
        """Makes workers end after their batch, and a trainer that waits for samples at once."""
        (self.folder / _PAUSED).touch()

    def unpause(self) -> None:
        """Takes `pause` back."""
        (self.folder / _PAUSED).unlink(missing_ok=True)

    def published_version(self) -> int:
        """Gives the latest version that workers can load; 0 before the first checkpoint.

        Raises:
            ValueError: The folder of checkpoints holds something else.
        """
        path, text = self.checkpoints / _TRACKER, ""
        for _ in range(50):
            try:
                text = path.read_text().strip()
            except FileNotFoundError:
                return 0
            if text.isdigit():
                return int(text)
            time.sleep(0.1)  # Megatron truncates the file before it writes the number.
        raise ValueError(f"{path} must hold the iteration of a checkpoint; got {text!r}")

    def checkpoint_folder(self, version: int) -> Path:
        """Gives the folder of a published version; a later one may have replaced it."""
        return self.checkpoints / f"iter_{version:07d}"

    def worker_folder(self, worker: str) -> Path:
        """Makes the folder of rollouts of a new life of a worker.

        What an earlier life left is read, but never written again: its lock may be of a host that
        is gone.
        """
        if not re.fullmatch(r"[A-Za-z0-9_-]+", worker):
            raise ValueError(f"a worker's name is of letters, digits, - and _; got {worker!r}")
        for life in range(1_000_000):
            path = self.folder / _ROLLOUTS / f"{worker}.{life}"
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                return path
        raise RuntimeError(f"worker {worker} began a million times; look why it ends")

    def oldest_needed_version(self, claim: Claim) -> int:
        """Gives the oldest version that the trainer may still ask for, also when it begins anew."""
        return claim.policy_version - self.settings.max_lag

    def drop_earlier_lives(self, worker: str, current: Path, *, before: int) -> None:
        """Removes what earlier lives of a worker left of versions older than `before`.

        Args:
            worker: Name of the worker, of which only this one lives.
            current: Folder of its present life, which is left alone.
            before: The oldest version that is needed.
        """
        for folder in (self.folder / _ROLLOUTS).glob(f"{worker}.*"):
            for version, path in version_folders(folder).items() if folder != current else ():
                if version < before:
                    shutil.rmtree(path)

    def share_settings(self, settings: QuantizerSettings) -> bool:
        """Makes these the quantiser settings of the run, unless it has some; gives whether."""
        content = json.dumps(settings_record(settings), indent=1).encode()
        return create_file(self.folder / SETTINGS_FILE, content)

    def claim(self, worker: str) -> Claim | None:
        """Gives the first batch that may be begun now and is nobody's; None if there is none.

        Args:
            worker: Name of the worker. Only one of this name lives: what an earlier life of it had
                claimed is taken over at once.

        Raises:
            PausedError: The run is paused.
        """
        if self.paused:
            raise PausedError(f"{self.folder} is paused")
        version = self.published_version()
        reach = batches_in_reach(
            version,
            self.settings.max_lag,
            num_batches=self.settings.num_batches,
            batches_per_step=self.settings.batches_per_step,
        )
        for number in reach:
            if self.is_complete(number):
                continue
            path = self.folder / _CLAIMS / f"b{number:08d}.json"
            content = json.dumps({"worker": worker, "policy_version": version}).encode()
            if create_file(path, content) or self._take_over(path, worker, content):
                if not self.is_complete(number):
                    return Claim(number, version, path)
                path.unlink(missing_ok=True)  # Its worker committed it since we looked.
        return None

    def give_up(self, claim: Claim) -> None:
        """Lets others have a claimed batch."""
        claim.path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def signs_of_life(self, claim: Claim) -> Iterator[None]:
        """Keeps a claim alive within, up to `batch_timeout_s`."""
        over = threading.Event()

        def beat() -> None:
            end = time.monotonic() + self.settings.batch_timeout_s
            while not over.wait(self.settings.lease_s / 4) and time.monotonic() < end:
                # Another worker may have taken the claim over, and finished.
                with contextlib.suppress(FileNotFoundError):
                    os.utime(claim.path)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def commit(
        self,
        claim: Claim,
        folder: Path,
        rewards: Sequence[Reward],
        weights_digest: str | None = None,
    ) -> bool:
        """Makes a batch complete whose samples were committed; gives whether it was the first.

        Args:
            claim: The claim.
            folder: The worker's folder, in which the samples are.
            rewards: Rewards of all samples, in their order.
            weights_digest: What the push of the version gave; None if the weights are BF16.

        Raises:
            ValueError: The batch has another number of samples.
        """
        if len(rewards) != self.settings.samples_per_batch:
            raise ValueError(
                f"a batch has {self.settings.samples_per_batch} samples; got {len(rewards)}"
            )
        record = {
            "folder": str(folder.relative_to(self.folder)),
            "policy_version": claim.policy_version,
            "rewards": [asdict(reward) for reward in rewards],
            "weights_digest": weights_digest,
        }
        first = create_file(self._batch_path(claim.batch), json.dumps(record).encode())
        claim.path.unlink(missing_ok=True)
        return first

    def is_complete(self, number: int) -> bool:
        """Whether a batch is complete."""
        return self._batch_path(number).exists()

    def batch(self, number: int) -> Batch:
        """Reads a complete batch.

        Raises:
            FileNotFoundError: It is not complete.
            ValueError: Its file is damaged.
        """

        def made(record: dict[str, Any]) -> Batch:
            rewards = tuple(Reward(**reward) for reward in record["rewards"])
            if len(rewards) != self.settings.samples_per_batch:
                raise ValueError(f"{len(rewards)} samples")
            digest = record.get("weights_digest")
            return Batch(number, record["folder"], record["policy_version"], rewards, digest)

        return _read(self._batch_path(number), made)

    def wait_for_batch(self, number: int, *, poll_s: float = 0.5) -> Batch:
        """Gives a batch as soon as it is complete.

        Raises:
            PausedError: It is not, and the run is paused.
        """
        while not self.is_complete(number):
            self._require_going_on(f"batch {number}")
            time.sleep(poll_s)
        return self.batch(number)

    def wait_for_settings(self, *, poll_s: float = 0.5) -> Path:
        """Gives the folder of the quantiser settings as soon as they are there.

        Raises:
            PausedError: They are not, and the run is paused.
        """
        while not (self.folder / SETTINGS_FILE).is_file():
            self._require_going_on("the first worker's calibration")
            time.sleep(poll_s)
        return self.folder

    def claims(self) -> dict[int, str]:
        """Gives the worker of each claimed batch that is not complete."""
        found = {}
        for path in sorted((self.folder / _CLAIMS).glob("b*.json")):
            with contextlib.suppress(FileNotFoundError):
                found[int(path.stem[1:])] = _read(path, lambda record: str(record["worker"]))
        return {number: name for number, name in found.items() if not self.is_complete(number)}

    def num_complete(self) -> int:
        """Gives how many batches are complete."""
        return len(list((self.folder / _BATCHES).glob("b*.json")))

    def _require_going_on(self, what: str) -> None:
        if self.paused:
            raise PausedError(f"{self.folder} was paused before {what} was there; resume it")

    def _batch_path(self, number: int) -> Path:
        return self.folder / _BATCHES / f"b{number:08d}.json"

    def _take_over(self, path: Path, worker: str, content: bytes) -> bool:
        # Two that take over at once may both get the batch: `commit` takes the first result.
        try:
            owner = _read(path, lambda record: str(record["worker"]))
            silent_s = self._file_system_time(worker) - path.stat().st_mtime
            if owner != worker and silent_s < self.settings.lease_s:
                return False
            path.rename(path.with_name(f"lost.{path.name}.{time.time_ns()}"))
        except FileNotFoundError:  # It ended meanwhile.
            pass
        return create_file(path, content)

    def _file_system_time(self, worker: str) -> float:
        """Gives the time by the clock that dates the files, which may not be this host's."""
        path = self.folder / _CLAIMS / f"clock.{worker}"
        path.touch()
        return path.stat().st_mtime


def _read[T](path: Path, made: Callable[[dict[str, Any]], T]) -> T:
    try:
        return made(json.loads(path.read_text(encoding="utf-8")))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged or of another version ({error})") from error
