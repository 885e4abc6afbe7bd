"""The optimizer steps of one rollout: micro-batches, loss, backward, hints in force.

Legend: B samples of a micro-batch, S positions.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads

from megatron_trace.hints.types import RolloutSample
from megatron_trace.rl.health import Alarm, parse_alarms, samples_to_drop
from megatron_trace.rl.losses import LossSums, policy_loss
from megatron_trace.rl.objectives.values import PolicyBatch
from megatron_trace.rl.run import RlRun
from megatron_trace.rl.tasks import PADDING_TOKEN
from megatron_trace.training import gradients
from megatron_trace.training.micro_batch import MicroBatch, make_micro_batch
from megatron_trace.training.model import (
    forward_micro_batch,
    logprobs_of_logits,
    top_logprobs_of_logits,
)
from megatron_trace.training.prefetch import MicroBatchPrefetcher
from megatron_trace.training.rounding import NonFiniteError

_logger = logging.getLogger(__name__)


@dataclass
class TrainingBatch:
    """A micro-batch with what the loss needs beside it.

    Attributes:
        micro_batch: Tokens, rollout log-probs, hints, routing.
        advantages: FP32 [B].
        old_logprobs: FP32 [B, S] of the trainer before the step; None until they are known.
    """

    micro_batch: MicroBatch
    advantages: torch.Tensor
    old_logprobs: torch.Tensor | None = None


@dataclass
class Update:
    """What the optimizer steps of an RL step report.

    Attributes:
        loss: Loss of each optimizer step.
        grad_norms: Gradient norm of each, before clipping.
        sums: Sums of the loss metrics over all tokens.
        rollout_logprobs: FP32 [response tokens] of each micro-batch.
        old_logprobs: The trainer's before the step, likewise.
        hint_bytes_per_token: Bytes that a token's hints take in the store.
        num_skipped: Optimizer steps that were not done, as something was NaN or Inf.
        num_dropped: Samples that an alarm left out.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    sums: LossSums = field(default_factory=LossSums)
    rollout_logprobs: list[torch.Tensor] = field(default_factory=list)
    old_logprobs: list[torch.Tensor] = field(default_factory=list)
    hint_bytes_per_token: int = 0
    num_skipped: int = 0
    num_dropped: int = 0


def training_batches(
    run: RlRun, samples: Sequence[RolloutSample], advantages: torch.Tensor
) -> list[TrainingBatch]:
    """Cuts the samples of an optimizer step into micro-batches, all in memory."""
    advantages = advantages.to(run.sites.device)
    return [
        TrainingBatch(
            make_micro_batch(
                samples[rows],
                run.store,
                run.sites,
                padding_token=PADDING_TOKEN,
                packed=run.settings.pack_samples,
            ),
            advantages[rows],
        )
        for rows in _slices(0, len(samples), run.settings.micro_batch_samples)
    ]


@contextmanager
def streamed_batches(
    run: RlRun, samples: Sequence[RolloutSample], advantages: torch.Tensor
) -> Iterator[Iterator[TrainingBatch]]:
    """Gives the micro-batches of `training_batches` one by one, read ahead from the files."""
    advantages = advantages.to(run.sites.device)
    slices = list(_slices(0, len(samples), run.settings.micro_batch_samples))
    assert run.reader is not None, "there are files"
    # A sample that was rolled out again after a resume is another one of the same name.
    run.reader.refresh()
    with MicroBatchPrefetcher(
        (samples[rows] for rows in slices),
        run.reader,
        run.sites,
        max_host_bytes=run.max_hint_bytes,
        padding_token=PADDING_TOKEN,
        packed=run.settings.pack_samples,
        reader=run.process,
    ) as prefetcher:
        yield (
            TrainingBatch(micro_batch, advantages[rows])
            for rows, micro_batch in zip(slices, prefetcher, strict=True)
        )


