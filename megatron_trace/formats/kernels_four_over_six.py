"""Triton kernels of 4over6: the same names, arguments and bits as `four_over_six`.

Legend: as `kernels`. Guided is that of NVFP4, since the scale byte says what was chosen. FP32 sums
are as the specification orders them, and never fused with a product: see `_launch`.
"""

from __future__ import annotations

from typing import get_args

import torch
import triton
import triton.language as tl

from megatron_trace.formats import kernels
from megatron_trace.formats import kernels_octets as octets
from megatron_trace.formats.checks import require_num_bits
from megatron_trace.formats.constants import BLOCK_SIZE
from megatron_trace.formats.four_over_six import ErrorRule
from megatron_trace.formats.kernels import guided

__all__ = ["guided", "rtn", "rtn_record"]

_WARPS = 4


def rtn(
    x: torch.Tensor,
    global_scale: torch.Tensor | float,
    *,
    dtype: torch.dtype | None = None,
    error: ErrorRule = "mse",
) -> torch.Tensor:
    """Gives `four_over_six.rtn`.

    Args:
        x: float [..., K] on a GPU.
        global_scale: FP32 0-d tensor or number, or one for each row, decode side.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
        error: What decides between 4 and 6.

    Returns:
        [..., K] in the dtype of x.

    Raises:
        ValueError: K is not a multiple of 16, the error rule is unknown, or x is not on a GPU.
    """
    x, scales = kernels.prepared(x, global_scale)
    y = torch.empty_like(x)
    _launch(x, dtype, x, y, y, y, scales, NUM_BITS=0, ERROR=_known(error))
    return y


def rtn_record(
    x: torch.Tensor,
    global_scale: torch.Tensor | float,
    *,
    num_bits: int,
    dtype: torch.dtype | None = None,
    error: ErrorRule = "mse",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives `four_over_six.rtn_record`.

    Args:
        x: float [..., K] on a GPU.
        global_scale: FP32 0-d tensor or number, or one for each row, decode side.
        num_bits: 1, 2 (lowest bits) or 4 (codes) per value of the hint.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
        error: What decides between 4 and 6.

    Returns:
        y: [..., K] in the dtype of x.
        hint: uint8 [..., K * num_bits / 8].
        scale_bytes: uint8 [..., B], E4M3.

    Raises:
        ValueError: K is not a multiple of 16, num_bits is not 1, 2 or 4, the error rule is unknown,
            or x is not on a GPU.
    """
    require_num_bits(num_bits)
    x, scales = kernels.prepared(x, global_scale)
    *rows, length = x.shape
    y = torch.empty_like(x)
    hint = x.new_empty((*rows, length * num_bits // 8), dtype=torch.uint8)
    scale_bytes = x.new_empty((*rows, length // BLOCK_SIZE), dtype=torch.uint8)
    words = hint.flatten().view(kernels.WORDS[num_bits])
    _launch(x, dtype, x, y, words, scale_bytes, scales, NUM_BITS=num_bits, ERROR=_known(error))
    return y, hint, scale_bytes


@triton.jit(do_not_specialize=["num_octets"])
def _record_kernel(
    x_ptr,
    y_ptr,
    hint_ptr,
    scale_bytes_ptr,
    scale_ptr,
    num_octets,
    NUM_BITS: tl.constexpr,
    ERROR: tl.constexpr,
    ROW: tl.constexpr,
    ROUNDED: tl.constexpr,
    T: tl.constexpr,
):
    first, left = octets.octets_of_program(num_octets, T, 1)
    x = octets.load_tile(x_ptr + first * 8, left, 0, T)
    scales = octets.load_block_scales(scale_ptr, first, left, 0, ROW, T)
    y, word, byte = rounded_octets(x, scales, NUM_BITS, ERROR, T)
    octets.store_tile(y_ptr + first * 8, y.to(ROUNDED), left, 0, T)
    if NUM_BITS:
        octets.store_hint(hint_ptr + first, scale_bytes_ptr + first // 2, word, byte, left, 0, T)


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


def _launch(
    x: torch.Tensor, dtype: torch.dtype | None, *arguments: torch.Tensor, **constants
) -> None:
    num_octets = x.numel() // 8
    if num_octets == 0:
        return
    tile = 32 * _WARPS
    with torch.cuda.device_of(x):
        _record_kernel[(triton.cdiv(num_octets, tile),)](
            *arguments,
            num_octets,
            **constants,
            ROW=kernels.row_of(x, arguments[-1]),
            ROUNDED=kernels.triton_dtype(dtype or x.dtype),
            T=tile,
            num_warps=_WARPS,
            # A product and a sum rounded once would be another error.
            enable_fp_fusion=False,
        )


def _known(error: ErrorRule) -> str:
    if error not in get_args(ErrorRule):
        raise ValueError(f"error must be one of {', '.join(get_args(ErrorRule))}; got {error!r}")
    return error
