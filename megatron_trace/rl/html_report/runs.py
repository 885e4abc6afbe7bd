"""Runs as their folders have them, complete or not: found, read, and what is wrong with them.

Nothing that a folder holds, or lacks, is an error here: a report is most wanted of the runs that
went wrong. What cannot be used is said in `RunFolder.problems`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_trace.rl.metrics_log import METRICS_FILE, readable_metrics
from megatron_trace.rl.run_record import RUN_FILE, TRAINING_FOLDER, flat

_SEED_FOLDER = re.compile(r"seed-(\d+)")
_IGNORED = re.compile(r"checkpoints|tensorboard|hints|\..*")


@dataclass
class RunFolder:
    """One run, as far as its folder tells.

    Attributes:
        folder: The folder.
        name: Name of the run; those of one name are repetitions under other seeds.
        seed: Its seed; None if nothing tells.
        records: Metrics of its steps, in order.
        settings: Settings by dotted name; empty if nothing tells.
        versions: Versions by name; empty if nothing tells.
        planned_steps: Steps that it is to have; None if nothing tells.
        status: How far it is, in words.
        is_whole: Whether it finished, with all of its steps.
        reason: Why it ended; empty if nothing tells.
        held_out: Held-out accuracy, `before` and `after`, where it was measured.
        problems: What is missing or damaged.
    """

    folder: Path
    name: str
    seed: int | None = None
    records: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    planned_steps: int | None = None
    status: str = ""
    is_whole: bool = False
    reason: str = ""
    held_out: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def place(self) -> Path:
        """The folder that a person knows: of a trainer's in an exchange, that of the exchange."""
        folder = self.folder.resolve()
        return folder.parent if folder.name == TRAINING_FOLDER else folder

    @property
    def title(self) -> str:
        """Name and seed."""
        return self.name if self.seed is None else f"{self.name}, seed {self.seed}"


def find_runs(paths: Sequence[Path]) -> list[RunFolder]:
    """Gives the runs in folders and below them, each once.

    Args:
        paths: Folders of runs, or folders above them. One without any run, or that does not exist,
            stands for a run of which nothing is there.
    """
    folders: dict[Path, Path] = {}  # By what they are, whatever links and names lead there.
    for path in paths:
        below = list(_run_folders(path, set())) if path.is_dir() else []
        for folder in below or [path]:
            folders.setdefault(folder.resolve(), folder)
    runs = [read_run(folder) for folder in folders.values()]
    _tell_apart(runs)
    # Repetitions stand together; names keep the order in which they first came.
    names = list(dict.fromkeys(run.name for run in runs))
    return sorted(
        runs, key=lambda run: (names.index(run.name), -1 if run.seed is None else run.seed)
    )


def read_run(folder: Path) -> RunFolder:
    """Gives what the folder of one run tells."""
    seed = _SEED_FOLDER.fullmatch(folder.parent.name)
    run = RunFolder(folder, name="", seed=int(seed[1]) if seed else None)
    run.name = run.place.name
    try:
        next(folder.iterdir(), None)
    except (FileNotFoundError, NotADirectoryError):
        run.status = "no such folder"
        run.problems.append(f"{folder} does not exist")
        return run
    except OSError as error:
        run.status = "cannot be read"
        run.problems.append(str(error))
        return run
    record = _read_record(folder / RUN_FILE, run)
    _take_record(run, record)
    if not run.settings:
        _take_checkpoint(run)
    run.records = _read_metrics(folder / METRICS_FILE, run)
    _take_held_out(run, record)
    run.status, run.is_whole = _status(run, record)
    return run


def _run_folders(path: Path, seen: set[Path]) -> Iterator[Path]:
    if path.resolve() in seen:  # A link that leads back.
        return
    seen.add(path.resolve())
    try:
        children = sorted(path.iterdir())
    except OSError:  # `read_run` tells why.
        yield path
        return
    names = {child.name for child in children}
    if TRAINING_FOLDER in names:
        yield path / TRAINING_FOLDER
        return
    is_run = METRICS_FILE in names or RUN_FILE in names
    if is_run or _SEED_FOLDER.fullmatch(path.parent.name):
        yield path
        return
    for child in children:
        if child.is_dir() and not _IGNORED.fullmatch(child.name):
            yield from _run_folders(child, seen)


