"""Score centering: the sampled token's score less the score that the rollout gives on average.

    p = exp(theta) the trainer now, q the rollout, y the sampled token, H the rollout's K most
    likely tokens, w(r) = min(r, C), sg = without gradient
    rho   = (1 - sum_H q) / (1 - sum_H p)           of what H leaves over, q = rho p is assumed
    alpha = rho * w(1 / rho) = min(1, C rho)
    gain  = A * (sg[w(p_y / q_y)] log p_y - sum_H sg[q_v w(p_v / q_v) - alpha p_v] log p_v)

Published [L] (arXiv 2609.20807): the estimator, K = 128 and C = 2; and, as the correction is added
to a loss with importance weights or without, w = 1 and alpha = rho (correction `none`). The
gradient of the second sum is what the first has on average under q, so that a constant advantage
moves nothing: a persistent difference between the two sides cannot add up over the steps. With
weights that reach no cap the average is 0 by itself, and so is the second sum: it is for the
probability that the cap takes away. Without weights it is for all of the difference.

Our reading: p is the trainer now, there is no clipping against an older policy, the mean is over
the tokens of a step. Where H holds all of the probability, alpha is 1 with weights; without, 1 -
sum_H p is taken for 1e-6 at least.

Legend: T response tokens, K tokens of H.
"""

from __future__ import annotations

import torch

from megatron_trace.rl.objectives.settings import LossSettings
from megatron_trace.rl.objectives.terms import Terms
from megatron_trace.rl.objectives.values import ResponseTokens

# Below it the rest of p is mostly rounding.
_SMALLEST_REST = 1e-6


def score_centering(tokens: ResponseTokens, settings: LossSettings) -> Terms:
    """Gives the terms of score centering.

    Raises:
        ValueError: The rollout's most likely tokens are not known.
    """
    if tokens.top_theta is None or tokens.top_rollout is None:
        raise ValueError(
            "score_centering needs the rollout's most likely tokens (RolloutSample.top_tokens and "
            "top_logprobs), and the samples have none; roll out with top_logprobs > 0"
        )
    weighs, cap = settings.correction == "tis", settings.importance_cap
    ratio = torch.exp(tokens.theta.detach() - tokens.rollout)
    nothing = torch.zeros_like(ratio, dtype=torch.bool)
    weight = ratio.clamp(max=cap) if weighs else torch.ones_like(ratio)
    coefficients = _coefficients(
        tokens.top_theta.detach(), tokens.top_rollout, cap if weighs else None
    )
    centre = (coefficients * tokens.top_theta).sum(-1)
    return Terms(
        gain=tokens.advantage * (weight * tokens.theta - centre),
        clipped=nothing,
        weight=weight,
        capped=ratio > cap if weighs else nothing,
        masked=nothing,
    )


def _coefficients(log_p: torch.Tensor, log_q: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Gives q_v w(p_v / q_v) - alpha p_v, FP32 [T, K]; 0 where q_v = 0. No cap: w is 1."""
    known = torch.isfinite(log_q)
    p, q = torch.where(known, log_p.exp(), 0.0), torch.where(known, log_q.exp(), 0.0)
    rest_p, rest_q = ((1.0 - of.sum(-1, keepdim=True)).clamp(min=0.0) for of in (p, q))
    if cap is None:
        return q - rest_q / rest_p.clamp(min=_SMALLEST_REST) * p
    # alpha = min(1, C rest_q / rest_p), also where rest_p is 0.
    small = cap * rest_q < rest_p
    alpha = torch.where(small, cap * rest_q / torch.where(small, rest_p, 1.0), 1.0)
    return torch.minimum(p, cap * q) - alpha * p
