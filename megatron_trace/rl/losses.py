"""The loss of a micro-batch under any objective, and the sums that its metrics are made of.

Legend: B samples, S positions, T response tokens of the micro-batch. Three log-probabilities of one
sampled token appear: `rollout` (the engine that sampled it), `old` (the trainer before the step)
and `theta` (the trainer now, differentiable).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_trace.metrics import Sums
from megatron_trace.rl.objectives.score_centering import score_centering
from megatron_trace.rl.objectives.sequence_clip import gspo, tbpo
from megatron_trace.rl.objectives.settings import LossSettings
from megatron_trace.rl.objectives.terms import Terms
from megatron_trace.rl.objectives.token_clip import token_clip
from megatron_trace.rl.objectives.values import PolicyBatch, ResponseTokens, response_tokens
from megatron_trace.training.rounding import NonFiniteError

OBJECTIVES: dict[str, Callable[[ResponseTokens, LossSettings], Terms]] = {
    "grpo": token_clip,
    "dapo": token_clip,
    "gspo": gspo,
    "tbpo": tbpo,
    "score_centering": score_centering,
}

# The squares of e^300, and their sum, are finite in FP64.
_LARGEST_EXPONENT = 300.0


@dataclass(frozen=True)
class LossSums(Sums):
    """Sums over tokens, so that micro-batches and ranks add up exactly.

    Attributes:
        num_tokens: Response tokens.
        clipped: Tokens that the objective's bounds leave without gradient.
        weight: Sum of importance weights.
        capped: Tokens whose weight was cut to the cap.
        masked: Tokens whose weight was set to 0.
        ratio: Sum of old / rollout, neither capped nor masked.
        ratio_squared: Sum of its squares.
        kl_old: Sum of the estimate of KL(old, theta), (ratio - 1) - log ratio.
        kl_rollout: Sum of the estimate of KL(rollout, theta), log-prob rollout - theta.
        surprise: Sum of -log-prob rollout, an estimate of the rollout policy's entropy.
        amplifying: Sum of |old - rollout| over tokens where it has the sign of the advantage.
        damping: The same where it has the other sign; see `rho_asym`.
    """

    num_tokens: int = 0
    clipped: float = 0.0
    weight: float = 0.0
    capped: float = 0.0
    masked: float = 0.0
    ratio: float = 0.0
    ratio_squared: float = 0.0
    kl_old: float = 0.0
    kl_rollout: float = 0.0
    surprise: float = 0.0
    amplifying: float = 0.0
    damping: float = 0.0

    def means(self) -> dict[str, Any]:
        """Gives the metrics per token; all None without a token: an entropy of 0 is a collapse."""
        num_tokens = max(self.num_tokens, 1)
        ratio_mean = self.ratio / num_tokens
        means = {
            "clipped_share": self.clipped / num_tokens,
            "importance_weight_mean": self.weight / num_tokens,
            "importance_capped_share": self.capped / num_tokens,
            "importance_masked_share": self.masked / num_tokens,
            "importance_ratio_std": max(self.ratio_squared / num_tokens - ratio_mean**2, 0.0)
            ** 0.5,
            "kl_old": self.kl_old / num_tokens,
            "kl_rollout": self.kl_rollout / num_tokens,
            "entropy": self.surprise / num_tokens,
            "rho_asym": self.rho_asym,
        }
        return means if self.num_tokens else dict.fromkeys(means)

    @property
    def rho_asym(self) -> float | None:
        """TRIAGE's early warning (arXiv 2610.07043) [L]: 1.34 in health, 1.85 before a collapse.

        Published: with delta = log pi_train - log pi_roll, the share of |delta| that amplifies the
        update over the share that damps it. Our reading: amplifying is a token whose delta has the
        sign of its advantage, as the update then pushes the two policies further apart. (The sign
        of delta alone cannot be meant: its mean is -KL, so that the quotient would be below 1.)
        None where nothing damps.
        """
        return self.amplifying / self.damping if self.damping else None


def count_units(mask: torch.Tensor, settings: LossSettings, own: torch.Tensor | None = None) -> int:
    """Gives how many units of the loss's mean a micro-batch has on this rank.

    Args:
        mask: bool [B, S]; response tokens.
        settings: The objective: its mean is over tokens or over sequences with a response.
        own: bool [B, S]; positions of this rank, None for all. A sequence is counted by the rank
            that has its first response token.
    """
    if settings.unit == "sequences":
        first = mask & (mask.cumsum(1) == 1)
        return int((first if own is None else first & own).sum())
    return int((mask if own is None else mask & own).sum())


def policy_loss(
    batch: PolicyBatch, *, num_units: int, settings: LossSettings
) -> tuple[torch.Tensor, LossSums]:
    """Gives the negated objective of a micro-batch: its sum over tokens / num_units.

    Args:
        batch: The micro-batch. A row without a response token adds nothing.
        num_units: Tokens or sequences (`LossSettings.unit`) of the whole optimizer step, over all
            its micro-batches and ranks, so that each weighs the same wherever it was batched.
        settings: The objective.

    Returns:
        The loss, FP32 0-d, and the sums for the metrics. Without a token in the mask the loss is 0
        and has zero gradients.

    Raises:
        NonFiniteError: A value inside the mask, or the loss, is NaN or Inf.
        ValueError: Shapes or dtypes contradict each other, or `num_units` is less than what the
            micro-batch has.
    """
    loss, sums = summed_loss(batch, settings)
    if not torch.isfinite(loss):
        raise NonFiniteError(f"the loss must be finite; got {loss.item()}")
    here = count_units(batch.mask, settings, batch.own)
    if num_units < here:
        raise ValueError(
            f"num_units must count the {settings.unit} of the whole step; got {num_units}, but "
            f"this micro-batch alone has {here}"
        )
    return loss / max(num_units, 1), sums


def summed_loss(batch: PolicyBatch, settings: LossSettings) -> tuple[torch.Tensor, LossSums]:
    """Gives the negated objective of a micro-batch, summed over this rank's tokens, and its sums.

    Raises:
        NonFiniteError: See `policy_loss`.
        ValueError: See `policy_loss`.
    """
    tokens = response_tokens(batch)
    terms = OBJECTIVES[settings.objective](tokens, settings)
    gain = terms.gain if tokens.own is None else terms.gain[tokens.own]
    return -gain.sum(), _sums(tokens, terms)


@torch.no_grad()
def _sums(tokens: ResponseTokens, terms: Terms) -> LossSums:
    own = slice(None) if tokens.own is None else tokens.own
    theta, old, rollout = tokens.theta[own], tokens.old[own], tokens.rollout[own]
    delta = old - rollout
    importance = delta.double().clamp(max=_LARGEST_EXPONENT).exp()
    drift = (theta - old).double()
    push = delta * tokens.advantage[own].sign()
    sums = {
        "clipped": terms.clipped[own].sum(),
        "weight": terms.weight[own].sum(),
        "capped": terms.capped[own].sum(),
        "masked": terms.masked[own].sum(),
        "ratio": importance.sum(),
        "ratio_squared": importance.square().sum(),
        "kl_old": (drift.clamp(max=_LARGEST_EXPONENT).expm1() - drift).sum(),
        "kl_rollout": (rollout - theta).sum(),
        "surprise": -rollout.sum(),
        "amplifying": push.clamp(min=0.0).sum(),
        "damping": -push.clamp(max=0.0).sum(),
    }
    # The device is asked once for all.
    values = torch.stack([value.double() for value in sums.values()]).tolist()
    return LossSums(theta.numel(), *values)
