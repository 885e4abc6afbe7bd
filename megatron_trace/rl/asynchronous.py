"""Rollouts that go on while the policy is trained, with a bound on how old a sample may be.

The engine works on several steps' samples at a time: when a sample of the next step to be trained
is over, one of a later step takes its place. An update and its push come amid those later samples.
All is counted in steps of the engine and never timed, so that a run repeats and resumes bit by bit.
On one device the engine computes between updates; rollout workers and a trainer as jobs of their
own are `rl.exchange`, under the same bound.

    step 0   engine: batch 0, and as much of 1 to 3 as fits | update, push of version 1
    step 1   engine: rest of batch 1, more of 2 to 4        | update, push of version 2
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_trace.hints.files_writer import HintFilesWriter
from megatron_trace.hints.types import RolloutSample
from megatron_trace.rl.health import parse_alarms
from megatron_trace.rl.run import RlRun
from megatron_trace.rl.staleness import batches_in_reach
from megatron_trace.rl.step import StepPrompts, prompts_of_step, rl_step
from megatron_trace.rollout.session import OnPush, RolloutSession


@dataclass(frozen=True, kw_only=True)
class AsyncSettings:
    """How far rollouts run ahead of the training.

    Attributes:
        max_version_lag: Most policy versions that a sample, by its oldest token, may be older than
            the policy it trains; 0 rolls out and trains in turn.
        on_push: What a push does with what running samples have computed: `keep` or `recompute`
            (`rollout.session`).
        engine_steps_per_update: Steps of the engine while one update is done, beside those until
            its samples are over.
        drain_every: Steps after which nothing is in flight, so that a checkpoint can be saved: what
            belongs to later steps is not begun before. 0 for none.
    """

    max_version_lag: int = 3
    on_push: OnPush = "keep"
    engine_steps_per_update: int = 4
    drain_every: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError on a value out of range, or one without effect."""
        for name in ("max_version_lag", "engine_steps_per_update", "drain_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0; got {getattr(self, name)}")
        if self.drain_every == 1 and self.max_version_lag:
            raise ValueError(
                f"max_version_lag={self.max_version_lag} has no effect with drain_every=1 (the "
                "demo's --save-every): nothing is rolled out ahead of a step that drains; drain "
                "less often, or set max_version_lag=0"
            )

    def batches_to_begin(self, step: int, *, num_steps: int) -> range:
        """Gives the steps whose samples may be in flight before a step is trained.

        Args:
            step: The step, which is also the version that serves.
            num_steps: Steps of the run.
        """
        end = num_steps
        if self.drain_every:
            end = min(end, (step // self.drain_every + 1) * self.drain_every)
        return batches_in_reach(step, self.max_version_lag, num_batches=end)


class AsyncRollouts:
    """Samples of a run's steps, begun ahead of them.

    Args:
        run: The run, started or resumed.
        settings: How far ahead.
        num_steps: Steps of the run; what belongs to later ones is not begun.

    Raises:
        ValueError: The run's settings contradict it.
    """

    def __init__(self, run: RlRun, settings: AsyncSettings, *, num_steps: int) -> None:
        _require_fitting(run, settings)
        self.settings = settings
        self.num_steps = num_steps
        self._batches: dict[int, StepPrompts] = {}
        self._session: RolloutSession | None = None
        self._report: dict[str, Any] = {}

    @property
    def num_in_flight(self) -> int:
        """Samples that were begun and not trained on."""
        return sum(len(batch.sample_ids) for batch in self._batches.values())

    def step(self, run: RlRun) -> dict[str, Any]:
        """Does one RL step and gives its metrics, those of `rl_step` and, under `asynchronous`:

        lag_tokens (sampled tokens by the versions that they are older than the policy they train),
        spans_mean and spans_max (versions of a sample), several_versions (share of samples),
        in_flight (samples) and engine_steps.

        Raises:
            RuntimeError: As of `rl_step`; samples in flight are lost then.
            ValueError: The run has done all of its steps.
        """
        try:
            metrics = rl_step(run, self._roll_out)
        except BaseException:
            self.abandon()
            raise
        return metrics | {"asynchronous": self._report}

    def abandon(self) -> None:
        """Drops what is in flight; the next step begins its samples anew."""
        if self._session is not None:
            self._session.close()
        self._batches, self._session = {}, None

    def _roll_out(self, run: RlRun) -> tuple[list[RolloutSample], list[int]]:
        step = run.progress.step
        if step >= self.num_steps:
            raise ValueError(f"step {step} is beyond the run's num_steps={self.num_steps}")
        session = self._session
        if session is None:
            session = self._session = run.engine.open_session(
                store=run.store, sampling=run.sampling(), on_push=self.settings.on_push
            )
        steps_before = session.num_steps
        for later in self.settings.batches_to_begin(step, num_steps=self.num_steps):
            if later not in self._batches:
                batch = self._batches[later] = prompts_of_step(run, later)
                session.add(batch.prompts, batch.sample_ids, seed=batch.seed)
        batch = self._batches.pop(step)
        while not session.is_over(batch.sample_ids):
            session.step()
        for _ in range(self.settings.engine_steps_per_update):
            if session.num_unfinished:
                session.step()
        samples = session.take(batch.sample_ids)
        if isinstance(run.store, HintFilesWriter):
            run.store.commit(samples)
        self._report = _report(samples, run.progress.policy_version) | {
            "in_flight": self.num_in_flight,
            "engine_steps": session.num_steps - steps_before,
        }
        if not self._batches:
            self.abandon()
        return samples, batch.rows


def _report(samples: Sequence[RolloutSample], policy_version: int) -> dict[str, Any]:
    lags: Counter[int] = Counter()
    for sample in samples:
        versions = sample.token_versions
        if sample.given is not None:
            versions = versions[sample.given == 0]
        lags.update((policy_version - versions).tolist())
    spans = [len(sample.version_spans or (None,)) for sample in samples]
    return {
        "lag_tokens": {str(lag): lags[lag] for lag in sorted(lags)},
        "spans_mean": sum(spans) / len(spans),
        "spans_max": max(spans),
        "several_versions": sum(count > 1 for count in spans) / len(spans),
    }


def _require_fitting(run: RlRun, settings: AsyncSettings) -> None:
    bound = run.settings.loss.max_lag
    contradictions = {
        "an alarm with action bf16: samples in flight are of the other arithmetic": any(
            alarm.action == "bf16" for alarm in parse_alarms(run.settings.health)
        ),
        "an environment: a task answers the turns of one step's samples at a time": (
            run.task.next_turn is not None
        ),
        f"max_lag={bound} with stale_samples=error: samples may be older": (
            run.settings.loss.stale_samples == "error"
            and bound is not None
            and bound < settings.max_version_lag
        ),
    }
    for name, present in contradictions.items():
        if present:
            raise ValueError(f"max_version_lag={settings.max_version_lag} contradicts {name}")
