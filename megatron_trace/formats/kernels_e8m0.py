"""E8M0 block scales in Triton: `scales_e8m0`, for whichever MX format.

Scales are powers of two, and so are their reciprocals: a product with one is the quotient, rounded
once, whatever the dtype.
"""

from __future__ import annotations

import triton
import triton.language as tl

# What the rule `even` adds to the bits of amax: half a step of the elements.
E2M1_HALF_STEP: tl.constexpr = tl.constexpr(1 << 21)
E4M3_HALF_STEP: tl.constexpr = tl.constexpr(1 << 19)
_FRACTION_MASK: tl.constexpr = tl.constexpr((1 << 23) - 1)
# FP32 bits of 2^-127, a denormal number.
_LEAST_BITS: tl.constexpr = tl.constexpr(1 << 22)


@triton.jit
def scale_byte_of(
    amax,
    RULE: tl.constexpr,
    LARGEST: tl.constexpr,
    EXPONENT: tl.constexpr,
    HALF_STEP: tl.constexpr,
):
    """Gives the E8M0 byte, int32, of a block's largest magnitude; `scales_e8m0` says the rules.

    Args:
        amax: FP32.
        RULE: A rule.
        LARGEST: Largest magnitude of the elements.
        EXPONENT: Its exponent.
        HALF_STEP: What `even` adds to the bits of amax: half a step of the elements.
    """
    bits = amax.to(tl.int32, bitcast=True)
    if RULE == "rceil":
        byte = _exponent_rounded_up(tl.div_rn(amax, LARGEST))
    elif RULE == "floor":
        byte = (bits >> 23) - EXPONENT
    elif RULE == "even":
        byte = ((bits + HALF_STEP) >> 23) - EXPONENT
    else:
        byte = _exponent_rounded_up(amax) - EXPONENT
    byte = tl.minimum(tl.maximum(byte, 0), 254)
    return tl.where(amax == amax, byte, 255)


@triton.jit
def _exponent_rounded_up(value):
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits <= _LEAST_BITS, 0, (bits + _FRACTION_MASK) >> 23)


@triton.jit
def scales_of(byte):
    """Gives the scale of a byte, 0 for byte 0; its reciprocal; whether the byte is 0."""
    scale = (byte << 23).to(tl.float32, bitcast=True)
    scale = tl.where(byte == 255, float("nan"), scale)
    reciprocal = tl.maximum((254 - byte) << 23, _LEAST_BITS).to(tl.float32, bitcast=True)
    return scale, tl.where(byte == 255, float("nan"), reciprocal), byte == 0
