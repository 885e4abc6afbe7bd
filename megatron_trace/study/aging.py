"""Policies some optimizer steps after the one that rolled out: real steps on its samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from megatron.core.distributed import finalize_model_grads

from megatron_trace.rl.optimizer import OptimizerSettings, build_optimizer
from megatron_trace.study.cells import ENGINES, Cell
from megatron_trace.study.gradients import policy_loss, synthetic_advantages
from megatron_trace.study.measure import batches_by_length
from megatron_trace.study.model import StudyModel
from megatron_trace.study.rollouts import RolloutSet, derived_store
from megatron_trace.study.trainer import build_trainer

SAMPLES_PER_STEP = 64


def aged_weights(
    model: StudyModel, rollouts: RolloutSet, *, learning_rate: float, steps: Sequence[int]
) -> dict[int, dict[str, torch.Tensor]]:
    """Gives the weights after some numbers of GRPO steps on the rollout's samples.

    A step takes the next 64 samples, with fixed synthetic advantages, by a BF16 trainer with the
    hints of all places.

    Args:
        model: The model.
        rollouts: Samples of the engine setting `fp4`.
        learning_rate: Learning rate of Adam.
        steps: Numbers of steps to stop at.

    Returns:
        By number of steps, the parameters on the CPU.
    """
    cell = Cell(
        "aging", sites=tuple(sorted({str(site) for _, site in next(iter(rollouts.codes.values()))}))
    )
    trainer, sites = build_trainer(model, cell, ENGINES["fp4"], rollouts.settings, model.weights)
    ddp, optimizer = build_optimizer(trainer, OptimizerSettings(learning_rate=learning_rate))
    store = derived_store(rollouts, cell)
    advantages = synthetic_advantages(rollouts.samples)
    found = {}
    for step in range(max(steps)):
        first = step * SAMPLES_PER_STEP % len(rollouts.samples)
        samples = rollouts.samples[first : first + SAMPLES_PER_STEP]
        num_tokens = sum(len(sample.response_tokens) for sample in samples)
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        for batch in batches_by_length(samples, cell.micro_batch):
            policy_loss(ddp, sites, batch, store, advantages, num_tokens).backward()
        finalize_model_grads([ddp])
        optimizer.step()
        if step + 1 in steps:
            found[step + 1] = {
                name: parameter.detach().cpu().clone()
                for name, parameter in trainer.named_parameters()
            }
    return found


def weight_change(weights: Mapping[str, torch.Tensor], older: Mapping[str, torch.Tensor]) -> float:
    """Gives the norm of the difference of BF16 weights over the norm of the older ones."""
    difference = sum(
        float((weights[name].to(value) - value.bfloat16().float()).square().sum())
        for name, value in older.items()
    )
    norm = sum(float(value.float().square().sum()) for value in older.values())
    return (difference / norm) ** 0.5
