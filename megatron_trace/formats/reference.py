"""NVFP4 in plain torch: the specification that every kernel translates.

Legend: `...` any leading shape, K values of a row (a multiple of 16), B = K / 16 blocks of a row.
A code is an E2M1 value as an integer 0 to 15 (bit 3 is the sign). Scales are decode-side:
value = code * (E4M3 block scale * FP32 global scale), the bracket being the effective scale. A
global scale is one number, or one for each row (token): a tensor whose last axis has length 1 and
whose other axes fit those of x.

Rules at the edges, equal in every implementation:
* The block scale is clamped to [2^-9, 448] before it is rounded to E4M3.
* A block of zeros, or one whose effective scale is 0, has byte 0 and codes 0; a block with byte 0
  decodes to +0, whatever its codes.
* The sign of x is kept in the code, also of -0 and of values that round to 0.
* rtn: ties go to the even code; beyond 6 the code is 7, for Inf and NaN too. The scale byte of a
  block with a NaN is NaN (0x7F), so the whole block decodes to NaN.
* guided: beyond 6 the candidates are 4 and 6. The code of a NaN is that of an Inf, but the value
  that `guided` gives for a NaN is NaN.
"""

from __future__ import annotations

import torch

from megatron_trace.formats import minifloat, scales_e4m3
from megatron_trace.formats.blocks import fp32_blocks, rounded_like, split
from megatron_trace.formats.checks import (
    as_row_scales,
    require_blocks,
    require_guide,
    require_input,
    require_num_bits,
    require_scales,
)
from megatron_trace.formats.constants import BLOCK_SIZE, E2M1_MAX
from megatron_trace.formats.minifloat import E2M1
from megatron_trace.formats.packing import pack_hint, unpack_hint


