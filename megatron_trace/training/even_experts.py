"""Even routing of padding rows."""

from __future__ import annotations

import torch


def even_experts(loads: torch.Tensor, num_rows: int, top_k: int) -> torch.Tensor:
    """Gives padding rows distinct experts so that all experts' loads end as even as they can.

    Args:
        loads: int64 [E]; rows that each expert has already.
        num_rows: Padding rows.
        top_k: Experts of a row.

    Returns:
        int64 [num_rows, top_k]. If no load exceeds the final mean, loads end within one of each
        other.

    Raises:
        ValueError: There are fewer experts than top_k.
    """
    num_experts = loads.numel()
    if top_k > num_experts:
        raise ValueError(f"{top_k} distinct experts per row, but there are {num_experts}")
    slots = num_rows * top_k
    low, high = int(loads.min()), int(loads.max()) + slots + 1
    while high - low > 1:
        level = (low + high) // 2
        if int((level - loads).clamp(0, num_rows).sum()) <= slots:
            low = level
        else:
            high = level
    quotas = (low - loads).clamp(0, num_rows)
    left = slots - int(quotas.sum())
    if left:
        raised = (low + 1 - loads).clamp(0, num_rows)
        candidates = (raised > quotas).nonzero()[:, 0]
        # Evenly spaced, so that neighbouring experts, which share a rank, do not get them all.
        quotas[candidates[torch.arange(left) * len(candidates) // left]] += 1
    # An expert's slots are at most num_rows neighbours, so dealing them out never repeats a row.
    dealt = torch.arange(num_experts).repeat_interleave(quotas)
    return dealt.view(top_k, num_rows).T.contiguous()
