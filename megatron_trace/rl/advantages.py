"""Advantages of sampled responses, relative to the other responses to the same prompt (GRPO).

Legend: G prompt groups, N samples of a group.
"""

from __future__ import annotations

import torch


def group_advantages(rewards: torch.Tensor, *, eps: float = 1e-4) -> torch.Tensor:
    """Gives (reward - mean) / (std + eps), mean and std taken over the samples of a prompt.

    The standard deviation is the unbiased one (divisor N - 1). A group whose rewards are all equal
    says nothing about its samples and gets exactly zero.

    Args:
        rewards: [G, N] rewards, any floating dtype.
        eps: Added to the standard deviation, in units of the reward.

    Returns:
        FP32 [G, N] advantages.

    Raises:
        ValueError: Wrong shape or dtype, fewer than two samples per group, or a reward that is not
            finite.

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2.
    """
    if rewards.dim() != 2 or not rewards.is_floating_point():
        raise ValueError(
            "rewards must be floating point [prompt groups, samples]; got "
            f"{rewards.dtype} {tuple(rewards.shape)}"
        )
    if rewards.shape[1] < 2:
        raise ValueError(
            "a group needs at least 2 samples, as an advantage is relative to the others; got "
            f"rewards of shape {tuple(rewards.shape)}"
        )
    if not torch.isfinite(rewards).all():
        group, sample = (~torch.isfinite(rewards)).nonzero()[0].tolist()
        raise ValueError(
            f"reward of group {group}, sample {sample} must be finite; got "
            f"{rewards[group, sample].item()}"
        )
    rewards = rewards.float()
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    advantages = centred / (rewards.std(dim=1, keepdim=True) + eps)
    # The mean of equal numbers may round away from them; the residue must not become a gradient.
    without_spread = rewards.amax(dim=1, keepdim=True) == rewards.amin(dim=1, keepdim=True)
    return advantages.masked_fill(without_spread, 0.0)


def advantages_of_rewarded(rewards: torch.Tensor, *, eps: float = 1e-4) -> torch.Tensor:
    """Gives the advantages of groups in which samples without a reward are left out.

    Args:
        rewards: [G, N] rewards, any floating dtype; NaN where a sample has none.
        eps: See `group_advantages`.

    Returns:
        FP32 [G, N] advantages among the samples with a reward; NaN for the others, and for a sample
        that is the only one of its group.

    Raises:
        ValueError: See `group_advantages`; NaN is no error here.
    """
    missing = rewards.isnan()
    if not missing.any():
        return group_advantages(rewards, eps=eps)
    advantages = torch.full(rewards.shape, torch.nan)
    for group, left_out in enumerate(missing):
        kept = rewards[group : group + 1, ~left_out]
        if kept.shape[1] > 1:
            advantages[group, ~left_out] = group_advantages(kept, eps=eps)[0]
    return advantages


def has_spread(rewards: torch.Tensor) -> torch.Tensor:
    """Gives where the rewards of a group differ, bool [G]; NaN in [G, N] is no reward."""
    highest = rewards.nan_to_num(nan=-torch.inf).amax(dim=1)
    return highest > rewards.nan_to_num(nan=torch.inf).amin(dim=1)
