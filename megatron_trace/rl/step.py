"""The RL step, top to bottom.

    prompts -> rollout (FP4, hints recorded) -> rewards -> advantages -> micro-batches
            -> old log-probs -> loss and backward (hints in force) -> optimizer step
            -> push (digests compared) -> hints expire

Legend: G prompt groups, N samples of a group, B samples of a micro-batch, S positions.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads

from megatron_trace.hints.files_writer import HintFilesWriter
from megatron_trace.hints.types import RolloutSample
from megatron_trace.metrics import LogprobGap, logprob_gap
from megatron_trace.rl.advantages import group_advantages
from megatron_trace.rl.losses import LossSums, grpo_loss
from megatron_trace.rl.prompt_order import rows_of_step
from megatron_trace.rl.rewards import score_samples
from megatron_trace.rl.run import RlRun
from megatron_trace.rl.tasks import PADDING_TOKEN
from megatron_trace.training.micro_batch import MicroBatch, make_micro_batch
from megatron_trace.training.model import token_logprobs

# Rollouts of a run, and of runs with neighbouring seeds, must not share a sampling seed.
_SEEDS_PER_RUN = 1_000_003


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
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    sums: LossSums = field(default_factory=LossSums)


def rl_step(run: RlRun) -> dict[str, Any]:
    """Does one step and gives its metrics, plain numbers that JSON can hold.

    Raises:
        RuntimeError: A protocol between the sides is broken: a quantiser did not run, weights
            differ after the push, or gradients are not finite. The run must be resumed from a
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
        batches = training_batches(run, samples, group_advantages(rewards).flatten())
        update = train(run, batches)
        run.sites.assert_ran()

    with _timed(seconds, "push"):
        run.push_weights(run.progress.policy_version + 1)
    run.store.expire(before=run.progress.policy_version)

    metrics = step_metrics(run, samples, rewards, batches, update, seconds)
    run.progress = dataclasses.replace(
        run.progress,
        step=run.progress.step + 1,
        prompt_cursor=run.progress.prompt_cursor + len(rows),
    )
    return metrics


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
        sampling=settings.sampling(),
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


def training_batches(
    run: RlRun, samples: Sequence[RolloutSample], advantages: torch.Tensor
) -> list[list[TrainingBatch]]:
    """Cuts the samples into optimizer steps, and these into micro-batches."""
    per_update = len(samples) // run.settings.updates_per_rollout
    advantages = advantages.to(run.sites.device)
    return [
        [
            TrainingBatch(
                make_micro_batch(
                    samples[rows.start : rows.stop],
                    run.store,
                    run.sites,
                    padding_token=PADDING_TOKEN,
                ),
                advantages[rows.start : rows.stop],
            )
            for rows in _slices(first, first + per_update, run.settings.micro_batch_samples)
        ]
        for first in range(0, len(samples), per_update)
    ]


def train(run: RlRun, batches: Sequence[Sequence[TrainingBatch]]) -> Update:
    """Does the optimizer steps of one rollout, hints and routing in force."""
    if len(batches) > 1:
        # The first optimizer step changes the policy that later ones must be compared with.
        for batch in (batch for batches_of_update in batches for batch in batches_of_update):
            with torch.no_grad(), run.sites.micro_batch(batch.micro_batch):
                batch.old_logprobs = _logprobs(run, batch.micro_batch)
    update = Update()
    for batches_of_update in batches:
        _optimizer_step(run, batches_of_update, update)
    return update


def _optimizer_step(run: RlRun, batches: Sequence[TrainingBatch], update: Update) -> None:
    num_tokens = sum(int(batch.micro_batch.loss_mask.sum()) for batch in batches)
    run.ddp.train()
    run.ddp.zero_grad_buffer()
    run.optimizer.zero_grad()
    total = 0.0
    for batch in batches:
        with run.sites.micro_batch(batch.micro_batch):
            logprobs = _logprobs(run, batch.micro_batch)
            if batch.old_logprobs is None:
                batch.old_logprobs = logprobs.detach()
            loss, sums = grpo_loss(
                logprobs,
                batch.old_logprobs,
                batch.micro_batch.rollout_logprobs,
                batch.advantages,
                batch.micro_batch.loss_mask,
                num_tokens=num_tokens,
                settings=run.settings.loss,
            )
            loss.backward()
        total += loss.item()
        update.sums += sums
    finalize_model_grads([run.ddp])
    result: Any = run.optimizer.step()
    succeeded, grad_norm, _ = result
    if not succeeded or not torch.isfinite(torch.tensor(grad_norm)):
        raise RuntimeError(
            f"step {run.progress.step}: the gradients must be finite; got norm {grad_norm}; resume "
            "from a checkpoint with a smaller learning rate"
        )
    update.losses.append(total)
    update.grad_norms.append(float(grad_norm))


def _logprobs(run: RlRun, micro_batch: MicroBatch) -> torch.Tensor:
    return token_logprobs(run.ddp, run.sites, micro_batch, temperature=run.settings.temperature)


def step_metrics(
    run: RlRun,
    samples: Sequence[RolloutSample],
    rewards: torch.Tensor,
    batches: Sequence[Sequence[TrainingBatch]],
    update: Update,
    seconds: dict[str, float],
) -> dict[str, Any]:
    """Gives the metrics of a step that was just done."""
    flat = [batch for batches_of_update in batches for batch in batches_of_update]
    gap = _gap(flat)
    hints = flat[0].micro_batch.hints.values()
    spread = rewards.amax(dim=1) > rewards.amin(dim=1)
    lengths = [len(sample.response_tokens) for sample in samples]
    return {
        "step": run.progress.step,
        "policy_version": samples[0].policy_version,
        "reward": rewards.mean().item(),
        "groups_with_spread": spread.float().mean().item(),
        "response_tokens": sum(lengths) / len(lengths),
        "unfinished": sum(s.finish_reason != "stop" for s in samples) / len(samples),
        "loss": sum(update.losses) / len(update.losses),
        "grad_norm": max(update.grad_norms),
        **update.sums.means(),
        "gap": dataclasses.asdict(gap),
        "quantisers": run.sites.report().as_dict(),
        "hint_bytes_per_token": sum(hint.stored_bytes for hint in hints),
        "kv_bytes_per_token": run.engine.kv_bytes_per_token,
        "kv_bytes_per_token_bf16": run.engine.kv_bytes_per_token_bf16,
        "seconds": seconds,
    }


def _gap(batches: Sequence[TrainingBatch]) -> LogprobGap:
    rollout, old = [], []
    for batch in batches:
        assert batch.old_logprobs is not None, "training sets them"
        rollout.append(batch.micro_batch.rollout_logprobs[batch.micro_batch.loss_mask])
        old.append(batch.old_logprobs[batch.micro_batch.loss_mask])
    mask = torch.ones(sum(len(part) for part in rollout), dtype=torch.bool)
    return logprob_gap(torch.cat(rollout), torch.cat(old), mask)


def _slices(start: int, stop: int, size: int) -> Iterator[slice]:
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - started
