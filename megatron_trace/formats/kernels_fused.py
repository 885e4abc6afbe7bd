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

from megatron_trace.formats import fused
from megatron_trace.formats import kernels_bf16 as bf16
from megatron_trace.formats import kernels_inputs as inputs
from megatron_trace.formats import kernels_octets as octets
from megatron_trace.formats import kernels_tiles as tiles
from megatron_trace.formats.checks import require_multiple
from megatron_trace.formats.kernels_inputs import Launch, launch_octets
from megatron_trace.formats.number_format import NVFP4, NVFP4_4OVER6, NumberFormat

_SWIGLU_WARPS = 4
# A tile of 4over6 is rounded anew if one of its blocks is undecided: of few blocks, rarely.
_SWIGLU_WARPS_4OVER6 = 2
_SWIGLU_TILES = 2
# Tiles of a row that a program of RMSNorm keeps in registers, of 1024 values.
_HELD_TILES = 8


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
    constants = inputs.constants_of(y, scales, number_format, dtype)
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
    hint, scale_bytes = inputs.new_hint(y, num_bits, number_format)
    words = inputs.words_of(hint, num_bits)
    constants = inputs.constants_of(y, scales, number_format, dtype)
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
    words, scale_bytes = inputs.given_hint(y, hint, scale_bytes, num_bits, number_format)
    constants = inputs.constants_of(y, scales, number_format, dtype)
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
        x: float [..., K] on a GPU.
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
    constants = inputs.constants_of(x, scales, number_format, dtype)
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
        x: float [..., K] on a GPU.
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
    hint, scale_bytes = inputs.new_hint(y, num_bits, number_format)
    constants = inputs.constants_of(x, scales, number_format, dtype)
    _launch_norm(
        x,
        weight,
        normed,
        y,
        inputs.words_of(hint, num_bits),
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
        x: float [..., K] on a GPU; the trainer's values.
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
    words, scale_bytes = inputs.given_hint(y, hint, scale_bytes, num_bits, number_format)
    constants = inputs.constants_of(x, scales, number_format, dtype)
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
    ONE_ROW: tl.constexpr,
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
        if ONE_ROW:
            row = (first.to(tl.int32) + tile * T) // row_octets
        else:
            row = (first.to(tl.int32) + octet) // row_octets
        gates = (first + octet + row.to(tl.int64) * row_octets)[:, None]
        mask = (octet < left)[:, None]
        if PAIRS:
            gates = gates * 4 + tl.arange(0, 4)[None, :]
            gate = tl.load(bf16.as_pairs(x_ptr) + gates, mask=mask, other=0)
            up = tl.load(bf16.as_pairs(x_ptr) + gates + row_octets * 4, mask=mask, other=0)
            x = bf16.product_of_pairs(silu_pairs(gate), up)
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
    HELD: tl.constexpr,
    TILES: tl.constexpr,
    T: tl.constexpr,
    LOG_T: tl.constexpr,
):
    """Normalises and quantises a row; those of its TILES beyond the first HELD are loaded twice."""
    row = tl.program_id(0).to(tl.int64)
    first = row * row_octets
    x_ptr += first * 8
    normed_ptr += first * 8
    y_ptr += first * 8
    hint_ptr += first * (8 if NUM_BITS == 8 else 1)
    scale_bytes_ptr += first // BLOCK
    held = tiles.load_all(x_ptr, row_octets, PAIRS, T, HELD)
    # Guided, registers would keep too many warps out; weights are in the cache by then.
    weights = () if GUIDED else tiles.load_all(weight_ptr, row_octets, PAIRS, T, HELD)
    hints = ()
    for tile in tl.static_range(HELD):
        hints += (_hint(hint_ptr, scale_bytes_ptr, row_octets, tile, NUM_BITS, BLOCK, GUIDED, T),)
    # A row has one global scale, whatever the others have.
    scales = tiles.load_scales(scale_ptr + (row if ROW else 0), first, row_octets, 0, BLOCK, 0, T)
    sums = tl.zeros((T,), tl.float32)
    for tile in tl.static_range(HELD):
        sums += _sums_of_squares(held[tile], PAIRS, T)
    for tile in range(HELD, TILES):
        sums += _sums_of_squares(tiles.load(x_ptr, row_octets, tile, PAIRS, T), PAIRS, T)
    for step in tl.static_range(LOG_T):
        sums = tl.sum(tl.reshape(sums, (T >> (step + 1), 2)), axis=1)
    mean = tl.div_rn(tl.sum(sums, axis=0), (row_octets * 8).to(tl.float32))
    inverse = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))

    for tile in tl.static_range(HELD):
        weight = tiles.load(weight_ptr, row_octets, tile, PAIRS, T) if GUIDED else weights[tile]
        normed = _normed(held[tile], weight, inverse, x_ptr.dtype.element_ty, PAIRS, T)
        tiles.store(normed_ptr, normed, row_octets, tile, x_ptr.dtype.element_ty, PAIRS, T)
        _quantise_tile(
            normed,
            hints[tile],
            scales,
            y_ptr,
            hint_ptr,
            scale_bytes_ptr,
            row_octets,
            tile,
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
    for tile in range(HELD, TILES):
        x = tiles.load(x_ptr, row_octets, tile, PAIRS, T)
        weight = tiles.load(weight_ptr, row_octets, tile, PAIRS, T)
        normed = _normed(x, weight, inverse, x_ptr.dtype.element_ty, PAIRS, T)
        tiles.store(normed_ptr, normed, row_octets, tile, x_ptr.dtype.element_ty, PAIRS, T)
        _quantise_tile(
            normed,
            _hint(hint_ptr, scale_bytes_ptr, row_octets, tile, NUM_BITS, BLOCK, GUIDED, T),
            scales,
            y_ptr,
            hint_ptr,
            scale_bytes_ptr,
            row_octets,
            tile,
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
def _sums_of_squares(x, PAIRS: tl.constexpr, T: tl.constexpr):
    """Gives FP32 [T], of each octet: neighbours are added, then neighbours of the sums."""
    if PAIRS:
        low, high = bf16.low_half(x), bf16.high_half(x)
        sums = low * low + high * high
    else:
        x = x.to(tl.float32)
        even, odd = tl.split(tl.reshape(x * x, (T, 4, 2)))
        sums = even + odd
    even, odd = tl.split(tl.reshape(sums, (T, 2, 2)))
    even, odd = tl.split(even + odd)
    return even + odd


@triton.jit
def _normed(x, weight, inverse, DTYPE: tl.constexpr, PAIRS: tl.constexpr, T: tl.constexpr):
    """Gives a tile normalised, in the dtype of x, before it is quantised."""
    if PAIRS:
        low = bf16.low_half(x) * inverse * bf16.low_half(weight)
        high = bf16.high_half(x) * inverse * bf16.high_half(weight)
        normed = bf16.pair_of(high, low)
    else:
        normed = (x.to(tl.float32) * inverse * weight.to(tl.float32)).to(DTYPE)
    return normed


@triton.jit
def silu_pairs(gate):
    """Gives silu of BF16 pairs: that of torch, as a test shows for all 65,536 numbers."""
    return bf16.pair_of(_near_silu(bf16.high_half(gate)), _near_silu(bf16.low_half(gate)))


@triton.jit
def _near_silu(gate):
    """Gives FP32 near enough to silu of a BF16 number to round to the same."""
    exp = bf16.near_power_of_two(gate * -1.4426950408889634)
    # By 16, so that the reciprocal of each finite sum is a normal number.
    return gate * 0.0625 * bf16.near_reciprocal(tl.fma(exp, 0.0625, 0.0625))


@triton.jit
def _silu(gate, INTERPRETED: tl.constexpr):
    # Triton's interpreter does not know libdevice.
    exp = tl.exp(-gate) if INTERPRETED else libdevice.exp(-gate)
    return tl.div_rn(gate, 1.0 + exp)


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
    if y.numel() // 8 >= 2**31:
        raise ValueError(f"swiglu takes up to 2^34 values at once; got {tuple(y.shape)}")
    chooses = constants["FORMAT"] == NVFP4_4OVER6.name and not constants["GUIDED"]
    num_warps = _SWIGLU_WARPS_4OVER6 if chooses else _SWIGLU_WARPS
    row_octets = y.shape[-1] // 8
    launch_octets(
        _swiglu_kernel,
        y,
        Launch(_SWIGLU_TILES, num_warps),
        gate_up,
        y,
        *others,
        row_octets=row_octets,
        **constants,
        # Whether the octets of a tile are of the same row.
        ONE_ROW=row_octets % (32 * num_warps) == 0,
        INTERPRETED=inputs.INTERPRETED,
        TILES=_SWIGLU_TILES,
    )


def _launch_norm(x: torch.Tensor, *others: torch.Tensor | float, **constants) -> None:
    if x.numel() == 0:
        return
    row_octets = x.shape[-1] // 8
    # `fused` deals the octets of a row to so many lanes; what is short of them adds zeros.
    tile = min(max(triton.next_power_of_2(row_octets), 32), fused.NORM_LANES)
    num_tiles = triton.cdiv(row_octets, tile)
    with torch.cuda.device_of(x):
        _rms_norm_kernel[(x.numel() // x.shape[-1],)](
            x,
            *others,
            row_octets,
            **constants,
            HELD=min(num_tiles, _HELD_TILES),
            TILES=num_tiles,
            T=tile,
            LOG_T=tile.bit_length() - 1,
            num_warps=tile // 32,
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
    y, scales = inputs.prepared(y, global_scale, number_format)
    return _aligned(gate_up), y, scales


def _norm_tensors(
    x: torch.Tensor,
    weight: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    number_format: NumberFormat,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives x contiguous and aligned, memory for normed and y, and the global scales."""
    x, scales = inputs.prepared(x, global_scale, number_format)
    length = x.shape[-1]
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
