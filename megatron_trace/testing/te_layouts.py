"""Trainers with Transformer Engine's experts over ranks, beside local experts in the same layout.

On ranks with a GPU each, or on gloo ranks inside `te_on_cpu()`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
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
KINDS = ("local", "te", "te_recipe")
NUM_POSITIONS = 16
LENGTHS = ((5, 3), (3, 2), (7, 4), (2, 13))


def steps_on_rank(rank: int, tasks: Mapping[str, Task], folder: Path) -> dict[str, Outcome]:
    """Entry of a rank: one training step of each task."""
    with contextlib.ExitStack() as stack:
        if cpu_runtime.is_installed():
            from megatron_trace.testing.te_on_cpu import te_on_cpu

            stack.enter_context(te_on_cpu())
        return train_layouts(rank, tasks, folder)


def outcomes_of_layouts(folder: Path, *, timeout_s: float) -> dict[str, dict[str, list[Outcome]]]:
    """Trains a step in every layout with every kind of experts, on two ranks.

    Args:
        folder: An empty folder for hints and file stores.
        timeout_s: Seconds after which the ranks are ended.

    Returns:
        By layout and kind, what each rank gave.
    """
    task = _task(folder / "hints")
    tasks = {
        f"{layout}/{kind}": replace(task, parallel=parallel, trace={**task.trace, "experts": kind})
        for layout, parallel in LAYOUTS.items()
        for kind in KINDS
    }
    stores = folder / "stores"
    stores.mkdir()
    of_rank: list[Any] = run_ranks(
        __file__, "steps_on_rank", world_size=2, timeout_s=timeout_s, tasks=tasks, folder=stores
    )
    return {
        layout: {kind: [outcomes[f"{layout}/{kind}"] for outcomes in of_rank] for kind in KINDS}
        for layout in LAYOUTS
    }


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
        weights={name: p.detach().clone() for name, p in model.named_parameters()},
        settings=rolled.settings,
        hint_folder=folder,
        replicas=[rolled.samples[:2], rolled.samples[2:]],
        num_positions=NUM_POSITIONS,
        trace={"hint_sites": HINT_SITES},
        dtype=torch.bfloat16,
    )
