"""Trainers with Transformer Engine's experts over ranks, beside local experts in the same layout.

On ranks with a GPU each, or on gloo ranks inside `te_on_cpu()`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_trace.config import HINT_SITES
from megatron_trace.hints import HintFilesWriter
from megatron_trace.testing import cpu_runtime
from megatron_trace.testing.layouts import Outcome, Task, train_layouts
from megatron_trace.testing.ranks import run_ranks
from megatron_trace.testing.rollouts import records_of
from megatron_trace.testing.tiny_trainer import recorded_rollout, tiny_trainer

TP, EP, ETP = (
    "tensor_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
LAYOUTS: dict[str, dict[str, int]] = {
    "EP2": {EP: 2, ETP: 1},
    "TP2": {TP: 2, ETP: 1},
    "TP2 EP2": {TP: 2, EP: 2, ETP: 1},
    "TP2 ETP2": {TP: 2, ETP: 2},
}
WORLD_SIZE = 2
KINDS = ("local", "te", "te_recipe")
NUM_POSITIONS = 16
# (prompt, response) tokens, two samples a replica; those of the first reach every TP rank.
LENGTHS = ((7, 4), (2, 13), (5, 3), (3, 2))


@dataclass(frozen=True)
class LayoutRuns:
    """What training in the layouts gave.

    Attributes:
        outcomes: By layout and kind of experts, what each rank gave; only of those that both ranks
            finished.
        failure: Why the others did not finish, with the end of the ranks' output; None if all did.
    """

    outcomes: dict[str, dict[str, list[Outcome]]]
    failure: str | None


def steps_on_rank(rank: int, tasks: Mapping[str, Task], folder: Path, step_timeout_s: float) -> int:
    """Entry of a rank: one training step of each task, whose outcome is left in a file.

    Returns:
        Number of tasks.
    """
    with contextlib.ExitStack() as stack:
        if cpu_runtime.is_installed():
            from megatron_trace.testing.te_on_cpu import te_on_cpu

            stack.enter_context(te_on_cpu())
        done = train_layouts(rank, tasks, folder, timeout_s=step_timeout_s)
        for number, (_, outcome) in enumerate(done):
            torch.save(outcome, _outcome_file(folder, number, rank))
    return len(tasks)


def outcomes_of_layouts(
    folder: Path,
    *,
    timeout_s: float,
    step_timeout_s: float,
    layouts: Sequence[str] = tuple(LAYOUTS),
    echo: Callable[[str], Any] | None = None,
) -> LayoutRuns:
    """Trains a step in every layout with every kind of experts, on two ranks.

    Args:
        folder: An empty folder for hints, file stores and outcomes.
        timeout_s: Seconds after which the ranks are ended.
        step_timeout_s: Seconds of one layout with one kind after which a rank prints where it
            stands, and all end.
        layouts: Names of the layouts.
        echo: Takes each line that a rank prints, as it comes.
    """
    task = _task(folder / "hints")
    tasks = {
        f"{layout}/{kind}": replace(
            task, parallel=LAYOUTS[layout], trace={**task.trace, "experts": kind}
        )
        for layout in layouts
        for kind in KINDS
    }
    stores = folder / "stores"
    stores.mkdir()
    failure = None
    try:
        run_ranks(
            __file__,
            "steps_on_rank",
            world_size=WORLD_SIZE,
            timeout_s=timeout_s,
            echo=echo,
            tasks=tasks,
            folder=stores,
            step_timeout_s=step_timeout_s,
        )
    except RuntimeError as error:
        failure = str(error)
    outcomes: dict[str, dict[str, list[Outcome]]] = {}
    for number, name in enumerate(tasks):
        files = [_outcome_file(stores, number, rank) for rank in range(WORLD_SIZE)]
        if all(file.exists() for file in files):
            layout, kind = name.split("/")
            of_rank = [torch.load(file, weights_only=False) for file in files]
            outcomes.setdefault(layout, {})[kind] = of_rank
    return LayoutRuns(outcomes, failure)


def _outcome_file(folder: Path, number: int, rank: int) -> Path:
    return folder / f"outcome-{number}-{rank}.pt"


def _task(folder: Path) -> Task:
    folder.mkdir()
    rolled = recorded_rollout(LENGTHS, num_experts=10, sites=HINT_SITES)
    with HintFilesWriter(folder) as writer:
        for sample in rolled.samples:
            for (kind, _, _), hint in records_of(rolled.store, sample).items():
                writer.put(hint, kind)
            writer.commit([sample])
    model, _ = tiny_trainer("bf16", dtype=torch.bfloat16)
    return Task(
        # On the host, so that no rank has to read another's device.
        weights={name: p.detach().cpu().clone() for name, p in model.named_parameters()},
        settings=rolled.settings,
        hint_folder=folder,
        replicas=[rolled.samples[:2], rolled.samples[2:]],
        num_positions=NUM_POSITIONS,
        trace={"hint_sites": HINT_SITES},
        dtype=torch.bfloat16,
    )
