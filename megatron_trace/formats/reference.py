"""NVFP4 in plain torch: the specification that every kernel translates.

Legend: `...` any leading shape, K values of a row (a multiple of 16), B = K / 16 blocks of a row.
A code is an E2M1 value as an integer 0 to 15 (bit 3 is the sign). A packed byte holds two codes,
the even column in its low nibble. Scales are decode-side:
value = code * (E4M3 block scale * FP32 global scale), the bracket being the effective scale.

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

from megatron_trace.formats.checks import (
    as_fp32,
    require_blocks,
    require_guide,
    require_input,
    require_multiple,
    require_num_bits,
    require_scales,
)
from megatron_trace.formats.constants import (
    BLOCK_SIZE,
    E2M1_MAX,
    E2M1_VALUES,
    E4M3_MAX,
    E4M3_MIN_SUBNORMAL,
)

# FP32 bit patterns. Adding 1.5 * 2^22 * p to a value in [p, 2p) leaves a multiple of p / 2.
_EXPONENT_MASK = 0x7F800000
_ONE_BITS = 127 << 23
_HALF = 1 << 23
_BIAS_BITS = (22 << 23) | (1 << 22)

# Between the two largest values, of which guided may take either for whatever lies beyond.
_BEYOND_4 = 5.0


def global_scale_from_amax(amax: torch.Tensor | float) -> torch.Tensor:
    """Gives the global scale with which `amax` takes the largest block scale and the largest code.

    Args:
        amax: 0-d tensor or number; largest magnitude of the tensor.

    Returns:
        FP32 0-d tensor, amax / (6 * 448).

    Source: method.md section 5, vanilla NVFP4; ModelOpt 0.47 `get_weights_scaling_factor_2`.
    """
    return torch.as_tensor(amax, dtype=torch.float32) / (E2M1_MAX * E4M3_MAX)


def encode(
    x: torch.Tensor, global_scale: torch.Tensor | float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives codes and block scales of x, rounded to nearest even.

    Args:
        x: float [..., K].
        global_scale: FP32 0-d tensor or number, decode side.

    Returns:
        codes: uint8 [..., K], 0 to 15.
        scale_bytes: uint8 [..., B], E4M3.

    Raises:
        ValueError: K is not a multiple of 16.

    Source: ModelOpt 0.47 `NVFP4QTensor.quantize`, bit-equal but for the edges named in the tests.
    """
    blocks, a, scale_bytes, effective = _normalised(x, global_scale)
    biased, bias = _round_to_ladder(a.nan_to_num_(nan=E2M1_MAX))
    return _nearest_codes(blocks, biased, bias, effective).reshape(x.shape), scale_bytes


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
        global_scale: FP32 0-d tensor or number, decode side.
        dtype: dtype of the result; the FP32 products are rounded to it.

    Returns:
        dtype [..., K].

    Raises:
        ValueError: Shapes disagree, or K is not a multiple of 16.
    """
    require_blocks(codes)
    require_scales(codes, scale_bytes)
    effective = _effective_scale(scale_bytes, global_scale)
    ladder = torch.tensor(E2M1_VALUES, device=codes.device)
    values = torch.cat((ladder, -ladder))[_split(codes).to(torch.int32)] * effective.unsqueeze(-1)
    values.masked_fill_((effective == 0).unsqueeze(-1), 0.0)
    return values.reshape(codes.shape).to(dtype)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Gives two codes in a byte, the even column in the low nibble.

    Args:
        codes: uint8 [..., K], K even.

    Returns:
        uint8 [..., K / 2].
    """
    require_multiple(codes, 2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """Gives the codes of packed bytes.

    Args:
        packed: uint8 [..., K / 2].

    Returns:
        uint8 [..., K].
    """
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def pack_bits(codes: torch.Tensor) -> torch.Tensor:
    """Gives the mantissa bits of codes, eight in a byte, the first column in bit 0.

    Args:
        codes: uint8 [..., K], K % 8 == 0; only bit 0 counts.

    Returns:
        uint8 [..., K / 8].
    """
    require_multiple(codes, 8)
    # One product moves bit 0 of byte j to bit 56 + j; partial products never meet, so none carries.
    words = (codes & 1).reshape(-1).view(torch.int64)
    packed = ((words * 0x0102040810204080) >> 56).to(torch.uint8)
    return packed.reshape(*codes.shape[:-1], codes.shape[-1] // 8)


def unpack_bits(bits: torch.Tensor) -> torch.Tensor:
    """Gives the bits of packed bytes.

    Args:
        bits: uint8 [..., K / 8].

    Returns:
        uint8 [..., K], 0 or 1.
    """
    # Byte j keeps bit j of the copied byte; adding 0x7F carries it into bit 7, wherever it was.
    copies = bits.reshape(-1).to(torch.int64) * 0x0101010101010101
    copies = copies.bitwise_and_(0x8040201008040201 - (1 << 64))
    unpacked = copies.add_(0x7F7F7F7F7F7F7F7F).bitwise_right_shift_(7)
    unpacked = unpacked.bitwise_and_(0x0101010101010101).view(torch.uint8)
    return unpacked.reshape(*bits.shape[:-1], bits.shape[-1] * 8)


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
        hint: uint8 [..., K * num_bits / 8]; packed mantissa bits (1) or packed codes (4).
        scale_bytes: uint8 [..., B]; the rollout's block scales.
        global_scale: FP32 0-d tensor or number; the rollout's global scale, decode side.
        num_bits: 1 or 4.

    Returns:
        uint8 [..., K], 0 to 15, with the sign of x.

    Raises:
        ValueError: Shapes disagree, K is not a multiple of 16, or num_bits is not 1 or 4.

    Source: method.md section 3.
    """
    require_guide(x, hint, scale_bytes, num_bits)
    blocks = _fp32_blocks(x)
    effective = _effective_scale(scale_bytes, global_scale)
    a = (blocks.abs() / effective.unsqueeze(-1)).clamp_(max=_BEYOND_4).nan_to_num_(nan=_BEYOND_4)
    steps, step = _guide(a, blocks, hint, num_bits)
    index = steps.to(torch.int32) + _first_index(step.view(torch.int32))
    return _signed_codes(index, blocks, effective).reshape(x.shape)


def rtn(
    x: torch.Tensor, global_scale: torch.Tensor | float, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Gives x fake-quantised by rounding to nearest even under its own block scales.

    Args:
        x: float [..., K].
        global_scale: FP32 0-d tensor or number, decode side.
        dtype: dtype in which the dequantised values are rounded; None is that of x.

    Returns:
        [..., K] in the dtype of x: `decode(*encode(x, global_scale), global_scale, dtype)`.

    Raises:
        ValueError: K is not a multiple of 16.
    """
    blocks, a, _, effective = _normalised(x, global_scale)
    biased, bias = _round_to_ladder(a)
    return _dequantised(x, blocks, biased.sub_(bias.view(torch.float32)), effective, dtype)


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
        global_scale: FP32 0-d tensor or number, decode side.
        num_bits: 1 (mantissa bits) or 4 (codes) per value of the hint.
        dtype: dtype in which the dequantised values are rounded; None is that of x.

    Returns:
        y: [..., K] in the dtype of x.
        hint: uint8 [..., K * num_bits / 8].
        scale_bytes: uint8 [..., B], E4M3.

    Raises:
        ValueError: K is not a multiple of 16, or num_bits is not 1 or 4.
    """
    require_num_bits(num_bits)
    blocks, a, scale_bytes, effective = _normalised(x, global_scale)
    biased, bias = _round_to_ladder(a.nan_to_num_(nan=E2M1_MAX))
    codes = _nearest_codes(blocks, biased, bias, effective).reshape(x.shape)
    y = _dequantised(x, blocks, biased.sub_(bias.view(torch.float32)), effective, dtype)
    return y, pack_bits(codes) if num_bits == 1 else pack_codes(codes), scale_bytes


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
        hint: uint8 [..., K * num_bits / 8]; packed mantissa bits (1) or packed codes (4).
        scale_bytes: uint8 [..., B]; the rollout's block scales.
        global_scale: FP32 0-d tensor or number; the rollout's global scale, decode side.
        num_bits: 1 or 4.
        dtype: dtype in which the dequantised values are rounded; None is that of x.

    Returns:
        [..., K] in the dtype of x: the decoded `guided_codes`, but NaN where x is NaN.

    Raises:
        ValueError: Shapes disagree, K is not a multiple of 16, or num_bits is not 1 or 4.
    """
    require_guide(x, hint, scale_bytes, num_bits)
    blocks = _fp32_blocks(x)
    effective = _effective_scale(scale_bytes, global_scale)
    a = (blocks.abs() / effective.unsqueeze(-1)).clamp_(max=_BEYOND_4)
    steps, step = _guide(a, blocks, hint, num_bits)
    return _dequantised(x, blocks, steps.mul_(step), effective, dtype)


def _normalised(
    x: torch.Tensor, global_scale: torch.Tensor | float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives x under its own block scales.

    Returns:
        blocks: FP32 [..., B, 16], x.
        a: FP32 [..., B, 16], |x| / effective scale, at most 6; NaN in blocks of zeros and of NaN.
        scale_bytes: uint8 [..., B].
        effective: FP32 [..., B]; 0 where the byte is 0.
    """
    require_input(x)
    blocks = _fp32_blocks(x)
    magnitudes = blocks.abs()
    scale = as_fp32(global_scale, x)
    amax = magnitudes.amax(-1)
    block_scales = (amax / (scale * E2M1_MAX)).clamp_(E4M3_MIN_SUBNORMAL, E4M3_MAX)
    block_scales = block_scales.to(torch.float8_e4m3fn)
    effective = block_scales.to(torch.float32) * scale
    zero = (amax == 0) | (effective == 0)
    effective.masked_fill_(zero, 0.0)
    # A NaN made by a division may carry a sign, which depends on the processor.
    scale_bytes = (block_scales.view(torch.uint8) & 0x7F).masked_fill_(zero, 0)
    a = magnitudes.div_(effective.unsqueeze(-1)).clamp_(max=E2M1_MAX)
    return blocks, a, scale_bytes, effective


def _round_to_ladder(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives a (overwritten) plus a bias that rounds it to E2M1, and the bias as int32 bits.

    The FP32 addition itself rounds to nearest even, and what it rounds to is the ladder's spacing:
    .5 below 2, 1 below 4, 2 from 4 on. Even multiples of the spacing are the even codes.
    """
    bias = (a.view(torch.int32) & _EXPONENT_MASK).clamp_(min=_ONE_BITS).add_(_BIAS_BITS)
    return a.add_(bias.view(torch.float32)), bias


def _nearest_codes(
    blocks: torch.Tensor, biased: torch.Tensor, bias: torch.Tensor, effective: torch.Tensor
) -> torch.Tensor:
    """Gives codes uint8 [..., B, 16] from what `_round_to_ladder` gives."""
    # The sum's bits exceed the bias's by the steps of p / 2 from code 0, 2 or 4 for p = 1, 2 or 4.
    first_index = (bias - (_BIAS_BITS + _ONE_BITS)) >> 22
    return _signed_codes(first_index.add_(biased.view(torch.int32)).sub_(bias), blocks, effective)


def _signed_codes(
    index: torch.Tensor, blocks: torch.Tensor, effective: torch.Tensor
) -> torch.Tensor:
    """Gives codes uint8 from magnitude codes int32 (overwritten), 0 where the scale is 0."""
    codes = index.add_((blocks.view(torch.int32) >> 28).bitwise_and_(8)).to(torch.uint8)
    return codes.masked_fill_((effective == 0).unsqueeze(-1), 0)


def _guide(
    a: torch.Tensor, blocks: torch.Tensor, hint: torch.Tensor, num_bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives the chosen candidate as a multiple of the ladder's spacing, and that spacing.

    Args:
        a: FP32 [..., B, 16], |x| / effective, at most 5; overwritten.
        blocks: FP32 [..., B, 16], x.
        hint: uint8 [..., K * num_bits / 8].
        num_bits: 1 or 4.
    """
    step_bits = (a.view(torch.int32) & _EXPONENT_MASK).clamp_(min=_ONE_BITS).sub_(_HALF)
    step = step_bits.view(torch.float32)
    position = a.div_(step)
    steps = position.floor()
    between = position != steps
    if num_bits == 1:
        # Steps count from an even code, so their parity is the mantissa bit.
        wanted = unpack_bits(hint).reshape(a.shape)
        upper = (steps.to(torch.uint8) ^ wanted).bitwise_and_(1).logical_and_(between)
    else:
        wanted = unpack_codes(hint).reshape(a.shape)
        same_sign = (wanted >= 8) == torch.signbit(blocks)
        index = steps.to(torch.int32) + _first_index(step_bits)
        upper = ((wanted & 7) > index).logical_and_(same_sign).logical_and_(between)
    return steps.add_(upper), step


def _first_index(step_bits: torch.Tensor) -> torch.Tensor:
    """Gives the code of 0 steps, 0, 2 or 4, where the FP32 bits of a step say .5, 1 or 2."""
    return (step_bits >> 22) - 252


def _dequantised(
    x: torch.Tensor,
    blocks: torch.Tensor,
    ladder_values: torch.Tensor,
    effective: torch.Tensor,
    dtype: torch.dtype | None,
) -> torch.Tensor:
    """Gives sign(x) * ladder_values * effective in the shape and dtype of x, rounded to dtype."""
    values = ladder_values.copysign_(blocks).mul_(effective.unsqueeze(-1))
    values.masked_fill_((effective == 0).unsqueeze(-1), 0.0)
    return values.reshape(x.shape).to(dtype or x.dtype).to(x.dtype)


def _effective_scale(scale_bytes: torch.Tensor, global_scale: torch.Tensor | float) -> torch.Tensor:
    """Gives FP32 [..., B], 0 where the byte is 0."""
    block_scales = scale_bytes.view(torch.float8_e4m3fn).to(torch.float32)
    effective = block_scales * as_fp32(global_scale, scale_bytes)
    return effective.masked_fill_(scale_bytes == 0, 0.0)


def _split(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(*tensor.shape[:-1], tensor.shape[-1] // BLOCK_SIZE, BLOCK_SIZE)


def _fp32_blocks(x: torch.Tensor) -> torch.Tensor:
    return _split(x.to(torch.float32))
