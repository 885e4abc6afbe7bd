"""NVFP4 on tiles of octets in Triton: every float dtype, every global scale.

Legend: as `kernels_inputs`.

How the rules of `reference` are met:
* Rounding to the ladder is one addition of a bias, as there. The biased sum holds the parity of the
  code in its lowest bit.
* Divisions are correctly rounded.
* Casts to and from E4M3 are arithmetic, so that Triton's interpreter agrees: its own cast loses the
  carry of the mantissa, and does not know NaN. Its cast to BF16 truncates, unlike that of a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

_EXPONENT_MASK: tl.constexpr = tl.constexpr(0x7F800000)
_SIGN_MASK: tl.constexpr = tl.constexpr(-(1 << 31))
# An FP32 power of two p, plus 1.5 * 2^22 * p, rounds to multiples of p / 2; 2^20, of p / 8.
_LADDER_BIAS: tl.constexpr = tl.constexpr(1.5 * 2.0**22)
_LADDER_BIAS_BITS: tl.constexpr = tl.constexpr((22 << 23) | (1 << 22))
_E4M3_BIAS: tl.constexpr = tl.constexpr(1.5 * 2.0**20)
_E4M3_BIAS_BITS: tl.constexpr = tl.constexpr((20 << 23) | (1 << 22))


@triton.jit
def rounded_octets(x, global_scale, NUM_BITS: tl.constexpr, T: tl.constexpr):
    """Gives x [T, 8] rounded to nearest under its own block scales.

    Args:
        x: float [T, 8].
        global_scale: FP32, or FP32 [T / 2, 1, 1].
        NUM_BITS: 1, 2 or 4.
        T: Octets.

    Returns:
        y: FP32 [T, 8].
        word: int32 [T]; 8 mantissa bits, pairs of lowest bits, or codes.
        byte: int32 [T], E4M3.
    """
    x = tl.reshape(x, (T // 2, 2, 8))
    nearest, biased, power, effective, zero, byte = nearest_octets(x.to(tl.float32), global_scale)
    sign_bits = sign_bits_of(x)
    y = dequantised(nearest, sign_bits, effective, zero)

    word = hint_word(biased, power, sign_bits, NUM_BITS)
    word = tl.reshape(tl.where(tl.reshape(zero, (T // 2, 1)), 0, word), (T,))
    byte = tl.reshape(tl.broadcast_to(byte, (T // 2, 2, 1)), (T,))
    return tl.reshape(y, (T, 8)), word, byte


@triton.jit
def hint_word(biased, power, sign_bits, NUM_BITS: tl.constexpr):
    """Gives int32 [N, M], the hint that [N, M, 8] of `round_to_ladder` leave behind."""
    biased = biased.to(tl.int32, bitcast=True)
    column = tl.arange(0, 8)[None, None, :]
    if NUM_BITS == 1:
        word = tl.sum((biased & 1) << column, axis=2)
    else:
        index = index_of(biased, power.to(tl.int32, bitcast=True))
        if NUM_BITS == 2:
            word = tl.sum((index & 3) << (2 * column), axis=2)
        else:
            word = tl.sum((index | ((sign_bits >> 28) & 8)) << (4 * column), axis=2)
    return word


@triton.jit
def guided_quotients(x, byte, global_scale):
    """Gives |x| / effective, 0 in blocks of zeros, FP32 [T, 8]; effective; zero [T, 1]."""
    effective = (_block_scale_value(byte) * global_scale)[:, None]
    zero = (byte[:, None] == 0) | (effective == 0)
    effective = tl.where(zero, 0.0, effective)
    # A NaN is passed on, but not by a block of zeros.
    return quotient(tl.where(zero, 0.0, tl.abs(x.to(tl.float32))), effective), effective, zero


@triton.jit
def guided_magnitudes(x, word, a, NUM_BITS: tl.constexpr, CODES: tl.constexpr):
    """Gives, of the two magnitudes beside x [T, 8] / its scale, the one that the hint says.

    Args:
        x: float [T, 8].
        word: int32 [T]; 8 mantissa bits, pairs of lowest bits, or codes.
        a: FP32 [T, 8]; |x| / effective, 0 in blocks of zeros.
        NUM_BITS: 1, 2 or 4.
        CODES: Whether codes are wanted, in which a NaN counts as beyond the largest value.

    Returns:
        FP32 [T, 8].
    """
    word = word[:, None]
    # From 4 on the candidates are 4 and 6, so that 5 may stand for all values beyond.
    if CODES:
        a = tl.where(a < 5.0, a, 5.0)
    else:
        a = tl.minimum(a, 5.0, propagate_nan=tl.PropagateNan.ALL)
    lower, upper, power = _candidates(a)
    column = tl.arange(0, 8)[None, :]
    if NUM_BITS == 1:
        # The lowest bit of a biased candidate is its mantissa bit.
        lower_bits = lower.to(tl.int32, bitcast=True)
        takes_upper = (((lower_bits << column) ^ word) & (1 << column)) != 0
    elif NUM_BITS == 2:
        index = index_of(lower.to(tl.int32, bitcast=True), power.to(tl.int32, bitcast=True))
        takes_upper = pair_says_upper(index, word >> (2 * column), 7)
    else:
        # Beyond a, on its side of 0, lies the upper candidate or what is nearest to it.
        wanted = _ladder_value((word >> (4 * column)) & 7).to(tl.int32, bitcast=True)
        wanted |= ((word << (28 - 4 * column)) ^ sign_bits_of(x)) & _SIGN_MASK
        takes_upper = wanted.to(tl.float32, bitcast=True) > a
    return tl.fma(power, -_LADDER_BIAS, tl.where(takes_upper, upper, lower))


@triton.jit
def pair_says_upper(index, pair, LARGEST: tl.constexpr):
    """Says whether the index that is `pair` modulo 4 and nearest to a lies above `index`.

    Args:
        index: int32; of the candidate below a.
        pair: int32, with other bits above the lowest two.
        LARGEST: Largest index of the ladder.
    """
    nearest = index - 1 + ((pair - index + 1) & 3)
    nearest = tl.where(nearest < 0, nearest + 4, nearest)
    return tl.where(nearest > LARGEST, nearest - 4, nearest) > index


@triton.jit
def code_words(magnitude, sign_bits, zero):
    """Gives int32 [T], the E2M1 codes of magnitudes on the ladder [T, 8]; 0 where `zero`."""
    # E2M1 is FP32's own layout, 2^126 times smaller.
    index = (magnitude * 1.1754943508222875e-38).to(tl.int32, bitcast=True) >> 22
    code = tl.where(zero, 0, index | ((sign_bits >> 28) & 8))
    return tl.sum(code << (4 * tl.arange(0, 8)[None, :]), axis=1)


@triton.jit
def octets_of_program(num_octets, T: tl.constexpr, TILES: tl.constexpr):
    """Gives the first octet of this program, int64, and how many there are from it on, int32."""
    first = tl.program_id(0).to(tl.int64) * (T * TILES)
    return first, tl.minimum(num_octets - first, T * TILES).to(tl.int32)


@triton.jit
def load_tile(x_ptr, left, tile, T: tl.constexpr):
    octets = tl.arange(0, T) + tile * T
    return load_octets(x_ptr, octets, octets < left)


@triton.jit
def load_octets(x_ptr, octets, mask):
    """Gives [T, 8], those octets of which the mask says so, and 0 elsewhere; by number, [T]."""
    columns = octets[:, None] * 8 + tl.arange(0, 8)[None, :]
    return tl.load(x_ptr + columns, mask=mask[:, None], other=0.0)


@triton.jit
def store_tile(y_ptr, y, left, tile, T: tl.constexpr):
    octets = tl.arange(0, T) + tile * T
    store_octets(y_ptr, tl.reshape(y, (T, 8)), octets, octets < left)


@triton.jit
def store_octets(y_ptr, y, octets, mask):
    """Stores [T, 8] as those octets of which the mask says so."""
    columns = octets[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(y_ptr + columns, y.to(y_ptr.dtype.element_ty), mask=mask[:, None])


@triton.jit
def load_scales(scale_ptr, first, left, tile, ROW: tl.constexpr, T: tl.constexpr):
    """Gives the global scales FP32 [T] of a tile's octets; the only one where ROW is 0."""
    if ROW == 0:
        scales = tl.load(scale_ptr)
    else:
        octets = tl.arange(0, T) + tile * T
        # In 32 bits per octet: the first of a program is beyond them in large tensors.
        rows = ((first % ROW).to(tl.int32) + octets) // ROW
        scales = tl.load(scale_ptr + first // ROW + rows, mask=octets < left, other=1.0)
    return scales


@triton.jit
def load_block_scales(scale_ptr, first, left, tile, ROW: tl.constexpr, T: tl.constexpr):
    """Gives the global scales FP32 [T / 2, 1, 1] of a tile's blocks; the only one if ROW is 0."""
    if ROW == 0:
        scales = tl.load(scale_ptr)
    else:
        scales = load_scales(scale_ptr, first // 2, left // 2, tile, ROW // 2, T // 2)
        scales = scales[:, None, None]
    return scales


@triton.jit
def load_all_scales(
    scale_ptr, first, left, ROW: tl.constexpr, T: tl.constexpr, TILES: tl.constexpr
):
    """Gives a tuple of what `load_scales` gives, of every tile."""
    scales = ()
    for tile in tl.static_range(TILES):
        scales += (load_scales(scale_ptr, first, left, tile, ROW, T),)
    return scales


@triton.jit
def load_hint(
    hint_ptr,
    scale_bytes_ptr,
    left,
    tile,
    T: tl.constexpr,
    NUM_BITS: tl.constexpr = 1,
    BLOCK: tl.constexpr = 2,
):
    """Gives the hint of a tile's octets and the scale bytes of their blocks, int32 [T].

    Args:
        hint_ptr: A word for each octet, or 8 bytes if the hint has 8 bits a value.
        scale_bytes_ptr: A byte for each block.
        left: Octets of this program.
        tile: Number of the tile.
        T: Octets of a tile.
        NUM_BITS: Bits a value; with 8, the hint is int32 [T, 8].
        BLOCK: Octets of a block.
    """
    octets = tl.arange(0, T) + tile * T
    return load_hints(hint_ptr, scale_bytes_ptr, octets, octets < left, NUM_BITS, BLOCK)


@triton.jit
def load_hints(
    hint_ptr, scale_bytes_ptr, octets, mask, NUM_BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Gives what `load_hint` gives, of octets by number, and 0 where the mask does not say so."""
    if NUM_BITS == 8:
        word = load_octets(hint_ptr, octets, mask).to(tl.int32)
    else:
        word = tl.load(hint_ptr + octets, mask=mask, other=0).to(tl.int32)
    byte = tl.load(scale_bytes_ptr + octets // BLOCK, mask=mask, other=0).to(tl.int32)
    return word, byte


@triton.jit
def store_hint(
    hint_ptr,
    scale_bytes_ptr,
    word,
    byte,
    left,
    tile,
    T: tl.constexpr,
    NUM_BITS: tl.constexpr = 1,
    BLOCK: tl.constexpr = 2,
):
    """Stores what `load_hint` gives."""
    octets = tl.arange(0, T) + tile * T
    store_hints(hint_ptr, scale_bytes_ptr, word, byte, octets, octets < left, NUM_BITS, BLOCK)


@triton.jit
def store_hints(
    hint_ptr,
    scale_bytes_ptr,
    word,
    byte,
    octets,
    mask,
    NUM_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Stores what `load_hints` gives, where the mask says so."""
    if NUM_BITS == 8:
        store_octets(hint_ptr, word, octets, mask)
    else:
        tl.store(hint_ptr + octets, word.to(hint_ptr.dtype.element_ty), mask=mask)
    # All octets of a block know its byte; the first stores it.
    tl.store(
        scale_bytes_ptr + octets // BLOCK, byte.to(tl.uint8), mask=mask & (octets % BLOCK == 0)
    )


@triton.jit
def nearest_octets(x, global_scale):
    """Gives x [T / 2, 2, 8] rounded to nearest under its own block scales.

    Returns:
        nearest: [T / 2, 2, 8] magnitudes on the ladder.
        biased, power: [T / 2, 2, 8], see `_round_to_ladder`.
        effective: [T / 2, 1, 1] effective scales, 0 where `zero`.
        zero: [T / 2, 1, 1], whether the block is one of zeros.
        byte: int32 [T / 2, 1, 1] E4M3.
    """
    magnitude = tl.abs(x)
    amax = tl.reduce(magnitude, 2, max_of, keep_dims=True)
    amax = tl.reduce(amax, 1, max_of, keep_dims=True)
    return nearest_by_scale(magnitude, amax, quotient(amax, global_scale * 6.0), global_scale)


@triton.jit
def nearest_by_scale(magnitude, amax, block_scale, global_scale):
    """Gives what `nearest_octets` gives, under given block scales.

    Args:
        magnitude: FP32 [T / 2, 2, 8].
        amax: FP32 [T / 2, 1, 1].
        block_scale: FP32 [T / 2, 1, 1], not yet rounded to E4M3.
        global_scale: FP32, or FP32 [T / 2, 1, 1].
    """
    block_scale, byte = _e4m3(block_scale)
    effective = block_scale * global_scale
    zero = (amax == 0) | (effective == 0)
    effective = tl.where(zero, 0.0, effective)
    a = quotient(magnitude, effective)
    # Not tl.minimum: a NaN is to become 6, in the interpreter too.
    nearest, biased, power = round_to_ladder(tl.where(a < 6.0, a, 6.0))
    return nearest, biased, power, effective, zero, tl.where(zero, 0, byte)


@triton.jit
def _e4m3(scale):
    """Gives a scale rounded to E4M3, 2^-9 to 448, as FP32 and as int32 byte."""
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
def index_of(biased_bits, power_bits):
    """Gives the index of a biased sum: steps of p / 2 from code 0, 2 or 4, for p = 1, 2 or 4."""
    return biased_bits - power_bits - _LADDER_BIAS_BITS + (power_bits >> 22) - 254


@triton.jit
def _ladder_value(index):
    """Gives the magnitude of codes 0 to 7: E2M1 is FP32's own layout, 2^126 times smaller."""
    return (index << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def round_to_ladder(a):
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
def quotient(a, divisor):
    """Gives a / divisor; 0 counts as 1, since what comes out is multiplied by 0."""
    return tl.div_rn(a, tl.where(divisor == 0, 1.0, divisor))


@triton.jit
def sign_bits_of(x):
    """Gives int32 whose bit 31 is the sign of x, of a NaN too."""
    if x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True)
    else:
        # A GPU drops the sign of a NaN when it makes FP32 of FP16.
        bits = x.to(tl.int16, bitcast=True).to(tl.int32) << 16
    return bits


@triton.jit
def dequantised(magnitude, sign_bits, effective, zero):
    """Gives sign * magnitude * effective; +0 in blocks of zeros."""
    sign = sign_bits & tl.where(zero, 0, _SIGN_MASK)
    return (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True) * effective


@triton.jit
def max_of(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
