"""The clipped policy objective with an importance weight for the rollout's other arithmetic.

Legend: B samples, S token positions. Three log-probabilities of one sampled token appear:
`rollout` (the engine that sampled it), `old` (the trainer, before the step) and `theta` (the
trainer now, differentiable). TRACE brings `old` and `rollout` together; the weight corrects for
what is left.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True)
class GrpoSettings:
    """Settings of the objective.

    Attributes:
        clip_low: The ratio theta / old is clipped below 1 - clip_low.
        clip_high: The ratio theta / old is clipped above 1 + clip_high.
        importance_cap: Upper bound C of the token weight min(old / rollout, C).
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    importance_cap: float = 5.0

    def __post_init__(self) -> None:
        """Raises ValueError on a value out of range."""
        if not 0.0 <= self.clip_low < 1.0:
            raise ValueError(f"clip_low must be in [0, 1); got {self.clip_low}")
        if self.clip_high < 0.0:
            raise ValueError(f"clip_high must be >= 0; got {self.clip_high}")
        if self.importance_cap < 1.0:
            raise ValueError(
                f"importance_cap must be >= 1, or equal policies are weighted down; got "
                f"{self.importance_cap}"
            )


@dataclass(frozen=True)
class LossSums:
    """Sums over tokens, so that micro-batches add up exactly.

    Attributes:
        num_tokens: Response tokens.
        clipped: Tokens whose clipped term is the smaller one: they have no gradient.
        weight: Sum of importance weights.
        capped: Tokens whose weight was cut to the cap.
        kl_old: Sum of the estimate of KL(old, theta), (ratio - 1) - log ratio.
        kl_rollout: Sum of the estimate of KL(rollout, theta), log-prob rollout - theta.
    """

    num_tokens: int = 0
    clipped: float = 0.0
    weight: float = 0.0
    capped: float = 0.0
    kl_old: float = 0.0
    kl_rollout: float = 0.0

    def __add__(self, other: LossSums) -> LossSums:
        """Gives the sums of both."""
        return LossSums(
            *(getattr(self, field.name) + getattr(other, field.name) for field in fields(self))
        )

    def means(self) -> dict[str, float]:
        """Gives the metrics per token; all 0 without a token."""
        num_tokens = max(self.num_tokens, 1)
        return {
            "clipped_share": self.clipped / num_tokens,
            "importance_weight_mean": self.weight / num_tokens,
            "importance_capped_share": self.capped / num_tokens,
            "kl_old": self.kl_old / num_tokens,
            "kl_rollout": self.kl_rollout / num_tokens,
        }


def grpo_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    num_tokens: int,
    settings: GrpoSettings,
) -> tuple[torch.Tensor, LossSums]:
    """Gives the negated clipped objective of a micro-batch: its sum over tokens / num_tokens.

        w = min(exp(old - rollout), C), detached        r = exp(theta - old)
        loss = - sum over tokens of w * min(r * A, clip(r, 1 - low, 1 + high) * A) / num_tokens

    Positions outside the mask are never read, whatever they hold.

    Args:
        logprobs: FP32 [B, S] log-probs of the trainer now, differentiable.
        old_logprobs: FP32 [B, S] log-probs of the trainer before the step.
        rollout_logprobs: FP32 [B, S] log-probs of the rollout.
        advantages: FP32 [B] one per sample.
        mask: bool [B, S], True at response tokens. A row without any (an empty response) adds
            nothing.
        num_tokens: Response tokens of the whole optimizer step, over all its micro-batches and
            ranks, so that every token weighs the same wherever it was batched.
        settings: Clip range and cap.

    Returns:
        The loss, FP32 0-d, and the sums for the metrics. Without a token in the mask the loss is 0
        and has zero gradients.

    Raises:
        ValueError: Shapes or dtypes contradict each other, fewer tokens in `num_tokens` than in
            the mask, or a value inside the mask is not finite.
    """
    _check(logprobs, old_logprobs, rollout_logprobs, advantages, mask, num_tokens)
    theta = logprobs[mask]
    old = old_logprobs[mask].detach()
    rollout = rollout_logprobs[mask].detach()
    advantage = advantages.detach()[:, None].expand_as(mask)[mask]
    for name, values in (
        ("theta", theta),
        ("old", old),
        ("rollout", rollout),
        ("advantage", advantage),
    ):
        if not torch.isfinite(values).all():
            raise ValueError(f"{name} must be finite at every response token; got NaN or Inf")

    importance = torch.exp(old - rollout)
    weight = importance.clamp(max=settings.importance_cap)
    ratio = torch.exp(theta - old)
    unclipped = ratio * advantage
    clipped = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high) * advantage
    loss = -(weight * torch.minimum(unclipped, clipped)).sum() / max(num_tokens, 1)
    with torch.no_grad():
        sums = LossSums(
            num_tokens=theta.numel(),
            clipped=(clipped < unclipped).sum().item(),
            weight=weight.sum().item(),
            capped=(importance > settings.importance_cap).sum().item(),
            kl_old=(ratio - 1.0 - (theta - old)).sum().item(),
            kl_rollout=(rollout - theta).sum().item(),
        )
    return loss, sums


def _check(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    num_tokens: int,
) -> None:
    if mask.dim() != 2 or mask.dtype != torch.bool:
        raise ValueError(
            f"mask must be bool [samples, positions]; got {mask.dtype} {tuple(mask.shape)}"
        )
    for name, tensor, shape in (
        ("logprobs", logprobs, mask.shape),
        ("old_logprobs", old_logprobs, mask.shape),
        ("rollout_logprobs", rollout_logprobs, mask.shape),
        ("advantages", advantages, mask.shape[:1]),
    ):
        if tensor.shape != shape or tensor.dtype != torch.float32:
            raise ValueError(
                f"{name} must be FP32 {tuple(shape)}, as the mask is {tuple(mask.shape)}; got "
                f"{tensor.dtype} {tuple(tensor.shape)}"
            )
    here = int(mask.sum())
    if num_tokens < here:
        raise ValueError(
            f"num_tokens must count the response tokens of the whole step; got {num_tokens}, but "
            f"this micro-batch alone has {here}"
        )
