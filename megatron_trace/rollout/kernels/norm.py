"""Triton kernel of RMSNorm with (1 + weight) in FP32: one launch where torch takes five.

Legend: N rows of K values, a program each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_MOST_VALUES = 1 << 14


def fits(x: torch.Tensor) -> bool:
    """Whether the kernel takes these rows [..., K]."""
    return x.is_cuda and x.dtype == torch.bfloat16 and 0 < x.shape[-1] <= _MOST_VALUES


def uncentred_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Gives x / sqrt(mean(x^2) + eps) * (1 + weight), computed in FP32.

    Args:
        x: BF16 [..., K].
        weight: BF16 [K], less one.
        eps: Added to the mean square.

    Returns:
        BF16 [..., K].
    """
    num_values = x.shape[-1]
    rows = x.reshape(-1, num_values)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    y = torch.empty_like(rows, memory_format=torch.contiguous_format)
    if len(rows):
        block = triton.next_power_of_2(num_values)
        with torch.cuda.device_of(rows):
            _norm_kernel[(len(rows),)](
                rows,
                weight,
                y,
                rows.stride(0),
                num_values,
                eps,
                BLOCK=block,
                num_warps=min(16, max(1, block // 512)),
            )
    return y.view(x.shape)


@triton.jit(do_not_specialize=["eps"])
def _norm_kernel(x_ptr, weight_ptr, y_ptr, stride, num_values, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_in = column < num_values
    x = tl.load(x_ptr + row * stride + column, mask=is_in, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=is_in, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, axis=0) / num_values + eps)
    y = x * inverse * (1 + weight)
    tl.store(y_ptr + row * num_values + column, y.to(y_ptr.dtype.element_ty), mask=is_in)
