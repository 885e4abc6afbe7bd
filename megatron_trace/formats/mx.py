"""The MX formats: small floats in blocks of 32 under power-of-two scales, whatever the small float.

Legend: `...` any leading shape, K values of a row (a multiple of 32), B = K / 32 blocks of a row.
`mxfp4` and `mxfp8` say what the arguments are and which rules hold at the edges; this file holds
what they have in common.
"""

from __future__ import annotations

import torch

from megatron_trace.formats import minifloat, scales_e8m0
from megatron_trace.formats.blocks import fp32_blocks, rounded_like, split
from megatron_trace.formats.checks import (
    require_blocks,
    require_guide,
    require_input,
    require_no_global_scale,
    require_num_bits,
    require_scales,
)
from megatron_trace.formats.constants import MX_BLOCK_SIZE
from megatron_trace.formats.minifloat import Minifloat
from megatron_trace.formats.packing import pack_hint, unpack_hint
from megatron_trace.formats.scales_e8m0 import ScaleRule


def encode(
    element: Minifloat, x: torch.Tensor, global_scale: None, scale_rule: ScaleRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives codes uint8 [..., K] and scale bytes uint8 [..., B]."""
    blocks, scale_bytes, effective = _own_scales(element, x, global_scale, scale_rule)
    return minifloat.nearest_codes(element, blocks, effective).reshape(x.shape), scale_bytes


def own_scale_bytes(
    element: Minifloat, x: torch.Tensor, global_scale: None, scale_rule: ScaleRule
) -> torch.Tensor:
    """Gives scale bytes uint8 [..., B]."""
    require_no_global_scale(global_scale)
    require_input(x, MX_BLOCK_SIZE)
    # Magnitudes and their largest are exact in every dtype.
    amax = split(x, MX_BLOCK_SIZE).abs().amax(-1).to(torch.float32)
    return scales_e8m0.scale_bytes_of(amax, element, scale_rule)


def scale_distance(
    element: Minifloat,
    x: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: None,
    scale_rule: ScaleRule,
) -> torch.Tensor:
    """Gives eighths of a power of two, int16 [..., B]."""
    require_scales(x, scale_bytes, MX_BLOCK_SIZE)
    own = own_scale_bytes(element, x, global_scale, scale_rule)
    return (own.to(torch.int16) - scale_bytes.to(torch.int16)).abs_().mul_(8)


def decode(
    element: Minifloat,
    codes: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Gives dtype [..., K]."""
    require_no_global_scale(global_scale)
    require_blocks(codes, MX_BLOCK_SIZE)
    require_scales(codes, scale_bytes, MX_BLOCK_SIZE)
    scales = scales_e8m0.decode(scale_bytes)
    values = minifloat.decoded(element, split(codes, MX_BLOCK_SIZE), scales)
    return values.reshape(codes.shape).to(dtype)


def rtn(
    element: Minifloat,
    x: torch.Tensor,
    global_scale: None,
    dtype: torch.dtype | None,
    scale_rule: ScaleRule,
) -> torch.Tensor:
    """Gives [..., K] in the dtype of x."""
    blocks, _, effective = _own_scales(element, x, global_scale, scale_rule)
    return rounded_like(minifloat.nearest_values(element, blocks, effective), x, dtype)


def rtn_record(
    element: Minifloat,
    x: torch.Tensor,
    global_scale: None,
    num_bits: int,
    dtype: torch.dtype | None,
    scale_rule: ScaleRule,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives [..., K] in the dtype of x, the hint, and the scale bytes."""
    require_num_bits(num_bits, element.code_bits)
    blocks, scale_bytes, effective = _own_scales(element, x, global_scale, scale_rule)
    codes, values = minifloat.nearest(element, blocks, effective)
    hint = pack_hint(codes.reshape(x.shape), num_bits)
    return rounded_like(values, x, dtype), hint, scale_bytes


def guided_codes(
    element: Minifloat,
    x: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: None,
    num_bits: int,
) -> torch.Tensor:
    """Gives codes uint8 [..., K] with the signs of x."""
    blocks, effective, wanted = _guide(element, x, hint, scale_bytes, global_scale, num_bits)
    codes = minifloat.guided_codes(element, blocks, effective, wanted, num_bits=num_bits)
    return codes.reshape(x.shape)


def guided(
    element: Minifloat,
    x: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: None,
    num_bits: int,
    dtype: torch.dtype | None,
) -> torch.Tensor:
    """Gives [..., K] in the dtype of x."""
    blocks, effective, wanted = _guide(element, x, hint, scale_bytes, global_scale, num_bits)
    values = minifloat.guided_values(element, blocks, effective, wanted, num_bits=num_bits)
    return rounded_like(values, x, dtype)


def _own_scales(
    element: Minifloat, x: torch.Tensor, global_scale: None, scale_rule: ScaleRule
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives blocks FP32 [..., B, 32], scale bytes, effective scales FP32 [..., B]."""
    require_no_global_scale(global_scale)
    require_input(x, MX_BLOCK_SIZE)
    blocks = fp32_blocks(x, MX_BLOCK_SIZE)
    scale_bytes = scales_e8m0.scale_bytes_of(blocks.abs().amax(-1), element, scale_rule)
    return blocks, scale_bytes, scales_e8m0.effective(scale_bytes)


def _guide(
    element: Minifloat,
    x: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: None,
    num_bits: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives blocks, effective scales, and the rollout's bits or codes uint8 [..., K]."""
    require_no_global_scale(global_scale)
    require_guide(
        x, hint, scale_bytes, num_bits, block_size=MX_BLOCK_SIZE, code_bits=element.code_bits
    )
    blocks = fp32_blocks(x, MX_BLOCK_SIZE)
    return blocks, scales_e8m0.effective(scale_bytes), unpack_hint(hint, num_bits)
