"""Rows cut into blocks, and values put back."""

from __future__ import annotations

import torch


def split(tensor: torch.Tensor, block_size: int) -> torch.Tensor:
    """Gives [..., K] as [..., K / block_size, block_size]."""
    return tensor.reshape(*tensor.shape[:-1], tensor.shape[-1] // block_size, block_size)


def fp32_blocks(x: torch.Tensor, block_size: int) -> torch.Tensor:
    """Gives [..., K] as FP32 [..., K / block_size, block_size]."""
    return split(x.to(torch.float32), block_size)


def rounded_like(
    values: torch.Tensor, x: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Gives values in the shape and dtype of x, rounded to dtype first if there is one."""
    return values.reshape(x.shape).to(dtype or x.dtype).to(x.dtype)
