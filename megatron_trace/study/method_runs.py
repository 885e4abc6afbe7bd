"""RL runs of methods side by side: what is varied, and one run of it, resumable.

Every run is a folder as `docs/report.md` says, `seed-<seed>/<name>`, with `held_out.jsonl` beside
the metrics: which held-out problems the run's own engine solved, in the precision that it is
deployed in, every few steps. The runs of a seed start from the same weights and see the same
prompts. `comparison.py` makes tables of the folders.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from megatron_trace.config import TraceConfig
from megatron_trace.rl import checkpoint
from megatron_trace.rl.asynchronous import AsyncRollouts, AsyncSettings
from megatron_trace.rl.health import must_stop
from megatron_trace.rl.metrics_log import METRICS_FILE, MetricsLog
from megatron_trace.rl.optimizer import OptimizerSettings
from megatron_trace.rl.run import RlRun, RunSettings, build_run, solved, start
from megatron_trace.rl.run_record import RunRecord
from megatron_trace.rl.step import rl_step
from megatron_trace.rl.tasks import CharTokenizer, TaskItem
from megatron_trace.rl_config import LossConfig
from megatron_trace.study.perturbation import perturb_layers

HELD_OUT_FILE = "held_out.jsonl"


@dataclass(frozen=True)
class Variant:
    """A method as it is compared.

    Attributes:
        trace: Fields of `TraceConfig` other than the defaults.
        loss: Objective and corrections.
        served: Precision that its engine serves, in training and in the evaluation.
    """

    trace: Mapping[str, Any]
    loss: LossConfig = field(default_factory=LossConfig)
    served: str = "NVFP4 W4A4 + KV4"


VARIANTS: dict[str, Variant] = {
    "bf16": Variant({"method": "bf16"}, served="BF16"),
    "qat": Variant({"method": "qat"}),
    "qarl": Variant({"method": "qarl"}),
    "quads": Variant({"method": "quads"}, served="NVFP4 W4A4 + KV4, compensated"),
    "score-centering": Variant({"method": "score_centering"}),
    "score-centering-unweighted": Variant(
        {"method": "score_centering"}, LossConfig(correction="none")
    ),
    "trace": Variant({"method": "trace"}),
    "trace-half": Variant({"method": "trace", "hint_layers": "latter_half"}),
}
# Whose trainers give activations no codes that diagnostics could compare.
_WITHOUT_CODES = ("bf16", "quads")


@dataclass(frozen=True)
class Problem:
    """What all runs of a seed have in common.

    Attributes:
        config: Model configuration.
        pattern: Hybrid layer pattern.
        items: Training items.
        held_out: Items that are never trained on.
        tokenizer: Tokenizer of tasks and model.
        weights: FP32 or BF16 parameters by name, that every run starts from.
        calibration: int64 [B, S] each; fix the static scales.
    """

    config: TransformerConfig
    pattern: str
    items: Sequence[TaskItem]
    held_out: Sequence[TaskItem]
    tokenizer: CharTokenizer
    weights: Mapping[str, torch.Tensor]
    calibration: Sequence[torch.Tensor]


@dataclass(frozen=True)
class RunPlan:
    """One run of the comparison.

    Attributes:
        variant: Name in `VARIANTS`.
        seed: Decides prompts and samples.
        steps: RL steps.
        base: Settings that the runs have in common; method, loss and seed are set here.
        perturb: Relative noise in the trainer's forward pass, a diagnostic (`perturbation.py`).
        evaluate_every: Steps between two evaluations on the held-out problems.
        save_every: Steps between two checkpoints.
        problem: Facts that tell the weights and problems from others.
        ahead: How far rollouts run ahead of the training; None rolls out and trains in turn.
    """

    variant: str
    seed: int
    steps: int
    base: RunSettings
    perturb: float = 0.0
    evaluate_every: int = 20
    save_every: int = 20
    problem: Mapping[str, Any] = field(default_factory=dict)
    ahead: AsyncSettings | None = None

    def __post_init__(self) -> None:
        """Raises ValueError if samples were in flight when the engine evaluates or is saved."""
        drains = self.ahead.drain_every if self.ahead else 1
        if not drains or self.evaluate_every % drains or self.save_every % drains:
            raise ValueError(
                f"evaluate_every={self.evaluate_every} and save_every={self.save_every} must be "
                f"multiples of drain_every={drains}: neither is possible with samples in flight"
            )

    @property
    def is_of_one_policy(self) -> bool:
        """Whether no weight moves: it is evaluated once, at the end, and nothing is to be saved."""
        return self.base.optimizer.learning_rate == 0.0

    @property
    def name(self) -> str:
        """Name of the run, the same for all seeds."""
        return self.variant + (f"-perturb-{self.perturb:g}" if self.perturb else "")

    @property
    def settings(self) -> RunSettings:
        """Settings of the run."""
        variant = VARIANTS[self.variant]
        changes = dict(variant.trace)
        if changes["method"] in _WITHOUT_CODES:
            changes["diagnostic_share"] = 0.0
        trace = dataclasses.replace(self.base.trace, **changes)
        return dataclasses.replace(self.base, trace=trace, loss=variant.loss, seed=self.seed)

    @property
    def identity(self) -> dict[str, Any]:
        """What must be equal for the run to be resumed; the number of steps may grow."""
        own = {
            "perturb": self.perturb,
            "served": VARIANTS[self.variant].served,
            "evaluate_every": self.evaluate_every,
        }
        if self.ahead is not None:
            own["asynchronous"] = dataclasses.asdict(self.ahead)
        return dataclasses.asdict(self.settings) | own | dict(self.problem)

    def record(self, work: Path) -> RunRecord:
        """Gives what the run's folder says of it."""
        return RunRecord(
            self.folder(work),
            name=self.name,
            seed=self.seed,
            settings=self.identity,
            steps=self.steps,
        )

    def folder(self, work: Path) -> Path:
        """Gives the run's folder."""
        return work / f"seed-{self.seed}" / self.name


