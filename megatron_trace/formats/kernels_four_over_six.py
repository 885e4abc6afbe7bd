"""Triton kernels of 4over6: the same names, arguments and bits as `four_over_six`.

Guided is that of NVFP4, since the scale byte says what was chosen.
"""

from __future__ import annotations

from typing import get_args

import torch

from megatron_trace.formats import kernels_whole as whole
from megatron_trace.formats.four_over_six import ErrorRule
from megatron_trace.formats.kernels import guided
from megatron_trace.formats.kernels_inputs import Launch, chosen
from megatron_trace.formats.number_format import NVFP4_4OVER6

__all__ = ["guided", "rtn", "rtn_record"]

# The fastest on an H200, for many values of BF16: docs/measurements.md.
_LAUNCH = Launch(tiles=4, num_warps=1)


def rtn(
    x: torch.Tensor,
    global_scale: torch.Tensor | float,
    *,
    dtype: torch.dtype | None = None,
    error: ErrorRule = "mse",
    launch: Launch | None = None,
) -> torch.Tensor:
    """Gives `four_over_six.rtn`.

    Args:
        x: float [..., K] on a GPU.
        global_scale: FP32 0-d tensor or number, or one for each row, decode side.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
        error: What decides between 4 and 6.
        launch: Tiles and warps; None is what was fastest.

    Returns:
        [..., K] in the dtype of x.

    Raises:
        ValueError: K is not a multiple of 16, the error rule is unknown, or x is not on a GPU.
    """
    launch = launch or chosen(x, _LAUNCH)
    number_format = whole.with_rule(NVFP4_4OVER6, error, get_args(ErrorRule))
    return whole.rtn(x, global_scale, number_format, dtype, launch)


def rtn_record(
    x: torch.Tensor,
    global_scale: torch.Tensor | float,
    *,
    num_bits: int,
    dtype: torch.dtype | None = None,
    error: ErrorRule = "mse",
    launch: Launch | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives `four_over_six.rtn_record`.

    Args:
        x: float [..., K] on a GPU.
        global_scale: FP32 0-d tensor or number, or one for each row, decode side.
        num_bits: 1, 2 (lowest bits) or 4 (codes) per value of the hint.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
        error: What decides between 4 and 6.
        launch: Tiles and warps; None is what was fastest.

    Returns:
        y: [..., K] in the dtype of x.
        hint: uint8 [..., K * num_bits / 8].
        scale_bytes: uint8 [..., B], E4M3.

    Raises:
        ValueError: K is not a multiple of 16, num_bits is not 1, 2 or 4, the error rule is unknown,
            or x is not on a GPU.
    """
    launch = launch or chosen(x, _LAUNCH)
    number_format = whole.with_rule(NVFP4_4OVER6, error, get_args(ErrorRule))
    return whole.rtn_record(x, global_scale, number_format, dtype, launch, num_bits=num_bits)
