"""Triton kernels of rtn, rtn_record and guided: the same names, arguments and bits as `reference`.

Legend: an octet is 8 neighbouring values, half a block. A tile is [T, 8], T octets, one for each
thread: 16 bytes of BF16, loaded and stored at once, whose hint bits are packed without leaving the
thread. A program handles several tiles, and loads all of them first.

How the rules of `reference` are met:
* Rounding to the ladder is one addition of a bias, as there. The biased sum holds the parity of the
  code in its lowest bit.
* Divisions that decide a rounding are right for every divisor: `quotient` says how.
* Casts to and from E4M3 are arithmetic, so that Triton's interpreter agrees: its own cast loses the
  carry of the mantissa, and does not know NaN. Its cast to BF16 truncates, unlike that of a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice
from triton.runtime.interpreter import InterpretedFunction

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


RTN_LAUNCH = Launch(tiles=4, num_warps=4)
RECORD_LAUNCH = Launch(tiles=4, num_warps=4)
GUIDED_LAUNCH = Launch(tiles=4, num_warps=4)


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
    _launch(_rtn_kernel, x, launch, x, y, scale, ROUNDED=_triton_dtype(dtype or x.dtype))
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
        launch,
        x,
        y,
        words,
        scale_bytes,
        scale,
        NUM_BITS=num_bits,
        ROUNDED=_triton_dtype(dtype or x.dtype),
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
        launch,
        x,
        words,
        scale_bytes.contiguous(),
        y,
        scale,
        NUM_BITS=num_bits,
        ROUNDED=_triton_dtype(dtype or x.dtype),
    )
    return y


@triton.jit(do_not_specialize=["num_octets"])
def _rtn_kernel(
    x_ptr,
    y_ptr,
    scale_ptr,
    num_octets,
    ROUNDED: tl.constexpr,
    FMA: tl.constexpr,
    T: tl.constexpr,
    TILES: tl.constexpr,
):
    x = _load_tiles(x_ptr, num_octets, T, TILES)
    global_scale = tl.load(scale_ptr)
    if FMA and _is_moderate(global_scale):
        _rtn_tiles(x, y_ptr, global_scale, num_octets, ROUNDED, True, T, TILES)
    else:
        _rtn_tiles(x, y_ptr, global_scale, num_octets, ROUNDED, False, T, TILES)


@triton.jit
def _rtn_tiles(
    x,
    y_ptr,
    global_scale,
    num_octets,
    ROUNDED: tl.constexpr,
    FMA: tl.constexpr,
    T: tl.constexpr,
    TILES: tl.constexpr,
):
    for tile in tl.static_range(TILES):
        blocks = _in_blocks(x[tile], T)
        nearest, _, _, effective, zero, _ = _round(blocks, global_scale, FMA)
        y = _dequantised(blocks, nearest, effective, zero)
        _store_tile(y_ptr, y.to(ROUNDED), num_octets, tile, T, TILES)


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
    FMA: tl.constexpr,
    T: tl.constexpr,
    TILES: tl.constexpr,
):
    x = _load_tiles(x_ptr, num_octets, T, TILES)
    g = tl.load(scale_ptr)
    if FMA and _is_moderate(g):
        _rtn_record_tiles(
            x, y_ptr, hint_ptr, scale_bytes_ptr, g, num_octets, NUM_BITS, ROUNDED, True, T, TILES
        )
    else:
        _rtn_record_tiles(
            x, y_ptr, hint_ptr, scale_bytes_ptr, g, num_octets, NUM_BITS, ROUNDED, False, T, TILES
        )


@triton.jit
def _rtn_record_tiles(
    x,
    y_ptr,
    hint_ptr,
    scale_bytes_ptr,
    global_scale,
    num_octets,
    NUM_BITS: tl.constexpr,
    ROUNDED: tl.constexpr,
    FMA: tl.constexpr,
    T: tl.constexpr,
    TILES: tl.constexpr,
):
    for tile in tl.static_range(TILES):
        blocks = _in_blocks(x[tile], T)
        nearest, biased, power, effective, zero, byte = _round(blocks, global_scale, FMA)
        y = _dequantised(blocks, nearest, effective, zero)
        _store_tile(y_ptr, y.to(ROUNDED), num_octets, tile, T, TILES)

        biased = biased.to(tl.int32, bitcast=True)
        column = tl.arange(0, 8)[None, None, :]
        if NUM_BITS == 1:
            word = tl.sum((biased & 1) << column, axis=2)
        else:
            power = power.to(tl.int32, bitcast=True)
            # Steps of p / 2 from code 0, 2 or 4, for p = 1, 2 or 4.
            index = biased - power - _LADDER_BIAS_BITS + (power >> 22) - 254
            sign = (blocks.to(tl.int32, bitcast=True) >> 28) & 8
            word = tl.sum((index | sign) << (4 * column), axis=2)
        word = tl.where(tl.reshape(zero, (T // 2, 1)), 0, word)
        octets = _octets(tile, T, TILES)
        mask = octets < num_octets
        word = tl.reshape(word, (T,)).to(hint_ptr.dtype.element_ty)
        tl.store(hint_ptr + octets, word, mask=mask)
        # Both octets of a block know its byte; the even one stores it.
        byte = tl.reshape(tl.broadcast_to(byte, (T // 2, 2, 1)), (T,)).to(tl.uint8)
        tl.store(scale_bytes_ptr + octets // 2, byte, mask=mask & (octets % 2 == 0))


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
    FMA: tl.constexpr,
    T: tl.constexpr,
    TILES: tl.constexpr,
):
    x = _load_tiles(x_ptr, num_octets, T, TILES)
    words = ()
    bytes_ = ()
    for tile in tl.static_range(TILES):
        octets = _octets(tile, T, TILES)
        words += (tl.load(hint_ptr + octets, mask=octets < num_octets, other=0),)
        byte = tl.load(scale_bytes_ptr + octets // 2, mask=octets < num_octets, other=0)
        bytes_ += (byte,)
    g = tl.load(scale_ptr)
    if FMA and _is_moderate(g):
        _guided_tiles(x, words, bytes_, y_ptr, g, num_octets, NUM_BITS, ROUNDED, True, T, TILES)
    else:
        _guided_tiles(x, words, bytes_, y_ptr, g, num_octets, NUM_BITS, ROUNDED, False, T, TILES)


@triton.jit
def _guided_tiles(
    x,
    words,
    bytes_,
    y_ptr,
    global_scale,
    num_octets,
    NUM_BITS: tl.constexpr,
    ROUNDED: tl.constexpr,
    FMA: tl.constexpr,
    T: tl.constexpr,
    TILES: tl.constexpr,
):
    for tile in tl.static_range(TILES):
        octets = x[tile].to(tl.float32)
        word = words[tile].to(tl.int32)[:, None]
        byte = bytes_[tile].to(tl.int32)[:, None]
        effective = _block_scale_value(byte) * global_scale
        zero = (byte == 0) | (effective == 0)
        effective = tl.where(zero, 0.0, effective)
        x_bits = octets.to(tl.int32, bitcast=True)
        # A NaN is passed on, but not by a block of zeros.
        magnitude = (x_bits & tl.where(zero, 0, 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        # From 4 on the candidates are 4 and 6, so that 5 may stand for all values beyond.
        a = tl.minimum(magnitude, effective * 5.0, propagate_nan=tl.PropagateNan.ALL)
        a = quotient(a, effective, FMA)
        lower, upper, power = _candidates(a, FMA)
        column = tl.arange(0, 8)[None, :]
        lower_bits = lower.to(tl.int32, bitcast=True)
        if NUM_BITS == 1:
            # The lowest bit of a biased candidate is its mantissa bit.
            takes_upper = (((lower_bits << column) ^ word) & (1 << column)) != 0
        else:
            # Beyond a, on its side of 0, lies the upper candidate or what is nearest to it.
            wanted = _ladder_value((word >> (4 * column)) & 7).to(tl.int32, bitcast=True)
            sign = (word << (28 - 4 * column)) ^ x_bits
            wanted = wanted | (sign & _SIGN_MASK)
            takes_upper = wanted.to(tl.float32, bitcast=True) > a
        chosen = tl.fma(power, -_LADDER_BIAS, tl.where(takes_upper, upper, lower))
        y = _dequantised(octets, chosen, effective, zero)
        _store_tile(y_ptr, y.to(ROUNDED), num_octets, tile, T, TILES)


@triton.jit
def _round(x, global_scale, FMA: tl.constexpr):
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
    block_scale, byte = _block_scale(amax, global_scale, FMA)
    effective = block_scale * global_scale
    zero = (amax == 0) | (effective == 0)
    effective = tl.where(zero, 0.0, effective)
    a = quotient(magnitude, effective, FMA)
    # Not tl.minimum: a NaN is to become 6, in the interpreter too.
    nearest, biased, power = _round_to_ladder(tl.where(a < 6.0, a, 6.0))
    return nearest, biased, power, effective, zero, tl.where(zero, 0, byte)


@triton.jit
def _block_scale(amax, global_scale, FMA: tl.constexpr):
    """Gives the E4M3 block scale as FP32, and as int32 byte."""
    divisor = global_scale * 6.0
    if FMA:
        # An infinite quotient would become NaN.
        amax = tl.minimum(amax, divisor * 512.0, propagate_nan=tl.PropagateNan.ALL)
    scale = quotient(amax, divisor, FMA)
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
def _candidates(a, FMA: tl.constexpr):
    """Gives the biased sums of the values of E2M1 below and above a, both a's where it is one."""
    power = _power(a)
    if FMA:
        lower = libdevice.fma_rz(power, _LADDER_BIAS, a)
        upper = libdevice.fma_ru(power, _LADDER_BIAS, a)
    else:
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
def quotient(a, divisor, FMA: tl.constexpr):
    """Gives a / divisor, correctly rounded where that decides a code or a scale byte.

    Args:
        a: FP32.
        divisor: FP32, broadcastable; 0 counts as 1, and what comes out is multiplied by 0.
        FMA: Multiply by the correctly rounded reciprocal, and correct once: three operations a
            value. The result lies on the same side of every boundary of E2M1 and E4M3 as the
            quotient, for each of the 2^23 mantissas of a divisor (tools/bench_formats.py tries
            them all), unless divisor * boundary is so small that the rest underflows.
    """
    if FMA:
        reciprocal = _reciprocal(divisor)
        quotient = a * reciprocal
        return tl.fma(tl.fma(quotient, -divisor, a), reciprocal, quotient)
    return tl.div_rn(a, tl.where(divisor == 0, 1.0, divisor))


