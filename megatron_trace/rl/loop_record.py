"""What a step inside Megatron's own loop measured, in the fields of an RL run's metrics.

A rank adds up what its micro-batches show; at the end of the step all ranks settle it together.

Legend: B samples of a micro-batch, S positions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_trace.metrics import LogprobGap, Sums
from megatron_trace.rl.health_metrics import training_health
from megatron_trace.rl.losses import LossSums
from megatron_trace.training.over_ranks import (
    largest,
    quantile,
    summed,
    summed_differences,
    summed_report,
)
from megatron_trace.training.report import TraceReport


@dataclass(frozen=True)
class SampleOrigin:
    """What is known of the samples of a micro-batch beside their tokens.

    Attributes:
        rewards: Reward of each.
        lags: Policy versions by which each is older than the weights it trains; none where samples
            have no step of their own.
        spreads: Whether the rewards of the group of each differ.
    """

    rewards: tuple[float, ...]
    lags: tuple[int, ...] = ()
    spreads: tuple[bool, ...] = ()


@dataclass(frozen=True)
class SampleSums(Sums):
    """Sums over samples.

    Attributes:
        num_samples: Samples.
        reward: Sum of their rewards.
        tokens: Their sampled tokens.
        dropped: Samples that an alarm left out.
        with_spread: Samples of groups whose rewards differ.
        lag: Sum of their lags.
        num_lagged: Samples whose lag is known.
    """

    num_samples: int = 0
    reward: float = 0.0
    tokens: int = 0
    dropped: int = 0
    with_spread: int = 0
    lag: int = 0
    num_lagged: int = 0


class StepMeasures:
    """What the micro-batches of one step show on this rank.

    Attributes:
        wait_s: Seconds in which the training waited for its micro-batches.
    """

    def __init__(self) -> None:
        self.wait_s = 0.0
        self._started: float | None = None
        self._gaps: list[torch.Tensor] = []
        self._sums = LossSums()
        # Of each micro-batch: its origin; tokens of its samples, and whether they are left out.
        self._samples: list[tuple[SampleOrigin, torch.Tensor, torch.Tensor]] = []

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the seconds inside the context as waited; the first of a step begins it."""
        began = time.perf_counter()
        if self._started is None:
            self._started = began
        yield
        self.wait_s += time.perf_counter() - began

    @property
    def elapsed_s(self) -> float:
        """Seconds since the step began on this rank; 0 before."""
        return 0.0 if self._started is None else time.perf_counter() - self._started

    def add(self, gaps: torch.Tensor, sums: LossSums) -> None:
        """Adds the tokens of a micro-batch.

        Args:
            gaps: FP32 [tokens]; training's log-probs less the rollout's.
            sums: What its loss adds up.
        """
        self._gaps.append(gaps.detach())
        self._sums += sums

    def add_samples(self, origin: SampleOrigin, tokens: torch.Tensor, out: torch.Tensor) -> None:
        """Adds the samples of a micro-batch.

        Args:
            origin: What is known of them.
            tokens: int64 [B]; sampled tokens of each.
            out: bool [B]; whether an alarm leaves it out.
        """
        self._samples.append((origin, tokens, out))

    def record(
        self, step: int, report: TraceReport, group: dist.ProcessGroup, *, p99: bool, codes: bool
    ) -> dict[str, Any]:
        """Gives the step's record, of all ranks; a collective.

        Args:
            step: Its number.
            report: What the quantisers on this rank did in it.
            group: All ranks.
            p99: Whether to find the 99th percentile of the gap, which takes 31 sums over ranks.
            codes: Whether full codes were compared, so that there is D_act.
        """
        gap, losses = self._of_tokens(group, p99=p99)
        of_samples, lags = self._of_samples(group)
        total = summed_report(report, group)
        if codes:
            total = replace(total, activation_difference=summed_differences(report, group))
        return {
            "step": step,
            "gap": gap.as_dict(),
            **losses.means(),
            **of_samples,
            "health": training_health(total) | lags,
            "quantisers": total.as_dict(),
        }

    def _of_tokens(self, group: dist.ProcessGroup, *, p99: bool) -> tuple[LogprobGap, LossSums]:
        own = torch.cat([torch.empty(0), *(part.float().cpu() for part in self._gaps)])
        delta = own.double()
        of_gaps = [delta.abs(), torch.expm1(delta) - delta, -delta, delta.exp()]
        sums = [delta.numel(), *(of.sum().item() for of in of_gaps), *astuple(self._sums)]
        num_tokens, size, kl, kl_naive, ratio, *of_loss = summed(sums, group)
        losses = LossSums(*of_loss)  # pyright: ignore[reportArgumentType]
        if not num_tokens:
            return LogprobGap(0, *[math.nan] * (len(fields(LogprobGap)) - 1)), losses
        ends = (
            torch.stack([-delta.min(), delta.max()])
            if own.numel()
            else torch.full((2,), -torch.inf)
        )
        low, high = largest(ends.tolist(), group)
        gap = LogprobGap(
            num_tokens=int(num_tokens),
            mean=size / num_tokens,
            p99=quantile(own.abs(), 0.99, group) if p99 else math.nan,
            max=max(low, high),
            kl=kl / num_tokens,
            kl_naive=kl_naive / num_tokens,
            ratio_mean=ratio / num_tokens,
            ratio_min=delta.new_tensor(-low).exp().item(),
            ratio_max=delta.new_tensor(high).exp().item(),
        )
        return gap, losses

    def _of_samples(self, group: dist.ProcessGroup) -> tuple[dict[str, Any], dict[str, Any]]:
        """Gives the fields of the samples, and those of their lags; empty where there are none."""
        own = SampleSums()
        longest = lag_max = 0
        for origin, tokens, out in self._samples:
            lengths, lags = tokens.tolist(), origin.lags
            longest, lag_max = max(longest, *lengths), max(lag_max, *lags, 0)
            own += SampleSums(
                num_samples=len(lengths),
                reward=math.fsum(origin.rewards),
                tokens=sum(lengths),
                dropped=int(out.sum()),
                with_spread=sum(origin.spreads),
                lag=sum(lags),
                num_lagged=len(lags),
            )
        sums = SampleSums(*summed(astuple(own), group))  # pyright: ignore[reportArgumentType]
        longest, lag_max = largest([longest, lag_max], group)
        if not sums.num_samples:
            return {}, {}
        of_samples = {
            "samples": int(sums.num_samples),
            "reward": sums.reward / sums.num_samples,
            "groups_with_spread": sums.with_spread / sums.num_samples,
            "response_tokens": sums.tokens / sums.num_samples,
            "response_tokens_max": int(longest),
            "dropped_samples": int(sums.dropped),
        }
        if not sums.num_lagged:
            return of_samples, {}
        return of_samples, {"lag_mean": sums.lag / sums.num_lagged, "lag_max": int(lag_max)}
