"""Trainer models that differ in their routed experts only, trained alike and compared.

Runs on a GPU, or on a CPU inside `te_on_cpu()`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.hybrid.hybrid_model import HybridModel

from megatron_trace.config import HINT_SITES
from megatron_trace.hints.types import RolloutSample
from megatron_trace.models.expert_names import local_name
from megatron_trace.rl.optimizer import OptimizerSettings, build_optimizer
from megatron_trace.testing.tiny_trainer import RecordedRollout, tiny_trainer
from megatron_trace.training.micro_batch import make_micro_batch
from megatron_trace.training.model import token_logprobs
from megatron_trace.training.report import TraceReport
from megatron_trace.training.sites import TraceSites
from megatron_trace.training.weights import expert_weight_digest

LEARNING_RATE = 1e-3
SAMPLES_PER_MICRO_BATCH = 2


@dataclass
class Training:
    """What some optimizer steps gave.

    Attributes:
        logprobs: FP32; of every response token, step after step.
        gradients: By step, the accumulated gradient of each parameter by its local name.
        digests: Of the quantised expert weights, before the first step and after each.
        reports: What the quantisers did in each step.
    """

    logprobs: list[torch.Tensor] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    reports: list[TraceReport] = field(default_factory=list)


def trainer_with(
    experts: str,
    rollout: RecordedRollout,
    weights: Mapping[str, torch.Tensor],
    *,
    method: Any = "trace",
    config: Mapping[str, Any] | None = None,
    **trace: Any,
) -> tuple[HybridModel, TraceSites]:
    """Builds a BF16 trainer with one kind of routed experts and given weights.

    Args:
        experts: `local`, `te` or `te_recipe`.
        rollout: What is trained on.
        weights: Parameters by local name.
        method: Method of TRACE.
        config: Fields of `TransformerConfig` to set otherwise.
        **trace: Fields of `TraceConfig`; hints of every site unless it says otherwise.
    """
    model, sites = tiny_trainer(
        method,
        dtype=torch.bfloat16,
        settings=rollout.settings,
        config=config,
        experts=experts,
        **{"hint_sites": HINT_SITES, **trace},
    )
    load_local(model, weights)
    return model, sites


def load_local(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Copies parameters that are named as local experts name them."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[local_name(name)])


def local_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gives copies of the parameters by their local names."""
    return {local_name(name): p.detach().clone() for name, p in model.named_parameters()}


def train_steps(
    model: HybridModel,
    sites: TraceSites,
    rollout: RecordedRollout,
    *,
    num_steps: int = 2,
    packed: bool = False,
) -> Training:
    """Does optimizer steps, each on all samples in micro-batches of two, packed or side by side."""
    ddp, optimizer = build_optimizer(model, OptimizerSettings(learning_rate=LEARNING_RATE))
    training = Training()
    if sites.quantises:
        training.digests.append(expert_weight_digest(model, sites))
    for _ in range(num_steps):
        sites.reset_report()
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        for part in _parts(rollout.samples):
            micro_batch = make_micro_batch(part, rollout.store, sites, packed=packed)
            with sites.micro_batch(micro_batch):
                logprobs = token_logprobs(ddp, sites, micro_batch)[micro_batch.loss_mask]
                (-logprobs.sum() / 10).backward()
            training.logprobs.append(logprobs.detach().cpu())
        finalize_model_grads([ddp])
        sites.assert_ran()
        training.reports.append(sites.report())
        training.gradients.append(
            {local_name(name): p.main_grad.cpu().clone() for name, p in _parameters(model)}
        )
        optimizer.step()
        if sites.quantises:
            training.digests.append(expert_weight_digest(model, sites))
    return training


def relative_errors(ours: Training, theirs: Training, *, step: int) -> dict[str, float]:
    """Gives the relative error (norm over norm) of each parameter's gradient that is not zero."""
    return {
        name: float((ours.gradients[step][name] - expected).norm() / expected.norm())
        for name, expected in theirs.gradients[step].items()
        if expected.any()
    }


def _parts(samples: Sequence[RolloutSample]) -> list[Sequence[RolloutSample]]:
    size = SAMPLES_PER_MICRO_BATCH
    return [samples[first : first + size] for first in range(0, len(samples), size)]


def _parameters(model: HybridModel) -> list[tuple[str, Any]]:
    return list(model.named_parameters())
