"""The RL step, top to bottom.

    prompts -> rollout (FP4, hints recorded) -> rewards -> advantages -> choice -> micro-batches
            -> old log-probs -> loss and backward (hints in force) -> optimizer step
            -> push (digests compared) -> hints expire

Legend: G prompt groups, N samples of a group, B samples of a micro-batch, S positions.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads

from megatron_trace.hints.files_writer import HintFilesWriter
from megatron_trace.hints.types import RolloutSample
from megatron_trace.metrics import LogprobGap, logprob_gap
from megatron_trace.rl.advantages import group_advantages
from megatron_trace.rl.fallback import fall_back_to_bf16
from megatron_trace.rl.health import non_finite_alarm, parse_alarms, raised, samples_to_drop
from megatron_trace.rl.health_metrics import health_of, largest_nearest, nearest_growth
from megatron_trace.rl.losses import LossSums, policy_loss
from megatron_trace.rl.objectives.values import PolicyBatch
from megatron_trace.rl.prompt_order import rows_of_step
from megatron_trace.rl.rewards import score_samples
from megatron_trace.rl.run import RlRun
from megatron_trace.rl.staleness import fresh_samples
from megatron_trace.rl.tasks import PADDING_TOKEN
from megatron_trace.training.micro_batch import MicroBatch, make_micro_batch
from megatron_trace.training.model import (
    forward_micro_batch,
    logprobs_of_logits,
    top_logprobs_of_logits,
)
from megatron_trace.training.prefetch import MicroBatchPrefetcher
from megatron_trace.training.rounding import NonFiniteError

# Rollouts of a run, and of runs with neighbouring seeds, must not share a sampling seed.
_SEEDS_PER_RUN = 1_000_003
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


@dataclass(frozen=True)
class Chosen:
    """The samples of a rollout that are trained on.

    Attributes:
        samples: The samples.
        advantages: FP32 [samples].
        num_stale: Samples that were left out as too old.
        num_without_spread: Samples that were left out as all rewards of their group are equal.
    """

    samples: list[RolloutSample]
    advantages: torch.Tensor
    num_stale: int
    num_without_spread: int


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


def rl_step(run: RlRun) -> dict[str, Any]:
    """Does one step and gives its metrics, plain numbers that JSON can hold.

    An optimizer step whose loss or gradient is NaN or Inf is skipped and counted: weights and
    optimizer state stay what they were. Alarms are checked at the end (`rl.health`); whoever drives
    the run asks `health.must_stop` of the metrics, and saves a checkpoint then.

    Raises:
        RuntimeError: A protocol between the sides is broken: a quantiser did not run, weights
            differ after the push, or an optimizer step failed. The run must be resumed from a
            checkpoint.
    """
    seconds: dict[str, float] = {}
    recorded_before_s = run.engine.seconds["record"]
    run.sites.reset_report()

    with _timed(seconds, "rollout"):
        samples, rows = roll_out(run)
    seconds["record"] = run.engine.seconds["record"] - recorded_before_s

    with _timed(seconds, "train"):
        rewards = rewards_of(run, samples, rows)
        chosen = choose(run, samples, rewards)
        update = train(run, chosen.samples, chosen.advantages)
        if chosen.samples and not update.num_skipped:
            run.sites.assert_ran()
            run.sites.assert_guided(f"step {run.progress.step}")

    trained_version = run.progress.policy_version
    with _timed(seconds, "push"):
        run.push_weights(run.progress.policy_version + 1)
    run.store.expire(before=run.progress.policy_version)

    metrics = step_metrics(
        run, samples, rewards, chosen, update, seconds, trained_version=trained_version
    )
    _note_health(run, metrics)
    run.progress = dataclasses.replace(
        run.progress,
        step=run.progress.step + 1,
        prompt_cursor=run.progress.prompt_cursor + len(rows),
    )
    if any(alarm["action"] == "bf16" for alarm in metrics["alarms"]):
        fall_back_to_bf16(run)
    return metrics


def _note_health(run: RlRun, metrics: dict[str, Any]) -> None:
    """Adds what depends on earlier steps, and the alarms, to a step's metrics."""
    health, progress = metrics["health"], run.progress
    first = progress.first_nearest_mismatch
    if first is None:
        first = largest_nearest(health)
    skipped = progress.skipped_updates + metrics["skipped_updates"]
    run.progress = dataclasses.replace(
        progress,
        first_nearest_mismatch=first,
        skipped_updates=skipped,
        num_updates=progress.num_updates + metrics["updates"],
    )
    health["nearest_growth"] = nearest_growth(health, first)
    health["skipped_updates"] = skipped
    alarms = parse_alarms(run.settings.health)
    if progress.in_bf16:
        alarms = [alarm for alarm in alarms if alarm.action != "bf16"]
    metrics["alarms"] = raised(alarms, metrics)
    if metrics["skipped_updates"]:
        metrics["alarms"].append(non_finite_alarm(run.settings.health, skipped))


