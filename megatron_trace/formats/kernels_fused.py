"""Triton kernels of `fused`: the same names, arguments and bits, on a GPU, for every format.

Legend: as `kernels_tiles`. SwiGLU works on tiles of any rows; RMSNorm on one row in a program,
whose squares are added in the order that `fused` fixes. Both are fast for BF16, two values in each
register until the format takes over.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from megatron_trace.formats import kernels, kernels_rows
from megatron_trace.formats import kernels_bf16 as bf16
from megatron_trace.formats import kernels_octets as octets
from megatron_trace.formats import kernels_tiles as tiles
from megatron_trace.formats.checks import require_multiple
from megatron_trace.formats.number_format import NVFP4, NumberFormat

_SWIGLU_WARPS = 4
_SWIGLU_TILES = 2
# Octets of a thread of RMSNorm: NVFP4 rounded to nearest, and all else.
_NORM_OCTETS = 4
_NORM_OCTETS_OTHER = 2
# Octets of a row that a program of RMSNorm holds.
_MAX_ROW_OCTETS = 4096


def swiglu_rtn(
    gate_up: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    *,
    number_format: NumberFormat = NVFP4,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Gives `fused.swiglu_rtn`.

    Args:
        gate_up: float [..., 2 K] on a GPU.
        global_scale: FP32 0-d tensor or number, or one for each row, decode side; None for a format
            without.
        number_format: The format.
        dtype: dtype in which the dequantised values are rounded; None is that of the input.

    Returns:
        float [..., K].

    Raises:
        ValueError: Shapes or devices disagree, K is not a multiple of the block size, or num_bits
            is not that of a hint.
    """
    gate_up, y, scales = _swiglu_tensors(gate_up, global_scale, number_format)
    constants = kernels_rows.constants_of(y, scales, number_format, dtype)
    _launch_swiglu(gate_up, y, y, y, scales, NUM_BITS=0, GUIDED=False, **constants)
    return y


