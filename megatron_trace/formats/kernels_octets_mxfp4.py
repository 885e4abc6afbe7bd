"""MXFP4 on tiles of octets in Triton: every float dtype. `kernels_bf16_mx` has pairs of BF16.

Legend: as `kernels_tiles`; a block is 4 octets.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_trace.formats import kernels_e8m0 as e8m0
from megatron_trace.formats import kernels_octets as octets


@triton.jit
def rounded_octets(x, NUM_BITS: tl.constexpr, RULE: tl.constexpr, T: tl.constexpr):
    """Gives x [T, 8] rounded to nearest under its own block scales.

    Args:
        x: float [T, 8].
        NUM_BITS: 1, 2 or 4, or 0, for which the word is not to be used.
        RULE: A rule of `scales_e8m0`.
        T: Octets, a multiple of 4.

    Returns:
        y: FP32 [T, 8].
        word: int32 [T]; 8 mantissa bits, pairs of lowest bits, or codes.
        byte: int32 [T], E8M0.
    """
    x = tl.reshape(x, (T // 4, 4, 8))
    magnitude, amax = magnitudes_of(x)
    byte = e8m0.scale_byte_of(amax, RULE, 6.0, 2, e8m0.E2M1_HALF_STEP)
    effective, reciprocal, zero = e8m0.scales_of(byte)
    # Not tl.minimum: a NaN is to become 6, in the interpreter too.
    a = magnitude * reciprocal
    nearest, biased, power = octets.round_to_ladder(tl.where(a < 6.0, a, 6.0))
    sign_bits = octets.sign_bits_of(x)
    y = octets.dequantised(nearest, sign_bits, effective, zero)
    word = octets.hint_word(biased, power, sign_bits, NUM_BITS)
    word = tl.reshape(tl.where(tl.reshape(zero, (T // 4, 1)), 0, word), (T,))
    byte = tl.reshape(tl.broadcast_to(byte, (T // 4, 4, 1)), (T,))
    return tl.reshape(y, (T, 8)), word, byte


@triton.jit
def magnitudes_of(x):
    """Gives |x|, FP32 [N, 4, 8], and the largest of each block, [N, 1, 1]."""
    magnitude = tl.abs(x.to(tl.float32))
    amax = tl.reduce(magnitude, 2, octets.max_of, keep_dims=True)
    return magnitude, tl.reduce(amax, 1, octets.max_of, keep_dims=True)


@triton.jit
def guided_quotients(x, byte):
    """Gives |x| / scale, 0 in blocks of zeros, FP32 [T, 8]; scales [T, 1]; zero [T, 1].

    Args:
        x: float [T, 8].
        byte: int32 [T], E8M0.
    """
    effective, reciprocal, zero = e8m0.scales_of(byte[:, None])
    # A NaN is passed on, but not by a block of zeros.
    return tl.where(zero, 0.0, tl.abs(x.to(tl.float32))) * reciprocal, effective, zero
