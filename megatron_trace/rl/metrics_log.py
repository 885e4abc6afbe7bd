"""Metrics of a run as JSONL: one line per step, flushed, continued after a resume.

Every line is strict JSON: a number that is not finite stands as one of the strings "NaN",
"Infinity" and "-Infinity", and is the number again in what `read_metrics` gives. TensorBoard may
have the records beside it: numbers only, named by their path in the record ("gap/mean").
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_trace.hints.durable import write_file

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

METRICS_FILE = "metrics.jsonl"
_logger = logging.getLogger(__name__)


class MetricsLog:
    """Appends one JSON object per step to a file, and its numbers to TensorBoard.

    Args:
        path: File to write.
        first_step: Step that is logged next. Lines of it and later steps, and a line that was cut
            when the run was killed, are removed; 0 starts the file anew.
        tensorboard: Whether the folder `tensorboard` beside the file gets the numbers too.
            TensorBoard then hides what it has of `first_step` and later steps.
        lacks: Whether steps before `first_step` may be missing, as of a run that did not begin at
            0, or was not logged from its start. Damaged lines are left out then, with a warning.

    Attributes:
        path: The file.
        kept: Records of the steps before `first_step`.

    Raises:
        ValueError: The file does not hold every step before `first_step`, so it belongs to another
            run.
        ImportError: TensorBoard is to be written and not installed.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        first_step: int,
        tensorboard: bool = False,
        lacks: bool = False,
    ) -> None:
        self.path = Path(path)
        self.kept = self._readable(first_step) if lacks else read_metrics(path, before=first_step)
        if not lacks and [record["step"] for record in self.kept] != list(range(first_step)):
            raise ValueError(
                f"{self.path} must hold the steps 0 to {first_step - 1} to be continued at step "
                f"{first_step}; it holds {[record['step'] for record in self.kept]}; resume with "
                "the run's own folder"
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Durably: a lost replacement would leave steps beside a checkpoint that others led to.
        write_file(self.path, "".join(line_of_record(record) for record in self.kept).encode())
        self._writer = _writer(self.path.parent, first_step) if tensorboard else None

    def _readable(self, first_step: int) -> list[dict[str, Any]]:
        records, damaged = readable_metrics(self.path)
        if damaged:
            _logger.warning("%s: %d damaged lines are left out", self.path, len(damaged))
        return [record for record in records if record["step"] < first_step]

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes the metrics of one step; `record["step"]` numbers it."""
        with self.path.open("a", encoding="utf-8") as lines:
            lines.write(line_of_record(record))
        if self._writer is not None:
            for name, value in _numbers(record):
                self._writer.add_scalar(name, value, record["step"])
            self._writer.flush()

    def close(self) -> None:
        """Closes TensorBoard's file, if there is one."""
        if self._writer is not None:
            self._writer.close()


def read_metrics(path: str | Path, *, before: int | None = None) -> list[dict[str, Any]]:
    """Gives the records of a metrics file, without a last line that was cut.

    Args:
        path: File of a `MetricsLog`; a missing one has no records.
        before: Only records of steps before this one.
    """
    path = Path(path)
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    complete = text[: text.rfind("\n") + 1]
    records = [record_of_line(line) for line in complete.splitlines()]
    return [record for record in records if before is None or record["step"] < before]


def readable_metrics(path: str | Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Gives what can be read of a metrics file: one record a step, and where lines are damaged.

    Args:
        path: File of a `MetricsLog`, or what is left of it; a missing one has no records.

    Returns:
        The records in the order of their steps, the last one of a step that has several; the
        numbers of the damaged lines, from 1.

    Raises:
        OSError: It cannot be read.
    """
    path = Path(path)
    if not path.exists():
        return [], []
    by_step: dict[int, dict[str, Any]] = {}
    damaged = []
    text = path.read_bytes().decode("utf-8", errors="replace")
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            record = record_of_line(line)
            by_step[int(record["step"])] = record
        except (ValueError, LookupError, TypeError, OverflowError):
            damaged.append(number)
    return [by_step[step] for step in sorted(by_step)], damaged


def line_of_record(record: Mapping[str, Any]) -> str:
    """Gives the line of a step's metrics, with its end."""
    return json.dumps(_strict(record), allow_nan=False) + "\n"


def record_of_line(line: str) -> Any:
    """Gives what a line of a metrics file holds; an object, if a `MetricsLog` wrote it.

    Raises:
        ValueError: The line is no JSON.
    """
    return _numeric(json.loads(line))


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _strict(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        # As JavaScript and Protocol Buffers name them.
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _numeric(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _numeric(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_numeric(part) for part in value]
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


def _writer(folder: Path, first_step: int) -> SummaryWriter:
    # Only here: it is an optional package, and slow to import.
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            "metrics for TensorBoard need the package tensorboard, which the extra demo installs: "
            "pip install -c constraints.txt -e .[demo]"
        ) from error
    return SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)


def _numbers(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and (prefix or name != "step"):
            yield prefix + name, float(value)