def _tell_apart(runs: list[RunFolder]) -> None:
    """Puts the folder above into the names of runs that have name and seed in common."""
    places: dict[tuple[str, int | None], list[RunFolder]] = {}
    for run in runs:
        places.setdefault((run.name, run.seed), []).append(run)
    doubled = {run.name for same in places.values() if len(same) > 1 for run in same}
    for run in runs:
        if run.name in doubled:
            above = run.place.parent
            if _SEED_FOLDER.fullmatch(above.name):
                above = above.parent
            run.name = f"{above.name}/{run.name}"


def _read_record(path: Path, run: RunFolder) -> dict[str, Any]:
    if not path.is_file():
        run.problems.append(f"{path.name} is missing: settings, versions and its end are not known")
        return {}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        run.problems.append(f"{path.name} cannot be read: {error}")
        return {}
    if not isinstance(record, dict):
        run.problems.append(f"{path.name} holds no object")
        return {}
    return record


def _take_record(run: RunFolder, record: Mapping[str, Any]) -> None:
    if isinstance(record.get("name"), str):
        run.name = record["name"]
    if _is_number(record.get("seed")):
        run.seed = int(record["seed"])
    if _is_number(record.get("steps")):
        run.planned_steps = int(record["steps"])
    run.reason = str(record.get("reason") or "")
    run.settings = flat(record.get("settings"))
    run.versions = {name: str(value) for name, value in flat(record.get("versions")).items()}


def _take_checkpoint(run: RunFolder) -> None:
    """Takes the settings from the latest checkpoint, which has them too."""
    for path in sorted(run.folder.glob(f"checkpoints/step-*/{RUN_FILE}"), reverse=True):
        try:
            identity = json.loads(path.read_text(encoding="utf-8"))["identity"]
        except (OSError, ValueError, LookupError, TypeError):
            continue
        run.settings = flat(identity)
        if run.seed is None and _is_number(run.settings.get("seed")):
            run.seed = int(run.settings["seed"])
        return


def _read_metrics(path: Path, run: RunFolder) -> list[dict[str, Any]]:
    if not path.is_file():
        run.problems.append(f"{path.name} is missing: no step was logged")
        return []
    try:
        records, damaged = readable_metrics(path)
    except OSError as error:
        run.problems.append(f"{path.name} cannot be read: {error}")
        return []
    if damaged:
        shown = ", ".join(map(str, damaged[:5])) + (" and more" if damaged[5:] else "")
        run.problems.append(
            f"{path.name}: {len(damaged)} damaged lines are left out (line {shown})"
        )
    if not records:
        run.problems.append(f"{path.name} has no step")
        return []
    last = int(records[-1]["step"])
    missing = last + 1 - len(records)
    if missing > 0:
        run.problems.append(f"{path.name} lacks {missing} of the steps 0 to {last}")
    return records


def _take_held_out(run: RunFolder, record: Mapping[str, Any]) -> None:
    held_out = record.get("held_out")
    if isinstance(held_out, Mapping):
        run.held_out = {str(k): float(v) for k, v in held_out.items() if _is_number(v)}
    before = run.folder / "held_out_before.json"
    if "before" not in run.held_out and before.is_file():
        try:
            run.held_out["before"] = float(json.loads(before.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            run.problems.append(f"{before.name} cannot be read")


def _status(run: RunFolder, record: Mapping[str, Any]) -> tuple[str, bool]:
    done, planned = len(run.records), run.planned_steps
    count = f"{done} steps" if planned is None else f"{done} of {planned} steps"
    if not done and not record:
        return "empty: nothing was logged", False
    known = str(record.get("status") or "")
    if known == "finished":
        whole = planned is None or done >= planned
        return ("finished" if whole else "finished, but steps are missing") + f", {count}", whole
    if known == "running":
        started = record.get("started", "?")
        return f"not ended (running still, or killed): {count}, started {started}", False
    if known:
        return f"{known} after {count}", False
    return f"{count}; whether it ended is not known", False


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)
