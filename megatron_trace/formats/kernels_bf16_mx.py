"""MXFP4 in pairs of BF16: what `kernels_bf16` is to NVFP4; and block scales of MXFP8.

Legend: as there; a block is 4 octets. A product with the reciprocal of a scale is the quotient, so
that no division decides a code.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_trace.formats import kernels_bf16 as bf16
from megatron_trace.formats import kernels_e8m0 as e8m0

_INF_BITS: tl.constexpr = tl.constexpr(0x7F800000)


@triton.jit
def recorded(pairs, NUM_BITS: tl.constexpr, RULE: tl.constexpr, T: tl.constexpr):
    """Gives pairs [T, 4] rounded to nearest, with hint and block scales.

    Args:
        pairs: int32 [T, 4].
        NUM_BITS: 1, 2 or 4.
        RULE: A rule of `scales_e8m0`.
        T: Octets, a multiple of 4.

    Returns:
        y: int32 [T, 4], BF16 pairs.
        word: int32 [T]; 8 mantissa bits, pairs of lowest bits, or codes.
        byte: int32 [T], E8M0.
    """
    byte = scale_bytes_of(pairs, RULE, 6.0, 2, e8m0.E2M1_HALF_STEP, T)
    scale, reciprocal, zero = e8m0.scales_of(byte[:, None])
    # A block of zeros may hold values too small to have a scale.
    pairs &= tl.where(zero, 0, -1)
    signs, magnitudes = pairs & bf16.SIGNS, pairs & bf16.MAGNITUDES
    # The scale of a block with a NaN is NaN; its codes are those of 6.
    lows = tl.minimum(bf16.low_half(magnitudes) * reciprocal, 6.0)
    highs = tl.minimum(bf16.high_half(magnitudes) * reciprocal, 6.0)
    # A product with a power of two has few bits itself.
    lows, lows_biased = bf16.round_beside(lows, lows)
    highs, highs_biased = bf16.round_beside(highs, highs)
    word = bf16.hint_word(lows, highs, lows_biased, highs_biased, signs, NUM_BITS, T)
    return bf16.dequantised(lows, highs, scale, signs), word, byte


@triton.jit
def scale_bytes_of(
    pairs,
    RULE: tl.constexpr,
    LARGEST: tl.constexpr,
    EXPONENT: tl.constexpr,
    HALF_STEP: tl.constexpr,
    T: tl.constexpr,
):
    """Gives int32 [T], the bytes of the blocks of octets; `e8m0.scale_byte_of` says the rest."""
    amax = tl.reduce(pairs & bf16.MAGNITUDES, 1, bf16.max_pairs)
    amax = tl.reduce(tl.reshape(amax, (T // 4, 4)), 1, bf16.max_pairs, keep_dims=True)
    amax = bf16.low_half(bf16.max_pairs(amax, amax >> 16))
    if RULE == "rceil":
        byte = rceil_byte(amax, LARGEST, EXPONENT)
    else:
        byte = e8m0.scale_byte_of(amax, RULE, LARGEST, EXPONENT, HALF_STEP)
    return tl.reshape(tl.broadcast_to(byte, (T // 4, 4)), (T,))


@triton.jit
def rceil_byte(amax, LARGEST: tl.constexpr, EXPONENT: tl.constexpr):
    """Gives the byte of `rceil`, int32, of a largest magnitude with 8 significant bits.

    The quotient by LARGEST exceeds a power of two where the fraction of amax exceeds that of
    LARGEST, by more than a division rounds off: so there is none.
    """
    # 1.5 or 1.75.
    MORE: tl.constexpr = (1 << 22) - 1 if LARGEST == 6.0 else (1 << 21) - 1
    bits = amax.to(tl.int32, bitcast=True)
    byte = tl.maximum(((bits + MORE) >> 23) - EXPONENT, 0)
    return tl.where(bits < _INF_BITS, byte, tl.where(bits == _INF_BITS, 254, 255))


@triton.jit
def guided(pairs, word, byte, NUM_BITS: tl.constexpr, CODES: tl.constexpr):
    """Gives pairs [T, 4] guided by the hint and the block scale of their octets.

    Args:
        pairs: int32 [T, 4].
        word: int32 [T]; 8 mantissa bits, pairs of lowest bits, or codes.
        byte: int32 [T], E8M0.
        NUM_BITS: 1, 2 or 4.
        CODES: Whether to give codes, in which a NaN counts as beyond the largest value.

    Returns:
        int32 [T, 4], BF16 pairs; or int32 [T], codes.
    """
    scale, reciprocal, zero = e8m0.scales_of(byte[:, None])
    # A NaN is passed on, but not by a block of zeros.
    pairs &= tl.where(zero, 0, -1)
    even = 2 * tl.arange(0, 4)[None, :]
    word = word[:, None]
    lows = _guided_half(
        bf16.low_half(pairs & bf16.MAGNITUDES), pairs << 16, reciprocal, word, even, NUM_BITS, CODES
    )
    highs = _guided_half(
        bf16.high_half(pairs & bf16.MAGNITUDES), pairs, reciprocal, word, even + 1, NUM_BITS, CODES
    )
    signs = pairs & bf16.SIGNS
    return bf16.codes(lows, highs, signs) if CODES else bf16.dequantised(lows, highs, scale, signs)


@triton.jit
def _guided_half(
    magnitude,
    sign,
    reciprocal,
    word,
    column,
    NUM_BITS: tl.constexpr,
    CODES: tl.constexpr,
):
    a = magnitude * reciprocal
    # From 4 on the candidates are 4 and 6, so that 5 may stand for all values beyond.
    if CODES:
        a = tl.where(a < 5.0, a, 5.0)
    else:
        a = tl.minimum(a, 5.0, propagate_nan=tl.PropagateNan.ALL)
    return bf16.chosen(a, sign, word, column, NUM_BITS)
