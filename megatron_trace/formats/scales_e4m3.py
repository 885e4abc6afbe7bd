"""E4M3 block scales under an FP32 global scale, as NVFP4 has them.

Legend: `...` any leading shape, B blocks of a row. Scales are decode-side; the effective scale of a
block is (E4M3 block scale * FP32 global scale), rounded to FP32.
"""

from __future__ import annotations

import torch

from megatron_trace.formats.constants import E2M1_MAX, E4M3_MAX, E4M3_MIN_SUBNORMAL

_FRACTION_MASK = (1 << 23) - 1
_EXPONENT_MASK = 0x7F800000


def global_scale_from_amax(
    amax: torch.Tensor | float, power_of_two: bool = False, *, e4m3_max: float = E4M3_MAX
) -> torch.Tensor:
    """Gives the global scale with which `amax` takes the largest block scale and the largest code.

    Args:
        amax: FP32 of any shape, or a number; largest magnitudes of the tensor, or of its rows.
        power_of_two: Whether to round up to a power of two (to 2^-126 at least, if not 0), with
            which code * block scale * global scale is exact in BF16. Rounding down would saturate.
        e4m3_max: Largest block scale to be used; 256 for 4over6.

    Returns:
        FP32 in the shape of amax, amax / (6 * e4m3_max).

    Source: ModelOpt 0.47 `get_weights_scaling_factor_2`.
    """
    amax = torch.as_tensor(amax, dtype=torch.float32)
    # A tensor, because a GPU multiplies by the rounded reciprocal of a number.
    scale = amax / torch.full((), E2M1_MAX * e4m3_max, device=amax.device)
    if not power_of_two:
        return scale
    rounded_up = ((scale.view(torch.int32) + _FRACTION_MASK) & _EXPONENT_MASK).view(torch.float32)
    return rounded_up.masked_fill(scale.isnan(), torch.nan)


def nearest(
    quotients: torch.Tensor, amax: torch.Tensor, global_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives block scales rounded to E4M3, and the scales that codes are then multiplied by.

    Args:
        quotients: FP32 [..., B]; what the block scales should be. Overwritten.
        amax: FP32 [..., B]; largest magnitudes of the blocks.
        global_scale: FP32 0-d or [..., 1].

    Returns:
        scale_bytes: uint8 [..., B]; 0 for blocks of zeros and where the effective scale is 0.
        effective: FP32 [..., B]; 0 where the byte is 0.
    """
    block_scales = quotients.clamp_(E4M3_MIN_SUBNORMAL, E4M3_MAX).to(torch.float8_e4m3fn)
    effective_scales = block_scales.to(torch.float32) * global_scale
    zero = (amax == 0) | (effective_scales == 0)
    # A NaN made by a division may carry a sign, which depends on the processor.
    scale_bytes = (block_scales.view(torch.uint8) & 0x7F).masked_fill_(zero, 0)
    return scale_bytes, effective_scales.masked_fill_(zero, 0.0)


def effective(scale_bytes: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """Gives the scales that codes are multiplied by.

    Args:
        scale_bytes: uint8 [..., B], E4M3.
        global_scale: FP32 0-d or [..., 1].

    Returns:
        FP32 [..., B]; 0 where the byte is 0.
    """
    block_scales = scale_bytes.view(torch.float8_e4m3fn).to(torch.float32)
    return (block_scales * global_scale).masked_fill_(scale_bytes == 0, 0.0)
