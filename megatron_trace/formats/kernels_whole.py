"""Triton kernels of rtn, rtn_record and guided for any format: what `kernels_mxfp4` and such call.

Legend: as `kernels_tiles`. A program loads all its tiles before it rounds the first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from megatron_trace.formats import kernels_octets as octets
from megatron_trace.formats import kernels_rows as rows
from megatron_trace.formats import kernels_tiles as tiles
from megatron_trace.formats.kernels import Launch
from megatron_trace.formats.number_format import NumberFormat


@dataclass(frozen=True)
class Launches:
    """How the kernels of a format are launched for BF16; other dtypes take one tile.

    Attributes:
        rtn: Without a record.
        record: With one.
        guided: Guided.
    """

    rtn: Launch
    record: Launch
    guided: Launch


_GENERAL_LAUNCH = Launch(tiles=1, num_warps=4)


def with_rule(number_format: NumberFormat, value: str, known: tuple[str, ...]) -> NumberFormat:
    """Gives a format under another rule of how block scales are chosen.

    Args:
        number_format: The format.
        value: Its rule.
        known: The rules there are.

    Raises:
        ValueError: There is no such rule.
    """
    (name,) = number_format.rules
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}; got {value!r}")
    return replace(number_format, rules={name: value})


def rtn(
    x: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    number_format: NumberFormat,
    dtype: torch.dtype | None,
    launch: Launch,
) -> torch.Tensor:
    """Gives `rtn` of a format's specification.

    Args:
        x: float [..., K] on a GPU.
        global_scale: FP32 0-d tensor or number, or one for each row; None if there is none.
        number_format: The format.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
        launch: For BF16.

    Raises:
        ValueError: K is not a multiple of the block size, or x is not on a GPU.
    """
    x, scales = rows.prepared(x, global_scale, number_format)
    y = torch.empty_like(x)
    constants = rows.constants_of(x, scales, number_format, dtype)
    _launch(_record_kernel, x, launch, x, y, y, y, scales, NUM_BITS=0, **constants)
    return y


def rtn_record(
    x: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    number_format: NumberFormat,
    dtype: torch.dtype | None,
    launch: Launch,
    *,
    num_bits: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives `rtn_record` of a format's specification.

    Args:
        x: float [..., K] on a GPU.
        global_scale: FP32 0-d tensor or number, or one for each row; None if there is none.
        number_format: The format.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
        launch: For BF16.
        num_bits: One of `number_format.hint_bits`.

    Raises:
        ValueError: K is not a multiple of the block size, num_bits is not that of a hint, or x is
            not on a GPU.
    """
    x, scales = rows.prepared(x, global_scale, number_format)
    hint, scale_bytes = rows.new_hint(x, num_bits, number_format)
    y = torch.empty_like(x)
    words = rows.words_of(hint, num_bits)
    constants = rows.constants_of(x, scales, number_format, dtype)
    _launch(
        _record_kernel, x, launch, x, y, words, scale_bytes, scales, NUM_BITS=num_bits, **constants
    )
    return y, hint, scale_bytes


def guided(
    x: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    number_format: NumberFormat,
    dtype: torch.dtype | None,
    launch: Launch,
    *,
    num_bits: int,
) -> torch.Tensor:
    """Gives `guided` of a format's specification.

    Args:
        x: float [..., K] on a GPU; the trainer's values.
        hint: uint8 [..., K * num_bits / 8].
        scale_bytes: uint8 [..., B]; the rollout's block scales.
        global_scale: FP32 0-d tensor or number, or one for each row; None if there is none.
        number_format: The format.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
        launch: For BF16.
        num_bits: One of `number_format.hint_bits`.

    Raises:
        ValueError: Shapes disagree, num_bits is not that of a hint, or a tensor is not on the GPU
            of x.
    """
    words, scale_bytes = rows.given_hint(x, hint, scale_bytes, num_bits, number_format)
    x, scales = rows.prepared(x, global_scale, number_format)
    y = torch.empty_like(x)
    constants = rows.constants_of(x, scales, number_format, dtype)
    _launch(
        _guided_kernel, x, launch, x, words, scale_bytes, y, scales, NUM_BITS=num_bits, **constants
    )
    return y


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
    loaded = tiles.load_all(x_ptr + first * 8, left, PAIRS, T, TILES)
    hint_ptr += first * (8 if NUM_BITS == 8 else 1)
    scale_bytes_ptr += first // BLOCK
    for tile in tl.static_range(TILES):
        scales = tiles.load_scales(scale_ptr, first, left, tile, BLOCK, ROW, T)
        y, word, byte = tiles.nearest(loaded[tile], scales, NUM_BITS, FORMAT, RULE, ROW, PAIRS, T)
        tiles.store(y_ptr + first * 8, y, left, tile, ROUNDED, PAIRS, T)
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
    loaded = tiles.load_all(x_ptr + first * 8, left, PAIRS, T, TILES)
    hint_ptr += first * (8 if NUM_BITS == 8 else 1)
    scale_bytes_ptr += first // BLOCK
    hints = ()
    for tile in tl.static_range(TILES):
        hints += (octets.load_hint(hint_ptr, scale_bytes_ptr, left, tile, T, NUM_BITS, BLOCK),)
    for tile in tl.static_range(TILES):
        scales = tiles.load_scales(scale_ptr, first, left, tile, BLOCK, ROW, T)
        y = tiles.guided(loaded[tile], hints[tile], scales, NUM_BITS, FORMAT, ROW, PAIRS, False, T)
        tiles.store(y_ptr + first * 8, y, left, tile, ROUNDED, PAIRS, T)


def _launch(kernel, x: torch.Tensor, launch: Launch, *arguments: torch.Tensor, **constants) -> None:
    num_octets = x.numel() // 8
    if num_octets == 0:
        return
    if not constants["PAIRS"]:
        launch = _GENERAL_LAUNCH
    tile = 32 * launch.num_warps
    with torch.cuda.device_of(x):
        kernel[(triton.cdiv(num_octets, tile * launch.tiles),)](
            *arguments,
            num_octets,
            **constants,
            T=tile,
            TILES=launch.tiles,
            num_warps=launch.num_warps,
            # 4over6: a product and a sum rounded once would be another error.
            enable_fp_fusion=False,
        )
