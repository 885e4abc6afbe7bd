"""Triton kernels of rtn, rtn_record and guided: the same names, arguments and bits as `reference`.

Legend: an octet is 8 neighbouring values, half a block. A tile is [T, 8], T octets, one for each
thread: 16 bytes of BF16, loaded and stored at once, whose hint bits are packed without leaving the
thread. A program handles several tiles.

There are two paths. `kernels_octets` takes every dtype and global scale, and Triton's interpreter
runs it. BF16 under usual global scales takes `kernels_bf16`, for speed. ROW is how many octets
share a global scale, those of a row, or 0 where there is one for all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from megatron_trace.formats import kernels_bf16 as bf16
from megatron_trace.formats import kernels_octets as octets
from megatron_trace.formats.checks import (
    as_row_scales,
    require_guide,
    require_input,
    require_num_bits,
)
from megatron_trace.formats.constants import BLOCK_SIZE


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched.

    Attributes:
        tiles: Tiles of a program.
        num_warps: Warps of a program.
    """

    tiles: int
    num_warps: int


# The fastest on an H200, for BF16: docs/measurements.md.
RTN_LAUNCH = Launch(tiles=2, num_warps=4)
RECORD_LAUNCH = Launch(tiles=4, num_warps=2)
GUIDED_LAUNCH = Launch(tiles=2, num_warps=4)
# For FP32 and FP16, and for up to 512 tokens of 2048 values.
GENERAL_LAUNCH = Launch(tiles=1, num_warps=2)
SMALL_LAUNCH = Launch(tiles=1, num_warps=4)
_SMALL_OCTETS = 512 * 2048 // 8


def rtn(
    x: torch.Tensor,
    global_scale: torch.Tensor | float,
    *,
    dtype: torch.dtype | None = None,
    launch: Launch | None = None,
) -> torch.Tensor:
    """Gives `reference.rtn`.

    Args:
        x: float [..., K] on a GPU.
        global_scale: FP32 0-d tensor or number, or one for each row, decode side.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
        launch: Tiles and warps; None is what was fastest.

    Returns:
        [..., K] in the dtype of x.

    Raises:
        ValueError: K is not a multiple of 16, or x is not on a GPU.
    """
    x, scale = prepared(x, global_scale)
    y = torch.empty_like(x)
    _launch(
        _rtn_kernel, x, dtype, launch or _chosen(x, RTN_LAUNCH), x, y, scale, ROW=row_of(x, scale)
    )
    return y


