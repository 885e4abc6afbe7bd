"""GEMM operands from NVFP4 codes: where the global scales are applied.

Legend: `...` any leading shape, K values along the contraction, B = K / 16 blocks, N outputs.

A code times its block scale has 6 significant bits and is exact in BF16; times an FP32 global scale
it is rounded, unless the global scale is a power of two. Hence two ways:

* `operand`: the global scale is part of the BF16 operand, as in fake quantisation. One rounding of
  every operand; nothing to do after the product.
* `accumulator`: the operand is code * block scale, exact, and g_x * g_w multiplies the FP32
  accumulator: what FP4 tensor cores do (`alpha`).

Both sides of TRACE must do the same. docs/formats.md has the errors of each and what we recommend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from megatron_trace.formats.checks import as_row_scales
from megatron_trace.formats.reference import decode

GlobalScaleAt = Literal["operand", "accumulator"]


@dataclass(frozen=True)
class Operand:
    """One operand of a product.

    Attributes:
        values: [..., K] in the dtype of the GEMM.
        factor: FP32 0-d or [..., 1]; what the accumulator must still be multiplied by.
    """

    values: torch.Tensor
    factor: torch.Tensor


def operand(
    codes: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor | float,
    *,
    scale_at: GlobalScaleAt,
    dtype: torch.dtype = torch.bfloat16,
) -> Operand:
    """Gives an operand of codes.

    Args:
        codes: uint8 [..., K], 0 to 15.
        scale_bytes: uint8 [..., B], E4M3.
        global_scale: FP32 0-d tensor or number, or one for each row, decode side.
        scale_at: Where the global scale is applied.
        dtype: dtype of the GEMM.

    Returns:
        The operand; its factor is 1 where the global scale is in the values.

    Raises:
        ValueError: Shapes disagree, or `scale_at` is unknown.
    """
    if scale_at not in get_args(GlobalScaleAt):
        known = " or ".join(get_args(GlobalScaleAt))
        raise ValueError(f"scale_at must be {known}; got {scale_at!r}")
    scale = as_row_scales(global_scale, scale_bytes)
    if scale_at == "operand":
        return Operand(decode(codes, scale_bytes, scale, dtype), torch.ones_like(scale))
    return Operand(decode(codes, scale_bytes, 1.0, dtype), scale)


def product(x: Operand, w: Operand, *, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Gives x times w transposed: FP32 sums, times the factors, rounded once.

    The specification of what a GEMM with an FP32 accumulator and an epilogue does; in FP32, where
    products of BF16 operands are exact.

    Args:
        x: Operand [..., K].
        w: Operand [N, K].
        dtype: dtype of the result.

    Returns:
        dtype [..., N].
    """
    accumulator = x.values.to(torch.float32) @ w.values.to(torch.float32).T
    w_factor = w.factor if w.factor.dim() == 0 else w.factor.squeeze(-1)
    return (accumulator * (x.factor * w_factor)).to(dtype)