def base_settings(**values: Any) -> RunSettings:
    """Gives what the runs have in common; an eighth of the samples has full codes to compare.

    Args:
        **values: Fields of `RunSettings`; `learning_rate` is that of its optimizer.
    """
    optimizer = OptimizerSettings(learning_rate=values.pop("learning_rate"))
    trace = TraceConfig(method="qat", diagnostic_share=0.125)
    return RunSettings(trace=trace, optimizer=optimizer, **values)


def do_run(plan: RunPlan, problem: Problem, work: Path) -> None:
    """Does the remaining steps and evaluations of a run.

    Raises:
        ValueError: The folder holds a run of other settings.
        SystemExit: An alarm stopped the run; its checkpoint is saved.
    """
    folder = plan.folder(work)
    folder.mkdir(parents=True, exist_ok=True)
    run = _build(plan.settings, problem)
    perturb_layers(run.model, plan.perturb)
    _take_up(run, plan, problem, folder)
    record = plan.record(work)
    held_out = HeldOutLog(folder / HELD_OUT_FILE, last_step=run.progress.step)
    with record.running():
        if not plan.is_of_one_policy:
            held_out.evaluate(run, problem.held_out, every=plan.evaluate_every, steps=plan.steps)
        log = MetricsLog(folder / METRICS_FILE, first_step=run.progress.step)
        rollouts = plan.ahead and AsyncRollouts(run, plan.ahead, num_steps=plan.steps)
        while run.progress.step < plan.steps:
            metrics = rollouts.step(run) if rollouts else rl_step(run)
            log.append(metrics)
            held_out.evaluate(run, problem.held_out, every=plan.evaluate_every, steps=plan.steps)
            stops = must_stop(metrics)
            if stops and rollouts:
                rollouts.abandon()
            done = run.progress.step
            is_due = stops or done == plan.steps or done % plan.save_every == 0
            if run.progress.num_updates and is_due and not plan.is_of_one_policy:
                saved = checkpoint.save(run, folder / "checkpoints", identity=plan.identity)
                checkpoint.drop_others(saved)
            if stops:
                raise SystemExit(f"stopped after step {metrics['step']}, as {stops}")
        if plan.variant == "bf16" and not plan.is_of_one_policy:
            _evaluate_in_fp4(run, plan, problem, held_out)
        shares = held_out.shares()
        record.held_out |= {"before": shares[min(shares)], "after": shares[max(shares)]}


