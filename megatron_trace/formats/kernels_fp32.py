"""What the Triton kernels do with FP32 under a usual global scale: divide by a reciprocal.

Legend: as `kernels_octets`; a quad is 4 neighbouring values, a quarter of a block. A tile is FP32
[T, 4], a quad for each thread: 16 bytes, loaded and stored at once, beside their neighbours'. What
is usual: `kernels_bf16`.

Equal bits, with fewer operations than the general path:
* `divided` gives the correctly rounded quotient of any two mantissas: tests/kernels/quotients.c
  tries every pair that might be wrong. Nothing underflows where a boundary lies, because effective
  scales are from 2^-99 to 2^16.
* Only for guided does it matter that a quotient underflows, if it does so to 0. The largest
  magnitude for which it does follows from the divisor; what is beyond it but far below the first
  step is replaced by another such number.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_trace.formats import kernels_bf16 as bf16
from megatron_trace.formats import kernels_octets as octets

_MAGNITUDE: tl.constexpr = tl.constexpr(0x7FFFFFFF)
_SIGN: tl.constexpr = tl.constexpr(-(1 << 31))
# The byte of 1.0 in E4M3.
_ONE: tl.constexpr = tl.constexpr(0x38)


@triton.jit
def record_usual(
    x_ptr,
    y_ptr,
    hint_ptr,
    scale_bytes_ptr,
    scale_ptr,
    first,
    left,
    NUM_BITS: tl.constexpr,
    ROW: tl.constexpr,
    ROUNDED: tl.constexpr,
    T: tl.constexpr,
    TILES: tl.constexpr,
):
    """Rounds all quads of a program if their global scales are usual; says whether they are.

    Args:
        x_ptr: FP32 values of this program.
        y_ptr: Where they are stored.
        hint_ptr: Words of its octets; with NUM_BITS 0 there are none.
        scale_bytes_ptr: Bytes of its blocks.
        scale_ptr: All global scales.
        first: First quad of this program.
        left: Quads of this program.
        NUM_BITS: Bits a value of the hint, or 0.
        ROW: How many quads share a global scale, 0 for all.
        ROUNDED: What values are rounded to.
        T: Quads of a tile.
        TILES: Tiles.
    """
    loaded = _load_all(x_ptr, left, T, TILES)
    scales = octets.load_all_scales(scale_ptr, first, left, ROW, T, TILES)
    usual = bf16.are_usual(scales, ROW, TILES)
    if usual:
        for tile in tl.static_range(TILES):
            y, word, byte = recorded(loaded[tile], scales[tile], NUM_BITS if NUM_BITS else 1, T)
            _store(y_ptr, y, left, tile, ROUNDED, T)
            if NUM_BITS:
                _store_hint(hint_ptr, scale_bytes_ptr, word, byte, left, tile, NUM_BITS, T)
    return usual


@triton.jit
def guide_usual(
    x_ptr,
    hint_ptr,
    scale_bytes_ptr,
    y_ptr,
    scale_ptr,
    first,
    left,
    NUM_BITS: tl.constexpr,
    ROW: tl.constexpr,
    ROUNDED: tl.constexpr,
    T: tl.constexpr,
    TILES: tl.constexpr,
):
    """Guides what `record_usual` rounds, and says what it does; takes what that takes."""
    loaded = _load_all(x_ptr, left, T, TILES)
    hints = ()
    for tile in tl.static_range(TILES):
        hints += (_load_hint(hint_ptr, scale_bytes_ptr, left, tile, NUM_BITS, T),)
    scales = octets.load_all_scales(scale_ptr, first, left, ROW, T, TILES)
    usual = bf16.are_usual(scales, ROW, TILES)
    if usual:
        for tile in tl.static_range(TILES):
            word, byte = hints[tile]
            y = guided(loaded[tile], word, byte, scales[tile], NUM_BITS)
            _store(y_ptr, y, left, tile, ROUNDED, T)
    return usual


@triton.jit
def recorded(x, global_scale, NUM_BITS: tl.constexpr, T: tl.constexpr):
    """Gives x [T, 4] rounded to nearest under its own block scales.

    Args:
        x: FP32 [T, 4].
        global_scale: FP32, or FP32 [T].
        NUM_BITS: 1, 2 or 4.
        T: Quads.

    Returns:
        y: FP32 [T, 4].
        word: int32 [T], see `_load_hint`.
        byte: int32 [T], E4M3.
    """
    magnitude = tl.abs(x)
    amax = _of_blocks(tl.reduce(magnitude, 1, octets.max_of), T)
    zero = amax == 0
    six = global_scale * 6.0
    # An infinite quotient would become NaN.
    amax = tl.minimum(amax, six * 512.0, propagate_nan=tl.PropagateNan.ALL)
    scale = divided(amax, six, reciprocal_of(six))
    scale = tl.maximum(scale, 0.001953125, propagate_nan=tl.PropagateNan.ALL)
    byte, scale = bf16.e4m3(scale)
    effective = scale * global_scale
    a = divided(magnitude, effective[:, None], reciprocal_of(effective)[:, None])
    # A NaN, also that of an infinite product, becomes 6.
    nearest, biased, power = octets.round_to_ladder(tl.minimum(a, 6.0))
    # Blocks of zeros are 0 by themselves, but for their signs.
    signs = x.to(tl.int32, bitcast=True) & tl.where(zero, 0, _SIGN)[:, None]
    word = _word_of(biased, power, signs, NUM_BITS, T)
    return _signed(nearest, signs, effective), word, tl.where(zero, 0, byte)


@triton.jit
def guided(x, word, byte, global_scale, NUM_BITS: tl.constexpr):
    """Gives x [T, 4] guided by the hint and the block scale of its quads.

    Args:
        x: FP32 [T, 4].
        word: int32 [T], see `_load_hint`.
        byte: int32 [T], E4M3.
        global_scale: FP32, or FP32 [T].
        NUM_BITS: 1, 2 or 4.

    Returns:
        FP32 [T, 4].
    """
    zero = byte == 0
    effective = bf16.e4m3_value(tl.where(zero, _ONE, byte)) * global_scale
    # A NaN is passed on, but not by a block of zeros.
    bits = x.to(tl.int32, bitcast=True) & tl.where(zero, 0, -1)[:, None]
    a = _between_steps(bits & _MAGNITUDE, effective)
    a = divided(a, effective[:, None], reciprocal_of(effective)[:, None])
    chosen = bf16.chosen(a, bits, word[:, None], tl.arange(0, 4)[None, :], NUM_BITS)
    return _signed(chosen, bits & _SIGN, effective)


@triton.jit
def divided(a, divisor, reciprocal):
    """Gives a / divisor, correctly rounded unless it is far below 1.

    Args:
        a: FP32.
        divisor: FP32, 2^-99 to 2^16.
        reciprocal: FP32, `reciprocal_of` it.
    """
    near = a * reciprocal
    return tl.fma(tl.fma(near, -divisor, a), reciprocal, near)


@triton.jit
def reciprocal_of(divisor):
    """Gives 1 / divisor as exactly as `divided` needs it."""
    r = bf16.near_reciprocal(divisor)
    error = tl.fma(r, -divisor, 1.0)
    # With the square of the error, rounded up: 2 divided by 2 - 2^-23 demands it.
    return tl.fma(bf16.fma_up(error, error, error), r, r)


@triton.jit
def _load_all(x_ptr, left, T: tl.constexpr, TILES: tl.constexpr):
    """Gives a tuple of [T, 4]; all loads are under way before the first is used.

    Args:
        x_ptr: FP32 values of this program.
        left: Quads of this program.
        T: Quads of a tile.
        TILES: Tiles.
    """
    loaded = ()
    for tile in tl.static_range(TILES):
        quads = tl.arange(0, T)[:, None] + tile * T
        columns = quads * 4 + tl.arange(0, 4)[None, :]
        loaded += (tl.load(x_ptr + columns, mask=quads < left, other=0.0),)
    return loaded


@triton.jit
def _store(y_ptr, y, left, tile, ROUNDED: tl.constexpr, T: tl.constexpr):
    """Stores a rounded tile; it is rounded to ROUNDED first."""
    quads = tl.arange(0, T)[:, None] + tile * T
    columns = quads * 4 + tl.arange(0, 4)[None, :]
    tl.store(y_ptr + columns, y.to(ROUNDED).to(y_ptr.dtype.element_ty), mask=quads < left)


@triton.jit
def _load_hint(hint_ptr, scale_bytes_ptr, left, tile, NUM_BITS: tl.constexpr, T: tl.constexpr):
    """Gives the hint of a tile's quads and the scale bytes of their blocks, int32 [T].

    Args:
        hint_ptr: A word for each octet.
        scale_bytes_ptr: A byte for each block.
        left: Quads of this program.
        tile: Number of the tile.
        NUM_BITS: Bits a value. With 1, words have the hint in their lowest bits, before others.
        T: Quads of a tile.
    """
    quads = tl.arange(0, T) + tile * T
    mask = quads < left
    if NUM_BITS == 1:
        word = tl.load(hint_ptr + quads // 2, mask=mask, other=0).to(tl.int32) >> (4 * (quads % 2))
    else:
        word = tl.load(_words_of_quads(hint_ptr, NUM_BITS) + quads, mask=mask, other=0).to(tl.int32)
    byte = tl.load(scale_bytes_ptr + quads // 4, mask=mask, other=0).to(tl.int32)
    return word, byte


@triton.jit
def _store_hint(
    hint_ptr,
    scale_bytes_ptr,
    word,
    byte,
    left,
    tile,
    NUM_BITS: tl.constexpr,
    T: tl.constexpr,
):
    """Stores what `recorded` gives."""
    quads = tl.arange(0, T) + tile * T
    mask = quads < left
    if NUM_BITS == 1:
        # Both quads of an octet know its bits; the first stores them.
        tl.store(hint_ptr + quads // 2, word.to(tl.uint8), mask=mask & (quads % 2 == 0))
    else:
        hint_ptr = _words_of_quads(hint_ptr, NUM_BITS)
        tl.store(hint_ptr + quads, word.to(hint_ptr.dtype.element_ty), mask=mask)
    tl.store(scale_bytes_ptr + quads // 4, byte.to(tl.uint8), mask=mask & (quads % 4 == 0))


@triton.jit
def _words_of_quads(hint_ptr, NUM_BITS: tl.constexpr):
    """Gives a pointer to words of octets as one to words of quads."""
    WORD: tl.constexpr = tl.uint8 if NUM_BITS == 2 else tl.int16
    return hint_ptr.to(tl.pointer_type(WORD), bitcast=True)


@triton.jit
def _between_steps(bits, effective):
    """Gives magnitudes FP32 [T, 4] that have the same candidates, and whose quotients are normal.

    Args:
        bits: int32 [T, 4], magnitudes.
        effective: FP32 [T].
    """
    # From 4 on the candidates are 4 and 6, so that about 5 may stand for all values beyond.
    a = bits.to(tl.float32, bitcast=True)
    a = tl.minimum(a, (effective * 5.0)[:, None], propagate_nan=tl.PropagateNan.ALL)
    # Up to 1 / 2 they are 0 and 1 / 2, and 2^-10 may stand for all of these but 0.
    a = tl.maximum(a, (effective * 0.0009765625)[:, None], propagate_nan=tl.PropagateNan.ALL)
    # Up to 2^-150 a quotient is 0. A denormal number's bits are how many times 2^-149 it is.
    largest = (effective * 0.5).to(tl.int32)
    return tl.where(bits > largest[:, None], a, 0.0)


@triton.jit
def _of_blocks(amax, T: tl.constexpr):
    """Gives FP32 [T], the largest of the four quads of a block."""
    amax = tl.reduce(tl.reshape(amax, (T // 4, 4)), 1, octets.max_of, keep_dims=True)
    return tl.reshape(tl.broadcast_to(amax, (T // 4, 4)), (T,))


@triton.jit
def _word_of(biased, power, signs, NUM_BITS: tl.constexpr, T: tl.constexpr):
    """Gives int32 [T], the hint that `round_to_ladder` leaves behind; with 1 bit, of octets."""
    biased = biased.to(tl.int32, bitcast=True)
    column = tl.arange(0, 4)[None, :]
    if NUM_BITS == 1:
        word = tl.sum((biased & 1) << column, axis=1) << (4 * (tl.arange(0, T) % 2))
        word = tl.sum(tl.reshape(word, (T // 2, 2)), axis=1, keep_dims=True)
        word = tl.reshape(tl.broadcast_to(word, (T // 2, 2)), (T,))
    else:
        index = octets.index_of(biased, power.to(tl.int32, bitcast=True))
        if NUM_BITS == 2:
            word = tl.sum((index & 3) << (2 * column), axis=1)
        else:
            word = tl.sum((index | ((signs >> 28) & 8)) << (4 * column), axis=1)
    return word


@triton.jit
def _signed(magnitude, signs, effective):
    bits = magnitude.to(tl.int32, bitcast=True) | signs
    return bits.to(tl.float32, bitcast=True) * effective[:, None]