def roll_out(run: RlRun) -> tuple[list[RolloutSample], list[int]]:
    """Samples responses to the next prompts; their hints are then in `run.store`.

    Returns:
        G * N samples, those of a group next to each other, and the items' rows of the G groups.
    """
    settings, progress = run.settings, run.progress
    rows = rows_of_step(
        len(run.items), progress.prompt_cursor, settings.prompts_per_step, seed=settings.seed
    )
    places = [(row, n) for row in rows for n in range(settings.samples_per_prompt)]
    samples = run.engine.generate(
        [run.prompts[row] for row, _ in places],
        [f"step-{progress.step}/item-{row}/sample-{n}" for row, n in places],
        store=run.store,
        sampling=run.sampling(),
        seed=settings.seed * _SEEDS_PER_RUN + progress.step,
    )
    if isinstance(run.store, HintFilesWriter):
        run.store.commit(samples)
    return samples, rows


def rewards_of(run: RlRun, samples: Sequence[RolloutSample], rows: Sequence[int]) -> torch.Tensor:
    """Gives the rewards, FP32 [G, N]."""
    num_samples = run.settings.samples_per_prompt
    items = [run.items[row] for row in rows for _ in range(num_samples)]
    scores = score_samples(samples, items, run.tokenizer, answer_format=run.settings.answer_format)
    return torch.tensor(scores).view(len(rows), num_samples)


def choose(run: RlRun, samples: Sequence[RolloutSample], rewards: torch.Tensor) -> Chosen:
    """Gives the samples that the objective takes, with the advantages of their whole groups.

    Args:
        run: The run.
        samples: G * N samples, those of a group next to each other.
        rewards: FP32 [G, N].

    Raises:
        StaleSampleError: A sample is too old, and is not to be left out.
    """
    versions = {sample.sample_id: sample.policy_version for sample in samples}
    fresh = set(fresh_samples(versions, run.progress.policy_version, run.settings.loss))
    spread = rewards.amax(dim=1, keepdim=True) > rewards.amin(dim=1, keepdim=True)
    has_spread = spread.expand_as(rewards).flatten()
    wanted = has_spread if run.settings.objective.objective == "dapo" else has_spread | True
    kept = [
        row for row, sample in enumerate(samples) if sample.sample_id in fresh and bool(wanted[row])
    ]
    return Chosen(
        [samples[row] for row in kept],
        group_advantages(rewards).flatten()[kept],
        num_stale=len(samples) - len(fresh),
        num_without_spread=int((~wanted).sum()),
    )


