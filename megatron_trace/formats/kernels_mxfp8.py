"""Triton kernels of MXFP8: the same names, arguments and bits as `mxfp8`.

Legend: as `kernels_mxfp4`, whose scales and launch these are. A hint of 8 bits is a byte a value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

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
_HALF_STEP: tl.constexpr = tl.constexpr(1 << 19)
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
    mxfp4.launch(
        _record_kernel, x, dtype, x, y, y, y, NUM_BITS=0, RULE=mxfp4.known_rule(scale_rule)
    )
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
    rule = mxfp4.known_rule(scale_rule)
    mxfp4.launch(_record_kernel, x, dtype, x, y, words, scale_bytes, NUM_BITS=num_bits, RULE=rule)
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
    mxfp4.launch(_guided_kernel, x, dtype, x, words, scale_bytes.contiguous(), y, NUM_BITS=num_bits)
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
    ROUNDED: tl.constexpr,
    T: tl.constexpr,
):
    first, left = octets.octets_of_program(num_octets, T, 1)
    x = tl.reshape(octets.load_tile(x_ptr + first * 8, left, 0, T), (T // 4, 4, 8))
    magnitude = tl.abs(x.to(tl.float32))
    amax = tl.reduce(magnitude, 2, octets.max_of, keep_dims=True)
    amax = tl.reduce(amax, 1, octets.max_of, keep_dims=True)
    byte = mxfp4.scale_byte_of(amax, RULE, 448.0, 8, _HALF_STEP)
    effective, reciprocal, zero = mxfp4.scales_of(byte)
    # Not tl.minimum: a NaN is to become 448, in the interpreter too.
    a = magnitude * reciprocal
    nearest, index = _rounded(tl.where(a < 448.0, a, 448.0))
    sign_bits = octets.sign_bits_of(x)
    y = octets.dequantised(nearest, sign_bits, effective, zero).to(ROUNDED)
    octets.store_tile(y_ptr + first * 8, y, left, 0, T)
    if NUM_BITS:
        code = tl.where(zero, 0, index | ((sign_bits >> 24) & 0x80))
        octet = tl.arange(0, T)
        if NUM_BITS == 8:
            octets.store_tile(hint_ptr + first * 8, code, left, 0, T)
        else:
            bits = (code & (2 * NUM_BITS - 1)) << (NUM_BITS * tl.arange(0, 8)[None, None, :])
            word = tl.reshape(tl.sum(bits, axis=2), (T,)).to(hint_ptr.dtype.element_ty)
            tl.store(hint_ptr + first + octet, word, mask=octet < left)
        byte = tl.reshape(tl.broadcast_to(byte, (T // 4, 4, 1)), (T,)).to(tl.uint8)
        mask = (octet < left) & (octet % 4 == 0)
        tl.store(scale_bytes_ptr + first // 4 + octet // 4, byte, mask=mask)


@triton.jit(do_not_specialize=["num_octets"])
def _guided_kernel(
    x_ptr,
    hint_ptr,
    scale_bytes_ptr,
    y_ptr,
    num_octets,
    NUM_BITS: tl.constexpr,
    ROUNDED: tl.constexpr,
    T: tl.constexpr,
):
    first, left = octets.octets_of_program(num_octets, T, 1)
    octet = tl.arange(0, T)
    mask = octet < left
    x = octets.load_tile(x_ptr + first * 8, left, 0, T)
    if NUM_BITS == 8:
        columns = octet[:, None] * 8 + tl.arange(0, 8)[None, :]
        wanted = tl.load(hint_ptr + first * 8 + columns, mask=mask[:, None], other=0).to(tl.int32)
    else:
        word = tl.load(hint_ptr + first + octet, mask=mask, other=0).to(tl.int32)
        wanted = word[:, None] >> (NUM_BITS * tl.arange(0, 8)[None, :])
    byte = tl.load(scale_bytes_ptr + first // 4 + octet // 4, mask=mask, other=0).to(tl.int32)
    effective, reciprocal, zero = mxfp4.scales_of(byte[:, None])
    # A NaN is passed on, but not by a block of zeros.
    a = tl.where(zero, 0.0, tl.abs(x.to(tl.float32))) * reciprocal
    # From 416 on the candidates are 416 and 448, so that 432 may stand for all values beyond.
    a = tl.minimum(a, 432.0, propagate_nan=tl.PropagateNan.ALL)
    sign_bits = octets.sign_bits_of(x)
    chosen = _chosen(a, wanted, sign_bits, NUM_BITS)
    y = octets.dequantised(chosen, sign_bits, effective, zero).to(ROUNDED)
    octets.store_tile(y_ptr + first * 8, y, left, 0, T)


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
        # The index that is this pair modulo 4 and nearest to a, which lies above `index`.
        nearest = index - 1 + ((wanted - index + 1) & 3)
        nearest = tl.where(nearest < 0, nearest + 4, nearest)
        upper = tl.where(nearest > 126, nearest - 4, nearest) > index
    else:
        same_sign = ((wanted << 24) ^ sign_bits) >= 0
        upper = same_sign & ((wanted & 0x7F) > index)
    return (steps + (upper & (position != steps)).to(tl.float32)) * step
