"""GRPO and DAPO: clipped ratios of single tokens.

    r = exp(theta - old), w the correction's weight
    gain = w * min(r * A, clip(r, 1 - low, 1 + high) * A), mean over the tokens of a step

Published [L]: GRPO (arXiv 2402.03300) takes advantages relative to the prompt group, clips at .2
on both sides and averages over each response, then over responses. DAPO (arXiv 2503.14476) takes
the mean over all tokens of a step, clips at .2 and .28, and leaves out groups with equal rewards.
TRACE trains with GRPO [P]. Our reading: `grpo` takes DAPO's token mean and bounds too, so that
micro-batches, ranks and Megatron's per-token loss add up exactly; `dapo` differs from it in that
groups without spread are left out before the step, so that their tokens do not count in the mean.
"""

from __future__ import annotations

import torch

from megatron_trace.rl.corrections import importance_weights
from megatron_trace.rl.objectives.settings import LossSettings
from megatron_trace.rl.objectives.terms import Terms
from megatron_trace.rl.objectives.values import ResponseTokens, ratio_of


def token_clip(tokens: ResponseTokens, settings: LossSettings) -> Terms:
    """Gives the clipped terms of single tokens."""
    weights = importance_weights(tokens, settings)
    ratio = ratio_of(tokens.theta - tokens.old)
    unclipped = ratio * tokens.advantage
    clipped = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high) * tokens.advantage
    return Terms(
        gain=weights.weight * torch.minimum(unclipped, clipped),
        clipped=clipped < unclipped,
        weight=weights.weight,
        capped=weights.capped,
        masked=weights.masked,
    )
