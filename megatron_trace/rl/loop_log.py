"""`metrics.jsonl` and `run.json` of a run inside Megatron's own loop, as RL runs leave them.

Step n is Megatron's iteration n + 1: what trains policy version n. A folder is one run's: steps
that stay in it led to the checkpoint that a process goes on from, and steps of other settings are
not replaced.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megatron_trace.compat import StepOutcome
from megatron_trace.rl.health_metrics import largest_nearest, nearest_growth
from megatron_trace.rl.lineage import PROCESS, Lineage, new_name
from megatron_trace.rl.metrics_log import METRICS_FILE, MetricsLog, readable_metrics
from megatron_trace.rl.run_record import RUN_FILE, TRAINING_FOLDER, RunRecord, read_record
from megatron_trace.training.over_ranks import agreed, all_ranks

# Group of Megatron's flags among the settings.
_MEGATRON = "megatron"
# Values of a process, of its place, or of how far it is, and what has a field of its own.
_NO_SETTINGS = (
    *("rank", "local_rank", "iteration", "curr_iteration", "consumed_train_samples"),
    *("seed", "metrics_dir"),
)
# How flags begin that decide no step: what is logged and saved when, when a process ends, where its
# tools write, and how long it waits. A job that begins again may have others, such as dates.
_NO_MATTER = (
    *("recorded.hint_memory_mb", "recorded.hint_reader", "recorded.prefetch"),
    *(
        f"{_MEGATRON}.{name}"
        for name in (
            *("app_tag_", "async_", "distributed_timeout_", "exit_", "flight_recorder_", "ft_"),
            *("inprocess_", "log_", "logging_level", "memory_snapshot_path", "non_persistent_"),
            *("num_workers", "one_logger_", "profile", "save_interval", "save_retain_interval"),
            *("straggler_", "tensorboard_", "timing_log_", "wandb_"),
        )
    ),
)


class LoopLog:
    """The log of one rank: the one that writes, or one that does not.

    A process that goes on from a checkpoint continues the file: lines of steps that are done again
    are replaced when the first of them is. Nothing is written before `begin`.

    Args:
        folder: Folder of the log; empty writes none.
        args: Megatron's parsed flags, which its checkpoints hold. The last rank writes, which has
            the loss.
        settings: Settings of ours, by the name of their group.

    Raises:
        ValueError: The folder is that of an RL run, or of what else has such files.
    """

    def __init__(self, folder: str, args: Namespace, settings: Mapping[str, Any]) -> None:
        self._folder = Path(folder)
        self._args = args
        self._metrics: MetricsLog | None = None
        self._first_nearest: float | None = None
        self._record: RunRecord | None = None  # Of the rank that writes.
        self._saved = Lineage()
        self._process = ""
        self._ends = ExitStack()
        if folder and args.rank == args.world_size - 1:
            _require_no_other(self._folder)
            groups = {name: asdict(of) for name, of in settings.items()} | {_MEGATRON: vars(args)}
            self._record = RunRecord(
                self._folder,
                name=_name_of(self._folder),
                seed=args.seed,
                settings={name: _plain(group) for name, group in groups.items()},
                steps=args.train_iters,
            )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Writes at the end of the context how the run ended, if it has begun within it."""
        with self._ends:
            yield

    def goes_on_from(self, saved: Any) -> None:
        """Takes the flags that the checkpoint holds from which the run goes on."""
        self._saved = Lineage.among(saved)

    def begin(self) -> None:
        """Writes that the run is going on, when its first step is next; a collective, once.

        Raises:
            ValueError: The folder is another run's. On the other ranks RuntimeError, as below.
            OSError: It cannot be made, read or written.
        """
        if self._process:
            return
        first_step, group = self._args.iteration, all_ranks()
        agreed(lambda: self._take_up(first_step), group)
        self._process = new_name(group)
        self._saved.followed_by(self._process, first_step=first_step).leave_among(self._args)

    def _take_up(self, first_step: int) -> None:
        if self._record is None:
            return
        try:
            self._require_same_run(self._record, first_step)
            self._ends.enter_context(self._record.running())
        except OSError as error:
            raise OSError(
                f"--trace-metrics-dir {self._folder} cannot be read and written: {error}; give a "
                "folder that can"
            ) from error

    def _require_same_run(self, record: RunRecord, first_step: int) -> None:
        """Checks that the steps in the folder are this run's.

        Those that stay are what led to the checkpoint. Where none stays, the run is begun again,
        and has the same settings, but for those that decide no step.
        """
        found, _ = readable_metrics(self._folder / METRICS_FILE)
        if not found:
            return
        first, last = found[0]["step"], found[-1]["step"]
        kept = [of for of in found if of["step"] < first_step]
        if (foreign := self._saved.first_foreign(kept)) is not None:
            step = foreign["step"]
            raise ValueError(
                f"--trace-metrics-dir {self._folder} has the steps {first} to {last} of another "
                f"run than the one whose checkpoint goes on with step {first_step}: step {step} "
                f"was done by process {foreign.get(PROCESS)} there, and by "
                f"{self._saved.process_of(step)} before the checkpoint; give the folder of the "
                "checkpoint's run, or a new one, which then begins with that step"
            )
        if not kept and (different := record.difference_there(but=_NO_MATTER)):
            raise ValueError(
                f"--trace-metrics-dir {self._folder} has the steps {first} to {last} of another "
                f"run, which this one would replace, as it begins with step {first_step}: "
                f"{different}; give a folder of its own, or remove that one"
            )

    def leave_off(self, reason: str) -> None:
        """Notes that the process ends in order before the last step; another one goes on."""
        if self._record is not None:
            self._record.left_off = reason

    def step(self, outcome: StepOutcome, record: Mapping[str, Any]) -> None:
        """Writes a step, after `begin`.

        Args:
            outcome: What Megatron says of it.
            record: What `LoopHealth.take_record` gives.

        Raises:
            OSError: The file cannot be written.
        """
        if self._record is None:
            return
        assert self._process, "a log begins before its first step"
        step = outcome.iteration - 1
        if self._metrics is None:
            path = self._folder / METRICS_FILE
            self._metrics = MetricsLog(path, first_step=step, lacks=True)
            for kept in self._metrics.kept:
                self._note_nearest(kept)
        health = dict(record.get("health", {}))
        if health:
            self._note_nearest(record)
            health["nearest_growth"] = nearest_growth(health, self._first_nearest)
        self._metrics.append(
            {
                **record,
                "step": step,
                PROCESS: self._process,
                "loss": outcome.losses.get("policy loss"),
                "grad_norm": outcome.grad_norm,
                "learning_rate": outcome.learning_rate,
                "updates": int(not outcome.skipped),
                "skipped_updates": int(outcome.skipped),
                "health": health,
            }
        )

    def _note_nearest(self, record: Mapping[str, Any]) -> None:
        """Keeps the mismatch to nearest of the first step that has one."""
        if self._first_nearest is None and record.get("health", {}).get("nearest_mismatch"):
            self._first_nearest = largest_nearest(record["health"])


def _require_no_other(folder: Path) -> None:
    """Checks that nothing of another kind would be replaced; an earlier run of the loop may be."""
    found = read_record(folder)
    if found is None:
        return
    settings = found.get("settings")
    if not (isinstance(settings, dict) and _MEGATRON in settings):
        raise ValueError(
            f"--trace-metrics-dir {folder} has the {RUN_FILE} of something else than a run in "
            "Megatron's loop, such as an RL run or an exchange, which would be lost; give a folder "
            "of its own"
        )


def _name_of(folder: Path) -> str:
    """Gives a run's name: that of its folder, or of the exchange's for `training` within one."""
    folder = folder.resolve()
    return (folder.parent if folder.name == TRAINING_FOLDER else folder).name


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Gives settings that JSON can hold; of Megatron's without ours, which are groups."""
    found = {}
    for name, value in settings.items():
        if name.startswith("trace_") or name in _NO_SETTINGS:
            continue
        if isinstance(value, torch.dtype):
            value = str(value)
        try:
            found[name] = json.loads(json.dumps(value))
        except (TypeError, ValueError):
            continue  # A function, or an object of Megatron's own.
    return found
