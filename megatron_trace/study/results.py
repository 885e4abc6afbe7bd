"""The rows of a study in files: one a cell while it runs, one compressed file in the end."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_trace.study.cells import Cell

Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
class CellResult:
    """The rows of one cell.

    Attributes:
        cell: Fields of the cell.
        seconds: Time that it took.
        rows: A row for every sample, or for every group of parameters.
        facts: What is true of the whole cell, such as how far the weights moved.
    """

    cell: Mapping[str, Any]
    seconds: float
    rows: Sequence[Row]
    facts: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Name of the cell."""
        return self.cell["name"]


@dataclass(frozen=True, eq=False)
class StudyResult:
    """All cells of one model and setting.

    Attributes:
        header: Model, setting, machine, versions, commit.
        cells: By name.
    """

    header: Mapping[str, Any]
    cells: Mapping[str, CellResult]


class ResultFolder:
    """Results of cells, each in a file of its own, so that a killed study goes on.

    Args:
        path: The folder.
        identity: What decides the rows beside the cell; a file of another is computed anew.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path = path
        self.identity = json.loads(json.dumps(identity))
        path.mkdir(parents=True, exist_ok=True)

    def read(self, cell: Cell) -> CellResult | None:
        """Gives the result of a cell, or None if it is missing or of other settings."""
        path = self._file(cell)
        if not path.exists():
            return None
        with path.open() as lines:
            head = json.loads(next(lines))
            if not self._fits(head, cell):
                return None
            return CellResult(
                head["cell"], head["seconds"], [json.loads(line) for line in lines], head["facts"]
            )

    def has(self, cell: Cell) -> bool:
        """Says whether `read` would give a result, without reading its rows."""
        path = self._file(cell)
        if not path.exists():
            return False
        with path.open() as lines:
            return self._fits(json.loads(next(lines)), cell)

    def _fits(self, head: Mapping[str, Any], cell: Cell) -> bool:
        return head["identity"] == self.identity and head["cell"] == _plain(cell)

    def write(
        self, cell: Cell, rows: Sequence[Row], *, seconds: float, facts: Mapping[str, Any]
    ) -> CellResult:
        """Writes the result of a cell under a temporary name and renames it."""
        head = {
            "cell": _plain(cell),
            "identity": self.identity,
            "seconds": round(seconds, 3),
            "facts": dict(facts),
        }
        path = self._file(cell)
        temporary = path.with_name(path.name + ".tmp")
        with temporary.open("w") as lines:
            for line in (head, *rows):
                lines.write(_dumped(line) + "\n")
        os.replace(temporary, path)
        return CellResult(head["cell"], head["seconds"], rows, facts)

    def _file(self, cell: Cell) -> Path:
        return self.path / (cell.name.replace("/", "__") + ".jsonl")


def save_study(path: Path, result: StudyResult) -> None:
    """Writes a study: a line with its header, then each cell's line and rows; equal bytes again."""
    temporary = path.with_name(path.name + ".tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=0) as lines:
        lines.write((_dumped({"study": result.header}) + "\n").encode())
        for cell in result.cells.values():
            head = {
                "start": cell.name,
                "cell": cell.cell,
                "seconds": cell.seconds,
                "facts": cell.facts,
            }
            rows = ({key: row[key] for key in row if key != "cell"} for row in cell.rows)
            for line in (head, *rows):
                lines.write((_dumped(line) + "\n").encode())
    os.replace(temporary, path)


def load_study(path: Path) -> StudyResult:
    """Reads what `save_study` wrote."""
    header: dict[str, Any] = {}
    cells: dict[str, CellResult] = {}
    rows: list[Row] = []
    with gzip.open(path, "rt") as lines:
        for text in lines:
            line = json.loads(text)
            if "study" in line:
                header = line["study"]
            elif "start" in line:
                rows = []
                cells[line["start"]] = CellResult(
                    line["cell"], line["seconds"], rows, line["facts"]
                )
            else:
                rows.append(line)
    if not header:
        raise ValueError(f"{path} is no file of a study: it has no header")
    return StudyResult(header, cells)


def _plain(cell: Cell) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(cell)))


def _dumped(line: Any) -> str:
    return json.dumps(line, separators=(",", ":"))
