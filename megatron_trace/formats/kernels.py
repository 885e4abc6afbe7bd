"""Triton kernels of rtn, rtn_record and guided: the same names, arguments and bits as `reference`.

Legend: an octet is 8 neighbouring values, half a block. A tile is [T, 8], T octets, one for each
thread: 16 bytes of BF16, loaded and stored at once, whose hint bits are packed without leaving the
thread. A program handles several tiles.

There are two paths. The one in this file takes every dtype and global scale, and Triton's
interpreter runs it. BF16 under a usual global scale takes that of `kernels_bf16`, for speed.

How the rules of `reference` are met here:
* Rounding to the ladder is one addition of a bias, as there. The biased sum holds the parity of the
  code in its lowest bit.
* Divisions are correctly rounded.
* Casts to and from E4M3 are arithmetic, so that Triton's interpreter agrees: its own cast loses the
  carry of the mantissa, and does not know NaN. Its cast to BF16 truncates, unlike that of a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from megatron_trace.formats import kernels_bf16 as bf16
from megatron_trace.formats.checks import as_fp32, require_guide, require_input, require_num_bits
from megatron_trace.formats.constants import BLOCK_SIZE

_EXPONENT_MASK: tl.constexpr = tl.constexpr(0x7F800000)
_SIGN_MASK: tl.constexpr = tl.constexpr(-(1 << 31))
# An FP32 power of two p, plus 1.5 * 2^22 * p, rounds to multiples of p / 2; 2^20, of p / 8.
_LADDER_BIAS: tl.constexpr = tl.constexpr(1.5 * 2.0**22)
_LADDER_BIAS_BITS: tl.constexpr = tl.constexpr((22 << 23) | (1 << 22))
_E4M3_BIAS: tl.constexpr = tl.constexpr(1.5 * 2.0**20)
_E4M3_BIAS_BITS: tl.constexpr = tl.constexpr((20 << 23) | (1 << 22))


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched.

    Attributes:
        tiles: Tiles of a program.
        num_warps: Warps of a program.
    """

    tiles: int
    num_warps: int


# Measured on an H200: docs/measurements.md.
RTN_LAUNCH = Launch(tiles=2, num_warps=4)
RECORD_LAUNCH = Launch(tiles=4, num_warps=2)
GUIDED_LAUNCH = Launch(tiles=2, num_warps=4)


def rtn(
    x: torch.Tensor,
    global_scale: torch.Tensor | float,
    *,
    dtype: torch.dtype | None = None,
    launch: Launch = RTN_LAUNCH,
) -> torch.Tensor:
    """Gives `reference.rtn`.

    Args:
        x: float [..., K] on a GPU.
        global_scale: FP32 0-d tensor or number, decode side.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
        launch: Tile and warps.

    Returns:
        [..., K] in the dtype of x.

    Raises:
        ValueError: K is not a multiple of 16, or x is not on a GPU.
    """
    x, scale = _require_input(x, global_scale)
    y = torch.empty_like(x)
    _launch(_rtn_kernel, x, dtype, launch, x, y, scale)
    return y


