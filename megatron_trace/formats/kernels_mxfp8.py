"""Triton kernels of MXFP8: the same names, arguments and bits as `mxfp8`.

Legend: as `kernels_mxfp4`, whose scales and launch these are. A hint of 8 bits is a byte a value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_trace.formats import kernels_bf16 as bf16
from megatron_trace.formats import kernels_bf16_mx as bf16_mx
from megatron_trace.formats import kernels_e8m0 as e8m0
from megatron_trace.formats import kernels_mxfp4 as mxfp4
from megatron_trace.formats import kernels_octets as octets
from megatron_trace.formats.checks import require_guide, require_num_bits
from megatron_trace.formats.constants import MX_BLOCK_SIZE
from megatron_trace.formats.scales_e8m0 import DEFAULT_RULE, ScaleRule

_EXPONENT_MASK: tl.constexpr = tl.constexpr(0x7F800000)
# FP32 bits of 2^-6, the least normal value of E4M3, and of 1.5 * 2^20, with which an FP32 power of
# two p, at least that, rounds to multiples of p / 8.
_LEAST_NORMAL_BITS: tl.constexpr = tl.constexpr(121 << 23)
_BIAS: tl.constexpr = tl.constexpr(1.5 * 2.0**20)
_BIAS_BITS: tl.constexpr = tl.constexpr((20 << 23) | (1 << 22))
# Of an octet, by bits a value; 8 bits are stored value by value.
_WORDS = {1: torch.uint8, 2: torch.int16, 8: torch.uint8}


def rtn(
    x: torch.Tensor,
    global_scale: None = None,
    *,
    dtype: torch.dtype | None = None,
    scale_rule: ScaleRule = DEFAULT_RULE,
) -> torch.Tensor:
    """Gives `mxfp8.rtn`.

    Args:
        x: float [..., K] on a GPU.
        global_scale: None.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
        scale_rule: How the scale follows from the largest magnitude of a block.

    Returns:
        [..., K] in the dtype of x.

    Raises:
        ValueError: K is not a multiple of 32, the rule is unknown, or x is not on a GPU.
    """
    x = mxfp4.prepared(x, global_scale)
    y = torch.empty_like(x)
    rule, pairs = mxfp4.known_rule(scale_rule), mxfp4.in_pairs(x, dtype)
    mxfp4.launch(_record_kernel, x, dtype, x, y, y, y, NUM_BITS=0, RULE=rule, PAIRS=pairs)
    return y


def rtn_record(
    x: torch.Tensor,
    global_scale: None = None,
    *,
    num_bits: int,
    dtype: torch.dtype | None = None,
    scale_rule: ScaleRule = DEFAULT_RULE,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives `mxfp8.rtn_record`.

    Args:
        x: float [..., K] on a GPU.
        global_scale: None.
        num_bits: 1, 2 or 8.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
        scale_rule: How the scale follows from the largest magnitude of a block.

    Returns:
        y: [..., K] in the dtype of x.
        hint: uint8 [..., K * num_bits / 8].
        scale_bytes: uint8 [..., B], E8M0.

    Raises:
        ValueError: K is not a multiple of 32, num_bits is not 1, 2 or 8, the rule is unknown, or x
            is not on a GPU.
    """
    require_num_bits(num_bits, code_bits=8)
    x = mxfp4.prepared(x, global_scale)
    *rows, length = x.shape
    y = torch.empty_like(x)
    hint = x.new_empty((*rows, length * num_bits // 8), dtype=torch.uint8)
    scale_bytes = x.new_empty((*rows, length // MX_BLOCK_SIZE), dtype=torch.uint8)
    words = hint.flatten().view(_WORDS[num_bits])
    constants = {"RULE": mxfp4.known_rule(scale_rule), "PAIRS": mxfp4.in_pairs(x, dtype)}
    mxfp4.launch(_record_kernel, x, dtype, x, y, words, scale_bytes, NUM_BITS=num_bits, **constants)
    return y, hint, scale_bytes


def guided(
    x: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: None = None,
    *,
    num_bits: int,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Gives `mxfp8.guided`.

    Args:
        x: float [..., K] on a GPU; the trainer's values.
        hint: uint8 [..., K * num_bits / 8].
        scale_bytes: uint8 [..., B]; the rollout's block scales.
        global_scale: None.
        num_bits: 1, 2 or 8.
        dtype: dtype in which the dequantised values are rounded; None is that of x.

    Returns:
        [..., K] in the dtype of x.

    Raises:
        ValueError: Shapes disagree, K is not a multiple of 32, num_bits is not 1, 2 or 8, or a
            tensor is not on the GPU of x.
    """
    require_num_bits(num_bits, code_bits=8)
    require_guide(x, hint, scale_bytes, num_bits, block_size=MX_BLOCK_SIZE, code_bits=8)
    x = mxfp4.prepared(x, global_scale)
    for name, tensor in (("hint", hint), ("scale_bytes", scale_bytes)):
        if tensor.device != x.device:
            raise ValueError(f"{name} must lie on {x.device} like x; got {tensor.device}")
    y = torch.empty_like(x)
    words, dtype_of_words = hint.flatten(), _WORDS[num_bits]
    aligned = words.data_ptr() % dtype_of_words.itemsize == 0
    words = (words if aligned else words.clone()).view(dtype_of_words)
    constants = {"NUM_BITS": num_bits, "PAIRS": mxfp4.in_pairs(x, dtype)}
    mxfp4.launch(_guided_kernel, x, dtype, x, words, scale_bytes.contiguous(), y, **constants)
    return y


@triton.jit(do_not_specialize=["num_octets"])
def _record_kernel(
    x_ptr,
    y_ptr,
    hint_ptr,
    scale_bytes_ptr,
    num_octets,
    NUM_BITS: tl.constexpr,
    RULE: tl.constexpr,
    PAIRS: tl.constexpr,
    ROUNDED: tl.constexpr,
    T: tl.constexpr,
):
    first, left = octets.octets_of_program(num_octets, T, 1)
    if PAIRS:
        pairs = bf16.load_pair_tile(x_ptr + first * 8, left, 0, T)
        y, word, byte = rounded_pairs(pairs, NUM_BITS, RULE, T)
        bf16.store_pairs(y_ptr + first * 8, y, left, 0, T)
    else:
        x = octets.load_tile(x_ptr + first * 8, left, 0, T)
        y, word, byte = rounded_octets(x, NUM_BITS, RULE, T)
        octets.store_tile(y_ptr + first * 8, y.to(ROUNDED), left, 0, T)
    if NUM_BITS:
        hint_ptr += first * (8 if NUM_BITS == 8 else 1)
        scale_bytes_ptr += first // 4
        octets.store_hint(hint_ptr, scale_bytes_ptr, word, byte, left, 0, T, NUM_BITS, 4)


@triton.jit(do_not_specialize=["num_octets"])
def _guided_kernel(
    x_ptr,
    hint_ptr,
    scale_bytes_ptr,
    y_ptr,
    num_octets,
    NUM_BITS: tl.constexpr,
    PAIRS: tl.constexpr,
    ROUNDED: tl.constexpr,
    T: tl.constexpr,
):
    first, left = octets.octets_of_program(num_octets, T, 1)
    hint_ptr += first * (8 if NUM_BITS == 8 else 1)
    word, byte = octets.load_hint(hint_ptr, scale_bytes_ptr + first // 4, left, 0, T, NUM_BITS, 4)
    if PAIRS:
        pairs = bf16.load_pair_tile(x_ptr + first * 8, left, 0, T)
        y = guided_pairs(pairs, word, byte, NUM_BITS, False, T)
        bf16.store_pairs(y_ptr + first * 8, y, left, 0, T)
    else:
        x = octets.load_tile(x_ptr + first * 8, left, 0, T)
        a, effective, zero = mxfp4.guided_quotients(x, byte)
        chosen = guided_magnitudes(x, word, a, NUM_BITS, False)
        y = octets.dequantised(chosen, octets.sign_bits_of(x), effective, zero)
        octets.store_tile(y_ptr + first * 8, y.to(ROUNDED), left, 0, T)


@triton.jit
def rounded_pairs(pairs, NUM_BITS: tl.constexpr, RULE: tl.constexpr, T: tl.constexpr):
    """Gives what `rounded_octets` gives, of and as BF16 pairs, int32 [T, 4]."""
    byte = bf16_mx.scale_bytes_of(pairs, RULE, 448.0, 8, e8m0.E4M3_HALF_STEP, T)
    scale, reciprocal, zero = e8m0.scales_of(byte[:, None])
    # A block of zeros may hold values too small to have a scale.
    pairs &= tl.where(zero, 0, -1)
    magnitudes = pairs & bf16.MAGNITUDES
    # The scale of a block with a NaN is NaN; its codes are those of 448.
    lows, low = _rounded(tl.minimum(bf16.low_half(magnitudes) * reciprocal, 448.0))
    highs, high = _rounded(tl.minimum(bf16.high_half(magnitudes) * reciprocal, 448.0))
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
    lows = _chosen(low_a, low, pairs << 16, NUM_BITS)
    highs = _chosen(high_a, high, pairs, NUM_BITS)
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
    nearest, index = _rounded(tl.where(a < 448.0, a, 448.0))
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
    return _chosen(a, wanted, octets.sign_bits_of(x), NUM_BITS)


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
def _rounded(a):
    """Gives a, 0 to 448, rounded to E4M3, and its index on the ladder."""
    power_bits = _power_bits(a)
    power = power_bits.to(tl.float32, bitcast=True)
    biased = tl.fma(power, _BIAS, a)
    steps = biased.to(tl.int32, bitcast=True) - power_bits - _BIAS_BITS
    return tl.fma(power, -_BIAS, biased), steps + _first_index(power_bits)


@triton.jit
def _chosen(a, wanted, sign_bits, NUM_BITS: tl.constexpr):
    """Gives, of the two magnitudes beside a, the one that the hint says.

    Args:
        a: FP32 [T, 8], 0 to 432 or NaN.
        wanted: int32 [T, 8]; lowest bits, with others above them, or codes.
        sign_bits: int32 [T, 8], bit 31 the sign.
        NUM_BITS: 1, 2 or 8.
    """
    power_bits = _power_bits(a)
    step = (power_bits - (3 << 23)).to(tl.float32, bitcast=True)
    # Steps are powers of two: this product too is exact.
    position = a * (8.0 * ((254 << 23) - power_bits).to(tl.float32, bitcast=True))
    steps = tl.floor(position)
    index = steps.to(tl.int32) + _first_index(power_bits)
    if NUM_BITS == 1:
        upper = ((index ^ wanted) & 1) != 0
    elif NUM_BITS == 2:
        upper = octets.pair_says_upper(index, wanted, 126)
    else:
        same_sign = ((wanted << 24) ^ sign_bits) >= 0
        upper = same_sign & ((wanted & 0x7F) > index)
    return (steps + (upper & (position != steps)).to(tl.float32)) * step
