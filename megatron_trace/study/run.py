"""Runs a study: every missing cell, each result in a file at once, by one or several processes."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megatron_trace.study.cell_measurer import CellMeasurer
from megatron_trace.study.cells import (
    ENGINES,
    LONG_PROMPT_TOKENS,
    Cell,
    StudySettings,
    cells_for,
)
from megatron_trace.study.locks import locked
from megatron_trace.study.model import StudyModel
from megatron_trace.study.results import ResultFolder, Row, StudyResult

# Raise it when rows of earlier versions must not be taken for those of this one.
VERSION = 1
# Seconds between two looks at what other processes have finished.
POLL_S = 0.2


class Study:
    """One model in one setting.

    Args:
        model: The model.
        settings: Size of the study.
        work: Folder that keeps rollouts and results between starts; several processes may share it.
        header: What the report says of machine and versions.
        say: Gets a line of progress for every cell.

    Attributes:
        measurer: What measures the cells.
    """

    def __init__(
        self,
        model: StudyModel,
        settings: StudySettings,
        work: Path,
        *,
        header: Mapping[str, Any],
        say: Callable[[str], None],
    ) -> None:
        self.model = model
        self.settings = settings
        self.header = header
        self._say = say
        folder = work / f"{model.name}-{settings.name}"
        self._locks = folder / "locks"
        self.identity = {
            "version": VERSION,
            "weights": weights_digest(model.weights),
            "settings": asdict(settings),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        }
        self.measurer = CellMeasurer(model, settings, folder, identity=self.identity, say=say)
        self._results = ResultFolder(folder / "cells", self.identity)

    @property
    def cells(self) -> list[Cell]:
        """The cells of this model and setting."""
        return cells_for(
            self.measurer.model_sites,
            short=self.settings.short,
            long_prompts=max(map(len, self.model.prompts)) > LONG_PROMPT_TOKENS,
        )

    def run(self, only: Sequence[str] = (), *, max_seconds: float = math.inf) -> StudyResult:
        """Computes every missing cell, and gives all that the work folder has; see `compute`."""
        self.compute(only, max_seconds=max_seconds)
        return self.result()

    def compute(self, only: Sequence[str] = (), *, max_seconds: float = math.inf) -> None:
        """Computes every missing cell that no other process computes.

        Args:
            only: Questions, or beginnings of names of cells up to a slash, in this order; all
                cells if empty.
            max_seconds: Time after which no missing cell is begun.

        Raises:
            ValueError: No cell has such a name.
            ExceptionGroup: Some cells failed; all others were computed.
        """
        until = time.perf_counter() + max_seconds
        missing = self._missing(only)
        errors: list[Exception] = []
        while missing and time.perf_counter() < until:
            for unit in missing:
                with self._claimed(unit) as mine:
                    if mine:
                        errors += self._computed(unit, until)
                        missing.remove(unit)
                        break  # The first of those that have become free is the next.
            else:
                time.sleep(POLL_S)  # The rest is in the hands of other processes.
        if errors:
            raise ExceptionGroup(f"{len(errors)} of the study's cells failed", errors)

    def _missing(self, only: Sequence[str]) -> list[list[Cell]]:
        """Gives the cells to compute, those together that one process should compute."""
        cells = self.cells
        if only:
            named = [c for name in only for c in self.cells if f"{c.name}/".startswith(f"{name}/")]
            cells = list(dict.fromkeys(named))
        unknown = [n for n in only if not any(f"{c.name}/".startswith(f"{n}/") for c in cells)]
        if unknown:
            known = ", ".join(sorted({cell.question for cell in self.cells}))
            raise ValueError(f"no cell is called {', '.join(unknown)}; the questions are {known}")
        units: dict[Cell, list[Cell]] = {}
        for cell in cells:
            units.setdefault(_unit_of(cell), []).append(cell)
        return [unit for unit in units.values() if not all(map(self._results.has, unit))]

    @contextlib.contextmanager
    def _claimed(self, unit: Sequence[Cell]) -> Iterator[bool]:
        """Yields whether these cells are this process's now: no other has them or their rollouts.

        Whoever needs a rollout set that is being made can do other things meanwhile.
        """
        first, engine = unit[0].name.replace("/", "__"), unit[0].engine
        with locked(self._locks / f"{first}.lock", wait=False) as mine:
            if not mine or self.measurer.has_rollouts(engine):
                yield mine
                return
            with locked(self._locks / f"rollouts-{engine}.lock", wait=False) as makes_them:
                yield makes_them

    def _computed(self, unit: Sequence[Cell], until: float) -> list[Exception]:
        """Computes those of some cells that are missing; gives what went wrong."""
        errors = []
        for cell in unit:
            if self._results.has(cell) or time.perf_counter() > until:
                continue
            started = time.perf_counter()
            try:
                rows, facts = self._known(cell) or self.measurer.measure(cell)
            except Exception as error:  # noqa: BLE001  Raised by `compute`, after the others.
                error.add_note(f"in cell {cell.name}")
                errors.append(error)
                self._say(f"{cell.name}: FAILED, {error!r}")
                continue
            seconds = time.perf_counter() - started
            self._results.write(cell, rows, seconds=seconds, facts=facts)
            self._say(f"{cell.name}: {seconds:.1f} s")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # For the other processes.
        return errors

    def result(self) -> StudyResult:
        """Gives all that the work folder has."""
        read = [self._results.read(cell) for cell in self.cells]
        found = {result.name: result for result in read if result is not None}
        engines = sorted({result.cell["engine"] for result in found.values()})
        header = {
            **self.header,
            "identity": self.identity,
            "model": self.model.name,
            "setting": self.settings.name,
            "pattern": self.model.pattern,
            "model_facts": dict(self.model.facts),
            "rollouts": {name: self.measurer.facts_of(name) for name in engines},
        }
        return StudyResult(header, found)

    def _known(self, cell: Cell) -> tuple[list[Row], dict[str, Any]] | None:
        """Gives the rows of a cell from another one that differs in name only; None if none does.

        The same setting answers several questions: 1 bit, all layers, the rollout's scales.
        """
        for other in self.cells:
            if cell.codes not in ("no", other.codes):
                continue
            if dataclasses.replace(other, name=cell.name, codes=cell.codes) != cell:
                continue
            result = self._results.read(other)
            if result is None:
                continue
            left_out = {"codes"} if cell.codes == "no" else set()
            rows = [
                {key: value for key, value in row.items() if key not in left_out}
                for row in result.rows
            ]
            return [{**row, "cell": cell.name} for row in rows], dict(result.facts)
        return None


def _unit_of(cell: Cell) -> Cell:
    """Gives what cells have in common that one process should compute.

    Gradients share a reference, which three processes rather make each than wait for one another;
    lags share the steps of the optimizer, long prompts fill the memory of a process, and cells that
    differ in name only share their rows.
    """
    if cell.gradient:
        method = "trace" if cell.method == "trace" else "qat"
        return Cell("", cell.engine, method, dtype=cell.dtype, guard=cell.guard, gradient=True)
    if cell.lag:
        return Cell("", cell.engine, lag=1, lag_rate=cell.lag_rate)
    if ENGINES[cell.engine].long_prompts:
        return Cell("", cell.engine)
    return dataclasses.replace(cell, name="", codes="no")


def weights_digest(weights: Mapping[str, torch.Tensor]) -> str:
    """Gives 16 hexadecimal digits of all weights."""
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(f"{name}/{tuple(value.shape)}/{value.dtype}/".encode())
        digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]