def train(run: RlRun, samples: Sequence[RolloutSample], advantages: torch.Tensor) -> Update:
    """Does the optimizer steps of one rollout, hints and routing in force.

    With hints in files and one optimizer step, a micro-batch is in memory only while it is used or
    read ahead. Several steps use each micro-batch twice, and hold all of them.

    Args:
        run: The run.
        samples: Samples of the rollout.
        advantages: FP32 [samples].
    """
    update = Update()
    if not samples:  # Nothing is to be learnt: the weights stay as they are.
        return update
    if run.reader is not None and run.settings.updates_per_rollout == 1:
        with streamed_batches(run, samples, advantages) as batches:
            _optimizer_step(run, batches, _num_units(run, samples), update)
        return update
    per_update = -(-len(samples) // run.settings.updates_per_rollout)
    slices = list(_slices(0, len(samples), per_update))
    batches = [training_batches(run, samples[rows], advantages[rows]) for rows in slices]
    if len(batches) > 1:
        # The first optimizer step changes the policy that later ones must be compared with.
        try:
            for batch in (batch for batches_of_update in batches for batch in batches_of_update):
                with torch.no_grad(), run.sites.micro_batch(batch.micro_batch):
                    batch.old_logprobs = _logprobs(run, batch.micro_batch)[0]
        except NonFiniteError as error:
            _note_skipped(run, error)
            update.num_skipped = len(batches)
            return update
    for rows, batches_of_update in zip(slices, batches, strict=True):
        _optimizer_step(run, batches_of_update, _num_units(run, samples[rows]), update)
    return update


def _num_units(run: RlRun, samples: Sequence[RolloutSample]) -> int:
    """Gives what the loss of an optimizer step is a mean over: tokens, or sequences."""
    lengths = [sample.num_sampled for sample in samples]
    if run.settings.objective.unit == "sequences":
        return sum(length > 0 for length in lengths)
    return sum(lengths)


def _optimizer_step(
    run: RlRun, batches: Iterable[TrainingBatch], num_units: int, update: Update
) -> None:
    run.ddp.train()
    run.ddp.zero_grad_buffer()
    run.optimizer.zero_grad()
    total = 0.0
    alarms = parse_alarms(run.settings.health)
    try:
        for batch in batches:
            total += _add_gradient(run, batch, num_units, update, alarms)
        finalize_model_grads([run.ddp])
        _require_finite_gradients(run)
    except NonFiniteError as error:
        _note_skipped(run, error)
        run.ddp.zero_grad_buffer()
        run.optimizer.zero_grad()
        update.num_skipped += 1
        return
    result: Any = run.optimizer.step()
    succeeded, grad_norm, _ = result
    if not succeeded or not torch.isfinite(torch.tensor(grad_norm)):
        raise RuntimeError(
            f"step {run.progress.step}: the gradients must be finite; got norm {grad_norm}; resume "
            "from a checkpoint with a smaller learning rate"
        )
    update.losses.append(total)
    update.grad_norms.append(float(grad_norm))


def _note_skipped(run: RlRun, error: NonFiniteError) -> None:
    _logger.warning("step %d: nothing is updated: %s", run.progress.step, error)


def _add_gradient(
    run: RlRun, batch: TrainingBatch, num_units: int, update: Update, alarms: Sequence[Alarm]
) -> float:
    """Adds a micro-batch to the gradient and to what the step reports; gives its loss."""
    micro_batch = batch.micro_batch
    with run.sites.micro_batch(micro_batch):
        logprobs, top_logprobs = _logprobs(run, micro_batch)
        if batch.old_logprobs is None:
            batch.old_logprobs = logprobs.detach()
        mask, old = micro_batch.loss_mask, batch.old_logprobs
        dropped = samples_to_drop(alarms, old - micro_batch.rollout_logprobs, mask)
        loss, sums = policy_loss(
            PolicyBatch(
                theta=logprobs,
                old=old,
                rollout=micro_batch.rollout_logprobs,
                advantages=batch.advantages,
                mask=mask & ~dropped[:, None],
                top_theta=top_logprobs,
                top_rollout=None if top_logprobs is None else micro_batch.top_logprobs,
            ),
            num_units=num_units,
            settings=run.settings.objective,
        )
        loss.backward()
    update.sums += sums
    update.num_dropped += int(dropped.sum())
    update.rollout_logprobs.append(micro_batch.rollout_logprobs[mask])
    update.old_logprobs.append(old[mask])
    update.hint_bytes_per_token = sum(rows.stored_bytes for rows in micro_batch.hints.values())
    return loss.item()


def _require_finite_gradients(run: RlRun) -> None:
    """Raises NonFiniteError if a gradient is NaN or Inf; Megatron's optimizer would take it."""
    if not gradients.are_finite([run.ddp]):
        raise NonFiniteError("the gradient must be finite; got NaN or Inf")


def _logprobs(run: RlRun, micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gives the log-probs of the next tokens, and those of the rollout's most likely ones."""
    logits = forward_micro_batch(run.ddp, run.sites, micro_batch)
    temperature = run.settings.temperature
    top_logprobs = None
    if run.settings.objective.center_top_k:
        top_logprobs = top_logprobs_of_logits(logits, micro_batch, temperature=temperature)
    return logprobs_of_logits(logits, micro_batch, temperature=temperature), top_logprobs


def _slices(start: int, stop: int, size: int) -> Iterator[slice]:
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))