def training_batches(
    run: RlRun, samples: Sequence[RolloutSample], advantages: torch.Tensor
) -> list[TrainingBatch]:
    """Cuts the samples of an optimizer step into micro-batches, all in memory."""
    advantages = advantages.to(run.sites.device)
    return [
        TrainingBatch(
            make_micro_batch(samples[rows], run.store, run.sites, padding_token=PADDING_TOKEN),
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
    try:
        for batch in batches:
            total += _add_gradient(run, batch, num_units, update)
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


def _add_gradient(run: RlRun, batch: TrainingBatch, num_units: int, update: Update) -> float:
    """Adds a micro-batch to the gradient and to what the step reports; gives its loss."""
    micro_batch = batch.micro_batch
    with run.sites.micro_batch(micro_batch):
        logprobs, top_logprobs = _logprobs(run, micro_batch)
        if batch.old_logprobs is None:
            batch.old_logprobs = logprobs.detach()
        mask, old = micro_batch.loss_mask, batch.old_logprobs
        dropped = samples_to_drop(
            parse_alarms(run.settings.health), old - micro_batch.rollout_logprobs, mask
        )
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
    ddp: Any = run.ddp  # torch has a method `buffers`, Megatron's DDP a list.
    buffers = (*ddp.buffers, *ddp.expert_parallel_buffers)
    finite = torch.stack([buffer.grad_data.isfinite().all() for buffer in buffers])
    if not finite.all():
        raise NonFiniteError("the gradient must be finite; got NaN or Inf")


def _logprobs(run: RlRun, micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gives the log-probs of the next tokens, and those of the rollout's most likely ones."""
    logits = forward_micro_batch(run.ddp, run.sites, micro_batch)
    temperature = run.settings.temperature
    top_logprobs = None
    if run.settings.objective.center_top_k:
        top_logprobs = top_logprobs_of_logits(logits, micro_batch, temperature=temperature)
    return logprobs_of_logits(logits, micro_batch, temperature=temperature), top_logprobs


def step_metrics(
    run: RlRun,
    samples: Sequence[RolloutSample],
    rewards: torch.Tensor,
    chosen: Chosen,
    update: Update,
    seconds: dict[str, float],
    *,
    trained_version: int,
) -> dict[str, Any]:
    """Gives the metrics of a step that was just done, of weights of `trained_version`."""
    gap, report = _gap(update), run.sites.report()
    lags = [trained_version - sample.policy_version for sample in samples]
    spread = rewards.amax(dim=1) > rewards.amin(dim=1)
    lengths = [len(sample.response_tokens) for sample in samples]
    return {
        "step": run.progress.step,
        "policy_version": samples[0].policy_version,
        "reward": rewards.mean().item(),
        "groups_with_spread": spread.float().mean().item(),
        "response_tokens": sum(lengths) / len(lengths),
        "response_tokens_max": max(lengths),
        "unfinished": sum(s.finish_reason != "stop" for s in samples) / len(samples),
        "stale_dropped": chosen.num_stale,
        "without_spread_dropped": chosen.num_without_spread,
        "loss": sum(update.losses) / max(len(update.losses), 1),
        "grad_norm": max(update.grad_norms, default=0.0),
        **update.sums.means(),
        "gap": {
            name: None if math.isnan(value) else value
            for name, value in dataclasses.asdict(gap).items()
        },
        "health": health_of(report, run.engine.report)
        | {"lag_mean": sum(lags) / len(lags), "lag_max": max(lags)},
        "updates": len(update.losses),
        "skipped_updates": update.num_skipped,
        "dropped_samples": update.num_dropped,
        "quantisers": report.as_dict(),
        "rollout": {
            name: value
            for name, value in run.engine.report.as_dict().items()
            if name != "settings_version"  # Counted in a process, so that a resumed one differs.
        },
        "hint_bytes_per_token": update.hint_bytes_per_token,
        "kv_bytes_per_token": run.engine.kv_bytes_per_token,
        "kv_bytes_per_token_bf16": run.engine.kv_bytes_per_token_bf16,
        "seconds": seconds,
    }


def _gap(update: Update) -> LogprobGap:
    nothing = torch.empty(0)
    rollout, old = (
        torch.cat([nothing, *(part.cpu() for part in parts)])
        for parts in (update.rollout_logprobs, update.old_logprobs)
    )
    return logprob_gap(rollout, old, torch.ones(len(rollout), dtype=torch.bool))


def _slices(start: int, stop: int, size: int) -> Iterator[slice]:
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - started
