"""4over6 in pairs of BF16: what `kernels_bf16` is to NVFP4.

Legend: as there. Which of the two block scales is better follows from FP32 sums in a prescribed
order. Here it follows from sums in any order and of fewer operations, unless they are too near one
another to tell; `recorded` says for which octets that is so. Values of these must be rounded by
`kernels_octets_four_over_six`.

Errors are in units of a candidate's scale, below 7 as its quotients are. Of both sums, the
prescribed and this one, a product or quotient is off by 2^-24 of itself, a difference, square and
partial sum by 2^-24 of itself. With e = sum of d^2, and values of at most 6 and quotients of at
most 7, 16 each, that is at most 2^-23 (24 + 28) sqrt(e) + 2^-24 * 40 e, less than
2^-17 e + 2^-18; and for e = sum of |d|, 2^-24 (96 + 112) + 2^-24 * 40 e, less than
2^-17 e + 2^-16.

Two errors are so decided if they differ by the sum of both bounds. The scale of 4 is at most twice
that of 6 (where both are rounded to multiples of 2^-9), so that 5 of 6's units are enough for what
does not grow with e (4 + 1 of squares); and of what grows, errors that differ by more than 1.6e-5
of 6's, a little more than 2^-16, differ by more than 2^-17 of their sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_trace.formats import kernels_bf16 as bf16


@triton.jit
def recorded(pairs, global_scale, NUM_BITS: tl.constexpr, ERROR: tl.constexpr, T: tl.constexpr):
    """Gives pairs [T, 4] rounded to nearest under the better block scale, where it is certain.

    Args:
        pairs: int32 [T, 4].
        global_scale: FP32, or FP32 [T].
        NUM_BITS: 1, 2 or 4.
        ERROR: What decides between 4 and 6.
        T: Octets.

    Returns:
        y: int32 [T, 4], BF16 pairs.
        word: int32 [T]; 8 mantissa bits, pairs of lowest bits, or codes.
        byte: int32 [T], E4M3.
        decided: bool [T]; whether these are right.
    """
    magnitudes = pairs & bf16.MAGNITUDES
    amax = bf16.largest_of_blocks(magnitudes, T)
    zero = amax == 0
    ratio = _quotient(amax, global_scale * 6.0)
    lows, highs = bf16.low_half(magnitudes), bf16.high_half(magnitudes)
    lows_4, low_bits_4, highs_4, high_bits_4, byte_4, scale_4, effective_4, error_4 = _candidate(
        lows, highs, 1.5 * ratio, global_scale, ERROR, T
    )
    lows_6, low_bits_6, highs_6, high_bits_6, byte_6, scale_6, effective_6, error_6 = _candidate(
        lows, highs, ratio, global_scale, ERROR, T
    )
    unit_4 = scale_4 * scale_4 if ERROR == "mse" else scale_4
    unit_6 = scale_6 * scale_6 if ERROR == "mse" else scale_6
    difference = error_6 * unit_6 - error_4 * unit_4
    # No square of what counts is a denormal number. Else nothing is decided, whatever the errors.
    usual = (global_scale > 9.094947017729282e-13) & (global_scale <= 128.0)
    LEAST: tl.constexpr = 1.9073486328125e-05 if ERROR == "mse" else 7.62939453125e-05
    margin = tl.fma(error_6, 1.6e-05, tl.where(usual, LEAST, float("inf"))) * unit_6
    # The errors of a block beyond either scale are not as small as was said.
    decided = (tl.abs(difference) > margin) & (amax < 6.9 * effective_6)
    decided = decided | (amax <= tl.where(usual, 0.0, -1.0))

    four = difference > 0
    effective = tl.where(four, effective_4, effective_6)
    byte = tl.where(zero, 0, tl.where(four, byte_4, byte_6))
    signs = pairs & tl.where(zero, 0, bf16.SIGNS)[:, None]
    four = four[:, None]
    lows = tl.where(four, lows_4, lows_6)
    highs = tl.where(four, highs_4, highs_6)
    low_bits = tl.where(four, low_bits_4, low_bits_6)
    high_bits = tl.where(four, high_bits_4, high_bits_6)
    word = bf16.hint_word(lows, highs, low_bits, high_bits, signs, NUM_BITS, T)
    return bf16.dequantised(lows, highs, effective[:, None], signs), word, byte, decided


@triton.jit
def _quotient(x, divisor):
    """Gives x / divisor rounded to nearest for a BF16 number x, where nothing over- or underflows.

    Dividing 1 instead takes the division out of the loop over tiles of one global scale.
    """
    reciprocal = tl.div_rn(1.0, divisor)
    near = x * reciprocal
    return tl.fma(tl.fma(near, -divisor, x), reciprocal, near)


@triton.jit
def _candidate(lows, highs, block_scale, global_scale, ERROR: tl.constexpr, T: tl.constexpr):
    """Gives magnitudes rounded under a block scale, not yet E4M3, and the error in its units.

    Returns:
        lows, their biased sums, highs, theirs: FP32 [T, 4].
        byte: int32 [T].
        scale: FP32 [T], of the byte.
        effective: FP32 [T], scale times the global scale.
        error: FP32 [T], of the block.
    """
    block_scale = tl.maximum(block_scale, 0.001953125, propagate_nan=tl.PropagateNan.ALL)
    byte, scale = bf16.e4m3(block_scale)
    effective = scale * global_scale
    r, s = bf16.short_reciprocal_of(effective)
    lows_near, highs_near = lows * r[:, None], highs * r[:, None]
    lows_a = tl.fma(lows, s[:, None], lows_near)
    highs_a = tl.fma(highs, s[:, None], highs_near)
    lows, lows_biased = bf16.round_beside(lows_a, lows_near)
    highs, highs_biased = bf16.round_beside(highs_a, highs_near)
    low_error, high_error = lows - lows_a, highs - highs_a
    if ERROR == "mse":
        errors = tl.fma(low_error, low_error, high_error * high_error)
    else:
        errors = tl.abs(low_error) + tl.abs(high_error)
    errors = tl.reshape(tl.sum(errors, axis=1), (T // 2, 2))
    errors = tl.broadcast_to(tl.sum(errors, axis=1, keep_dims=True), (T // 2, 2))
    errors = tl.reshape(errors, (T,))
    return lows, lows_biased, highs, highs_biased, byte, scale, effective, errors