def swiglu_rtn_record(
    gate_up: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    *,
    num_bits: int,
    number_format: NumberFormat = NVFP4,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives `fused.swiglu_rtn_record`.

    Args:
        gate_up: float [..., 2 K] on a GPU.
        global_scale: FP32 0-d tensor or number, or one for each row, decode side; None for a format
            without.
        number_format: The format.
        num_bits: One of `number_format.hint_bits`.
        dtype: dtype in which the dequantised values are rounded; None is that of the input.

    Returns:
        y: float [..., K].
        hint: uint8 [..., K * num_bits / 8].
        scale_bytes: uint8 [..., B].

    Raises:
        ValueError: Shapes or devices disagree, K is not a multiple of the block size, or num_bits
            is not that of a hint.
    """
    gate_up, y, scales = _swiglu_tensors(gate_up, global_scale, number_format)
    hint, scale_bytes = kernels_rows.new_hint(y, num_bits, number_format)
    words = kernels_rows.words_of(hint, num_bits)
    constants = kernels_rows.constants_of(y, scales, number_format, dtype)
    _launch_swiglu(
        gate_up, y, words, scale_bytes, scales, NUM_BITS=num_bits, GUIDED=False, **constants
    )
    return y, hint, scale_bytes


def swiglu_guided(
    gate_up: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    *,
    num_bits: int,
    number_format: NumberFormat = NVFP4,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Gives `fused.swiglu_guided`.

    Args:
        gate_up: float [..., 2 K] on a GPU; the trainer's values.
        hint: uint8 [..., K * num_bits / 8].
        scale_bytes: uint8 [..., B]; the rollout's block scales.
        global_scale: The rollout's, as `swiglu_rtn`.
        number_format: The format.
        num_bits: One of `number_format.hint_bits`.
        dtype: dtype in which the dequantised values are rounded; None is that of the input.

    Returns:
        float [..., K].

    Raises:
        ValueError: Shapes or devices disagree, K is not a multiple of the block size, or num_bits
            is not that of a hint.
    """
    gate_up, y, scales = _swiglu_tensors(gate_up, global_scale, number_format)
    words, scale_bytes = kernels_rows.given_hint(y, hint, scale_bytes, num_bits, number_format)
    constants = kernels_rows.constants_of(y, scales, number_format, dtype)
    _launch_swiglu(
        gate_up, y, words, scale_bytes, scales, NUM_BITS=num_bits, GUIDED=True, **constants
    )
    return y


def rms_norm_rtn(
    x: torch.Tensor,
    weight: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    *,
    eps: float,
    number_format: NumberFormat = NVFP4,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives `fused.rms_norm_rtn`.

    Args:
        x: float [..., K] on a GPU, K at most 32768.
        weight: float [K].
        global_scale: FP32 0-d tensor or number, or one for each row, decode side; None for a format
            without.
        number_format: The format.
        eps: Added to the mean square.
        dtype: dtype in which the dequantised values are rounded; None is that of the input.

    Returns:
        normed: float [..., K].
        y: float [..., K].

    Raises:
        ValueError: Shapes or devices disagree, K is not a multiple of the block size, or num_bits
            is not that of a hint.
    """
    x, normed, y, scales = _norm_tensors(x, weight, global_scale, number_format)
    constants = kernels_rows.constants_of(x, scales, number_format, dtype)
    _launch_norm(x, weight, normed, y, y, y, scales, eps, NUM_BITS=0, GUIDED=False, **constants)
    return normed, y


def rms_norm_rtn_record(
    x: torch.Tensor,
    weight: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    *,
    eps: float,
    num_bits: int,
    number_format: NumberFormat = NVFP4,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives `fused.rms_norm_rtn_record`.

    Args:
        x: float [..., K] on a GPU, K at most 32768.
        weight: float [K].
        global_scale: FP32 0-d tensor or number, or one for each row, decode side; None for a format
            without.
        number_format: The format.
        eps: Added to the mean square.
        num_bits: One of `number_format.hint_bits`.
        dtype: dtype in which the dequantised values are rounded; None is that of the input.

    Returns:
        normed: float [..., K].
        y: float [..., K].
        hint: uint8 [..., K * num_bits / 8].
        scale_bytes: uint8 [..., B].

    Raises:
        ValueError: Shapes or devices disagree, K is not a multiple of the block size, or num_bits
            is not that of a hint.
    """
    x, normed, y, scales = _norm_tensors(x, weight, global_scale, number_format)
    hint, scale_bytes = kernels_rows.new_hint(y, num_bits, number_format)
    constants = kernels_rows.constants_of(x, scales, number_format, dtype)
    _launch_norm(
        x,
        weight,
        normed,
        y,
        kernels_rows.words_of(hint, num_bits),
        scale_bytes,
        scales,
        eps,
        NUM_BITS=num_bits,
        GUIDED=False,
        **constants,
    )
    return normed, y, hint, scale_bytes


def rms_norm_guided(
    x: torch.Tensor,
    weight: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    *,
    eps: float,
    num_bits: int,
    number_format: NumberFormat = NVFP4,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives `fused.rms_norm_guided`.

    Args:
        x: float [..., K] on a GPU, K at most 32768; the trainer's values.
        weight: float [K].
        hint: uint8 [..., K * num_bits / 8].
        scale_bytes: uint8 [..., B]; the rollout's block scales.
        global_scale: The rollout's, as `swiglu_rtn`.
        number_format: The format.
        eps: Added to the mean square.
        num_bits: One of `number_format.hint_bits`.
        dtype: dtype in which the dequantised values are rounded; None is that of the input.

    Returns:
        normed: float [..., K].
        y: float [..., K].

    Raises:
        ValueError: Shapes or devices disagree, K is not a multiple of the block size, or num_bits
            is not that of a hint.
    """
    x, normed, y, scales = _norm_tensors(x, weight, global_scale, number_format)
    words, scale_bytes = kernels_rows.given_hint(y, hint, scale_bytes, num_bits, number_format)
    constants = kernels_rows.constants_of(x, scales, number_format, dtype)
    _launch_norm(
        x,
        weight,
        normed,
        y,
        words,
        scale_bytes,
        scales,
        eps,
        NUM_BITS=num_bits,
        GUIDED=True,
        **constants,
    )
    return normed, y


@triton.jit(do_not_specialize=["num_octets"])
def _swiglu_kernel(
    x_ptr,
    y_ptr,
    hint_ptr,
    scale_bytes_ptr,
    scale_ptr,
    num_octets,
    row_octets,
    NUM_BITS: tl.constexpr,
    GUIDED: tl.constexpr,
    FORMAT: tl.constexpr,
    RULE: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDED: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    T: tl.constexpr,
    TILES: tl.constexpr,
):
    first, left = octets.octets_of_program(num_octets, T, TILES)
    y_ptr += first * 8
    hint_ptr += first * (8 if NUM_BITS == 8 else 1)
    scale_bytes_ptr += first // BLOCK
    for tile in tl.static_range(TILES):
        hint = _hint(hint_ptr, scale_bytes_ptr, left, tile, NUM_BITS, BLOCK, GUIDED, T)
        scales = tiles.load_scales(scale_ptr, first, left, tile, BLOCK, ROW, T)
        octet = tl.arange(0, T) + tile * T
        # Before the gate of row r lie r rows of gates and r of ups.
        row = (first.to(tl.int32) + octet) // row_octets
        gates = (first + octet + row.to(tl.int64) * row_octets)[:, None]
        mask = (octet < left)[:, None]
        if PAIRS:
            gates = gates * 4 + tl.arange(0, 4)[None, :]
            gate = tl.load(bf16.as_pairs(x_ptr) + gates, mask=mask, other=0)
            up = tl.load(bf16.as_pairs(x_ptr) + gates + row_octets * 4, mask=mask, other=0)
            high, low = _silu(bf16.high_half(gate), False), _silu(bf16.low_half(gate), False)
            silu = bf16.pair_of(high, low)
            x = bf16.pair_of(
                bf16.high_half(silu) * bf16.high_half(up), bf16.low_half(silu) * bf16.low_half(up)
            )
        else:
            gates = gates * 8 + tl.arange(0, 8)[None, :]
            gate = tl.load(x_ptr + gates, mask=mask, other=0.0)
            up = tl.load(x_ptr + gates + row_octets * 8, mask=mask, other=0.0)
            silu = _silu(gate.to(tl.float32), INTERPRETED).to(x_ptr.dtype.element_ty)
            x = (silu.to(tl.float32) * up.to(tl.float32)).to(x_ptr.dtype.element_ty)
        _quantise_tile(
            x,
            hint,
            scales,
            y_ptr,
            hint_ptr,
            scale_bytes_ptr,
            left,
            tile,
            NUM_BITS,
            GUIDED,
            FORMAT,
            RULE,
            ROW,
            BLOCK,
            ROUNDED,
            PAIRS,
            T,
        )


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    normed_ptr,
    y_ptr,
    hint_ptr,
    scale_bytes_ptr,
    scale_ptr,
    eps,
    row_octets,
    NUM_BITS: tl.constexpr,
    GUIDED: tl.constexpr,
    FORMAT: tl.constexpr,
    RULE: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDED: tl.constexpr,
    PAIRS: tl.constexpr,
    T: tl.constexpr,
    LOG_T: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = row * row_octets
    x = octets.load_tile(x_ptr + first * 8, row_octets, 0, T).to(tl.float32)
    weight = octets.load_tile(weight_ptr, row_octets, 0, T).to(tl.float32)
    hint_ptr += first * (8 if NUM_BITS == 8 else 1)
    scale_bytes_ptr += first // BLOCK
    hint = _hint(hint_ptr, scale_bytes_ptr, row_octets, 0, NUM_BITS, BLOCK, GUIDED, T)
    # A row has one global scale, whatever the others have.
    scales = tiles.load_scales(scale_ptr + (row if ROW else 0), first, row_octets, 0, BLOCK, 0, T)
    mean = tl.div_rn(_sum_of_neighbours(x * x, T, LOG_T), (row_octets * 8).to(tl.float32))
    inverse = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    normed = x * inverse * weight
    if PAIRS:
        normed = bf16.paired(normed, T)
        bf16.store_pairs(normed_ptr + first * 8, normed, row_octets, 0, T)
    else:
        normed = normed.to(x_ptr.dtype.element_ty)
        octets.store_tile(normed_ptr + first * 8, normed, row_octets, 0, T)
    _quantise_tile(
        normed,
        hint,
        scales,
        y_ptr + first * 8,
        hint_ptr,
        scale_bytes_ptr,
        row_octets,
        0,
        NUM_BITS,
        GUIDED,
        FORMAT,
        RULE,
        0,
        BLOCK,
        ROUNDED,
        PAIRS,
        T,
    )


@triton.jit
def _silu(gate, INTERPRETED: tl.constexpr):
    # Triton's interpreter does not know libdevice.
    exp = tl.exp(-gate) if INTERPRETED else libdevice.exp(-gate)
    return tl.div_rn(gate, 1.0 + exp)


@triton.jit
def _sum_of_neighbours(values, T: tl.constexpr, LOG_T: tl.constexpr):
    """Gives the sum of [T, 8], adding neighbours, then neighbours of the sums, and so on."""
    even, odd = tl.split(tl.reshape(values, (T, 4, 2)))
    even, odd = tl.split(tl.reshape(even + odd, (T, 2, 2)))
    even, odd = tl.split(even + odd)
    sums = even + odd
    for step in tl.static_range(LOG_T):
        sums = tl.sum(tl.reshape(sums, (T >> (step + 1), 2)), axis=1)
    return tl.sum(sums, axis=0)


@triton.jit
def _hint(
    hint_ptr,
    scale_bytes_ptr,
    left,
    tile,
    NUM_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    GUIDED: tl.constexpr,
    T: tl.constexpr,
):
    hint = ()
    if GUIDED:
        hint = octets.load_hint(hint_ptr, scale_bytes_ptr, left, tile, T, NUM_BITS, BLOCK)
    return hint


@triton.jit
def _quantise_tile(
    x,
    hint,
    scales,
    y_ptr,
    hint_ptr,
    scale_bytes_ptr,
    left,
    tile,
    NUM_BITS: tl.constexpr,
    GUIDED: tl.constexpr,
    FORMAT: tl.constexpr,
    RULE: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDED: tl.constexpr,
    PAIRS: tl.constexpr,
    T: tl.constexpr,
):
    """Quantises a tile and stores the result, and a hint if recorded.

    A hint that guides has been loaded before, so as not to wait for it here.
    """
    if GUIDED:
        y = tiles.guided(x, hint, scales, NUM_BITS, FORMAT, ROW, PAIRS, False, T)
    else:
        y, word, byte = tiles.nearest(x, scales, NUM_BITS, FORMAT, RULE, ROW, PAIRS, T)
        if NUM_BITS:
            octets.store_hint(hint_ptr, scale_bytes_ptr, word, byte, left, tile, T, NUM_BITS, BLOCK)
    tiles.store(y_ptr, y, left, tile, ROUNDED, PAIRS, T)


def _launch_swiglu(
    gate_up: torch.Tensor, y: torch.Tensor, *others: torch.Tensor, **constants
) -> None:
    num_octets = y.numel() // 8
    if num_octets == 0:
        return
    if num_octets >= 2**31:
        raise ValueError(f"swiglu takes up to 2^34 values at once; got {tuple(y.shape)}")
    octets_per_tile = 32 * _SWIGLU_WARPS
    grid = (triton.cdiv(num_octets, octets_per_tile * _SWIGLU_TILES),)
    with torch.cuda.device_of(y):
        _swiglu_kernel[grid](
            gate_up,
            y,
            *others,
            num_octets,
            y.shape[-1] // 8,
            **constants,
            INTERPRETED=kernels.INTERPRETED,
            T=octets_per_tile,
            TILES=_SWIGLU_TILES,
            num_warps=_SWIGLU_WARPS,
            # 4over6: a product and a sum rounded once would be another error.
            enable_fp_fusion=False,
        )


def _launch_norm(x: torch.Tensor, *others: torch.Tensor | float, **constants) -> None:
    if x.numel() == 0:
        return
    row_octets = x.shape[-1] // 8
    tile = triton.next_power_of_2(row_octets)
    to_nearest = constants["FORMAT"] == NVFP4.name and not constants["GUIDED"]
    per_thread = _NORM_OCTETS if to_nearest else _NORM_OCTETS_OTHER
    with torch.cuda.device_of(x):
        _rms_norm_kernel[(x.numel() // x.shape[-1],)](
            x,
            *others,
            row_octets,
            **constants,
            T=tile,
            LOG_T=tile.bit_length() - 1,
            num_warps=min(max(tile // (32 * per_thread), 1), 16),
            # A product and a sum round twice, as in `fused`.
            enable_fp_fusion=False,
        )


def _swiglu_tensors(
    gate_up: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    number_format: NumberFormat,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives gate_up contiguous and aligned, memory for y, and the global scales."""
    require_multiple(gate_up, 2 * number_format.block_size)
    y = gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))
    y, scales = kernels_rows.prepared(y, global_scale, number_format)
    return _aligned(gate_up), y, scales


def _norm_tensors(
    x: torch.Tensor,
    weight: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    number_format: NumberFormat,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives x contiguous and aligned, memory for normed and y, and the global scales."""
    x, scales = kernels_rows.prepared(x, global_scale, number_format)
    length = x.shape[-1]
    if length > _MAX_ROW_OCTETS * 8:
        raise ValueError(f"rows must be at most {_MAX_ROW_OCTETS * 8} long; got {length}")
    if weight.shape != (length,) or weight.device != x.device or not weight.is_contiguous():
        raise ValueError(
            f"weight must be [{length}], contiguous, on {x.device}; got {tuple(weight.shape)} on "
            f"{weight.device}"
        )
    x = _aligned(x)
    return x, torch.empty_like(x), torch.empty_like(x), scales


def _aligned(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()
