"""Rows of values as tokens have them, and the same with noise, as a trainer computes them.

Legend: R rows, K values of a row.
"""

from __future__ import annotations

import torch


def rows_of(num_values: int, *, seed: int = 0) -> torch.Tensor:
    """Gives FP32 [R, K]: Gaussian values, each row with a size of its own; fewer of long rows."""
    generator = torch.Generator().manual_seed(seed)
    rows = 4096 if num_values <= 128 else 512
    sizes = torch.exp(0.5 * torch.randn(rows, 1, generator=generator))
    return torch.randn(rows, num_values, generator=generator) * sizes


def with_noise(x: torch.Tensor, relative: float) -> torch.Tensor:
    """Gives x with Gaussian noise of a relative size on every value; the same on every call."""
    generator = torch.Generator().manual_seed(99)
    return x * (1 + relative * torch.randn(x.shape, generator=generator))