class HeldOutLog:
    """Which held-out problems were solved after how many steps, one evaluation a line.

    Args:
        path: The file; made if it is missing.
        last_step: Steps that the run has done; evaluations after more of them are removed.

    Attributes:
        rows: The evaluations: `step`, `served`, and `solved`, a character 0 or 1 for each problem.
    """

    def __init__(self, path: Path, *, last_step: int) -> None:
        self.path = path
        self.rows = [row for row in read_held_out(path) if row["step"] <= last_step]
        self._write()

    def evaluate(
        self, run: RlRun, items: Sequence[TaskItem], *, every: int, steps: int, served: str = ""
    ) -> None:
        """Evaluates a run if it is time to, and it was not done yet.

        Args:
            run: The run.
            items: Held-out items.
            every: Steps between two evaluations; there is one after the last step in any case.
            steps: Steps of the whole run.
            served: Precision, where it is not the one that the run is deployed in.
        """
        step = run.progress.step
        is_due = step % every == 0 or step == steps
        if not is_due or any((row["step"], row["served"]) == (step, served) for row in self.rows):
            return
        right = "".join("01"[one] for one in solved(run, items))
        self.rows.append({"step": step, "served": served, "solved": right})
        self._write()

    def shares(self) -> dict[int, float]:
        """Gives the share solved in deployment precision by steps."""
        return {
            row["step"]: row["solved"].count("1") / len(row["solved"])
            for row in self.rows
            if not row["served"]
        }

    def _write(self) -> None:
        temporary = self.path.with_name(self.path.name + ".tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        os.replace(temporary, self.path)


def read_held_out(path: Path) -> list[dict[str, Any]]:
    """Gives the evaluations in a file; none if it is missing."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _build(settings: RunSettings, problem: Problem) -> RlRun:
    return build_run(
        settings,
        problem.config,
        pattern=problem.pattern,
        items=problem.items,
        tokenizer=problem.tokenizer,
    )


def _take_up(run: RlRun, plan: RunPlan, problem: Problem, folder: Path) -> None:
    """Gives a run that was built the weights it goes on with."""
    checkpoints = folder / "checkpoints"
    for unfinished in checkpoints.glob("step-*.tmp-*"):
        shutil.rmtree(unfinished)
    if any(checkpoints.glob("step-??????")):
        checkpoint.resume(
            run, checkpoint.latest(checkpoints), identity=plan.identity, num_steps=plan.steps
        )
    else:
        start(run, problem.weights, problem.calibration)


def _evaluate_in_fp4(run: RlRun, plan: RunPlan, problem: Problem, held_out: HeldOutLog) -> None:
    """Evaluates the final BF16 policy as post-training quantisation to nearest serves it."""
    settings = dataclasses.replace(plan, variant="qat").settings
    trace = dataclasses.replace(settings.trace, diagnostic_share=0.0)
    quantised = _build(dataclasses.replace(settings, trace=trace), problem)
    start(quantised, run.named_weights(), problem.calibration)
    quantised.progress = run.progress
    held_out.evaluate(
        quantised,
        problem.held_out,
        every=plan.evaluate_every,
        steps=plan.steps,
        served=VARIANTS["qat"].served,
    )
