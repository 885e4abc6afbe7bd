"""GSPO and TBPO: one ratio for a whole response, the geometric mean over its tokens.

    s = exp(mean of (theta - old) over the response)

    gspo  gain = w_t * min(s A, clip(s, 1 - low, 1 + high) A) / length
    tbpo  w = min(exp(mean of (old - rollout)), C)
          A >= 0: gain = w min(s, 1 + high) A / length
          A <  0: gain = w s A / length if 1 - low <= s <= 1 + 7e-4, else 0 without gradient

mean over the sequences of a step. Sums over tokens of a response: a token's term has the value of
its sequence's and the gradient that the token has in it, which is how GSPO's paper writes it for
single tokens (s_t = detached s * exp(theta_t - detached theta_t)).

Published [L]: GSPO (arXiv 2507.18071) with low 3e-4, high 4e-4 and without w; TBPO, the objective
of QaRL (arXiv 2604.07853), with C = 2, high 4e-4, low 3e-4 and 7e-4 and no other weight for the
rollout. Our reading: GSPO is corrected by weights of tokens (`rl.corrections`), as TRACE's other
objectives are; TBPO, whose lower bound for A >= 0 is not public, has none there, and its mean is
over sequences as GSPO's.
"""

from __future__ import annotations

import torch

from megatron_trace.rl.corrections import importance_weights
from megatron_trace.rl.objectives.settings import LossSettings
from megatron_trace.rl.objectives.terms import Terms
from megatron_trace.rl.objectives.values import ResponseTokens, ratio_of

TBPO_NEGATIVE_HIGH = 7e-4


def gspo(tokens: ResponseTokens, settings: LossSettings) -> Terms:
    """Gives the terms of GSPO."""
    weights = importance_weights(tokens, settings)
    ratio = _sequence_ratio(tokens)
    unclipped = ratio * tokens.advantage
    clipped = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high) * tokens.advantage
    return Terms(
        gain=weights.weight * torch.minimum(unclipped, clipped) / tokens.length,
        clipped=clipped < unclipped,
        weight=weights.weight,
        capped=weights.capped,
        masked=weights.masked,
    )


def tbpo(tokens: ResponseTokens, settings: LossSettings) -> Terms:
    """Gives the terms of TBPO."""
    importance = torch.exp(tokens.mean_of_sequence(tokens.old - tokens.rollout))
    weight = importance.clamp(max=settings.importance_cap)
    ratio, advantage = _sequence_ratio(tokens), tokens.advantage
    positive, value = advantage >= 0, ratio.detach()
    inside = (value >= 1.0 - settings.clip_low) & (value <= 1.0 + TBPO_NEGATIVE_HIGH)
    bounded = torch.where(
        positive,
        ratio.clamp(max=1.0 + settings.clip_high),
        torch.where(inside, ratio, 0.0),
    )
    nothing = torch.zeros_like(inside)
    return Terms(
        gain=weight * bounded * advantage / tokens.length,
        clipped=torch.where(positive, value > 1.0 + settings.clip_high, ~inside),
        weight=weight,
        capped=importance > settings.importance_cap,
        masked=nothing,
    )


def _sequence_ratio(tokens: ResponseTokens) -> torch.Tensor:
    """Gives [T]: s of the token's sequence, with the token's own gradient."""
    ratio = ratio_of(tokens.mean_of_sequence(tokens.theta - tokens.old))
    return ratio * torch.exp(tokens.theta - tokens.theta.detach())
