"""Triton kernels of rtn, rtn_record and guided: the same names, arguments and bits as `reference`.

`kernels_octets` takes every dtype and global scale, and Triton's interpreter runs it. BF16 under
usual global scales takes `kernels_bf16`, for speed.
"""

from __future__ import annotations

import torch

from megatron_trace.formats import kernels_whole as whole
from megatron_trace.formats.kernels_inputs import Launch
from megatron_trace.formats.number_format import NVFP4


def rtn(
    x: torch.Tensor,
    global_scale: torch.Tensor | float,
    *,
    dtype: torch.dtype | None = None,
    launch: Launch | None = None,
) -> torch.Tensor:
    """Gives `reference.rtn`.

    Args:
        x: float [..., K] on a GPU.
        global_scale: FP32 0-d tensor or number, or one for each row, decode side.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
        launch: Tiles and warps; None is what was fastest.

    Returns:
        [..., K] in the dtype of x.

    Raises:
        ValueError: K is not a multiple of 16, or x is not on a GPU.
    """
    return whole.rtn(x, global_scale, NVFP4, dtype, launch)


def rtn_record(
    x: torch.Tensor,
    global_scale: torch.Tensor | float,
    *,
    num_bits: int,
    dtype: torch.dtype | None = None,
    launch: Launch | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives `reference.rtn_record`.

    Args:
        x: float [..., K] on a GPU.
        global_scale: FP32 0-d tensor or number, or one for each row, decode side.
        num_bits: 1, 2 (lowest bits) or 4 (codes) per value of the hint.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
        launch: Tiles and warps; None is what was fastest.

    Returns:
        y: [..., K] in the dtype of x.
        hint: uint8 [..., K * num_bits / 8].
        scale_bytes: uint8 [..., B], E4M3.

    Raises:
        ValueError: K is not a multiple of 16, num_bits is not 1, 2 or 4, or x is not on a GPU.
    """
    return whole.rtn_record(x, global_scale, NVFP4, dtype, launch, num_bits=num_bits)


def guided(
    x: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor | float,
    *,
    num_bits: int,
    dtype: torch.dtype | None = None,
    launch: Launch | None = None,
) -> torch.Tensor:
    """Gives `reference.guided`.

    Args:
        x: float [..., K] on a GPU; the trainer's values.
        hint: uint8 [..., K * num_bits / 8]; packed lowest bits (1, 2) or codes (4).
        scale_bytes: uint8 [..., B]; the rollout's block scales.
        global_scale: FP32 0-d tensor or number, or one for each row; the rollout's, decode side.
        num_bits: 1, 2 or 4.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
        launch: Tiles and warps; None is what was fastest.

    Returns:
        [..., K] in the dtype of x.

    Raises:
        ValueError: Shapes disagree, K is not a multiple of 16, num_bits is not 1, 2 or 4, or a
            tensor is not on the GPU of x.
    """
    return whole.guided(x, hint, scale_bytes, global_scale, NVFP4, dtype, launch, num_bits=num_bits)
