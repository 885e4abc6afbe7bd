"""What must not be among values: NaN and Inf, and what a global scale cannot hold.

Legend: K values of a row. What is noted of NaN and Inf is one number for a tensor, so that it can
lie on the device until somebody asks: the place of the first of them, and which of them it is.
"""

from __future__ import annotations

import math

import torch

from megatron_trace.formats.blocks import split

# What is noted of values that are all finite.
ALL_FINITE = torch.iinfo(torch.int64).max
_KINDS = (math.nan, math.inf, -math.inf)


def note_bad_values(
    x: torch.Tensor,
    first_bad: torch.Tensor | None,
    num_beyond: torch.Tensor | None,
    limit: float,
    block_size: int,
) -> None:
    """Notes the first NaN or Inf of x, and counts the blocks that a scale cannot hold.

    On a GPU that is one kernel, and nobody waits for it.

    Args:
        x: float [..., K], K a multiple of the block size.
        first_bad: int64 [1] where x is, in which the least is kept of what it holds and what there
            is to note (`first_bad_value` reads it); None does not look for NaN and Inf.
        num_beyond: int64 [1] where x is, to which the number of blocks is added whose largest
            magnitude exceeds the limit, and which hold no NaN; None does not count them.
        limit: The limit, which is rounded to the dtype of x first.
        block_size: Neighbouring values of a block, a power of two.
    """
    if x.is_cuda:
        # Only here: Triton looks for a GPU driver when it is imported.
        from megatron_trace.formats import kernels_checks

        kernels_checks.note_bad_values(x, first_bad, num_beyond, limit, block_size)
        return
    if num_beyond is not None:
        amax = split(x, block_size).abs().amax(-1)
        num_beyond.add_((amax > limit).sum())
    if first_bad is None:
        return
    is_bad = ~x.isfinite().flatten()
    if is_bad.any():
        index = int(is_bad.nonzero()[0, 0])
        value = x.flatten()[index].item()
        kind = 0 if math.isnan(value) else _KINDS.index(value)
        first_bad.clamp_(max=index * len(_KINDS) + kind)


def first_bad_value(noted: int) -> tuple[int, float] | None:
    """Gives which value is the first that is not finite; None if all are.

    Args:
        noted: What `note_bad_values` keeps.

    Returns:
        Its place among the values, counted row by row, and what it is: NaN, Inf or -Inf.
    """
    if noted == ALL_FINITE:
        return None
    index, kind = divmod(noted, len(_KINDS))
    return index, _KINDS[kind]
