"""Measures cells: rollout sets once, then trainers that score their samples.

What several cells share is kept: rollout sets, hints, gradients of full codes, older policies.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
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
from megatron_trace.study.cells import ALL_SITES, ENGINES, LAGS, Cell, StudySettings
from megatron_trace.study.gradients import ChunkGradients, chunk_gradients, gradient_rows
from megatron_trace.study.measure import Scores, rows_of, score, store_for
from megatron_trace.study.model import StudyModel
from megatron_trace.study.results import Row
from megatron_trace.study.rollouts import RolloutSet, build_engine
from megatron_trace.study.trainer import build_trainer


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


class CellMeasurer:
    """Measures the cells of one model, on the current device.

    Args:
        model: The model.
        settings: Size of the study.
        folder: Keeps rollout sets between starts.
        identity: What decides the rollouts beside the engine setting; those of another are refused.
        say: Gets a line of progress for every rollout set.
    """

    def __init__(
        self,
        model: StudyModel,
        settings: StudySettings,
        folder: Path,
        *,
        identity: Mapping[str, Any],
        say: Callable[[str], None],
    ) -> None:
        self.model = model
        self.settings = settings
        self._folder = folder
        self._identity = identity
        self._say = say
        on_gpu = torch.cuda.is_available()
        self._device = torch.device(torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        # What every cell copies stays where the trainer is.
        self._weights = {name: value.to(self._device) for name, value in model.weights.items()}
        self._rollouts: dict[str, RolloutSet] = {}
        self._stores: dict[tuple[Any, ...], HintStore] = {}
        self._references: dict[str, ChunkGradients] = {}
        self._weights_of_rate: dict[float, dict[int, dict[str, torch.Tensor]]] = {}
        self._aged: dict[tuple[float, int], Aged] = {}

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
            identity = dict(self._identity) | {"engine": asdict(setting)}
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

    def facts_of(self, engine: str) -> dict[str, Any]:
        """Gives what the report says of a rollout set, without reading the set again."""
        path = self._path_of(engine).with_suffix(".json")
        if not path.exists():
            path.write_text(json.dumps(_facts_of(self.rollouts(engine))))
        return json.loads(path.read_text())

    def has_rollouts(self, engine: str) -> bool:
        """Says whether a rollout set is there, so that `rollouts` does not generate it."""
        return engine in self._rollouts or self._path_of(engine).exists()

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
