"""The RL step, top to bottom.

    prompts -> rollout (FP4, hints recorded) -> rewards -> advantages -> choice -> micro-batches
            -> old log-probs -> loss and backward (hints in force) -> optimizer step (`rl.updates`)
            -> push (digests compared) -> hints expire

Legend: G prompt groups, N samples of a group.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from megatron_trace.hints.files_writer import HintFilesWriter
from megatron_trace.hints.types import RolloutSample
from megatron_trace.metrics import LogprobGap, logprob_gap
from megatron_trace.rl.advantages import advantages_of_rewarded, has_spread
from megatron_trace.rl.fallback import fall_back_to_bf16
from megatron_trace.rl.health import non_finite_alarm, parse_alarms, raised
from megatron_trace.rl.health_metrics import health_of, largest_nearest, nearest_growth
from megatron_trace.rl.own_task import Scores
from megatron_trace.rl.prompt_order import rows_of_step
from megatron_trace.rl.run import RlRun
from megatron_trace.rl.staleness import fresh_samples, version_of, without_stale_tokens
from megatron_trace.rl.tasks import TaskItem
from megatron_trace.rl.updates import Update, train

# Rollouts of a run, and of runs with neighbouring seeds, must not share a sampling seed.
_SEEDS_PER_RUN = 1_000_003


@dataclass(frozen=True)
class Chosen:
    """The samples of a rollout that are trained on.

    Attributes:
        samples: The samples.
        advantages: FP32 [samples].
        num_stale: Samples that were left out as too old.
        num_without_spread: Samples that were left out as all rewards of their group are equal.
        num_unrewarded: Samples that were left out as they, or all others of their group, have no
            reward.
        num_stale_tokens: Tokens of the samples that are not trained on, as too old.
    """

    samples: list[RolloutSample]
    advantages: torch.Tensor
    num_stale: int
    num_without_spread: int
    num_unrewarded: int = 0
    num_stale_tokens: int = 0


# Gives the samples of a run's next step, those of a group next to each other, and the items' rows.
RolloutSource = Callable[[RlRun], tuple[list[RolloutSample], list[int]]]


@dataclass(frozen=True)
class StepPrompts:
    """What a step rolls out.

    Attributes:
        rows: The items' rows of the G groups.
        items: Item of each of the G * N samples.
        prompts: G * N prompts, those of a group next to each other.
        sample_ids: Name of each sample.
        seed: Seed of the sampling.
    """

    rows: list[int]
    items: list[TaskItem]
    prompts: list[list[int]]
    sample_ids: list[str]
    seed: int


def rl_step(run: RlRun, source: RolloutSource | None = None) -> dict[str, Any]:
    """Does one step and gives its metrics, plain numbers that JSON can hold.

    An optimizer step whose loss or gradient is NaN or Inf is skipped and counted: weights and
    optimizer state stay what they were. Alarms are checked at the end (`rl.health`); whoever drives
    the run asks `health.must_stop` of the metrics, and saves a checkpoint then.

    Raises:
        RuntimeError: A protocol between the sides is broken: a quantiser did not run, weights
            differ after the push, or an optimizer step failed; or hardly a row was guided in the
            first step. The run must be resumed from a checkpoint.
    """
    seconds: dict[str, float] = {}
    recorded_before_s = run.engine.seconds["record"]
    run.sites.reset_report()

    with _timed(seconds, "rollout"):
        samples, rows = (source or roll_out)(run)
    seconds["record"] = run.engine.seconds["record"] - recorded_before_s

    with _timed(seconds, "train"):
        scores = scores_of(run, samples, rows)
        rewards = torch.tensor(scores.rewards).view(len(rows), -1)
        chosen = choose(run, samples, rewards)
        update = train(run, chosen.samples, chosen.advantages)
        if chosen.samples and not update.num_skipped:
            run.sites.assert_ran()
            if run.progress.step == 0:
                # Later on the alarms tell (`guard_rejections`, `coverage`).
                run.sites.assert_guided("step 0")

    trained_version = run.progress.policy_version
    with _timed(seconds, "push"):
        run.push_weights(run.progress.policy_version + 1)
    run.store.expire(before=run.progress.policy_version)

    metrics = step_metrics(
        run,
        samples,
        scores,
        rewards,
        chosen,
        update,
        seconds,
        trained_version=trained_version,
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


def prompts_of_step(run: RlRun, step: int) -> StepPrompts:
    """Gives what a step rolls out, the run's next or a later one.

    Args:
        run: The run.
        step: Number of the step.
    """
    settings, progress = run.settings, run.progress
    cursor = progress.prompt_cursor + (step - progress.step) * settings.prompts_per_step
    rows = rows_of_step(len(run.items), cursor, settings.prompts_per_step, seed=settings.seed)
    places = [(row, n) for row in rows for n in range(settings.samples_per_prompt)]
    # Where an epoch ends within the step, an item may be in it twice.
    seen: Counter[int] = Counter()
    names = []
    for row, _ in places:
        names.append(f"step-{step}/item-{row}/sample-{seen[row]}")
        seen[row] += 1
    seed = settings.seed * _SEEDS_PER_RUN + step
    items = [run.items[row] for row, _ in places]
    return StepPrompts(rows, items, [run.prompts[row] for row, _ in places], names, seed)


def roll_out(run: RlRun) -> tuple[list[RolloutSample], list[int]]:
    """Samples responses to the next prompts; their hints are then in `run.store`.

    Returns:
        G * N samples, those of a group next to each other, and the items' rows of the G groups.
    """
    asked = prompts_of_step(run, run.progress.step)
    run.task.begin(dict(zip(asked.sample_ids, asked.items, strict=True)))
    samples = run.engine.generate(
        asked.prompts,
        asked.sample_ids,
        store=run.store,
        sampling=run.sampling(),
        seed=asked.seed,
        next_turn=run.task.next_turn,
    )
    if isinstance(run.store, HintFilesWriter):
        run.store.commit(samples)
    return samples, asked.rows


def scores_of(run: RlRun, samples: Sequence[RolloutSample], rows: Sequence[int]) -> Scores:
    """Gives the rewards of G * N samples.

    Raises:
        RuntimeError: No sample got a reward, so that it cannot be the samples' fault.
    """
    items = [run.items[row] for row in rows for _ in range(run.settings.samples_per_prompt)]
    scores = run.task.scores(samples, items)
    if sum(scores.failures.values()) == len(samples):
        raise RuntimeError(
            f"step {run.progress.step}: reward or environment failed on all {len(samples)} samples "
            f"({scores.failures}); the log has the first reason. Correct the function, or raise "
            "--trace-function-timeout-s, and resume"
        )
    return scores


def choose(run: RlRun, samples: Sequence[RolloutSample], rewards: torch.Tensor) -> Chosen:
    """Gives the samples that the objective takes, with the advantages of their whole groups.

    Args:
        run: The run.
        samples: G * N samples, those of a group next to each other.
        rewards: FP32 [G, N]; NaN where a sample has none.

    Raises:
        StaleSampleError: A sample is too old, and is not to be left out.
    """
    trained, loss = run.progress.policy_version, run.settings.loss
    versions = {sample.sample_id: version_of(sample, loss) for sample in samples}
    fresh = set(fresh_samples(versions, trained, loss))
    spread = has_spread(rewards)[:, None].expand_as(rewards).flatten()
    wanted = spread if run.settings.objective.objective == "dapo" else spread | True
    advantages = advantages_of_rewarded(rewards).flatten()
    rewarded = ~advantages.isnan()
    kept = [
        row
        for row, sample in enumerate(samples)
        if sample.sample_id in fresh and bool(wanted[row] & rewarded[row])
    ]
    taken = [without_stale_tokens(samples[row], trained, loss) for row in kept]
    return Chosen(
        taken,
        advantages[kept],
        num_stale=len(samples) - len(fresh),
        num_without_spread=int((~wanted).sum()),
        num_unrewarded=int((~rewarded).sum()),
        num_stale_tokens=sum(
            samples[row].num_sampled - sample.num_sampled
            for row, sample in zip(kept, taken, strict=True)
            if sample is not samples[row]
        ),
    )


def step_metrics(
    run: RlRun,
    samples: Sequence[RolloutSample],
    scores: Scores,
    rewards: torch.Tensor,
    chosen: Chosen,
    update: Update,
    seconds: dict[str, float],
    *,
    trained_version: int,
) -> dict[str, Any]:
    """Gives the metrics of a step that was just done, of weights of `trained_version`."""
    report = run.sites.report()
    lags = [trained_version - sample.policy_version for sample in samples]
    lengths = [len(sample.response_tokens) for sample in samples]
    return {
        "step": run.progress.step,
        "policy_version": samples[0].policy_version,
        "reward": rewards.nanmean().item(),
        "reward_failures": scores.failures,
        "reward_failed": sum(scores.failures.values()) / len(samples),
        "groups_with_spread": has_spread(rewards).float().mean().item(),
        "response_tokens": sum(lengths) / len(lengths),
        "response_tokens_max": max(lengths),
        "unfinished": sum(s.finish_reason != "stop" for s in samples) / len(samples),
        "stale_dropped": chosen.num_stale,
        "stale_tokens_dropped": chosen.num_stale_tokens,
        "without_spread_dropped": chosen.num_without_spread,
        "unrewarded_dropped": chosen.num_unrewarded,
        "loss": sum(update.losses) / max(len(update.losses), 1),
        "grad_norm": max(update.grad_norms, default=0.0),
        **update.sums.means(),
        "gap": _gap(update).as_dict(),
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


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - started
