"""Triton kernels of rtn, rtn_record and guided: the bits of every format's specification.

`kernels_octets` takes every dtype and global scale, and Triton's interpreter runs it. Under usual
global scales BF16 takes `kernels_bf16` and FP32 in NVFP4 `kernels_fp32`, for speed.

Legend: as `kernels_tiles`. A program loads all its tiles before it rounds the first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_trace.formats import kernels_bf16 as bf16
from megatron_trace.formats import kernels_fp32 as fp32
from megatron_trace.formats import kernels_inputs as inputs
from megatron_trace.formats import kernels_octets as octets
from megatron_trace.formats import kernels_tiles as tiles
from megatron_trace.formats.kernels_inputs import Launch, chosen, launch_octets
from megatron_trace.formats.number_format import NVFP4, NVFP4_4OVER6, NumberFormat

# The fastest on an H200, for many values of BF16: docs/measurements.md.
_RTN_LAUNCH = Launch(tiles=2, num_warps=4)
_RECORD_LAUNCH = Launch(tiles=4, num_warps=2)
_GUIDED_LAUNCH = Launch(tiles=2, num_warps=4)
_FOUR_OVER_SIX_LAUNCH = Launch(tiles=4, num_warps=1)
# The interpreter knows neither PTX nor an fma that rounds once.
HAS_PTX: tl.constexpr = tl.constexpr(not inputs.INTERPRETED)


def rtn(
    x: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    number_format: NumberFormat,
    *,
    dtype: torch.dtype | None = None,
    launch: Launch | None = None,
) -> torch.Tensor:
    """Gives `rtn` of a format's specification.

    Args:
        x: float [..., K] on a GPU.
        global_scale: FP32 0-d tensor or number, or one for each row; None if there is none.
        number_format: The format.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
        launch: Tiles and warps; None is what was fastest.

    Returns:
        [..., K] in the dtype of x.

    Raises:
        ValueError: K is not a multiple of the block size, or x is not on a GPU.
    """
    x, scales = inputs.prepared(x, global_scale, number_format)
    y = torch.empty_like(x)
    constants = inputs.constants_of(x, scales, number_format, dtype)
    launch = launch or _fastest(x, number_format, _RTN_LAUNCH)
    constants |= {"NUM_BITS": 0} | _options(number_format, launch)
    launch_octets(_record_kernel, x, launch, x, y, y, y, scales, **constants)
    return y


def rtn_record(
    x: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    number_format: NumberFormat,
    *,
    num_bits: int,
    dtype: torch.dtype | None = None,
    launch: Launch | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives `rtn_record` of a format's specification.

    Args:
        x: float [..., K] on a GPU.
        global_scale: FP32 0-d tensor or number, or one for each row; None if there is none.
        number_format: The format.
        num_bits: One of `number_format.hint_bits`.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
        launch: Tiles and warps; None is what was fastest.

    Returns:
        y: [..., K] in the dtype of x.
        hint: uint8 [..., K * num_bits / 8].
        scale_bytes: uint8 [..., B].

    Raises:
        ValueError: K is not a multiple of the block size, num_bits is not that of a hint, or x is
            not on a GPU.
    """
    x, scales = inputs.prepared(x, global_scale, number_format)
    hint, scale_bytes = inputs.new_hint(x, num_bits, number_format)
    y = torch.empty_like(x)
    words = inputs.words_of(hint, num_bits)
    constants = inputs.constants_of(x, scales, number_format, dtype)
    launch = launch or _fastest(x, number_format, _RECORD_LAUNCH)
    constants |= {"NUM_BITS": num_bits} | _options(number_format, launch)
    launch_octets(_record_kernel, x, launch, x, y, words, scale_bytes, scales, **constants)
    return y, hint, scale_bytes


def guided(
    x: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    number_format: NumberFormat,
    *,
    num_bits: int,
    dtype: torch.dtype | None = None,
    launch: Launch | None = None,
) -> torch.Tensor:
    """Gives `guided` of a format's specification.

    Args:
        x: float [..., K] on a GPU; the trainer's values.
        hint: uint8 [..., K * num_bits / 8].
        scale_bytes: uint8 [..., B]; the rollout's block scales.
        global_scale: FP32 0-d tensor or number, or one for each row; None if there is none.
        number_format: The format.
        num_bits: One of `number_format.hint_bits`.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
        launch: Tiles and warps; None is what was fastest.

    Returns:
        [..., K] in the dtype of x.

    Raises:
        ValueError: Shapes disagree, num_bits is not that of a hint, or a tensor is not on the GPU
            of x.
    """
    if number_format.name == NVFP4_4OVER6.name:
        # The scale byte says which of the two was chosen.
        number_format = NVFP4
    x, words, scale_bytes, scales, constants = inputs.guided_inputs(
        x, hint, scale_bytes, global_scale, number_format, num_bits, dtype
    )
    y = torch.empty_like(x)
    launch = launch or chosen(x, _GUIDED_LAUNCH)
    constants |= _options(number_format, launch)
    launch_octets(_guided_kernel, x, launch, x, words, scale_bytes, y, scales, **constants)
    return y


