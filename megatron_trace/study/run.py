"""Runs a study: rollout sets once, then every missing cell, each result in a file at once."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from megatron_trace.hints.store import HintStore
from megatron_trace.models.hybrid import pattern_sites
from megatron_trace.rollout.engine import RolloutEngine
from megatron_trace.study import rollouts as rollout_sets
from megatron_trace.study.aging import aged_weights, weight_change
from megatron_trace.study.cells import (
    ALL_SITES,
    ENGINES,
    LAGS,
    LONG_PROMPT_TOKENS,
    Cell,
    cells_for,
)
from megatron_trace.study.gradients import ChunkGradients, chunk_gradients, gradient_rows
from megatron_trace.study.locks import locked
from megatron_trace.study.measure import Scores, rows_of, score, store_for
from megatron_trace.study.model import StudyModel
from megatron_trace.study.results import ResultFolder, Row, StudyResult
from megatron_trace.study.rollouts import RolloutSet, build_engine
from megatron_trace.study.trainer import build_trainer

# Raise it when rows of earlier versions must not be taken for those of this one.
VERSION = 1
# Seconds between two looks at what other processes have finished.
POLL_S = 0.2


@dataclass(frozen=True)
class StudySettings:
    """Size of a study.

    Attributes:
        name: `cpu` or `h200`.
        num_samples: Samples of every rollout set.
        max_new_tokens: Longest response.
        short: Whether only the questions of a slow model are asked.
    """

    name: str
    num_samples: int
    max_new_tokens: int
    short: bool = False


@dataclass(frozen=True, eq=False)
class Aged:
    """A policy some steps after the rollout's.

    Attributes:
        weights: Its parameters.
        rollouts: The rollout's samples as its engine reads them, with fresh codes.
        reference: By sample, the log-probs of its trainer under fresh full codes.
    """

    weights: Mapping[str, torch.Tensor]
    rollouts: RolloutSet
    reference: Mapping[str, torch.Tensor]


class Study:
    """One model in one setting.

    Args:
        model: The model.
        settings: Size of the study.
        work: Folder that keeps rollouts and results between starts.
        header: What the report says of machine and versions.
        say: Gets a line of progress for every cell.
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
        self._folder = work / f"{model.name}-{settings.name}"
        self._rollouts: dict[str, RolloutSet] = {}
        self._weights_of_rate: dict[float, dict[int, dict[str, torch.Tensor]]] = {}
        self._aged: dict[tuple[float, int], Aged] = {}
        on_gpu = torch.cuda.is_available()
        device = torch.cuda.get_device_name() if on_gpu else "cpu"
        self._device = torch.device(torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        # What every cell copies stays where the trainer is.
        self._weights = {name: value.to(self._device) for name, value in model.weights.items()}
        self._stores: dict[tuple[Any, ...], HintStore] = {}
        self._references: dict[str, ChunkGradients] = {}
        self.identity = {
            "version": VERSION,
            "weights": weights_digest(model.weights),
            "settings": asdict(settings),
            "device": device,
        }
        self._results = ResultFolder(self._folder / "cells", self.identity)

    @property
    def cells(self) -> list[Cell]:
        """The cells of this model and setting."""
        return cells_for(
            self.model_sites,
            short=self.settings.short,
            long_prompts=max(map(len, self.model.prompts)) > LONG_PROMPT_TOKENS,
        )

    def run(self, only: Sequence[str] = (), *, max_seconds: float = math.inf) -> StudyResult:
        """Computes every missing cell, and gives all that the work folder has.

        Several processes may share a work folder: each takes what no other has begun.

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
            done = self._take_one(missing, until, errors)
            if done is None:
                time.sleep(POLL_S)  # The rest is in the hands of other processes.
            else:
                missing.remove(done)
        if errors:
            raise ExceptionGroup(f"{len(errors)} of the study's cells failed", errors)
        return self.result()

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

    def _take_one(
        self, units: Sequence[list[Cell]], until: float, errors: list[Exception]
    ) -> list[Cell] | None:
        """Computes the first unit that no other process has, and gives it; None if there is none.

        Args:
            units: The units that are not known to be computed.
            until: Time after which no missing cell is begun.
            errors: Gets what went wrong in a cell.
        """
        for unit in units:
            name = unit[0].name.replace("/", "__")
            with locked(self._folder / "locks" / f"{name}.lock", wait=False) as mine:
                if not mine:
                    continue
                try:
                    if not self._has_rollouts(unit[0].engine):
                        continue
                    for cell in unit:
                        if not self._results.has(cell) and time.perf_counter() < until:
                            self._compute(cell)
                except Exception as error:  # noqa: BLE001  Raised by `run`, after the others.
                    error.add_note(f"in {unit[0].name}")
                    errors.append(error)
                    self._say(f"{unit[0].name}: FAILED, {error!r}")
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()  # For the other processes.
                return unit
        return None

    def _has_rollouts(self, engine: str) -> bool:
        """Makes a rollout set if it is missing, unless another process does; says if it is there.

        Whoever needs a set that is being made can do other things meanwhile.
        """
        if engine in self._rollouts or self._path_of(engine).exists():
            return True
        with locked(self._folder / "locks" / f"rollouts-{engine}.lock", wait=False) as mine:
            if mine:
                self.rollouts(engine)
            return mine

    def _compute(self, cell: Cell) -> None:
        started = time.perf_counter()
        rows, facts = self._known(cell) or self.measure(cell)
        seconds = time.perf_counter() - started
        self._results.write(cell, rows, seconds=seconds, facts=facts)
        self._say(f"{cell.name}: {seconds:.1f} s")

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
            "rollouts": {name: self._facts_of(name) for name in engines},
        }
        return StudyResult(header, found)

    def _facts_of(self, engine: str) -> dict[str, Any]:
        """Gives what the report says of a rollout set, without reading the set again."""
        path = self._path_of(engine).with_suffix(".json")
        if not path.exists():
            path.write_text(json.dumps(_facts_of(self.rollouts(engine))))
        return json.loads(path.read_text())

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

    def measure(self, cell: Cell) -> tuple[list[Row], dict[str, Any]]:
        """Gives the rows of a cell, and what is true of it as a whole."""
        if cell.gradient:
            return gradient_rows(cell.name, self._gradients(cell), self._reference(cell)), {}
        if cell.lag:
            return self._measure_aged(cell)
        if cell.fresh:
            return self._measure_prefill(cell), {}
        rollouts = self.rollouts(cell.engine)
        return rows_of(cell, rollouts, self._score(cell, rollouts, self._weights)), {}

    def rollouts(self, engine: str) -> RolloutSet:
        """Gives the rollout set of an engine setting; generates it if the folder lacks it."""
        if engine not in self._rollouts:
            setting = ENGINES[engine]
            path = self._path_of(engine)
            identity = self.identity | {"engine": asdict(setting)}
            if path.exists():
                self._rollouts[engine] = rollout_sets.load(path, identity).to(self._device)
            else:
                started = time.perf_counter()
                made = rollout_sets.roll_out(
                    self.model,
                    setting,
                    num_samples=self.settings.num_samples // (4 if setting.long_prompts else 1),
                    max_new_tokens=self.settings.max_new_tokens,
                )
                rollout_sets.save(made, path, identity)
                path.with_suffix(".json").write_text(json.dumps(_facts_of(made)))
                self._rollouts[engine] = made.to(self._device)
                self._say(f"rollouts {engine}: {time.perf_counter() - started:.1f} s")
        return self._rollouts[engine]

    def _path_of(self, engine: str) -> Path:
        return self._folder / f"rollouts-{engine}.pt"

    def _score(
        self, cell: Cell, rollouts: RolloutSet, weights: Mapping[str, torch.Tensor]
    ) -> Scores:
        settings = rollouts.settings
        trainer, sites = build_trainer(self.model, cell, ENGINES[cell.engine], settings, weights)
        return score(trainer, sites, rollouts, self._store(rollouts, cell))

    def _store(self, rollouts: RolloutSet, cell: Cell) -> HintStore | None:
        """Gives the hints of a cell, made once for all cells that read the same."""
        if rollouts is not self._rollouts.get(cell.engine) or cell.damage != "none":
            return store_for(rollouts, cell)
        key = (cell.engine, cell.bits, cell.scale_form)
        if key not in self._stores:
            store = store_for(rollouts, cell)
            if store is None:
                return None
            self._stores[key] = store
        return self._stores[key]

    # The policy gradient.

    def _reference(self, cell: Cell) -> ChunkGradients:
        """Gives the gradients of full codes by a trainer of the cell's dtype."""
        if cell.dtype not in self._references:
            full = self._full_codes("gradient/reference", gradient=True, dtype=cell.dtype)
            self._references[cell.dtype] = self._gradients(full)
        return self._references[cell.dtype]

    def _gradients(self, cell: Cell) -> ChunkGradients:
        rollouts = self.rollouts(cell.engine)
        trainer, sites = build_trainer(
            self.model, cell, ENGINES[cell.engine], rollouts.settings, self._weights
        )
        return chunk_gradients(trainer, sites, rollouts.samples, self._store(rollouts, cell))

    def _full_codes(self, name: str, **fields: Any) -> Cell:
        return Cell(name, bits=4, guard=False, sites=self.model_sites, **fields)

    @property
    def model_sites(self) -> tuple[str, ...]:
        """Sites that the model has, in the order of `ALL_SITES`."""
        present = {str(site) for site in pattern_sites(self.model.pattern)}
        return tuple(site for site in ALL_SITES if site in present)

    # Policies that have moved on, and the engine against itself.

    @cached_property
    def _engine(self) -> RolloutEngine:
        engine = build_engine(self.model, ENGINES["fp4"])
        settings = self.rollouts("fp4").settings
        assert settings is not None, "the engine fp4 quantises"
        engine.use_settings(settings)
        return engine

    def _read_again(self, weights: Mapping[str, torch.Tensor], version: int) -> RolloutSet:
        rollouts = self.rollouts("fp4")
        self._engine.push_weights(weights, version)
        samples, codes = rollout_sets.rescored(
            self._engine, rollouts.samples, policy_version=version
        )
        return RolloutSet(samples, codes, rollouts.settings).to(self._device)

    def _measure_prefill(self, cell: Cell) -> list[Row]:
        """Compares the codes of decoding with those of reading the same tokens as a prompt."""
        decoded = self.rollouts("fp4")
        read = self._read_again(self._weights, 0)
        rows = rows_of(cell, decoded, self._score(cell, read, self._weights))
        for row in rows:
            row["codes"] = rollout_sets.code_differences(
                decoded.codes[row["sample"]], read.codes[row["sample"]]
            )
        return rows

    def _measure_aged(self, cell: Cell) -> tuple[list[Row], dict[str, Any]]:
        aged = self._policy(cell.lag_rate, cell.lag)
        rollouts = aged.rollouts if cell.fresh else self.rollouts(cell.engine)
        scores = self._score(cell, rollouts, aged.weights)
        rows = rows_of(cell, rollouts, scores, aged.reference)
        if cell.fresh:
            old = {sample.sample_id: sample.logprobs for sample in rollouts.samples}
            for row in rows:
                drift = aged.reference[row["sample"]] - old[row["sample"]]
                row["drift"] = [float(f"{delta:.3g}") for delta in drift.tolist()]
        return rows, {"weight_change": weight_change(aged.weights, self._weights)}

    def _policy(self, rate: float, steps: int) -> Aged:
        if rate not in self._weights_of_rate:
            wanted = [number for lag_rate, number in LAGS if lag_rate == rate]
            self._weights_of_rate[rate] = aged_weights(
                self.model, self.rollouts("fp4"), learning_rate=rate, steps=wanted
            )
        if (rate, steps) not in self._aged:
            weights = self._weights_of_rate[rate][steps]
            read = self._read_again(weights, steps)
            reference = self._score(self._full_codes("lag/reference"), read, weights)
            self._aged[rate, steps] = Aged(weights, read, reference.logprobs)
        return self._aged[rate, steps]


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


def _facts_of(rollouts: RolloutSet) -> dict[str, Any]:
    samples = rollouts.samples
    return {
        "samples": len(samples),
        "response_tokens": sum(len(sample.response_tokens) for sample in samples),
        "forwarded_tokens": sum(sample.num_rows for sample in samples),
        "longest": max(len(sample.tokens) for sample in samples),
        "finished": sum(sample.finish_reason == "stop" for sample in samples),
        "mean_logprob": float(torch.cat([sample.logprobs for sample in samples]).mean()),
    }