def rtn_record(
    x: torch.Tensor,
    global_scale: torch.Tensor | float,
    *,
    num_bits: int,
    dtype: torch.dtype | None = None,
    launch: Launch | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives `reference.rtn_record`.

    Args:
        x: float [..., K] on a GPU.
        global_scale: FP32 0-d tensor or number, or one for each row, decode side.
        num_bits: 1, 2 (lowest bits) or 4 (codes) per value of the hint.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
        launch: Tiles and warps; None is what was fastest.

    Returns:
        y: [..., K] in the dtype of x.
        hint: uint8 [..., K * num_bits / 8].
        scale_bytes: uint8 [..., B], E4M3.

    Raises:
        ValueError: K is not a multiple of 16, num_bits is not 1, 2 or 4, or x is not on a GPU.
    """
    require_num_bits(num_bits)
    x, scale = prepared(x, global_scale)
    *rows, length = x.shape
    y = torch.empty_like(x)
    hint = x.new_empty((*rows, length * num_bits // 8), dtype=torch.uint8)
    scale_bytes = x.new_empty((*rows, length // BLOCK_SIZE), dtype=torch.uint8)
    words = hint.flatten().view(WORDS[num_bits])
    _launch(
        _rtn_record_kernel,
        x,
        dtype,
        launch or _chosen(x, RECORD_LAUNCH),
        x,
        y,
        words,
        scale_bytes,
        scale,
        NUM_BITS=num_bits,
        ROW=row_of(x, scale),
    )
    return y, hint, scale_bytes


def guided(
    x: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor | float,
    *,
    num_bits: int,
    dtype: torch.dtype | None = None,
    launch: Launch | None = None,
) -> torch.Tensor:
    """Gives `reference.guided`.

    Args:
        x: float [..., K] on a GPU; the trainer's values.
        hint: uint8 [..., K * num_bits / 8]; packed lowest bits (1, 2) or codes (4).
        scale_bytes: uint8 [..., B]; the rollout's block scales.
        global_scale: FP32 0-d tensor or number, or one for each row; the rollout's, decode side.
        num_bits: 1, 2 or 4.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
        launch: Tiles and warps; None is what was fastest.

    Returns:
        [..., K] in the dtype of x.

    Raises:
        ValueError: Shapes disagree, K is not a multiple of 16, num_bits is not 1, 2 or 4, or a
            tensor is not on the GPU of x.
    """
    require_guide(x, hint, scale_bytes, num_bits)
    x, scale = prepared(x, global_scale)
    for name, tensor in (("hint", hint), ("scale_bytes", scale_bytes)):
        if tensor.device != x.device:
            raise ValueError(f"{name} must lie on {x.device} like x; got {tensor.device}")
    y = torch.empty_like(x)
    words, dtype_of_words = hint.flatten(), WORDS[num_bits]
    aligned = words.data_ptr() % dtype_of_words.itemsize == 0
    words = (words if aligned else words.clone()).view(dtype_of_words)
    _launch(
        _guided_kernel,
        x,
        dtype,
        launch or _chosen(x, GUIDED_LAUNCH),
        x,
        words,
        scale_bytes.contiguous(),
        y,
        scale,
        NUM_BITS=num_bits,
        ROW=row_of(x, scale),
    )
    return y


@triton.jit(do_not_specialize=["num_octets"])
def _rtn_kernel(
    x_ptr,
    y_ptr,
    scale_ptr,
    num_octets,
    ROW: tl.constexpr,
    ROUNDED: tl.constexpr,
    PAIRS: tl.constexpr,
    T: tl.constexpr,
    TILES: tl.constexpr,
):
    first, left = octets.octets_of_program(num_octets, T, TILES)
    x_ptr += first * 8
    y_ptr += first * 8
    if PAIRS:
        tiles = bf16.load_pairs(x_ptr, left, T, TILES)
        scales = octets.load_all_scales(scale_ptr, first, left, ROW, T, TILES)
        if bf16.are_usual(scales, ROW, TILES):
            for tile in tl.static_range(TILES):
                y, _, _ = bf16.recorded(tiles[tile], scales[tile], 1, T)
                bf16.store_pairs(y_ptr, y, left, tile, T)
        else:
            _rtn_tiles(x_ptr, y_ptr, scale_ptr, first, left, ROW, ROUNDED, T, TILES)
    else:
        _rtn_tiles(x_ptr, y_ptr, scale_ptr, first, left, ROW, ROUNDED, T, TILES)


@triton.jit
def _rtn_tiles(
    x_ptr,
    y_ptr,
    scale_ptr,
    first,
    left,
    ROW: tl.constexpr,
    ROUNDED: tl.constexpr,
    T: tl.constexpr,
    TILES: tl.constexpr,
):
    for tile in range(TILES):
        x = tl.reshape(octets.load_tile(x_ptr, left, tile, T), (T // 2, 2, 8))
        scales = octets.load_block_scales(scale_ptr, first, left, tile, ROW, T)
        nearest, _, _, effective, zero, _ = octets.nearest_octets(x.to(tl.float32), scales)
        y = octets.dequantised(nearest, octets.sign_bits_of(x), effective, zero)
        octets.store_tile(y_ptr, y.to(ROUNDED), left, tile, T)


@triton.jit(do_not_specialize=["num_octets"])
def _rtn_record_kernel(
    x_ptr,
    y_ptr,
    hint_ptr,
    scale_bytes_ptr,
    scale_ptr,
    num_octets,
    NUM_BITS: tl.constexpr,
    ROW: tl.constexpr,
    ROUNDED: tl.constexpr,
    PAIRS: tl.constexpr,
    T: tl.constexpr,
    TILES: tl.constexpr,
):
    first, left = octets.octets_of_program(num_octets, T, TILES)
    x_ptr += first * 8
    y_ptr += first * 8
    hint_ptr += first
    scale_bytes_ptr += first // 2
    if PAIRS:
        tiles = bf16.load_pairs(x_ptr, left, T, TILES)
        scales = octets.load_all_scales(scale_ptr, first, left, ROW, T, TILES)
        if bf16.are_usual(scales, ROW, TILES):
            for tile in tl.static_range(TILES):
                y, word, byte = bf16.recorded(tiles[tile], scales[tile], NUM_BITS, T)
                bf16.store_pairs(y_ptr, y, left, tile, T)
                octets.store_hint(hint_ptr, scale_bytes_ptr, word, byte, left, tile, T)
        else:
            _rtn_record_tiles(
                x_ptr,
                y_ptr,
                hint_ptr,
                scale_bytes_ptr,
                scale_ptr,
                first,
                left,
                NUM_BITS,
                ROW,
                ROUNDED,
                T,
                TILES,
            )
    else:
        _rtn_record_tiles(
            x_ptr,
            y_ptr,
            hint_ptr,
            scale_bytes_ptr,
            scale_ptr,
            first,
            left,
            NUM_BITS,
            ROW,
            ROUNDED,
            T,
            TILES,
        )


@triton.jit
def _rtn_record_tiles(
    x_ptr,
    y_ptr,
    hint_ptr,
    scale_bytes_ptr,
    scale_ptr,
    first,
    left,
    NUM_BITS: tl.constexpr,
    ROW: tl.constexpr,
    ROUNDED: tl.constexpr,
    T: tl.constexpr,
    TILES: tl.constexpr,
):
    for tile in range(TILES):
        x = octets.load_tile(x_ptr, left, tile, T)
        scales = octets.load_block_scales(scale_ptr, first, left, tile, ROW, T)
        y, word, byte = octets.rounded_octets(x, scales, NUM_BITS, T)
        octets.store_tile(y_ptr, y.to(ROUNDED), left, tile, T)
        octets.store_hint(hint_ptr, scale_bytes_ptr, word, byte, left, tile, T)


@triton.jit(do_not_specialize=["num_octets"])
def _guided_kernel(
    x_ptr,
    hint_ptr,
    scale_bytes_ptr,
    y_ptr,
    scale_ptr,
    num_octets,
    NUM_BITS: tl.constexpr,
    ROW: tl.constexpr,
    ROUNDED: tl.constexpr,
    PAIRS: tl.constexpr,
    T: tl.constexpr,
    TILES: tl.constexpr,
):
    first, left = octets.octets_of_program(num_octets, T, TILES)
    x_ptr += first * 8
    y_ptr += first * 8
    hint_ptr += first
    scale_bytes_ptr += first // 2
    if PAIRS:
        tiles = bf16.load_pairs(x_ptr, left, T, TILES)
        hints = ()
        for tile in tl.static_range(TILES):
            hints += (octets.load_hint(hint_ptr, scale_bytes_ptr, left, tile, T),)
        scales = octets.load_all_scales(scale_ptr, first, left, ROW, T, TILES)
        if bf16.are_usual(scales, ROW, TILES):
            for tile in tl.static_range(TILES):
                word, byte = hints[tile]
                y = bf16.guided(tiles[tile], word, byte, scales[tile], NUM_BITS)
                bf16.store_pairs(y_ptr, y, left, tile, T)
        else:
            _guided_tiles(
                x_ptr,
                hint_ptr,
                scale_bytes_ptr,
                y_ptr,
                scale_ptr,
                first,
                left,
                NUM_BITS,
                ROW,
                ROUNDED,
                T,
                TILES,
            )
    else:
        _guided_tiles(
            x_ptr,
            hint_ptr,
            scale_bytes_ptr,
            y_ptr,
            scale_ptr,
            first,
            left,
            NUM_BITS,
            ROW,
            ROUNDED,
            T,
            TILES,
        )


@triton.jit
def _guided_tiles(
    x_ptr,
    hint_ptr,
    scale_bytes_ptr,
    y_ptr,
    scale_ptr,
    first,
    left,
    NUM_BITS: tl.constexpr,
    ROW: tl.constexpr,
    ROUNDED: tl.constexpr,
    T: tl.constexpr,
    TILES: tl.constexpr,
):
    for tile in range(TILES):
        x = octets.load_tile(x_ptr, left, tile, T)
        word, byte = octets.load_hint(hint_ptr, scale_bytes_ptr, left, tile, T)
        scales = octets.load_scales(scale_ptr, first, left, tile, ROW, T)
        y = octets.guided_octets(x, word, byte, scales, NUM_BITS)
        octets.store_tile(y_ptr, y.to(ROUNDED), left, tile, T)


# An octet of a hint, by its bits.
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
INTERPRETED = isinstance(_rtn_kernel, InterpretedFunction)
_TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


def _chosen(x: torch.Tensor, large: Launch) -> Launch:
    if x.numel() <= 8 * _SMALL_OCTETS:
        return SMALL_LAUNCH
    return large if x.dtype == torch.bfloat16 else GENERAL_LAUNCH


def _launch(
    kernel,
    x: torch.Tensor,
    dtype: torch.dtype | None,
    launch: Launch,
    *arguments: torch.Tensor,
    **constants: int,
) -> None:
    num_octets = x.numel() // 8
    if num_octets == 0:
        return
    octets_per_tile = 32 * launch.num_warps
    grid = (triton.cdiv(num_octets, octets_per_tile * launch.tiles),)
    rounded_to = dtype or x.dtype
    with torch.cuda.device_of(x):
        kernel[grid](
            *arguments,
            num_octets,
            **constants,
            ROUNDED=triton_dtype(rounded_to),
            # The interpreter knows neither PTX nor an fma that rounds once.
            PAIRS=x.dtype == rounded_to == torch.bfloat16 and not INTERPRETED,
            T=octets_per_tile,
            TILES=launch.tiles,
            num_warps=launch.num_warps,
        )


def prepared(
    x: torch.Tensor, global_scale: torch.Tensor | float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives x contiguous and aligned, and global scales FP32: 0-d, or one for each row [R].

    Raises:
        ValueError: x has another dtype or length, is not on a GPU, or the scales do not fit it.
    """
    require_input(x)
    scales = as_row_scales(global_scale, x)
    if scales.dim():
        scales = scales.expand(*x.shape[:-1], 1).reshape(-1).contiguous()
    return prepared_values(x), scales


def prepared_values(x: torch.Tensor) -> torch.Tensor:
    """Gives x contiguous and aligned.

    Raises:
        ValueError: x has another dtype, or is not on a GPU.
    """
    if not (x.is_cuda or INTERPRETED):
        raise ValueError(
            f"implementation triton needs x on a GPU; got {x.device}; use torch or auto there"
        )
    triton_dtype(x.dtype)
    x = x.contiguous()
    # Pairs of values are loaded.
    return x if x.data_ptr() % 4 == 0 else x.clone()


def row_of(x: torch.Tensor, scales: torch.Tensor) -> int:
    """Gives how many octets share a global scale, 0 for all."""
    return x.shape[-1] // 8 if scales.dim() else 0


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    """Gives the dtype in Triton; raises ValueError where the kernels do not take it."""
    try:
        return _TRITON_DTYPES[dtype]
    except KeyError:
        names = ", ".join(str(name) for name in _TRITON_DTYPES)
        raise ValueError(f"implementation triton takes {names}; got {dtype}") from None
