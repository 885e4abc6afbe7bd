"""The policy gradient of a cell beside that of full codes, by group of parameters.

Samples are cut into chunks, and the inner products of the chunks' gradients are kept: the cosine
and the error of any resampling of the chunks follow from them.

Legend: C chunks, r gradients of the reference (full codes), d what a cell's gradients differ by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel

from megatron_trace.hints.store import HintStore
from megatron_trace.hints.types import RolloutSample
from megatron_trace.rl.losses import policy_loss as step_loss
from megatron_trace.rl.objectives.settings import LossSettings
from megatron_trace.rl.objectives.values import PolicyBatch
from megatron_trace.study.measure import batches_by_length
from megatron_trace.study.trainer import StudySites
from megatron_trace.training.micro_batch import make_micro_batch
from megatron_trace.training.model import token_logprobs

NUM_CHUNKS = 12
# By part of a parameter's name, the first that applies.
GROUPS = (
    ("router", ".router."),
    ("experts fc1", ".experts.local_experts."),
    ("norms", "norm"),
    ("attention", ".self_attention."),
    ("dense MLP", ".mlp."),
    ("embedding", "embedding"),
    ("output layer", "output_layer"),
)
ChunkGradients = list[dict[str, torch.Tensor]]


def group_of(name: str) -> str:
    """Gives the group of a parameter.

    Raises:
        ValueError: It belongs to none.
    """
    if ".experts." in name and "linear_fc2" in name:
        return "experts fc2"
    for group, part in GROUPS:
        if part in name:
            return group
    raise ValueError(f"parameter {name} belongs to no group of {[group for group, _ in GROUPS]}")


def synthetic_advantages(samples: Sequence[RolloutSample]) -> dict[str, float]:
    """Gives a fixed advantage for every sample: normal, of mean 0.

    Every model of the study can be given them, and all methods get the same. Rewards would make
    most advantages of a group 0.
    """
    values = torch.randn(len(samples), generator=torch.Generator().manual_seed(0))
    values = (values - values.mean()) / values.std()
    return dict(zip([sample.sample_id for sample in samples], values.tolist(), strict=True))


def chunk_gradients(
    trainer: HybridModel,
    sites: StudySites,
    samples: Sequence[RolloutSample],
    store: HintStore | None,
) -> ChunkGradients:
    """Gives the gradient of the loss of every chunk of the samples, as parameters are kept."""
    advantages = synthetic_advantages(samples)
    num_tokens = sum(len(sample.response_tokens) for sample in samples)
    chunks = []
    for chunk in range(NUM_CHUNKS):
        trainer.zero_grad(set_to_none=True)
        for batch in batches_by_length(samples[chunk::NUM_CHUNKS], sites.cell.micro_batch):
            loss = policy_loss(trainer, sites, batch, store, advantages, num_tokens)
            loss.backward()
        chunks.append(
            {
                name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                for name, parameter in trainer.named_parameters()
            }
        )
    trainer.zero_grad(set_to_none=True)
    return chunks


def policy_loss(
    trainer: torch.nn.Module,
    sites: StudySites,
    samples: Sequence[RolloutSample],
    store: HintStore | None,
    advantages: Mapping[str, float],
    num_tokens: int,
) -> torch.Tensor:
    """Gives the loss of a first step on some samples: old and new log-probs are the same."""
    micro_batch = make_micro_batch(samples, store, sites)
    sites.counts = {}  # Not read here, and those of other samples.
    with sites.micro_batch(micro_batch):
        logprobs = token_logprobs(trainer, sites, micro_batch)
    of_samples = [advantages[sample.sample_id] for sample in samples]
    batch = PolicyBatch(
        theta=logprobs,
        old=logprobs.detach(),
        rollout=micro_batch.rollout_logprobs,
        advantages=torch.tensor(of_samples, device=logprobs.device),
        mask=micro_batch.loss_mask,
    )
    loss, _ = step_loss(batch, num_units=num_tokens, settings=LossSettings())
    return loss


def gradient_rows(
    cell_name: str, gradients: ChunkGradients, reference: ChunkGradients
) -> list[dict[str, Any]]:
    """Gives a row for every group: inner products [C, C] of d with d, d with r, r with r."""
    sums: dict[str, list[torch.Tensor]] = {}
    for name in reference[0]:
        r_CP = torch.stack([chunk[name].flatten() for chunk in reference]).double()
        d_CP = torch.stack([chunk[name].flatten() for chunk in gradients]).double() - r_CP
        products = [d_CP @ d_CP.T, d_CP @ r_CP.T, r_CP @ r_CP.T]
        for group in (group_of(name), "all"):
            known = sums.setdefault(group, [torch.zeros_like(part) for part in products])
            for total, part in zip(known, products, strict=True):
                total += part
    return [
        {"cell": cell_name, "group": group}
        | {
            key: [[float(f"{value:.6g}") for value in line] for line in part.tolist()]
            for key, part in zip(("dd", "dr", "rr"), parts, strict=True)
        }
        for group, parts in sums.items()
    ]