def _fastest(x: torch.Tensor, number_format: NumberFormat, launch: Launch) -> Launch:
    """Gives the launch of kernels that round to nearest."""
    is_of_two = number_format.name == NVFP4_4OVER6.name
    return chosen(x, _FOUR_OVER_SIX_LAUNCH if is_of_two else launch)


def _options(number_format: NumberFormat, launch: Launch) -> dict[str, object]:
    # The general path of NVFP4 takes fewer instructions if they may be fused: in FP32 it guided at
    # .939 instead of .921 of a copy's speed.
    return {"TILES": launch.tiles, "fuses": number_format is NVFP4}


@triton.jit(do_not_specialize=["num_octets"])
def _record_kernel(
    x_ptr,
    y_ptr,
    hint_ptr,
    scale_bytes_ptr,
    scale_ptr,
    num_octets,
    NUM_BITS: tl.constexpr,
    FORMAT: tl.constexpr,
    RULE: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDED: tl.constexpr,
    PAIRS: tl.constexpr,
    T: tl.constexpr,
    TILES: tl.constexpr,
):
    first, left = octets.octets_of_program(num_octets, T, TILES)
    x_ptr += first * 8
    y_ptr += first * 8
    hint_ptr += first * (8 if NUM_BITS == 8 else 1)
    scale_bytes_ptr += first // BLOCK
    if HAS_PTX and FORMAT == "nvfp4" and x_ptr.dtype.element_ty == tl.float32:
        # In quads, of which each octet has two.
        usual = fp32.record_usual(
            x_ptr,
            y_ptr,
            hint_ptr,
            scale_bytes_ptr,
            scale_ptr,
            2 * first,
            2 * left,
            NUM_BITS,
            2 * ROW,
            ROUNDED,
            T,
            2 * TILES,
        )
        if not usual:
            _record_unusual(
                x_ptr,
                y_ptr,
                hint_ptr,
                scale_bytes_ptr,
                scale_ptr,
                first,
                left,
                NUM_BITS,
                FORMAT,
                RULE,
                ROW,
                BLOCK,
                ROUNDED,
                T,
                TILES,
            )
        return
    loaded = tiles.load_all(x_ptr, left, PAIRS, T, TILES)
    scales = tiles.load_all_scales(scale_ptr, first, left, BLOCK, ROW, T, TILES)
    if PAIRS and FORMAT == "nvfp4":
        # Asked once, of all tiles: a question each takes registers.
        if bf16.are_usual(scales, ROW, TILES):
            for tile in tl.static_range(TILES):
                y, word, byte = tiles.nearest(
                    loaded[tile], scales[tile], NUM_BITS, FORMAT, RULE, ROW, True, T, True
                )
                bf16.store_pairs(y_ptr, y, left, tile, T)
                if NUM_BITS:
                    octets.store_hint(hint_ptr, scale_bytes_ptr, word, byte, left, tile, T)
        else:
            _record_unusual(
                x_ptr,
                y_ptr,
                hint_ptr,
                scale_bytes_ptr,
                scale_ptr,
                first,
                left,
                NUM_BITS,
                FORMAT,
                RULE,
                ROW,
                BLOCK,
                ROUNDED,
                T,
                TILES,
            )
    else:
        for tile in tl.static_range(TILES):
            y, word, byte = tiles.nearest(
                loaded[tile], scales[tile], NUM_BITS, FORMAT, RULE, ROW, PAIRS, T
            )
            tiles.store(y_ptr, y, left, tile, ROUNDED, PAIRS, T)
            if NUM_BITS:
                octets.store_hint(
                    hint_ptr, scale_bytes_ptr, word, byte, left, tile, T, NUM_BITS, BLOCK
                )


