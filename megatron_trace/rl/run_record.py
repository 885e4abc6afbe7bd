"""`run.json` in the folder of a run: what it is, with which versions, and how it ended.

It is written when the run starts and again when it ends; one that says `running` and is old belongs
to a run that was killed. Programs that read it must not trust a field to be there.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megatron_trace import __version__

RUN_FILE = "run.json"
# In the folder of an exchange, whose own file of that name says what all of it must agree on: where
# its trainer writes.
TRAINING_FOLDER = "training"
_FORMAT = "megatron_trace run"
# Characters of why a run ended: a report shows it whole.
_LONGEST_REASON = 1000
_PACKAGES = ("torch", "triton", "megatron-core", "nvidia-modelopt", "transformer-engine", "numpy")


class RunRecord:
    """The `run.json` of one run.

    Args:
        folder: Folder of the run; made if it is missing.
        name: Name of the run; runs of one name that differ in their seed are repetitions.
        seed: Its seed.
        settings: What decides its numbers, in plain values that JSON can hold, nested at will.
        steps: Steps that the run is to have.

    Attributes:
        path: The file.
        held_out: Held-out accuracy by when it was measured (`before`, `after`); to be filled in.
        left_off: Why it ends before its last step, to be filled in where it does so in order, and
            goes on in another process.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        name: str,
        seed: int,
        settings: Mapping[str, Any],
        steps: int,
    ) -> None:
        self.path = Path(folder) / RUN_FILE
        self.held_out: dict[str, float] = {}
        self.left_off = ""
        self._fields = {
            "format": _FORMAT,
            "name": name,
            "seed": seed,
            "steps": steps,
            "settings": dict(settings),
            "versions": versions(),
            "started": _now(),
        }

    def difference_there(self, *, but: Sequence[str] = ()) -> str:
        """Gives what makes the run that the file has another one: a setting, or the seed.

        Args:
            but: How dotted names of settings begin that may differ.

        Returns:
            The first name that differs with both values, as part of a message; empty if the runs
            are the same.
        """
        found = read_record(self.path.parent)
        if found is None:
            return f"its {RUN_FILE} is missing or damaged"
        own = json.loads(json.dumps(self._fields))
        theirs, ours = ({"seed": of.get("seed")} | flat(of.get("settings")) for of in (found, own))
        missing = object()
        for name in sorted(theirs.keys() | ours.keys()):
            if name.startswith(tuple(but)):
                continue
            if theirs.get(name, missing) != ours.get(name, missing):
                was, now = (json.dumps(of[name]) if name in of else "-" for of in (theirs, ours))
                return f"{name} was {was} there and is {now} here"
        return ""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Writes that the run is going on, and at the end of the context how it ended."""
        self._write(status="running")
        try:
            yield
        except KeyboardInterrupt:
            self._write_end("interrupted")
            raise
        except SystemExit as error:
            self._write_end("stopped", str(error.code).strip())
            raise
        except BaseException as error:
            self._write_end("crashed", _told(error))
            raise
        self._write_end("finished")

    def _write_end(self, status: str, reason: str = "") -> None:
        if self.left_off:
            status, reason = "left off", self.left_off
        self._write(status=status, ended=_now(), **({"reason": reason} if reason else {}))

    def _write(self, **fields: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f"{self.path.name}.tmp-{os.getpid()}")
        record = self._fields | fields | {"held_out": self.held_out}
        temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, self.path)


def _told(error: BaseException) -> str:
    """Gives what an error says, without tracebacks that it holds and not at any length.

    Megatron's of a checkpoint has the traceback of every rank, and the names of all its tensors.
    """
    text = f"{type(error).__name__}: {error}"
    if "Traceback (most recent call last)" in text:
        text = "\n".join(
            line for line in text.splitlines() if line and not line.startswith((" ", "Traceback"))
        )
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]} ..."


def read_record(folder: str | Path) -> dict[str, Any] | None:
    """Gives the object that the `run.json` of a folder holds.

    Returns:
        It, an empty one if the file holds something else, or None if it is not there or damaged.
    """
    try:
        found = json.loads((Path(folder) / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else {}


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Gives nested objects as one, by dotted names; of what is no object, an empty one."""
    if not isinstance(value, Mapping):
        return {prefix.removesuffix("."): value} if prefix else {}
    found: dict[str, Any] = {}
    for name, part in value.items():
        found |= flat(part, f"{prefix}{name}.")
    return found


def versions() -> dict[str, str]:
    """Gives the versions that a run's numbers depend on, and the commit where there is one."""
    found = {
        "megatron_trace": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": _device(),
    }
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return {name: value for name, value in found.items() if value}


def _device() -> str:
    import torch  # Only here: who reads a run's file needs no torch.

    return torch.cuda.get_device_properties(0).name if torch.cuda.is_available() else "CPU"


def _commit() -> str:
    """Gives the commit of the package's repository, with + if tracked files differ from it."""
    folder = Path(__file__).parent
    try:
        commit = _git(folder, "rev-parse", "--short=12", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return ""
    return commit + ("+" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    called = ["git", "-C", str(folder), *arguments]
    return subprocess.run(called, capture_output=True, text=True, check=True).stdout.strip()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