def rtn_record(
    x: torch.Tensor,
    global_scale: torch.Tensor | float,
    *,
    num_bits: int,
    dtype: torch.dtype | None = None,
    launch: Launch = RECORD_LAUNCH,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives `reference.rtn_record`.

    Args:
        x: float [..., K] on a GPU.
        global_scale: FP32 0-d tensor or number, decode side.
        num_bits: 1 (mantissa bits) or 4 (codes) per value of the hint.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
        launch: Tile and warps.

    Returns:
        y: [..., K] in the dtype of x.
        hint: uint8 [..., K * num_bits / 8].
        scale_bytes: uint8 [..., B], E4M3.

    Raises:
        ValueError: K is not a multiple of 16, num_bits is not 1 or 4, or x is not on a GPU.
    """
    _require_num_bits(num_bits)
    x, scale = _require_input(x, global_scale)
    *rows, length = x.shape
    y = torch.empty_like(x)
    hint = x.new_empty((*rows, length * num_bits // 8), dtype=torch.uint8)
    scale_bytes = x.new_empty((*rows, length // BLOCK_SIZE), dtype=torch.uint8)
    words = hint.flatten().view(torch.int32) if num_bits == 4 else hint
    _launch(
        _rtn_record_kernel,
        x,
        dtype,
        launch,
        x,
        y,
        words,
        scale_bytes,
        scale,
        NUM_BITS=num_bits,
    )
    return y, hint, scale_bytes


def guided(
    x: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor | float,
    *,
    num_bits: int,
    dtype: torch.dtype | None = None,
    launch: Launch = GUIDED_LAUNCH,
) -> torch.Tensor:
    """Gives `reference.guided`.

    Args:
        x: float [..., K] on a GPU; the trainer's values.
        hint: uint8 [..., K * num_bits / 8]; packed mantissa bits (1) or packed codes (4).
        scale_bytes: uint8 [..., B]; the rollout's block scales.
        global_scale: FP32 0-d tensor or number; the rollout's global scale, decode side.
        num_bits: 1 or 4.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
        launch: Tile and warps.

    Returns:
        [..., K] in the dtype of x.

    Raises:
        ValueError: Shapes disagree, K is not a multiple of 16, num_bits is not 1 or 4, or a tensor
            is not on the GPU of x.
    """
    require_guide(x, hint, scale_bytes, num_bits)
    _require_num_bits(num_bits)
    x, scale = _require_input(x, global_scale)
    for name, tensor in (("hint", hint), ("scale_bytes", scale_bytes)):
        if tensor.device != x.device:
            raise ValueError(f"{name} must lie on {x.device} like x; got {tensor.device}")
    y = torch.empty_like(x)
    words = hint.flatten()
    if num_bits == 4:
        words = (words if words.data_ptr() % 4 == 0 else words.clone()).view(torch.int32)
    _launch(
        _guided_kernel,
        x,
        dtype,
        launch,
        x,
        words,
        scale_bytes.contiguous(),
        y,
        scale,
        NUM_BITS=num_bits,
    )
    return y


@triton.jit(do_not_specialize=["num_octets"])
def _rtn_kernel(
    x_ptr,
    y_ptr,
    scale_ptr,
    num_octets,
    ROUNDED: tl.constexpr,
    PAIRS: tl.constexpr,
    T: tl.constexpr,
    TILES: tl.constexpr,
):
    first, left = _octets_of_program(num_octets, T, TILES)
    x_ptr += first * 8
    y_ptr += first * 8
    if PAIRS:
        tiles = bf16.load_pairs(x_ptr, left, T, TILES)
        g = tl.load(scale_ptr)
        if bf16.is_usual(g):
            reciprocal, rest = bf16.reciprocal_of(g * 6.0)
            for tile in tl.static_range(TILES):
                lows, highs, _, _, effective, signs, _ = bf16.rounded(
                    tiles[tile], g, reciprocal, rest, T
                )
                y = bf16.dequantised(lows, highs, effective, signs)
                bf16.store_pairs(y_ptr, y, left, tile, T)
        else:
            _rtn_tiles(x_ptr, y_ptr, g, left, ROUNDED, T, TILES)
    else:
        _rtn_tiles(x_ptr, y_ptr, tl.load(scale_ptr), left, ROUNDED, T, TILES)


@triton.jit
def _rtn_tiles(
    x_ptr, y_ptr, global_scale, left, ROUNDED: tl.constexpr, T: tl.constexpr, TILES: tl.constexpr
):
    for tile in range(TILES):
        x = tl.reshape(_load_tile(x_ptr, left, tile, T), (T // 2, 2, 8))
        nearest, _, _, effective, zero, _ = _round(x.to(tl.float32), global_scale)
        y = _dequantised(nearest, _sign_bits(x), effective, zero)
        _store_tile(y_ptr, y.to(ROUNDED), left, tile, T)


@triton.jit(do_not_specialize=["num_octets"])
def _rtn_record_kernel(
    x_ptr,
    y_ptr,
    hint_ptr,
    scale_bytes_ptr,
    scale_ptr,
    num_octets,
    NUM_BITS: tl.constexpr,
    ROUNDED: tl.constexpr,
    PAIRS: tl.constexpr,
    T: tl.constexpr,
    TILES: tl.constexpr,
):
    first, left = _octets_of_program(num_octets, T, TILES)
    x_ptr += first * 8
    y_ptr += first * 8
    hint_ptr += first
    scale_bytes_ptr += first // 2
    if PAIRS:
        tiles = bf16.load_pairs(x_ptr, left, T, TILES)
        g = tl.load(scale_ptr)
        if bf16.is_usual(g):
            reciprocal, rest = bf16.reciprocal_of(g * 6.0)
            for tile in tl.static_range(TILES):
                lows, highs, lows_biased, highs_biased, effective, signs, byte = bf16.rounded(
                    tiles[tile], g, reciprocal, rest, T
                )
                y = bf16.dequantised(lows, highs, effective, signs)
                bf16.store_pairs(y_ptr, y, left, tile, T)
                if NUM_BITS == 1:
                    word = bf16.mantissa_bits(lows_biased, highs_biased, T)
                else:
                    word = bf16.codes(lows, highs, signs)
                _store_hint(hint_ptr, scale_bytes_ptr, word, byte, left, tile, T)
        else:
            _rtn_record_tiles(
                x_ptr, y_ptr, hint_ptr, scale_bytes_ptr, g, left, NUM_BITS, ROUNDED, T, TILES
            )
    else:
        g = tl.load(scale_ptr)
        _rtn_record_tiles(
            x_ptr, y_ptr, hint_ptr, scale_bytes_ptr, g, left, NUM_BITS, ROUNDED, T, TILES
        )


@triton.jit
def _rtn_record_tiles(
    x_ptr,
    y_ptr,
    hint_ptr,
    scale_bytes_ptr,
    global_scale,
    left,
    NUM_BITS: tl.constexpr,
    ROUNDED: tl.constexpr,
    T: tl.constexpr,
    TILES: tl.constexpr,
):
    for tile in range(TILES):
        x = tl.reshape(_load_tile(x_ptr, left, tile, T), (T // 2, 2, 8))
        nearest, biased, power, effective, zero, byte = _round(x.to(tl.float32), global_scale)
        sign_bits = _sign_bits(x)
        y = _dequantised(nearest, sign_bits, effective, zero)
        _store_tile(y_ptr, y.to(ROUNDED), left, tile, T)

        biased = biased.to(tl.int32, bitcast=True)
        column = tl.arange(0, 8)[None, None, :]
        if NUM_BITS == 1:
            word = tl.sum((biased & 1) << column, axis=2)
        else:
            power = power.to(tl.int32, bitcast=True)
            # Steps of p / 2 from code 0, 2 or 4, for p = 1, 2 or 4.
            index = biased - power - _LADDER_BIAS_BITS + (power >> 22) - 254
            word = tl.sum((index | ((sign_bits >> 28) & 8)) << (4 * column), axis=2)
        word = tl.reshape(tl.where(tl.reshape(zero, (T // 2, 1)), 0, word), (T,))
        byte = tl.reshape(tl.broadcast_to(byte, (T // 2, 2, 1)), (T,))
        _store_hint(hint_ptr, scale_bytes_ptr, word, byte, left, tile, T)


@triton.jit(do_not_specialize=["num_octets"])
def _guided_kernel(
    x_ptr,
    hint_ptr,
    scale_bytes_ptr,
    y_ptr,
    scale_ptr,
    num_octets,
    NUM_BITS: tl.constexpr,
    ROUNDED: tl.constexpr,
    PAIRS: tl.constexpr,
    T: tl.constexpr,
    TILES: tl.constexpr,
):
    first, left = _octets_of_program(num_octets, T, TILES)
    x_ptr += first * 8
    y_ptr += first * 8
    hint_ptr += first
    scale_bytes_ptr += first // 2
    if PAIRS:
        tiles = bf16.load_pairs(x_ptr, left, T, TILES)
        hints = ()
        for tile in tl.static_range(TILES):
            hints += (_load_hint(hint_ptr, scale_bytes_ptr, left, tile, T),)
        g = tl.load(scale_ptr)
        if bf16.is_usual(g):
            for tile in tl.static_range(TILES):
                word, byte = hints[tile]
                y = bf16.guided(tiles[tile], word, byte, g, NUM_BITS)
                bf16.store_pairs(y_ptr, y, left, tile, T)
        else:
            _guided_tiles(
                x_ptr, hint_ptr, scale_bytes_ptr, y_ptr, g, left, NUM_BITS, ROUNDED, T, TILES
            )
    else:
        g = tl.load(scale_ptr)
        _guided_tiles(x_ptr, hint_ptr, scale_bytes_ptr, y_ptr, g, left, NUM_BITS, ROUNDED, T, TILES)


@triton.jit
def _guided_tiles(
    x_ptr,
    hint_ptr,
    scale_bytes_ptr,
    y_ptr,
    global_scale,
    left,
    NUM_BITS: tl.constexpr,
    ROUNDED: tl.constexpr,
    T: tl.constexpr,
    TILES: tl.constexpr,
):
    for tile in range(TILES):
        x = _load_tile(x_ptr, left, tile, T)
        word, byte = _load_hint(hint_ptr, scale_bytes_ptr, left, tile, T)
        word = word[:, None]
        effective = (_block_scale_value(byte) * global_scale)[:, None]
        zero = (byte[:, None] == 0) | (effective == 0)
        effective = tl.where(zero, 0.0, effective)
        # A NaN is passed on, but not by a block of zeros.
        magnitude = tl.where(zero, 0.0, tl.abs(x.to(tl.float32)))
        # From 4 on the candidates are 4 and 6, so that 5 may stand for all values beyond.
        a = _quotient(magnitude, effective)
        a = tl.minimum(a, 5.0, propagate_nan=tl.PropagateNan.ALL)
        lower, upper, power = _candidates(a)
        column = tl.arange(0, 8)[None, :]
        sign_bits = _sign_bits(x)
        if NUM_BITS == 1:
            # The lowest bit of a biased candidate is its mantissa bit.
            lower_bits = lower.to(tl.int32, bitcast=True)
            takes_upper = (((lower_bits << column) ^ word) & (1 << column)) != 0
        else:
            # Beyond a, on its side of 0, lies the upper candidate or what is nearest to it.
            wanted = _ladder_value((word >> (4 * column)) & 7).to(tl.int32, bitcast=True)
            wanted |= ((word << (28 - 4 * column)) ^ sign_bits) & _SIGN_MASK
            takes_upper = wanted.to(tl.float32, bitcast=True) > a
        chosen = tl.fma(power, -_LADDER_BIAS, tl.where(takes_upper, upper, lower))
        y = _dequantised(chosen, sign_bits, effective, zero)
        _store_tile(y_ptr, y.to(ROUNDED), left, tile, T)


@triton.jit
def _round(x, global_scale):
    """Gives x [T / 2, 2, 8] rounded to nearest under its own block scales.

    Returns:
        nearest: [T / 2, 2, 8] magnitudes on the ladder.
        biased, power: [T / 2, 2, 8], see `_round_to_ladder`.
        effective: [T / 2, 1, 1] effective scales, 0 where `zero`.
        zero: [T / 2, 1, 1], whether the block is one of zeros.
        byte: int32 [T / 2, 1, 1] E4M3.
    """
    magnitude = tl.abs(x)
    amax = tl.reduce(magnitude, 2, _max, keep_dims=True)
    amax = tl.reduce(amax, 1, _max, keep_dims=True)
    block_scale, byte = _block_scale(amax, global_scale)
    effective = block_scale * global_scale
    zero = (amax == 0) | (effective == 0)
    effective = tl.where(zero, 0.0, effective)
    a = _quotient(magnitude, effective)
    # Not tl.minimum: a NaN is to become 6, in the interpreter too.
    nearest, biased, power = _round_to_ladder(tl.where(a < 6.0, a, 6.0))
    return nearest, biased, power, effective, zero, tl.where(zero, 0, byte)


@triton.jit
def _block_scale(amax, global_scale):
    """Gives the E4M3 block scale as FP32, and as int32 byte."""
    scale = _quotient(amax, global_scale * 6.0)
    scale = tl.minimum(scale, 448.0, propagate_nan=tl.PropagateNan.ALL)
    scale = tl.maximum(scale, 0.001953125, propagate_nan=tl.PropagateNan.ALL)
    exponent = scale.to(tl.int32, bitcast=True) & _EXPONENT_MASK
    power = tl.maximum(exponent.to(tl.float32, bitcast=True), 0.015625)
    biased = tl.fma(power, _E4M3_BIAS, scale)
    rounded = tl.fma(power, -_E4M3_BIAS, biased)
    # The sum exceeds the bias by eighths of p, of which the least normal p, 2^-6, counts from 0.
    power = power.to(tl.int32, bitcast=True)
    byte = biased.to(tl.int32, bitcast=True) - power - _E4M3_BIAS_BITS + (power >> 20) - (121 << 3)
    return rounded, tl.where(scale == scale, byte, 0x7F)


@triton.jit
def _block_scale_value(byte):
    """Gives the value of an E4M3 byte: it is FP32's own layout, 2^120 times smaller."""
    value = (byte << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where(byte == 0x7F, float("nan"), value)


@triton.jit
def _ladder_value(index):
    """Gives the magnitude of codes 0 to 7: E2M1 is FP32's own layout, 2^126 times smaller."""
    return (index << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def _round_to_ladder(a):
    """Gives a, 0 to 6, rounded to E2M1; the biased sum that rounds it; its power of two p, >= 1."""
    power = _power(a)
    biased = tl.fma(power, _LADDER_BIAS, a)
    return tl.fma(power, -_LADDER_BIAS, biased), biased, power


@triton.jit
def _candidates(a):
    """Gives the biased sums of the values of E2M1 below and above a, both a's where it is one."""
    power = _power(a)
    nearest = tl.fma(power, _LADDER_BIAS, a)
    rest = a - tl.fma(power, -_LADDER_BIAS, nearest)
    lower = tl.where(rest < 0, nearest - 0.5 * power, nearest)
    upper = tl.where(rest > 0, nearest + 0.5 * power, nearest)
    return lower, upper, power


@triton.jit
def _power(a):
    """Gives the power of two p <= a < 2p, at least 1."""
    exponent = a.to(tl.int32, bitcast=True) & _EXPONENT_MASK
    return tl.maximum(exponent.to(tl.float32, bitcast=True), 1.0)


@triton.jit
def _quotient(a, divisor):
    """Gives a / divisor; 0 counts as 1, since what comes out is multiplied by 0."""
    return tl.div_rn(a, tl.where(divisor == 0, 1.0, divisor))


@triton.jit
def _sign_bits(x):
    """Gives int32 whose bit 31 is the sign of x, of a NaN too."""
    if x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True)
    else:
        # A GPU drops the sign of a NaN when it makes FP32 of FP16.
        bits = x.to(tl.int16, bitcast=True).to(tl.int32) << 16
    return bits


@triton.jit
def _dequantised(magnitude, sign_bits, effective, zero):
    """Gives sign * magnitude * effective; +0 in blocks of zeros."""
    sign = sign_bits & tl.where(zero, 0, _SIGN_MASK)
    return (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True) * effective


@triton.jit
def _octets_of_program(num_octets, T: tl.constexpr, TILES: tl.constexpr):
    """Gives the first octet of this program, int64, and how many there are from it on, int32."""
    first = tl.program_id(0).to(tl.int64) * (T * TILES)
    return first, tl.minimum(num_octets - first, T * TILES).to(tl.int32)


@triton.jit
def _load_tile(x_ptr, left, tile, T: tl.constexpr):
    octets = tl.arange(0, T)[:, None] + tile * T
    return tl.load(x_ptr + octets * 8 + tl.arange(0, 8)[None, :], mask=octets < left, other=0.0)


@triton.jit
def _load_hint(hint_ptr, scale_bytes_ptr, left, tile, T: tl.constexpr):
    octets = tl.arange(0, T) + tile * T
    word = tl.load(hint_ptr + octets, mask=octets < left, other=0).to(tl.int32)
    byte = tl.load(scale_bytes_ptr + octets // 2, mask=octets < left, other=0).to(tl.int32)
    return word, byte


@triton.jit
def _store_tile(y_ptr, y, left, tile, T: tl.constexpr):
    octets = tl.arange(0, T)[:, None] + tile * T
    y = tl.reshape(y, (T, 8)).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + octets * 8 + tl.arange(0, 8)[None, :], y, mask=octets < left)


@triton.jit
def _store_hint(hint_ptr, scale_bytes_ptr, word, byte, left, tile, T: tl.constexpr):
    octets = tl.arange(0, T) + tile * T
    mask = octets < left
    tl.store(hint_ptr + octets, word.to(hint_ptr.dtype.element_ty), mask=mask)
    # Both octets of a block know its byte; the even one stores it.
    tl.store(scale_bytes_ptr + octets // 2, byte.to(tl.uint8), mask=mask & (octets % 2 == 0))


@triton.jit
def _max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


_INTERPRETED = isinstance(_rtn_kernel, InterpretedFunction)
_TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


def _launch(
    kernel,
    x: torch.Tensor,
    dtype: torch.dtype | None,
    launch: Launch,
    *arguments: torch.Tensor,
    **constants: int,
) -> None:
    num_octets = x.numel() // 8
    if num_octets == 0:
        return
    octets_per_tile = 32 * launch.num_warps
    grid = (triton.cdiv(num_octets, octets_per_tile * launch.tiles),)
    rounded = _triton_dtype(dtype or x.dtype)
    with torch.cuda.device_of(x):
        kernel[grid](
            *arguments,
            num_octets,
            **constants,
            ROUNDED=rounded,
            # The interpreter knows neither PTX nor an fma that rounds once.
            PAIRS=x.dtype == torch.bfloat16 and rounded == tl.bfloat16 and not _INTERPRETED,
            T=octets_per_tile,
            TILES=launch.tiles,
            num_warps=launch.num_warps,
        )


def _require_input(
    x: torch.Tensor, global_scale: torch.Tensor | float
) -> tuple[torch.Tensor, torch.Tensor]:
    require_input(x)
    if not (x.is_cuda or _INTERPRETED):
        raise ValueError(
            f"implementation triton needs x on a GPU; got {x.device}; use torch or auto there"
        )
    _triton_dtype(x.dtype)
    x = x.contiguous()
    # Pairs of values are loaded.
    return x if x.data_ptr() % 4 == 0 else x.clone(), as_fp32(global_scale, x)


def _require_num_bits(num_bits: int) -> None:
    require_num_bits(num_bits)
    if num_bits == 2:
        raise ValueError(
            "implementation triton has no kernel for num_bits=2 yet; use auto or torch, or 1 or 4 "
            "bits"
        )


def _triton_dtype(dtype: torch.dtype) -> tl.dtype:
    try:
        return _TRITON_DTYPES[dtype]
    except KeyError:
        names = ", ".join(str(name) for name in _TRITON_DTYPES)
        raise ValueError(f"implementation triton takes {names}; got {dtype}") from None
