"""What the Triton kernels do with BF16 under a usual global scale: two values in each register.

Legend: a pair is two neighbouring BF16 values as one int32, the first in the low half. A tile is
[T, 4] pairs, T octets (half a block), one for each thread. `lows` and `highs` are FP32 or int32
[T, 4] of the first and second values of pairs.

Equal bits, with fewer operations than the general path of `kernels_octets`:
* BF16 has 8 significant bits. So a quotient by an FP32 number lies on the same side of each
  boundary of E2M1 and E4M3 as its reciprocal, kept as the sum of two FP32 numbers, times x:
  `divided` says how, and tools/bench_formats.py tries all 2^23 mantissas of a divisor.
* If the first of these numbers has 14 bits, its product with x has 22, and is near the quotient:
  `round_beside` rounds beside it without asking for a power of two.
* Maxima, clamps and signs act on pairs.
* `is_usual` admits global scales with which nothing underflows or overflows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_trace.formats import kernels_octets as octets

# An FP32 power of two p, plus 1.5 * 2^22 * p, rounds to multiples of p / 2.
_BIAS: tl.constexpr = tl.constexpr(1.5 * 2.0**22)
_EXPONENT_MASK: tl.constexpr = tl.constexpr(0x7F800000)
MAGNITUDES: tl.constexpr = tl.constexpr(0x7FFF7FFF)
SIGNS: tl.constexpr = tl.constexpr(0x80008000 - (1 << 32))
_HIGH: tl.constexpr = tl.constexpr(-(1 << 16))
# The byte of 1.0 in E4M3.
_ONE: tl.constexpr = tl.constexpr(0x38)


@triton.jit
def is_usual(global_scale):
    """Says whether 2^-90 < global_scale <= 2^7: no NaN, and amax up to 344064.

    Effective scales are then normal and at most 57344, by which no BF16 number but 0 divides to 0.
    """
    return (global_scale > 8.077935669463161e-28) & (global_scale <= 128.0)


@triton.jit
def are_usual(scales, ROW: tl.constexpr, TILES: tl.constexpr):
    """Says whether all global scales are usual, of what `kernels_octets.load_all_scales` gives."""
    usual = is_usual(scales[0])
    if ROW:
        for tile in tl.static_range(1, TILES):
            usual &= is_usual(scales[tile])
        usual = tl.min(usual.to(tl.int32), axis=0) != 0
    return usual


@triton.jit
def load_pair_tile(x_ptr, left, tile, T: tl.constexpr):
    """Gives the pairs [T, 4] of a tile."""
    octets = tl.arange(0, T) + tile * T
    return load_octets(x_ptr, octets, octets < left)


@triton.jit
def load_octets(x_ptr, octets, mask):
    """Gives the pairs [T, 4] of octets, by number, where the mask [T] says so."""
    columns = octets[:, None] * 4 + tl.arange(0, 4)[None, :]
    return tl.load(as_pairs(x_ptr) + columns, mask=mask[:, None])


@triton.jit
def rounded(pairs, global_scale, reciprocal, rest, T: tl.constexpr):
    """Gives pairs [T, 4] rounded to nearest under their own block scales.

    Args:
        pairs: int32 [T, 4].
        global_scale: FP32, or FP32 [T].
        reciprocal: Likewise, first of `reciprocal_of` 6 * global_scale.
        rest: Likewise, second of it.
        T: Octets.

    Returns:
        lows, highs: FP32 [T, 4], magnitudes on the ladder.
        lows_biased, highs_biased: FP32 [T, 4], whose lowest bits are the mantissa bits.
        effective: FP32 [T, 1].
        signs: int32 [T, 4], +0 in blocks of zeros.
        byte: int32 [T], E4M3.
    """
    magnitudes = pairs & MAGNITUDES
    amax = largest_of_blocks(magnitudes, T)
    zero = amax == 0
    # An infinite quotient would become NaN.
    amax = tl.minimum(amax, global_scale * 3072.0, propagate_nan=tl.PropagateNan.ALL)
    scale = divided(amax, reciprocal, rest)
    scale = tl.maximum(scale, 0.001953125, propagate_nan=tl.PropagateNan.ALL)
    byte, scale = e4m3(scale)
    byte = tl.where(zero, 0, byte)
    effective = scale * global_scale
    limit = effective * 6.0
    r, s = short_reciprocal_of(effective)
    signs = pairs & tl.where(zero, 0, SIGNS)[:, None]

    magnitudes = min_pairs(magnitudes, pair_of(limit, limit)[:, None])
    lows, lows_biased = nearest(low_half(magnitudes), r[:, None], s[:, None])
    highs, highs_biased = nearest(high_half(magnitudes), r[:, None], s[:, None])
    return lows, highs, lows_biased, highs_biased, effective[:, None], signs, byte


@triton.jit
def largest_of_blocks(magnitudes, T: tl.constexpr):
    """Gives FP32 [T], the largest magnitude in the block of each octet, of pairs [T, 4]."""
    amax = tl.reduce(magnitudes, 1, max_pairs)
    amax = tl.reduce(tl.reshape(amax, (T // 2, 2)), 1, max_pairs, keep_dims=True)
    amax = tl.reshape(tl.broadcast_to(amax, (T // 2, 2)), (T,))
    return low_half(max_pairs(amax, amax >> 16))


@triton.jit
def nearest(magnitude, reciprocal, rest):
    """Gives a magnitude rounded to the ladder, and the biased sum that rounded it.

    Args:
        magnitude: FP32 with 8 significant bits, at most about 6 times the divisor.
        reciprocal: FP32, first of `short_reciprocal_of` the divisor.
        rest: FP32, second of it.
    """
    near = magnitude * reciprocal
    return round_beside(tl.fma(magnitude, rest, near), near)


@triton.jit
def round_beside(a, near):
    """Gives what `round_to_ladder` gives, of a number that another is near to.

    Args:
        a: FP32, 0 to 6.
        near: FP32, a to 2^-14 of it, with at most 22 significant bits.

    The sum of a and 2^22 * near lies on the grid of near's power of two, as 2^22 * near does. Its
    lowest bit is that of a's code because near's last two are 0; so that ties, where near has few
    bits, go to the even code, and a sum just below the next power of two ends on it exactly. Where
    a and near lie on two sides of a power of two, a is nearest to that, on either grid.
    """
    near = tl.maximum(near, 1.0)
    biased = tl.fma(near, 4194304.0, a)
    return tl.fma(near, -4194304.0, biased), biased


@triton.jit
def round_to_ladder(a):
    """Gives a, 0 to 6, rounded to E2M1, and the biased sum that rounded it."""
    power = _power(a)
    biased = tl.fma(power, _BIAS, a)
    return tl.fma(power, -_BIAS, biased), biased


@triton.jit
def guided(
    pairs,
    word,
    byte,
    global_scale,
    NUM_BITS: tl.constexpr,
    T: tl.constexpr,
    CODES: tl.constexpr = False,
):
    """Gives pairs [T, 4] guided by the hint and the block scale of their octets.

    Args:
        pairs: int32 [T, 4].
        word: int32 [T]; 8 mantissa bits, pairs of lowest bits, or codes.
        byte: int32 [T], E4M3.
        global_scale: FP32, or FP32 [T].
        NUM_BITS: 1, 2 or 4.
        T: Octets.
        CODES: Whether to give codes, in which a NaN counts as beyond the largest value.

    Returns:
        out: int32 [T, 4], BF16 pairs; or int32 [T], codes.
        lowest: int32 [T], the lowest bits of pairs rounded to nearest under these block scales;
            not to be used where the byte is 0.
    """
    zero = byte == 0
    effective = e4m3_value(tl.where(zero, _ONE, byte)) * global_scale
    # From 4 on the candidates are 4 and 6, and above 5 the latter is nearest, so that about 5.5 may
    # stand for all values beyond.
    limit = effective * 5.5
    r, s = reciprocal_of(effective)
    # A NaN is passed on, but not by a block of zeros.
    pairs &= tl.where(zero, 0, -1)[:, None]
    magnitudes = min_pairs(pairs & MAGNITUDES, pair_of(limit, limit)[:, None])
    even = 2 * tl.arange(0, 4)[None, :]
    word = word[:, None]
    lows = low_half(magnitudes)
    highs = high_half(magnitudes)
    lows, low_bits = _guided_half(
        lows, pairs << 16, r[:, None], s[:, None], word, even, NUM_BITS, CODES
    )
    highs, high_bits = _guided_half(
        highs, pairs, r[:, None], s[:, None], word, even + 1, NUM_BITS, CODES
    )
    if CODES:
        out = codes(lows, highs, pairs & SIGNS)
    else:
        out = dequantised(lows, highs, effective[:, None], pairs & SIGNS)
    return out, mantissa_bits(low_bits, high_bits, T)


@triton.jit
def _guided_half(
    magnitude,
    sign,
    reciprocal,
    rest,
    word,
    column,
    NUM_BITS: tl.constexpr,
    CODES: tl.constexpr,
):
    """Gives the candidate beside a magnitude that the hint says; nearest as a biased sum.

    Of a NaN, that is the one NaN that instructions make: its lowest bit is 1, as that of 6 is.
    """
    a = divided(magnitude, reciprocal, rest)
    if CODES:
        # A NaN of either is beyond.
        a = tl.where(a < 6.0, a, 5.5)
    _, biased = round_to_ladder(a)
    return chosen(a, sign, word, column, NUM_BITS), biased


@triton.jit
def chosen(a, sign, word, column, NUM_BITS: tl.constexpr):
    """Gives, of the two values of E2M1 beside a, the one that the hint says.

    Args:
        a: FP32 [T, 4], 0 to about 5, or NaN.
        sign: int32 [T, 4], bit 31 the sign.
        word: int32 [T, 1]; 8 mantissa bits, pairs of lowest bits, or codes.
        column: int32 [1, 4]; where in the octet the values are.
        NUM_BITS: 1, 2 or 4.
    """
    power = _power(a)
    lower = fma_down(power, _BIAS, a)
    upper = fma_up(power, _BIAS, a)
    if NUM_BITS == 1:
        takes_upper = (((lower.to(tl.int32, bitcast=True) << column) ^ word) & (1 << column)) != 0
    elif NUM_BITS == 2:
        index = octets.index_of(lower.to(tl.int32, bitcast=True), power.to(tl.int32, bitcast=True))
        takes_upper = octets.pair_says_upper(index, word >> (2 * column), 7)
    else:
        # Beyond a, on its side of 0, lies the upper candidate or what is nearest to it.
        wanted = ((word >> (4 * column)) & 7) << 22
        wanted |= ((word << (28 - 4 * column)) ^ sign) & -(1 << 31)
        # E2M1 is FP32's own layout, 2^126 times smaller.
        takes_upper = wanted.to(tl.float32, bitcast=True) * 8.507059173023462e37 > a
    return tl.fma(power, -_BIAS, tl.where(takes_upper, upper, lower))


@triton.jit
def dequantised(lows, highs, effective, signs):
    """Gives the BF16 pairs of magnitudes on the ladder."""
    return pair_of(highs * effective, lows * effective) | signs


@triton.jit
def store_pairs(y_ptr, pairs, left, tile, T: tl.constexpr):
    """Stores the pairs [T, 4] of a tile."""
    octets = tl.arange(0, T) + tile * T
    store_octets(y_ptr, pairs, octets, octets < left)


@triton.jit
def store_octets(y_ptr, pairs, octets, mask):
    """Stores pairs [T, 4] as octets, by number, where the mask [T] says so."""
    columns = octets[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(as_pairs(y_ptr) + columns, pairs, mask=mask[:, None])


@triton.jit
def recorded(pairs, global_scale, NUM_BITS: tl.constexpr, T: tl.constexpr):
    """Gives pairs [T, 4] rounded to nearest, with hint and block scales.

    Args:
        pairs: int32 [T, 4].
        global_scale: FP32, or FP32 [T].
        NUM_BITS: 1, 2 or 4.
        T: Octets.

    Returns:
        y: int32 [T, 4], BF16 pairs.
        word: int32 [T]; 8 mantissa bits, pairs of lowest bits, or codes.
        byte: int32 [T], E4M3.
    """
    reciprocal, rest = reciprocal_of(global_scale * 6.0)
    lows, highs, lows_biased, highs_biased, effective, signs, byte = rounded(
        pairs, global_scale, reciprocal, rest, T
    )
    word = hint_word(lows, highs, lows_biased, highs_biased, signs, NUM_BITS, T)
    return dequantised(lows, highs, effective, signs), word, byte


@triton.jit
def hint_word(
    lows, highs, lows_biased, highs_biased, signs, NUM_BITS: tl.constexpr, T: tl.constexpr
):
    """Gives int32 [T], the hint that values rounded to E2M1 leave behind."""
    if NUM_BITS == 1:
        word = mantissa_bits(lows_biased, highs_biased, T)
    else:
        word = codes(lows, highs, signs)
        if NUM_BITS == 2:
            word = word & 0x33333333
            word = ((word >> 2) | word) & 0x0F0F0F0F
            word = ((word >> 4) | word) & 0x00FF00FF
            word = ((word >> 8) | word) & 0x0000FFFF
    return word


@triton.jit
def paired(x, T: tl.constexpr):
    """Gives FP32 [T, 8] as BF16 pairs [T, 4]."""
    low, high = tl.split(tl.reshape(x, (T, 4, 2)))
    return pair_of(high, low)


@triton.jit
def unpaired(pairs, T: tl.constexpr):
    """Gives pairs [T, 4] as BF16 [T, 8]."""
    # By bits, because a cast drops the sign of a NaN.
    halves = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16))
    return tl.reshape(halves, (T, 8)).to(tl.bfloat16, bitcast=True)


@triton.jit
def mantissa_bits(lows_biased, highs_biased, T: tl.constexpr):
    """Gives int32 [T]: the lowest bits of 8 columns, the first in bit 0."""
    low_0, low_1, low_2, low_3 = _columns(lows_biased.to(tl.uint32, bitcast=True), T)
    high_0, high_1, high_2, high_3 = _columns(highs_biased.to(tl.uint32, bitcast=True), T)
    # Each step shifts one bit in from above.
    bits = low_0 << 31
    bits = (bits >> 1) | (high_0 << 31)
    bits = (bits >> 1) | (low_1 << 31)
    bits = (bits >> 1) | (high_1 << 31)
    bits = (bits >> 1) | (low_2 << 31)
    bits = (bits >> 1) | (high_2 << 31)
    bits = (bits >> 1) | (low_3 << 31)
    bits = (bits >> 1) | (high_3 << 31)
    return (bits >> 24).to(tl.int32)


@triton.jit
def codes(lows, highs, signs):
    """Gives int32 [T]: the codes of 8 columns, the first in bits 0 to 3."""
    # The codes of a block with a NaN are 7.
    lows = tl.minimum(lows, 6.0)
    highs = tl.minimum(highs, 6.0)
    # E2M1 is FP32's own layout, 2^126 times smaller.
    low = (lows * 1.1754943508222875e-38).to(tl.int32, bitcast=True) >> 22
    high = (highs * 1.1754943508222875e-38).to(tl.int32, bitcast=True) >> 18
    byte = low | high | ((signs >> 12) & 0x8) | ((signs >> 24) & 0x80)
    return tl.sum(byte << (8 * tl.arange(0, 4)[None, :]), axis=1)


@triton.jit
def divided(x, reciprocal, rest):
    """Gives x / d for a BF16 number x, on the right side of each boundary of E2M1 and E4M3.

    Args:
        x: FP32 with 8 significant bits.
        reciprocal: FP32, first of `reciprocal_of` d.
        rest: FP32, second of it.
    """
    return tl.fma(x, reciprocal, x * rest)


@triton.jit
def reciprocal_of(divisor):
    """Gives 1 / divisor as a sum of two FP32 numbers, to 2^-46 of it."""
    r = near_reciprocal(divisor)
    # Rounded up, and with the square of the error: 2 divided by 2 - 2^-23 demands both.
    r = fma_up(tl.fma(r, -divisor, 1.0), r, r)
    error = tl.fma(r, -divisor, 1.0)
    return r, tl.fma(error, error, error) * r


@triton.jit
def short_reciprocal_of(divisor):
    """Gives 1 / divisor as a sum of two FP32 numbers, of which the first has 14 significant bits.

    As exact as rounding to E2M1 asks for, which tools/bench_formats.py tries for all mantissas.
    """
    r = near_reciprocal(divisor).to(tl.int32, bitcast=True)
    r = ((r + 0x200) & -0x400).to(tl.float32, bitcast=True)
    error = tl.fma(r, -divisor, 1.0)
    # Rounded up: 2 divided by 2 - 2^-23 demands it.
    return r, fma_up(error, error, error) * r


@triton.jit
def _power(a):
    """Gives the power of two p <= a < 2p, at least 1."""
    exponent = a.to(tl.int32, bitcast=True) & _EXPONENT_MASK
    return tl.maximum(exponent.to(tl.float32, bitcast=True), 1.0)


@triton.jit
def _columns(values, T: tl.constexpr):
    """Gives the four columns of [T, 4]."""
    even, odd = tl.split(tl.reshape(values, (T, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def low_half(pairs):
    """Gives the first values of pairs, FP32."""
    return (pairs << 16).to(tl.float32, bitcast=True)


@triton.jit
def high_half(pairs):
    """Gives the second values of pairs, FP32."""
    return (pairs & _HIGH).to(tl.float32, bitcast=True)


@triton.jit
def as_pairs(pointer):
    """Gives a pointer to BF16 as one to pairs."""
    return pointer.to(tl.pointer_type(tl.int32), bitcast=True)


# Triton has these for BF16, but takes pairs apart. The directed roundings of its libdevice take
# denormal numbers for 0.


@triton.jit
def max_pairs(a, b):
    return tl.inline_asm_elementwise(
        "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def min_pairs(a, b):
    return tl.inline_asm_elementwise(
        "min.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def pair_of(high, low):
    """Gives the pairs of FP32 values, rounded to BF16."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def product_of_pairs(a, b):
    """Gives the products of BF16 pairs, each rounded once."""
    return tl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def near_reciprocal(x):
    """Gives 1 / x to the last bit or so; 0 for what has no normal reciprocal."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def near_power_of_two(x):
    """Gives 2^x to the last bits."""
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def number_of_bits(word):
    """Gives how many bits of int32 are 1."""
    return tl.inline_asm_elementwise(
        "popc.b32 $0, $1;", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def fma_down(a, b, c):
    return tl.inline_asm_elementwise(
        "fma.rz.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, c], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def fma_up(a, b, c):
    return tl.inline_asm_elementwise(
        "fma.rp.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, c], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def e4m3(scale):
    """Gives the byte of a scale rounded to E4M3, at most 448, and its value."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 byte, low, high;
        .reg .b32 halves;
        cvt.rn.satfinite.e4m3x2.f32 byte, 0f00000000, $2;
        cvt.rn.f16x2.e4m3x2 halves, byte;
        mov.b32 {low, high}, halves;
        cvt.f32.f16 $1, low;
        cvt.u32.u16 $0, byte;
        }""",
        "=r,=f,f",
        [scale],
        dtype=(tl.int32, tl.float32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def e4m3_value(byte):
    """Gives the value of an E4M3 byte."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 byte, low, high;
        .reg .b32 halves;
        cvt.u16.u32 byte, $1;
        cvt.rn.f16x2.e4m3x2 halves, byte;
        mov.b32 {low, high}, halves;
        cvt.f32.f16 $0, low;
        }""",
        "=f,r",
        [byte],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )
