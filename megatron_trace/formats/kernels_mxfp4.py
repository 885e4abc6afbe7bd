"""Triton kernels of MXFP4: the same names, arguments and bits as `mxfp4`.

Legend: as `kernels`; a block is 4 octets. BF16 goes in pairs (`kernels_bf16_mx`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from megatron_trace.formats import kernels_bf16 as bf16
from megatron_trace.formats import kernels_bf16_mx as bf16_mx
from megatron_trace.formats import kernels_e8m0 as e8m0
from megatron_trace.formats import kernels_octets as octets
from megatron_trace.formats.checks import (
    require_guide,
    require_input,
    require_no_global_scale,
    require_num_bits,
)
from megatron_trace.formats.constants import MX_BLOCK_SIZE
from megatron_trace.formats.scales_e8m0 import DEFAULT_RULE, ScaleRule

_RULES = ("rceil", "floor", "even", "ceil")
_WARPS = 4
# Of an octet, by bits a value.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def rtn(
    x: torch.Tensor,
    global_scale: None = None,
    *,
    dtype: torch.dtype | None = None,
    scale_rule: ScaleRule = DEFAULT_RULE,
) -> torch.Tensor:
    """Gives `mxfp4.rtn`.

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
    x = prepared(x, global_scale)
    y = torch.empty_like(x)
    rule, pairs = known_rule(scale_rule), in_pairs(x, dtype)
    launch(_record_kernel, x, dtype, x, y, y, y, NUM_BITS=0, RULE=rule, PAIRS=pairs)
    return y


def rtn_record(
    x: torch.Tensor,
    global_scale: None = None,
    *,
    num_bits: int,
    dtype: torch.dtype | None = None,
    scale_rule: ScaleRule = DEFAULT_RULE,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives `mxfp4.rtn_record`.

    Args:
        x: float [..., K] on a GPU.
        global_scale: None.
        num_bits: 1, 2 or 4.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
        scale_rule: How the scale follows from the largest magnitude of a block.

    Returns:
        y: [..., K] in the dtype of x.
        hint: uint8 [..., K * num_bits / 8].
        scale_bytes: uint8 [..., B], E8M0.

    Raises:
        ValueError: K is not a multiple of 32, num_bits is not 1, 2 or 4, the rule is unknown, or x
            is not on a GPU.
    """
    require_num_bits(num_bits)
    x = prepared(x, global_scale)
    *rows, length = x.shape
    y = torch.empty_like(x)
    hint = x.new_empty((*rows, length * num_bits // 8), dtype=torch.uint8)
    scale_bytes = x.new_empty((*rows, length // MX_BLOCK_SIZE), dtype=torch.uint8)
    words = hint.flatten().view(_WORDS[num_bits])
    constants = {"RULE": known_rule(scale_rule), "PAIRS": in_pairs(x, dtype)}
    launch(_record_kernel, x, dtype, x, y, words, scale_bytes, NUM_BITS=num_bits, **constants)
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
    """Gives `mxfp4.guided`.

    Args:
        x: float [..., K] on a GPU; the trainer's values.
        hint: uint8 [..., K * num_bits / 8].
        scale_bytes: uint8 [..., B]; the rollout's block scales.
        global_scale: None.
        num_bits: 1, 2 or 4.
        dtype: dtype in which the dequantised values are rounded; None is that of x.

    Returns:
        [..., K] in the dtype of x.

    Raises:
        ValueError: Shapes disagree, K is not a multiple of 32, num_bits is not 1, 2 or 4, or a
            tensor is not on the GPU of x.
    """
    require_num_bits(num_bits)
    require_guide(x, hint, scale_bytes, num_bits, block_size=MX_BLOCK_SIZE)
    x = prepared(x, global_scale)
    for name, tensor in (("hint", hint), ("scale_bytes", scale_bytes)):
        if tensor.device != x.device:
            raise ValueError(f"{name} must lie on {x.device} like x; got {tensor.device}")
    y = torch.empty_like(x)
    words, dtype_of_words = hint.flatten(), _WORDS[num_bits]
    aligned = words.data_ptr() % dtype_of_words.itemsize == 0
    words = (words if aligned else words.clone()).view(dtype_of_words)
    constants = {"NUM_BITS": num_bits, "PAIRS": in_pairs(x, dtype)}
    launch(_guided_kernel, x, dtype, x, words, scale_bytes.contiguous(), y, **constants)
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
        y, word, byte = bf16_mx.recorded(pairs, NUM_BITS if NUM_BITS else 1, RULE, T)
        bf16.store_pairs(y_ptr + first * 8, y, left, 0, T)
    else:
        x = octets.load_tile(x_ptr + first * 8, left, 0, T)
        y, word, byte = rounded_octets(x, NUM_BITS, RULE, T)
        octets.store_tile(y_ptr + first * 8, y.to(ROUNDED), left, 0, T)
    if NUM_BITS:
        scale_bytes_ptr += first // 4
        octets.store_hint(hint_ptr + first, scale_bytes_ptr, word, byte, left, 0, T, NUM_BITS, 4)


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
    word, byte = octets.load_hint(
        hint_ptr + first, scale_bytes_ptr + first // 4, left, 0, T, NUM_BITS, 4
    )
    if PAIRS:
        pairs = bf16.load_pair_tile(x_ptr + first * 8, left, 0, T)
        y = bf16_mx.guided(pairs, word, byte, NUM_BITS, False)
        bf16.store_pairs(y_ptr + first * 8, y, left, 0, T)
    else:
        x = octets.load_tile(x_ptr + first * 8, left, 0, T)
        a, effective, zero = guided_quotients(x, byte)
        chosen = octets.guided_magnitudes(x, word, a, NUM_BITS, False)
        y = octets.dequantised(chosen, octets.sign_bits_of(x), effective, zero)
        octets.store_tile(y_ptr + first * 8, y.to(ROUNDED), left, 0, T)


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


_INTERPRETED = isinstance(_record_kernel, InterpretedFunction)


def launch(
    kernel, x: torch.Tensor, dtype: torch.dtype | None, *arguments: torch.Tensor, **constants
) -> None:
    """Launches a kernel of a MX format with a thread for each octet of x."""
    num_octets = x.numel() // 8
    if num_octets == 0:
        return
    tile = 32 * _WARPS
    with torch.cuda.device_of(x):
        kernel[(triton.cdiv(num_octets, tile),)](
            *arguments,
            num_octets,
            **constants,
            ROUNDED=_DTYPES[dtype or x.dtype],
            T=tile,
            num_warps=_WARPS,
        )


def prepared(x: torch.Tensor, global_scale: None) -> torch.Tensor:
    """Gives x contiguous; raises ValueError where the kernels do not take it."""
    require_no_global_scale(global_scale)
    require_input(x, MX_BLOCK_SIZE)
    if not (x.is_cuda or _INTERPRETED):
        raise ValueError(f"the Triton kernels of MX formats need x on a GPU; got {x.device}")
    if x.dtype not in _DTYPES:
        raise ValueError(
            f"the Triton kernels of MX formats take FP32, BF16 and FP16; got {x.dtype}"
        )
    x = x.contiguous()
    # Pairs of values are loaded.
    return x if x.data_ptr() % 4 == 0 else x.clone()


def in_pairs(x: torch.Tensor, dtype: torch.dtype | None) -> bool:
    """Says whether x is quantised two values in a register."""
    # The interpreter knows neither PTX nor an fma that rounds once.
    return x.dtype == (dtype or x.dtype) == torch.bfloat16 and not _INTERPRETED


def known_rule(scale_rule: ScaleRule) -> str:
    """Gives the rule; raises ValueError if it is none."""
    if scale_rule not in _RULES:
        raise ValueError(f"scale_rule must be one of {', '.join(_RULES)}; got {scale_rule!r}")
    return scale_rule