def encode(
    x: torch.Tensor, global_scale: torch.Tensor | float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives codes and block scales of x, rounded to nearest even.

    Args:
        x: float [..., K].
        global_scale: FP32 0-d tensor or number, or one for each row, decode side.

    Returns:
        codes: uint8 [..., K], 0 to 15.
        scale_bytes: uint8 [..., B], E4M3.

    Raises:
        ValueError: K is not a multiple of 16.

    Source: ModelOpt 0.47 `NVFP4QTensor.quantize`, bit-equal but for the edges named in the tests.
    """
    blocks, scale_bytes, effective = _own_scales(x, global_scale)
    return minifloat.nearest_codes(E2M1, blocks, effective).reshape(x.shape), scale_bytes


def own_scale_bytes(x: torch.Tensor, global_scale: torch.Tensor | float) -> torch.Tensor:
    """Gives the block scales that `encode` gives, without its codes.

    Args:
        x: float [..., K].
        global_scale: FP32 0-d tensor or number, or one for each row, decode side.

    Returns:
        uint8 [..., B], E4M3.

    Raises:
        ValueError: K is not a multiple of 16.
    """
    require_input(x)
    # Magnitudes and their largest are exact in every dtype.
    amax = split(x, BLOCK_SIZE).abs().amax(-1).to(torch.float32)
    scale_bytes, _ = _nearest_scales(amax, as_row_scales(global_scale, x))
    return scale_bytes


def scale_distance(
    x: torch.Tensor, scale_bytes: torch.Tensor, global_scale: torch.Tensor | float
) -> torch.Tensor:
    """Gives how far block scales are from those that x has, in eighths of a power of two.

    Args:
        x: float [..., K].
        scale_bytes: uint8 [..., B], E4M3.
        global_scale: FP32 0-d tensor or number, or one for each row, decode side.

    Returns:
        int16 [..., B], steps of E4M3; 0 only where the bytes are equal.

    Raises:
        ValueError: Shapes disagree, or K is not a multiple of 16.
    """
    require_scales(x, scale_bytes)
    # Positive E4M3 values are ordered like their bytes.
    own = own_scale_bytes(x, global_scale)
    return (own.to(torch.int16) - scale_bytes.to(torch.int16)).abs_()


def decode(
    codes: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor | float,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Gives the values of codes.

    Args:
        codes: uint8 [..., K], 0 to 15.
        scale_bytes: uint8 [..., B], E4M3.
        global_scale: FP32 0-d tensor or number, or one for each row, decode side.
        dtype: dtype of the result; the FP32 products are rounded to it.

    Returns:
        dtype [..., K].

    Raises:
        ValueError: Shapes disagree, or K is not a multiple of 16.
    """
    require_blocks(codes)
    require_scales(codes, scale_bytes)
    effective = scales_e4m3.effective(scale_bytes, as_row_scales(global_scale, scale_bytes))
    values = minifloat.decoded(E2M1, split(codes, BLOCK_SIZE), effective)
    return values.reshape(codes.shape).to(dtype)


def guided_codes(
    x: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor | float,
    *,
    num_bits: int,
) -> torch.Tensor:
    """Gives, of the two codes beside x, the one that the rollout's hint says.

    Args:
        x: float [..., K]; the trainer's values.
        hint: uint8 [..., K * num_bits / 8]; packed lowest bits (1, 2) or codes (4).
        scale_bytes: uint8 [..., B]; the rollout's block scales.
        global_scale: FP32 0-d tensor or number, or one for each row; the rollout's, decode side.
        num_bits: 1, 2 or 4.

    Returns:
        uint8 [..., K], 0 to 15, with the sign of x.

    Raises:
        ValueError: Shapes disagree, K is not a multiple of 16, or num_bits is not 1, 2 or 4.

    Source: TRACE, arXiv 2610.07767; the rules at the edges are ours.
    """
    blocks, effective, wanted = _guide(x, hint, scale_bytes, global_scale, num_bits)
    codes = minifloat.guided_codes(E2M1, blocks, effective, wanted, num_bits=num_bits)
    return codes.reshape(x.shape)


def rtn(
    x: torch.Tensor, global_scale: torch.Tensor | float, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Gives x fake-quantised by rounding to nearest even under its own block scales.

    Args:
        x: float [..., K].
        global_scale: FP32 0-d tensor or number, or one for each row, decode side.
        dtype: dtype in which the dequantised values are rounded; None is that of x.

    Returns:
        [..., K] in the dtype of x: `decode(*encode(x, global_scale), global_scale, dtype)`.

    Raises:
        ValueError: K is not a multiple of 16.
    """
    blocks, _, effective = _own_scales(x, global_scale)
    return rounded_like(minifloat.nearest_values(E2M1, blocks, effective), x, dtype)


def rtn_record(
    x: torch.Tensor,
    global_scale: torch.Tensor | float,
    *,
    num_bits: int,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives what `rtn` gives, with the hint and the block scales that it used.

    Args:
        x: float [..., K].
        global_scale: FP32 0-d tensor or number, or one for each row, decode side.
        num_bits: 1, 2 (lowest bits) or 4 (codes) per value of the hint.
        dtype: dtype in which the dequantised values are rounded; None is that of x.

    Returns:
        y: [..., K] in the dtype of x.
        hint: uint8 [..., K * num_bits / 8].
        scale_bytes: uint8 [..., B], E4M3.

    Raises:
        ValueError: K is not a multiple of 16, or num_bits is not 1, 2 or 4.
    """
    require_num_bits(num_bits)
    blocks, scale_bytes, effective = _own_scales(x, global_scale)
    codes, values = minifloat.nearest(E2M1, blocks, effective)
    hint = pack_hint(codes.reshape(x.shape), num_bits)
    return rounded_like(values, x, dtype), hint, scale_bytes


def guided(
    x: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor | float,
    *,
    num_bits: int,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Gives x fake-quantised to the codes that the rollout's hint says.

    Args:
        x: float [..., K]; the trainer's values.
        hint: uint8 [..., K * num_bits / 8]; packed lowest bits (1, 2) or codes (4).
        scale_bytes: uint8 [..., B]; the rollout's block scales.
        global_scale: FP32 0-d tensor or number, or one for each row; the rollout's, decode side.
        num_bits: 1, 2 or 4.
        dtype: dtype in which the dequantised values are rounded; None is that of x.

    Returns:
        [..., K] in the dtype of x: the decoded `guided_codes`, but NaN where x is NaN.

    Raises:
        ValueError: Shapes disagree, K is not a multiple of 16, or num_bits is not 1, 2 or 4.
    """
    blocks, effective, wanted = _guide(x, hint, scale_bytes, global_scale, num_bits)
    values = minifloat.guided_values(E2M1, blocks, effective, wanted, num_bits=num_bits)
    return rounded_like(values, x, dtype)


def _own_scales(
    x: torch.Tensor, global_scale: torch.Tensor | float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives blocks FP32 [..., B, 16], scale bytes, effective scales FP32 [..., B]."""
    require_input(x)
    scale = as_row_scales(global_scale, x)
    blocks = fp32_blocks(x, BLOCK_SIZE)
    amax = blocks.abs().amax(-1)
    return blocks, *_nearest_scales(amax, scale)


def _nearest_scales(amax: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return scales_e4m3.nearest(amax / (scale * E2M1_MAX), amax, scale)


def _guide(
    x: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor | float,
    num_bits: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives blocks, the rollout's effective scales, and its bits or codes uint8 [..., K]."""
    require_guide(x, hint, scale_bytes, num_bits)
    effective = scales_e4m3.effective(scale_bytes, as_row_scales(global_scale, scale_bytes))
    return fp32_blocks(x, BLOCK_SIZE), effective, unpack_hint(hint, num_bits)
