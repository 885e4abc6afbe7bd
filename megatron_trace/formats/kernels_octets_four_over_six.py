"""4over6 on tiles of octets in Triton: every float dtype, every global scale.

Legend: as `kernels_tiles`. FP32 sums are as the specification orders them, and never fused with a
product: whoever launches says so.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_trace.formats import kernels_octets as octets


@triton.jit
def rounded_octets(x, scales, NUM_BITS: tl.constexpr, ERROR: tl.constexpr, T: tl.constexpr):
    """Gives x [T, 8] rounded to nearest under the better of its two block scales.

    Args:
        x: float [T, 8].
        scales: FP32, or FP32 [T / 2, 1, 1]; global scales.
        NUM_BITS: 1, 2 or 4, or 0, for which the word is not to be used.
        ERROR: What decides between 4 and 6.
        T: Octets.

    Returns:
        y: FP32 [T, 8].
        word: int32 [T]; 8 mantissa bits, pairs of lowest bits, or codes.
        byte: int32 [T], E4M3.
    """
    x = tl.reshape(x, (T // 2, 2, 8))
    sign_bits = octets.sign_bits_of(x)
    magnitude = tl.abs(x.to(tl.float32))
    amax = tl.reduce(magnitude, 2, octets.max_of, keep_dims=True)
    amax = tl.reduce(amax, 1, octets.max_of, keep_dims=True)

    ratio = octets.quotient(amax, scales * 6.0)
    near_4, biased_4, power_4, effective_4, zero_4, byte_4 = octets.nearest_by_scale(
        magnitude, amax, 1.5 * ratio, scales
    )
    near_6, biased_6, power_6, effective_6, zero_6, byte_6 = octets.nearest_by_scale(
        magnitude, amax, ratio, scales
    )
    error_4 = _error(near_4 * effective_4, magnitude, ERROR)
    four = error_4 < _error(near_6 * effective_6, magnitude, ERROR)

    zero = tl.where(four, zero_4, zero_6)
    effective = tl.where(four, effective_4, effective_6)
    y = octets.dequantised(tl.where(four, near_4, near_6), sign_bits, effective, zero)
    biased = tl.where(four, biased_4, biased_6)
    word = octets.hint_word(biased, tl.where(four, power_4, power_6), sign_bits, NUM_BITS)
    word = tl.reshape(tl.where(tl.reshape(zero, (T // 2, 1)), 0, word), (T,))
    byte = tl.where(four, byte_4, byte_6)
    byte = tl.reshape(tl.broadcast_to(byte, (T // 2, 2, 1)), (T,))
    return tl.reshape(y, (T, 8)), word, byte


@triton.jit
def candidate_bytes(x, scale, T: tl.constexpr):
    """Gives the two block scales, int32 [T] each, that the blocks of x [T, 8] may have.

    Args:
        x: float [T, 8].
        scale: FP32; the global scale.
        T: Octets.
    """
    magnitude = tl.abs(tl.reshape(x, (T // 2, 2, 8)).to(tl.float32))
    amax = tl.reduce(magnitude, 2, octets.max_of, keep_dims=True)
    amax = tl.reduce(amax, 1, octets.max_of, keep_dims=True)
    ratio = octets.quotient(amax, scale * 6.0)
    _, _, _, _, _, four = octets.nearest_by_scale(magnitude, amax, 1.5 * ratio, scale)
    _, _, _, _, _, six = octets.nearest_by_scale(magnitude, amax, ratio, scale)
    four = tl.reshape(tl.broadcast_to(four, (T // 2, 2, 1)), (T,))
    return four, tl.reshape(tl.broadcast_to(six, (T // 2, 2, 1)), (T,))


@triton.jit
def _error(values, magnitude, ERROR: tl.constexpr):
    """Gives FP32 [N, 1, 1], the error of [N, 2, 8] magnitudes; equal to that of signed values."""
    difference = values - magnitude
    terms = difference * difference if ERROR == "mse" else tl.abs(difference)
    # From the first column to the last: the second octet goes on where the first ends.
    octet = tl.arange(0, 2)[None, :, None]
    total = _added(0.0, terms)
    total = tl.sum(tl.where(octet == 0, total, -0.0), axis=1, keep_dims=True)
    return tl.sum(tl.where(octet == 1, _added(total, terms), -0.0), axis=1, keep_dims=True)


@triton.jit
def _added(total, terms):
    """Gives total plus [N, M, 8], one column after the other: [N, M, 1]."""
    column = tl.arange(0, 8)[None, None, :]
    for wanted in tl.static_range(8):
        # Adding -0 changes nothing, not even the sign of a 0; the compiler drops it.
        total += tl.sum(tl.where(column == wanted, terms, -0.0), axis=2, keep_dims=True)
    return total