@triton.jit
def _record_unusual(
    x_ptr,
    y_ptr,
    hint_ptr,
    scale_bytes_ptr,
    scale_ptr,
    first,
    left,
    NUM_BITS: tl.constexpr,
    FORMAT: tl.constexpr,
    RULE: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDED: tl.constexpr,
    T: tl.constexpr,
    TILES: tl.constexpr,
):
    """Rounds all tiles of a program without pairs, one after the other, whatever the scales."""
    for tile in range(TILES):
        x = tiles.load(x_ptr, left, tile, False, T)
        scales = tiles.load_scales(scale_ptr, first, left, tile, BLOCK, ROW, T)
        y, word, byte = tiles.nearest(x, scales, NUM_BITS, FORMAT, RULE, ROW, False, T)
        tiles.store(y_ptr, y, left, tile, ROUNDED, False, T)
        if NUM_BITS:
            octets.store_hint(hint_ptr, scale_bytes_ptr, word, byte, left, tile, T, NUM_BITS, BLOCK)


@triton.jit(do_not_specialize=["num_octets"])
def _guided_kernel(
    x_ptr,
    hint_ptr,
    scale_bytes_ptr,
    y_ptr,
    scale_ptr,
    num_octets,
    NUM_BITS: tl.constexpr,
    FORMAT: tl.constexpr,
    RULE: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDED: tl.constexpr,
    PAIRS: tl.constexpr,
    T: tl.constexpr,
    TILES: tl.constexpr,
):
    first, left = octets.octets_of_program(num_octets, T, TILES)
    x_ptr += first * 8
    y_ptr += first * 8
    hint_ptr += first * (8 if NUM_BITS == 8 else 1)
    scale_bytes_ptr += first // BLOCK
    if HAS_PTX and FORMAT == "nvfp4" and x_ptr.dtype.element_ty == tl.float32:
        # In quads, of which each octet has two.
        usual = fp32.guide_usual(
            x_ptr,
            hint_ptr,
            scale_bytes_ptr,
            y_ptr,
            scale_ptr,
            2 * first,
            2 * left,
            NUM_BITS,
            2 * ROW,
            ROUNDED,
            T,
            2 * TILES,
        )
        if not usual:
            _guide_unusual(
                x_ptr,
                hint_ptr,
                scale_bytes_ptr,
                y_ptr,
                scale_ptr,
                first,
                left,
                NUM_BITS,
                FORMAT,
                ROW,
                BLOCK,
                ROUNDED,
                T,
                TILES,
            )
        return
    loaded = tiles.load_all(x_ptr, left, PAIRS, T, TILES)
    hints = ()
    for tile in tl.static_range(TILES):
        hints += (octets.load_hint(hint_ptr, scale_bytes_ptr, left, tile, T, NUM_BITS, BLOCK),)
    scales = tiles.load_all_scales(scale_ptr, first, left, BLOCK, ROW, T, TILES)
    if PAIRS and FORMAT == "nvfp4":
        if bf16.are_usual(scales, ROW, TILES):
            for tile in tl.static_range(TILES):
                y = tiles.guided(
                    loaded[tile],
                    hints[tile],
                    scales[tile],
                    NUM_BITS,
                    FORMAT,
                    ROW,
                    True,
                    False,
                    T,
                    True,
                )
                bf16.store_pairs(y_ptr, y, left, tile, T)
        else:
            _guide_unusual(
                x_ptr,
                hint_ptr,
                scale_bytes_ptr,
                y_ptr,
                scale_ptr,
                first,
                left,
                NUM_BITS,
                FORMAT,
                ROW,
                BLOCK,
                ROUNDED,
                T,
                TILES,
            )
    else:
        for tile in tl.static_range(TILES):
            y = tiles.guided(
                loaded[tile], hints[tile], scales[tile], NUM_BITS, FORMAT, ROW, PAIRS, False, T
            )
            tiles.store(y_ptr, y, left, tile, ROUNDED, PAIRS, T)


@triton.jit
def _guide_unusual(
    x_ptr,
    hint_ptr,
    scale_bytes_ptr,
    y_ptr,
    scale_ptr,
    first,
    left,
    NUM_BITS: tl.constexpr,
    FORMAT: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDED: tl.constexpr,
    T: tl.constexpr,
    TILES: tl.constexpr,
):
    """Guides all tiles of a program without pairs, one after the other, whatever the scales."""
    for tile in range(TILES):
        x = tiles.load(x_ptr, left, tile, False, T)
        hint = octets.load_hint(hint_ptr, scale_bytes_ptr, left, tile, T, NUM_BITS, BLOCK)
        scales = tiles.load_scales(scale_ptr, first, left, tile, BLOCK, ROW, T)
        y = tiles.guided(x, hint, scales, NUM_BITS, FORMAT, ROW, False, False, T)
        tiles.store(y_ptr, y, left, tile, ROUNDED, False, T)
