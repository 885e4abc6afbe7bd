"""Scores the samples of a rollout set by the trainer of a cell: one row a sample.

Legend: B samples, S positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel

from megatron_trace.hints.store import HintStore
from megatron_trace.hints.types import RolloutSample
from megatron_trace.study.cells import Cell
from megatron_trace.study.rollouts import RolloutSet, derived_store
from megatron_trace.study.trainer import StudySites, activation_noise, counts_of_sample
from megatron_trace.training.micro_batch import make_micro_batch
from megatron_trace.training.model import token_logprobs

# Pairs of positions of a micro-batch: Megatron's own attention keeps a score for each, per head.
MAX_ATTENTION_PAIRS = 1 << 26 if torch.cuda.is_available() else 1 << 25


@dataclass(frozen=True, eq=False)
class Scores:
    """What a trainer says about some samples.

    Attributes:
        logprobs: By sample, FP32 [response tokens].
        counts: By sample, nested counts of codes, guided rows and routing.
    """

    logprobs: Mapping[str, torch.Tensor]
    counts: Mapping[str, Mapping[str, Any]]


@torch.no_grad()
def score(
    trainer: HybridModel, sites: StudySites, rollouts: RolloutSet, store: HintStore | None
) -> Scores:
    """Gives a trainer's log-probs of the sampled tokens, and the counts of its quantisers."""
    cell = sites.cell
    sites.diagnostics = cell.codes != "no" and sites.quantises
    logprobs: dict[str, torch.Tensor] = {}
    counts: dict[str, dict[str, Any]] = {}
    for samples in batches_by_length(rollouts.samples, cell.micro_batch):
        micro_batch = make_micro_batch(samples, store, sites)
        sites.counts = {}
        with (
            sites.micro_batch(micro_batch, replay_routing=cell.replay_routing),
            activation_noise(trainer, cell),
        ):
            scored = token_logprobs(trainer, sites, micro_batch).cpu()
        mask = micro_batch.loss_mask.cpu()
        sites.counts = {key: value.cpu() for key, value in sites.counts.items()}
        for column, sample in enumerate(samples):
            logprobs[sample.sample_id] = scored[column][mask[column]]
            counts[sample.sample_id] = counts_of_sample(sites, column)
    return Scores(logprobs, counts)


def store_for(rollouts: RolloutSet, cell: Cell) -> HintStore | None:
    """Gives the hints of a cell; None where neither hints nor codes are read."""
    reads = cell.method == "trace" or cell.codes != "no"
    return derived_store(rollouts, cell) if reads and rollouts.codes else None


def rows_of(
    cell: Cell,
    rollouts: RolloutSet,
    scores: Scores,
    reference: Mapping[str, torch.Tensor] | None = None,
) -> list[dict[str, Any]]:
    """Gives a row for every sample, plain numbers that JSON can hold.

    Args:
        cell: The cell.
        rollouts: The samples.
        scores: What the trainer says about them.
        reference: By sample, the log-probs to compare with; those of the rollout if None.

    Returns:
        `first` is the position of the first response token, `deltas` training's log-prob minus the
        reference's of each response token, in nats.
    """
    rows = []
    for sample in rollouts.samples:
        known = sample.logprobs if reference is None else reference[sample.sample_id]
        deltas = scores.logprobs[sample.sample_id].double() - known.double()
        row = {
            "cell": cell.name,
            "sample": sample.sample_id,
            "first": len(sample.prompt_tokens),
            "deltas": [float(f"{delta:.3g}") for delta in deltas.tolist()],
        }
        rows.append({**row, **scores.counts[sample.sample_id]})
    return rows


def batches_by_length(samples: Sequence[RolloutSample], size: int) -> Iterator[list[RolloutSample]]:
    """Gives the samples in batches of similar lengths, the shortest first.

    Args:
        samples: The samples.
        size: Samples of a batch at most; fewer where their attention would take too much memory.
    """
    batch: list[RolloutSample] = []
    for sample in sorted(samples, key=lambda sample: len(sample.tokens)):
        pairs = (len(batch) + 1) * len(sample.tokens) ** 2
        if batch and (len(batch) == size or pairs > MAX_ATTENTION_PAIRS):
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch
