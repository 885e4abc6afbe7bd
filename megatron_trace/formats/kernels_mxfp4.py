"""Triton kernels of MXFP4: the same names, arguments and bits as `mxfp4`."""

from __future__ import annotations

from typing import get_args

import torch

from megatron_trace.formats import kernels_whole as whole
from megatron_trace.formats.kernels_inputs import Launch
from megatron_trace.formats.number_format import MXFP4
from megatron_trace.formats.scales_e8m0 import DEFAULT_RULE, ScaleRule


def rtn(
    x: torch.Tensor,
    global_scale: None = None,
    *,
    dtype: torch.dtype | None = None,
    scale_rule: ScaleRule = DEFAULT_RULE,
    launch: Launch | None = None,
) -> torch.Tensor:
    """Gives `mxfp4.rtn`.

    Args:
        x: float [..., K] on a GPU.
        global_scale: None.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
        scale_rule: How the scale follows from the largest magnitude of a block.
        launch: Tiles and warps; None is what was fastest.

    Returns:
        [..., K] in the dtype of x.

    Raises:
        ValueError: K is not a multiple of 32, the rule is unknown, or x is not on a GPU.
    """
    number_format = whole.with_rule(MXFP4, scale_rule, get_args(ScaleRule))
    return whole.rtn(x, global_scale, number_format, dtype, launch)


def rtn_record(
    x: torch.Tensor,
    global_scale: None = None,
    *,
    num_bits: int,
    dtype: torch.dtype | None = None,
    scale_rule: ScaleRule = DEFAULT_RULE,
    launch: Launch | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives `mxfp4.rtn_record`.

    Args:
        x: float [..., K] on a GPU.
        global_scale: None.
        num_bits: 1, 2 or 4.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
        scale_rule: How the scale follows from the largest magnitude of a block.
        launch: Tiles and warps; None is what was fastest.

    Returns:
        y: [..., K] in the dtype of x.
        hint: uint8 [..., K * num_bits / 8].
        scale_bytes: uint8 [..., B], E8M0.

    Raises:
        ValueError: K is not a multiple of 32, num_bits is not 1, 2 or 4, the rule is unknown, or x
            is not on a GPU.
    """
    number_format = whole.with_rule(MXFP4, scale_rule, get_args(ScaleRule))
    return whole.rtn_record(x, global_scale, number_format, dtype, launch, num_bits=num_bits)


def guided(
    x: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: None = None,
    *,
    num_bits: int,
    dtype: torch.dtype | None = None,
    launch: Launch | None = None,
) -> torch.Tensor:
    """Gives `mxfp4.guided`.

    Args:
        x: float [..., K] on a GPU; the trainer's values.
        hint: uint8 [..., K * num_bits / 8].
        scale_bytes: uint8 [..., B]; the rollout's block scales.
        global_scale: None.
        num_bits: 1, 2 or 4.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
        launch: Tiles and warps; None is what was fastest.

    Returns:
        [..., K] in the dtype of x.

    Raises:
        ValueError: Shapes disagree, K is not a multiple of 32, num_bits is not 1, 2 or 4, or a
            tensor is not on the GPU of x.
    """
    return whole.guided(x, hint, scale_bytes, global_scale, MXFP4, dtype, launch, num_bits=num_bits)
