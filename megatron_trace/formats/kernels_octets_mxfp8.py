"""MXFP8 on tiles of octets in Triton: every float dtype, and BF16 in pairs.

Legend: as `kernels_tiles`; a block is 4 octets, a hint of 8 bits a byte a value.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_trace.formats import kernels_bf16 as bf16
from megatron_trace.formats import kernels_bf16_mx as bf16_mx
from megatron_trace.formats import kernels_e8m0 as e8m0
from megatron_trace.formats import kernels_octets as octets
from megatron_trace.formats import kernels_octets_mxfp4 as mxfp4

_EXPONENT_MASK: tl.constexpr = tl.constexpr(0x7F800000)
# FP32 bits of 2^-6, the least normal value of E4M3, and of 1.5 * 2^20, with which an FP32 power of
# two p, at least that, rounds to multiples of p / 8.
_LEAST_NORMAL_BITS: tl.constexpr = tl.constexpr(121 << 23)
_BIAS: tl.constexpr = tl.constexpr(1.5 * 2.0**20)
_BIAS_BITS: tl.constexpr = tl.constexpr((20 << 23) | (1 << 22))


@triton.jit
def rounded_pairs(pairs, NUM_BITS: tl.constexpr, RULE: tl.constexpr, T: tl.constexpr):
    """Gives what `rounded_octets` gives, of and as BF16 pairs, int32 [T, 4]."""
    byte = bf16_mx.scale_bytes_of(pairs, RULE, 448.0, 8, e8m0.E4M3_HALF_STEP, T)
    scale, reciprocal, zero = e8m0.scales_of(byte[:, None])
    # A block of zeros may hold values too small to have a scale.
    pairs &= tl.where(zero, 0, -1)
    magnitudes = pairs & bf16.MAGNITUDES
    # The scale of a block with a NaN is NaN; its codes are those of 448.
    lows, low = rounded(tl.minimum(bf16.low_half(magnitudes) * reciprocal, 448.0))
    highs, high = rounded(tl.minimum(bf16.high_half(magnitudes) * reciprocal, 448.0))
    low |= (pairs >> 8) & 0x80
    high |= (pairs >> 24) & 0x80
    if NUM_BITS == 8:
        word = tl.reshape(tl.join(low, high), (T, 8))
    else:
        BITS: tl.constexpr = NUM_BITS if NUM_BITS else 1
        MASK: tl.constexpr = 2 * BITS - 1
        both = (low & MASK) | ((high & MASK) << BITS)
        word = tl.sum(both << (2 * BITS * tl.arange(0, 4)[None, :]), axis=1)
    return bf16.dequantised(lows, highs, scale, pairs & bf16.SIGNS), word, byte


@triton.jit
def guided_pairs(pairs, word, byte, NUM_BITS: tl.constexpr, CODES: tl.constexpr, T: tl.constexpr):
    """Gives BF16 pairs int32 [T, 4] guided by the hint of their octets; or codes int32 [T, 8]."""
    scale, reciprocal, zero = e8m0.scales_of(byte[:, None])
    # A NaN is passed on, but not by a block of zeros.
    pairs &= tl.where(zero, 0, -1)
    magnitudes = pairs & bf16.MAGNITUDES
    if NUM_BITS == 8:
        low, high = tl.split(tl.reshape(word, (T, 4, 2)))
    else:
        low = word[:, None] >> (2 * NUM_BITS * tl.arange(0, 4)[None, :])
        high = low >> NUM_BITS
    low_a = _bounded(bf16.low_half(magnitudes) * reciprocal, CODES)
    high_a = _bounded(bf16.high_half(magnitudes) * reciprocal, CODES)
    lows = _chosen(low_a, low, pairs << 16, NUM_BITS, True)
    highs = _chosen(high_a, high, pairs, NUM_BITS, True)
    if CODES:
        low = codes_of(lows, pairs << 16, zero)
        high = codes_of(highs, pairs, zero)
        out = tl.reshape(tl.join(low, high), (T, 8))
    else:
        out = bf16.dequantised(lows, highs, scale, pairs & bf16.SIGNS)
    return out


@triton.jit
def rounded_octets(x, NUM_BITS: tl.constexpr, RULE: tl.constexpr, T: tl.constexpr):
    """Gives x [T, 8] rounded to nearest under its own block scales.

    Args:
        x: float [T, 8].
        NUM_BITS: 1, 2 or 8, or 0, for which the word is not to be used.
        RULE: A rule of `scales_e8m0`.
        T: Octets, a multiple of 4.

    Returns:
        y: FP32 [T, 8].
        word: int32 [T], 8 mantissa bits or pairs of lowest bits; or codes, int32 [T, 8].
        byte: int32 [T], E8M0.
    """
    x = tl.reshape(x, (T // 4, 4, 8))
    magnitude, amax = mxfp4.magnitudes_of(x)
    byte = e8m0.scale_byte_of(amax, RULE, 448.0, 8, e8m0.E4M3_HALF_STEP)
    effective, reciprocal, zero = e8m0.scales_of(byte)
    # Not tl.minimum: a NaN is to become 448, in the interpreter too.
    a = magnitude * reciprocal
    nearest, index = rounded(tl.where(a < 448.0, a, 448.0))
    sign_bits = octets.sign_bits_of(x)
    y = octets.dequantised(nearest, sign_bits, effective, zero)
    code = tl.where(zero, 0, index | ((sign_bits >> 24) & 0x80))
    if NUM_BITS == 8:
        word = tl.reshape(code, (T, 8))
    else:
        BITS: tl.constexpr = NUM_BITS if NUM_BITS else 1
        bits = (code & (2 * BITS - 1)) << (BITS * tl.arange(0, 8)[None, None, :])
        word = tl.reshape(tl.sum(bits, axis=2), (T,))
    byte = tl.reshape(tl.broadcast_to(byte, (T // 4, 4, 1)), (T,))
    return tl.reshape(y, (T, 8)), word, byte


@triton.jit
def guided_magnitudes(x, word, a, NUM_BITS: tl.constexpr, CODES: tl.constexpr):
    """Gives, of the two magnitudes beside x [T, 8] / its scale, the one that the hint says.

    Args:
        x: float [T, 8].
        word: int32 [T], 8 mantissa bits or pairs of lowest bits; or codes, int32 [T, 8].
        a: FP32 [T, 8]; |x| / scale, 0 in blocks of zeros.
        NUM_BITS: 1, 2 or 8.
        CODES: Whether codes are wanted, in which a NaN counts as beyond the largest value.

    Returns:
        FP32 [T, 8].
    """
    a = _bounded(a, CODES)
    wanted = word if NUM_BITS == 8 else word[:, None] >> (NUM_BITS * tl.arange(0, 8)[None, :])
    return _chosen(a, wanted, octets.sign_bits_of(x), NUM_BITS, False)


@triton.jit
def _bounded(a, CODES: tl.constexpr):
    # From 416 on the candidates are 416 and 448, so that 432 may stand for all values beyond.
    if CODES:
        a = tl.where(a < 432.0, a, 432.0)
    else:
        a = tl.minimum(a, 432.0, propagate_nan=tl.PropagateNan.ALL)
    return a


@triton.jit
def codes_of(magnitude, sign_bits, zero):
    """Gives int32, the E4M3 codes of magnitudes on the ladder; 0 where `zero`."""
    # E4M3 is FP32's own layout, 2^120 times smaller.
    index = (magnitude * 7.52316384526264e-37).to(tl.int32, bitcast=True) >> 20
    return tl.where(zero, 0, index | ((sign_bits >> 24) & 0x80))


@triton.jit
def _power_bits(a):
    """Gives the FP32 bits of the power of two below a, at least the least normal value."""
    return tl.maximum(a.to(tl.int32, bitcast=True) & _EXPONENT_MASK, _LEAST_NORMAL_BITS)


@triton.jit
def _first_index(power_bits):
    """Gives the index of 0 steps of p / 8 on the ladder."""
    return (power_bits - _LEAST_NORMAL_BITS) >> 20


@triton.jit
def rounded(a):
    """Gives a, 0 to 448, rounded to E4M3, and its index on the ladder."""
    power_bits = _power_bits(a)
    power = power_bits.to(tl.float32, bitcast=True)
    biased = tl.fma(power, _BIAS, a)
    steps = biased.to(tl.int32, bitcast=True) - power_bits - _BIAS_BITS
    return tl.fma(power, -_BIAS, biased), steps + _first_index(power_bits)


@triton.jit
def _chosen(a, wanted, sign_bits, NUM_BITS: tl.constexpr, PTX: tl.constexpr):
    """Gives, of the two magnitudes beside a, the one that the hint says.

    Args:
        a: FP32 [T, 8], 0 to 432 or NaN.
        wanted: int32 [T, 8]; lowest bits, with others above them, or codes.
        sign_bits: int32 [T, 8], bit 31 the sign.
        NUM_BITS: 1, 2 or 8.
        PTX: Whether sums may be rounded down and up, which the interpreter cannot.
    """
    power_bits = _power_bits(a)
    power = power_bits.to(tl.float32, bitcast=True)
    if PTX:
        lower = bf16.fma_down(power, _BIAS, a)
        upper = bf16.fma_up(power, _BIAS, a)
    else:
        nearest = tl.fma(power, _BIAS, a)
        rest = a - tl.fma(power, -_BIAS, nearest)
        lower = tl.where(rest < 0, nearest - 0.125 * power, nearest)
        upper = tl.where(rest > 0, nearest + 0.125 * power, nearest)
    lower_bits = lower.to(tl.int32, bitcast=True)
    if NUM_BITS == 1:
        # The lowest bit of a biased candidate is that of its code.
        takes_upper = ((lower_bits ^ wanted) & 1) != 0
    else:
        index = lower_bits - power_bits - _BIAS_BITS + _first_index(power_bits)
        if NUM_BITS == 2:
            takes_upper = octets.pair_says_upper(index, wanted, 126)
        else:
            same_sign = ((wanted << 24) ^ sign_bits) >= 0
            takes_upper = same_sign & ((wanted & 0x7F) > index)
    return tl.fma(power, -_BIAS, tl.where(takes_upper, upper, lower))
