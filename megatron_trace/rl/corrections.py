"""Weights of tokens that another arithmetic, or an older policy, has sampled.

    ratio_t = exp(old_t - rollout_t), detached          C the cap, F the floor

    tis           min(ratio_t, C)                       truncated importance sampling
    icepop        ratio_t if F <= ratio_t <= C else 0
    mis_token     ratio_t if ratio_t <= C else 0        masked importance sampling
    mis_sequence  R if R <= C else 0, for all tokens of a sequence; R = product of its ratio_t
    none          1

Published [L]: TIS with C = 2 usual, and 5 in TRACE's paper [P], our default; IcePop with .5 and 5;
MIS by hard masks of tokens or sequences, C = 2. Our reading: a masked token adds nothing to the
loss and still counts in the mean, so that micro-batches and ranks add up whatever they mask (some
implementations take it out of the mean); in
`mis_sequence` R is the product over the whole response, not its geometric mean.

Legend: T response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_trace.rl.objectives.settings import LossSettings
from megatron_trace.rl.objectives.values import ResponseTokens


@dataclass(frozen=True)
class Weights:
    """Importance weights.

    Attributes:
        weight: FP32 [T], without gradient.
        ratio: FP32 [T]; the tokens' own old / rollout, neither capped nor masked.
        capped: bool [T]; tokens whose weight was cut to the cap.
        masked: bool [T]; tokens whose weight is 0 instead of their ratio.
    """

    weight: torch.Tensor
    ratio: torch.Tensor
    capped: torch.Tensor
    masked: torch.Tensor


def importance_weights(tokens: ResponseTokens, settings: LossSettings) -> Weights:
    """Gives the weights of response tokens.

    Args:
        tokens: The tokens.
        settings: Which correction, with cap and floor.

    Raises:
        ValueError: The correction is unknown.
    """
    cap = settings.importance_cap
    ratio = torch.exp(tokens.old - tokens.rollout)
    nothing = torch.zeros_like(ratio, dtype=torch.bool)
    if settings.correction == "none":
        return Weights(torch.ones_like(ratio), ratio, nothing, nothing)
    if settings.correction == "tis":
        return Weights(ratio.clamp(max=cap), ratio, ratio > cap, nothing)
    if settings.correction == "icepop":
        weight, kept = ratio, (ratio >= settings.importance_floor) & (ratio <= cap)
    elif settings.correction == "mis_token":
        weight, kept = ratio, ratio <= cap
    elif settings.correction == "mis_sequence":
        weight = torch.exp(tokens.of_sequence(tokens.old - tokens.rollout))
        kept = weight <= cap
    else:
        raise ValueError(f"unknown correction {settings.correction!r}")
    return Weights(torch.where(kept, weight, 0.0), ratio, nothing, ~kept)