@triton.jit
def _reciprocal(divisor):
    """Gives 1 / divisor, correctly rounded for normal divisors and results; finite for 0."""
    divisor = tl.where(divisor == 0, 1.0, divisor)
    r = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [divisor], dtype=tl.float32, is_pure=True, pack=1
    )
    r = tl.fma(tl.fma(r, -divisor, 1.0), r, r)
    return tl.fma(tl.fma(r, -divisor, 1.0), r, r)


@triton.jit
def _is_moderate(global_scale):
    """Says whether no product or rest of `quotient` can underflow or overflow."""
    return (global_scale > 1e-27) & (global_scale < 1e27)


@triton.jit
def _dequantised(x, magnitude, effective, zero):
    """Gives sign(x) * magnitude * effective; +0 in blocks of zeros."""
    sign = x.to(tl.int32, bitcast=True) & tl.where(zero, 0, _SIGN_MASK)
    return (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True) * effective


@triton.jit
def _octets(tile, T: tl.constexpr, TILES: tl.constexpr):
    """Gives int64 [T], the octets of a tile of this program."""
    return tl.program_id(0).to(tl.int64) * (T * TILES) + tl.arange(0, T) + tile * T


@triton.jit
def _load_tiles(x_ptr, num_octets, T: tl.constexpr, TILES: tl.constexpr):
    """Gives a tuple of [T, 8]; all loads are under way before the first is used."""
    tiles = ()
    for tile in tl.static_range(TILES):
        octets = _octets(tile, T, TILES)[:, None]
        values = octets * 8 + tl.arange(0, 8)[None, :]
        tiles += (tl.load(x_ptr + values, mask=octets < num_octets, other=0.0),)
    return tiles


@triton.jit
def _in_blocks(octets, T: tl.constexpr):
    return tl.reshape(octets, (T // 2, 2, 8)).to(tl.float32)


@triton.jit
def _store_tile(y_ptr, y, num_octets, tile, T: tl.constexpr, TILES: tl.constexpr):
    octets = _octets(tile, T, TILES)[:, None]
    values = octets * 8 + tl.arange(0, 8)[None, :]
    y = tl.reshape(y, (T, 8)).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + values, y, mask=octets < num_octets)


@triton.jit
def _max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


_INTERPRETED = isinstance(_rtn_kernel, InterpretedFunction)
_TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


def _launch(kernel, x: torch.Tensor, launch: Launch, *arguments, **constants) -> None:
    num_octets = x.numel() // 8
    if num_octets == 0:
        return
    octets_per_tile = 32 * launch.num_warps
    grid = (triton.cdiv(num_octets, octets_per_tile * launch.tiles),)
    with torch.cuda.device_of(x):
        kernel[grid](
            *arguments,
            num_octets,
            **constants,
            # The interpreter rounds an fma twice, and knows neither directed rounding nor PTX.
            FMA=not _INTERPRETED,
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
    return x.contiguous(), as_fp32(global_scale, x)


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
