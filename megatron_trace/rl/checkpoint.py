"""Save and resume of an RL run: weights, optimizer with FP32 masters, random states, progress.

Written with Megatron's dist_checkpointing, so that the tensors can be loaded into another layout.
A checkpoint is a folder `step-000004` beside others; it appears under this name only when it is
complete, and `run.json` in it lists every other file with size and SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_trace import compat
from megatron_trace.config import TraceConfig
from megatron_trace.hints.settings_file import settings_from_record, settings_record
from megatron_trace.rl.fallback import fall_back_to_bf16
from megatron_trace.rl.health import NO_ALARMS
from megatron_trace.rl.optimizer import OptimizerSettings
from megatron_trace.rl.run import Progress, RlRun, RunSettings, use_settings_of_engine
from megatron_trace.rl_config import HealthConfig, LossConfig

_FORMAT = "megatron_trace RL checkpoint"
_FORMAT_VERSION = 1
_RUN_FILE = "run.json"


def save(run: RlRun, folder: str | Path, *, identity: Mapping[str, Any]) -> Path:
    """Writes a checkpoint of a run between two steps and gives its path.

    Args:
        run: The run.
        folder: Folder of the run's checkpoints.
        identity: What must be the same when the run is resumed (settings, model, tasks), in plain
            values that JSON can hold.

    Raises:
        ValueError: The run did no optimizer step yet, or samples are in flight.
    """
    if run.engine.session is not None:
        raise ValueError(
            f"{run.engine.session.num_in_flight} samples are in flight, which a checkpoint does "
            "not hold: the run could not be resumed bit by bit; save after a step that drains "
            "(drain_every), or abandon them"
        )
    if run.progress.num_updates == 0:
        # Megatron could save it, but then not load it, for want of Adam's moments.
        raise ValueError(
            "a run has no optimizer state to save before its first step; start it anew instead"
        )
    final = Path(folder) / f"step-{run.progress.step:06d}"
    temporary = final.with_name(f"{final.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    with compat.checkpoint_writes_in_process():
        dist_checkpointing.save(_sharded_state(run, is_loading=False), str(temporary))
    settings = run.engine.settings
    record = {
        "format": _FORMAT,
        "format_version": _FORMAT_VERSION,
        "identity": dict(identity),
        "progress": asdict(run.progress),
        "quantizer_settings": settings and settings_record(settings),
        "files": {name: _file_record(temporary / name) for name in _files(temporary)},
    }
    with (temporary / _RUN_FILE).open("w", encoding="utf-8") as file:
        json.dump(record, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    if final.exists():  # A run that was resumed from an earlier step comes by here again.
        shutil.rmtree(final)
    os.replace(temporary, final)
    return final


def drop_others(checkpoint: Path) -> None:
    """Removes the checkpoints of other steps beside this one."""
    for path in _complete(checkpoint.parent):
        if path != checkpoint:
            shutil.rmtree(path)


def latest(folder: str | Path) -> Path:
    """Gives the complete checkpoint of the latest step.

    Raises:
        ValueError: The folder has none.
    """
    found = _complete(Path(folder))
    if not found:
        raise ValueError(f"{folder} has no checkpoint (a folder step-...); start without resuming")
    return max(found, key=lambda path: int(path.name.removeprefix("step-")))


def _complete(folder: Path) -> list[Path]:
    paths = folder.iterdir() if folder.is_dir() else ()
    return [path for path in paths if re.fullmatch(r"step-\d{6,}", path.name)]


def resume(
    run: RlRun,
    checkpoint: str | Path,
    *,
    identity: Mapping[str, Any],
    num_steps: int | None = None,
) -> None:
    """Brings a run that was just built, or whose step failed, to the state of a checkpoint.

    The engine takes the saved scales, and the saved weights are pushed again; later steps then
    equal those of a run that was never stopped. Settings that did not exist yet when it was saved
    had their defaults. Alarms that only warn or stop may be others: one that stopped the run would
    stop it again after every step.

    Args:
        run: A run with the same settings; hints that it has not trained on are dropped.
        checkpoint: Folder of one checkpoint.
        identity: See `save`.
        num_steps: Steps that the run is to have in the end; None if it only is to be what it was.

    Raises:
        ValueError: The checkpoint is truncated or of something else, its run was another one, or
            has done more steps than it is to have.
    """
    checkpoint = Path(checkpoint)
    record = _verified_record(checkpoint)
    defaults = {field.name: field.default for field in fields(RunSettings)}
    for name in sorted(record["identity"].keys() | dict(identity).keys()):
        saved, own = record["identity"].get(name), _plain(identity.get(name))
        if name not in record["identity"] and own == defaults.get(name):
            continue
        if _deciding(name, saved) != _deciding(name, own):
            raise ValueError(
                f"{checkpoint} is of another run: {name} was {saved!r}, now it is {own!r}; resume "
                "with the settings of the run that was saved"
            )
    progress = Progress(**record["progress"])
    if num_steps is not None and progress.step > num_steps:
        raise ValueError(
            f"{checkpoint} has done {progress.step} steps, more than the {num_steps} that the run "
            "is to have; resume with as many or more, or start it anew"
        )
    if run.engine.session is not None:
        run.engine.session.close()
    if progress.in_bf16 and not run.progress.in_bf16:
        fall_back_to_bf16(run)
    state: Any = dist_checkpointing.load(_sharded_state(run, is_loading=True), str(checkpoint))
    run.drop_hints()
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random_states"]["torch"])
    _random_tracker().set_states(state["random_states"]["tracker"])
    run.progress = progress
    settings = record["quantizer_settings"]
    if settings is not None:
        run.engine.use_settings(settings_from_record(settings))
        use_settings_of_engine(run)
    run.push_weights(run.progress.policy_version)


def _deciding(name: str, value: Any) -> Any:
    """Gives what of a setting decides the numbers of a run."""
    if name != "health" or not isinstance(value, Mapping):
        return value
    texts = set(value["alarms"]) - set(NO_ALARMS)
    return sorted(text for text in texts if not text.endswith((":warn", ":stop")))


def saved_run(checkpoint: str | Path) -> tuple[RunSettings, dict[str, Any]]:
    """Gives the settings of the run that a checkpoint is of, and its identity (see `save`).

    Settings that did not exist yet when it was saved have their defaults.

    Raises:
        ValueError: The checkpoint is truncated or of something else, or has settings that do not
            exist any more.
    """
    identity = _verified_record(Path(checkpoint))["identity"]
    nested = {
        "trace": TraceConfig,
        "loss": LossConfig,
        "health": HealthConfig,
        "optimizer": OptimizerSettings,
    }
    try:
        names = [field.name for field in fields(RunSettings) if field.name in identity]
        values = {name: identity[name] for name in names}
        for name, kind in nested.items():
            values[name] = kind(**{key: _tupled(value) for key, value in values[name].items()})
        return RunSettings(**values), identity
    except (LookupError, TypeError) as error:
        raise ValueError(
            f"{checkpoint} has other settings than this version's ({error}); use the version that "
            "saved it"
        ) from error


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _sharded_state(run: RlRun, *, is_loading: bool) -> dict[str, Any]:
    model = run.model.sharded_state_dict()
    return {
        "model": model,
        "optimizer": run.optimizer.sharded_state_dict(model, is_loading=is_loading),
        "random_states": {
            "torch": torch.get_rng_state(),
            "tracker": _random_tracker().get_states(),
        },
    }


def _random_tracker() -> Any:
    tracker = get_cuda_rng_tracker()
    assert tracker is not None, "Megatron's parallel state is initialised before a run is built"
    return tracker


def _verified_record(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / _RUN_FILE
    if not path.is_file():
        raise ValueError(f"{checkpoint} is no RL checkpoint: it has no {_RUN_FILE}")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is truncated or damaged ({error}); use an earlier step"
        ) from error
    found = (record.get("format"), record.get("format_version")) if isinstance(record, dict) else ()
    if found != (_FORMAT, _FORMAT_VERSION):
        raise ValueError(
            f"{path} must say {(_FORMAT, _FORMAT_VERSION)}; got {found}; it is of another program "
            "or version"
        )
    for name, expected in record["files"].items():
        file = checkpoint / name
        got = _file_record(file) if file.is_file() else "no such file"
        if got != expected:
            raise ValueError(
                f"{file} is truncated or damaged: expected {expected}, got {got}; use an earlier "
                "step"
            )
    return record


def _files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def _file_record(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {
            "num_bytes": path.stat().st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def _plain(value: Any) -> Any:
    """Gives a value as it looks after JSON."""
    return json.loads(json.dumps(value))
