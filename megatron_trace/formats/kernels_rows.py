"""Triton kernels that encode rows, or guide those with a hint and round the others to nearest.

Legend: as `kernels_tiles`. One pass gives what `ops.encode`, `ops.guided` with `has_hint`, and
`ops.guided_packed` specify in several, for every format.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_trace.formats import kernels
from megatron_trace.formats import kernels_octets as octets
from megatron_trace.formats import kernels_tiles as tiles
from megatron_trace.formats.checks import (
    require_guide,
    require_input,
    require_no_global_scale,
    require_num_bits,
)
from megatron_trace.formats.number_format import NumberFormat

_WARPS = 4
_TILE = 32 * _WARPS
# An octet of a hint, by its bits; 8 bits are stored value by value.
WORDS = {**kernels.WORDS, 8: torch.uint8}


def encode(
    x: torch.Tensor, global_scale: torch.Tensor | float | None, number_format: NumberFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives packed codes and block scales of x, rounded to nearest.

    Args:
        x: float [..., K] on a GPU.
        global_scale: FP32 0-d tensor or number, or one for each row; None if there is none.
        number_format: The format.

    Returns:
        packed_codes: uint8 [..., K * code_bits / 8].
        scale_bytes: uint8 [..., B].

    Raises:
        ValueError: K is not a multiple of the block size, or x is not on a GPU.
    """
    x, scales = prepared(x, global_scale, number_format)
    bits = number_format.code_bits
    packed, scale_bytes = new_hint(x, bits, number_format)
    _launch(
        _encode_kernel,
        x,
        x,
        words_of(packed, bits),
        scale_bytes,
        scales,
        NUM_BITS=bits,
        **constants_of(x, scales, number_format, None),
    )
    return packed, scale_bytes


def guided(
    x: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    has_hint: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    number_format: NumberFormat,
    *,
    num_bits: int,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Gives values: guided in rows with a hint, rounded to nearest in the others.

    Args:
        x: float [..., K] on a GPU; the trainer's values.
        hint: uint8 [..., K * num_bits / 8].
        scale_bytes: uint8 [..., B]; the rollout's block scales.
        has_hint: bool [...].
        global_scale: FP32 0-d tensor or number, or one for each row; None if there is none.
        number_format: The format.
        num_bits: Bits a value of the hint.
        dtype: dtype in which the dequantised values are rounded; None is that of x.

    Returns:
        [..., K] in the dtype of x.

    Raises:
        ValueError: Shapes disagree, num_bits is not that of a hint, or x is not on a GPU.
    """
    hint, scale_bytes = given_hint(x, hint, scale_bytes, num_bits, number_format)
    x, scales = prepared(x, global_scale, number_format)
    y = torch.empty_like(x)
    _launch(
        _guided_kernel,
        x,
        x,
        hint,
        scale_bytes,
        has_hint.contiguous().view(torch.uint8),
        y,
        y,
        scales,
        NUM_BITS=num_bits,
        CODE_BITS=number_format.code_bits,
        CODES=False,
        ONE_ROW=x.shape[-1] % (8 * _TILE) == 0,
        **constants_of(x, scales, number_format, dtype),
    )
    return y


def guided_packed(
    x: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    has_hint: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    number_format: NumberFormat,
    *,
    num_bits: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives packed codes and block scales of the values that `guided` gives, where x is finite.

    Args:
        x: float [..., K] on a GPU; the trainer's values.
        hint: uint8 [..., K * num_bits / 8].
        scale_bytes: uint8 [..., B]; the rollout's block scales.
        has_hint: bool [...].
        global_scale: FP32 0-d tensor or number, or one for each row; None if there is none.
        number_format: The format.
        num_bits: Bits a value of the hint.

    Returns:
        packed_codes: uint8 [..., K * code_bits / 8].
        scale_bytes: uint8 [..., B]; those given, and own ones in rows without hint.

    Raises:
        ValueError: Shapes disagree, num_bits is not that of a hint, or x is not on a GPU.
    """
    hint, scale_bytes = given_hint(x, hint, scale_bytes, num_bits, number_format)
    x, scales = prepared(x, global_scale, number_format)
    bits = number_format.code_bits
    packed, own_bytes = new_hint(x, bits, number_format)
    _launch(
        _guided_kernel,
        x,
        x,
        hint,
        scale_bytes,
        has_hint.contiguous().view(torch.uint8),
        words_of(packed, bits),
        own_bytes,
        scales,
        NUM_BITS=num_bits,
        CODE_BITS=bits,
        CODES=True,
        ONE_ROW=x.shape[-1] % (8 * _TILE) == 0,
        **constants_of(x, scales, number_format, None),
    )
    return packed, own_bytes


@triton.jit(do_not_specialize=["num_octets"])
def _encode_kernel(
    x_ptr,
    hint_ptr,
    scale_bytes_ptr,
    scale_ptr,
    num_octets,
    row_octets,
    NUM_BITS: tl.constexpr,
    FORMAT: tl.constexpr,
    RULE: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDED: tl.constexpr,
    PAIRS: tl.constexpr,
    T: tl.constexpr,
):
    first, left = octets.octets_of_program(num_octets, T, 1)
    x = tiles.load(x_ptr + first * 8, left, 0, PAIRS, T)
    scales = tiles.load_scales(scale_ptr, first, left, 0, BLOCK, ROW, T)
    _, word, byte = tiles.nearest(x, scales, NUM_BITS, FORMAT, RULE, ROW, PAIRS, T)
    hint_ptr += first * (8 if NUM_BITS == 8 else 1)
    scale_bytes_ptr += first // BLOCK
    octets.store_hint(hint_ptr, scale_bytes_ptr, word, byte, left, 0, T, NUM_BITS, BLOCK)


@triton.jit(do_not_specialize=["num_octets"])
def _guided_kernel(
    x_ptr,
    hint_ptr,
    scale_bytes_ptr,
    has_hint_ptr,
    out_ptr,
    out_bytes_ptr,
    scale_ptr,
    num_octets,
    row_octets,
    NUM_BITS: tl.constexpr,
    CODE_BITS: tl.constexpr,
    CODES: tl.constexpr,
    ONE_ROW: tl.constexpr,
    FORMAT: tl.constexpr,
    RULE: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDED: tl.constexpr,
    PAIRS: tl.constexpr,
    T: tl.constexpr,
):
    first, left = octets.octets_of_program(num_octets, T, 1)
    x = tiles.load(x_ptr + first * 8, left, 0, PAIRS, T)
    hint_ptr += first * (8 if NUM_BITS == 8 else 1)
    hint = octets.load_hint(hint_ptr, scale_bytes_ptr + first // BLOCK, left, 0, T, NUM_BITS, BLOCK)
    scales = tiles.load_scales(scale_ptr, first, left, 0, BLOCK, ROW, T)
    has_hint_ptr += first // row_octets
    _, byte = hint
    if ONE_ROW:
        if tl.load(has_hint_ptr) != 0:
            out = tiles.guided(x, hint, scales, NUM_BITS, FORMAT, ROW, PAIRS, CODES, T)
        else:
            y, word, byte = tiles.nearest(x, scales, CODE_BITS, FORMAT, RULE, ROW, PAIRS, T)
            out = word if CODES else y
    else:
        octet = tl.arange(0, T)
        row = ((first % row_octets).to(tl.int32) + octet) // row_octets
        present = tl.load(has_hint_ptr + row, mask=octet < left, other=1) != 0
        out = tiles.guided(x, hint, scales, NUM_BITS, FORMAT, ROW, PAIRS, CODES, T)
        if tl.min(present.to(tl.int32), axis=0) == 0:
            y, word, own_byte = tiles.nearest(x, scales, CODE_BITS, FORMAT, RULE, ROW, PAIRS, T)
            byte = tl.where(present, byte, own_byte)
            own = word if CODES else y
            if CODES and CODE_BITS == 4:
                out = tl.where(present, out, own)
            else:
                out = tl.where(present[:, None], out, own)
    if CODES:
        out_ptr += first * (8 if CODE_BITS == 8 else 1)
        out_bytes_ptr += first // BLOCK
        octets.store_hint(out_ptr, out_bytes_ptr, out, byte, left, 0, T, CODE_BITS, BLOCK)
    else:
        tiles.store(out_ptr + first * 8, out, left, 0, ROUNDED, PAIRS, T)


def prepared(
    x: torch.Tensor, global_scale: torch.Tensor | float | None, number_format: NumberFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives x contiguous and aligned, and global scales FP32: 0-d, [R], or x where there are none.

    Raises:
        ValueError: x has another dtype or length, is not on a GPU, or the scales do not fit it.
    """
    require_input(x, number_format.block_size)
    if number_format.has_global_scale:
        assert global_scale is not None, f"{number_format.name} has a global scale"
        return kernels.prepared(x, global_scale)
    require_no_global_scale(global_scale)
    x = kernels.prepared_values(x)
    return x, x


def constants_of(
    x: torch.Tensor,
    scales: torch.Tensor,
    number_format: NumberFormat,
    dtype: torch.dtype | None,
) -> dict[str, object]:
    """Gives the constants that `kernels_tiles` takes.

    Args:
        x: What is quantised.
        scales: As `prepared` gives them.
        number_format: The format.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
    """
    rounded_to = dtype or x.dtype
    return {
        "FORMAT": number_format.name,
        "RULE": number_format.rule,
        "ROW": kernels.row_of(x, scales) if number_format.has_global_scale else 0,
        "BLOCK": number_format.block_size // 8,
        "ROUNDED": kernels.triton_dtype(rounded_to),
        # The interpreter knows neither PTX nor an fma that rounds once.
        "PAIRS": x.dtype == rounded_to == torch.bfloat16 and not kernels.INTERPRETED,
    }


def new_hint(
    x: torch.Tensor, num_bits: int, number_format: NumberFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives memory for the hint and the block scales of x."""
    require_num_bits(num_bits, number_format.code_bits)
    *rows, length = x.shape
    hint = x.new_empty((*rows, length * num_bits // 8), dtype=torch.uint8)
    return hint, x.new_empty((*rows, length // number_format.block_size), dtype=torch.uint8)


def given_hint(
    x: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    num_bits: int,
    number_format: NumberFormat,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives the hint as words, and the block scales, of x.

    Raises:
        ValueError: Shapes disagree, num_bits is not that of a hint, or a device is another.
    """
    require_guide(
        x,
        hint,
        scale_bytes,
        num_bits,
        block_size=number_format.block_size,
        code_bits=number_format.code_bits,
    )
    for name, tensor in (("hint", hint), ("scale_bytes", scale_bytes)):
        if tensor.device != x.device:
            raise ValueError(f"{name} must lie on {x.device} like x; got {tensor.device}")
    return words_of(hint, num_bits), scale_bytes.contiguous()


def words_of(hint: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Gives a hint with one word for each octet, or one byte for each value of 8 bits."""
    flat, dtype = hint.flatten(), WORDS[num_bits]
    # Codes of 8 bits are loaded an octet at a time.
    alignment = 8 if num_bits == 8 else dtype.itemsize
    return (flat if flat.data_ptr() % alignment == 0 else flat.clone()).view(dtype)


def _launch(kernel, x: torch.Tensor, *arguments: torch.Tensor, **constants: object) -> None:
    num_octets = x.numel() // 8
    if num_octets == 0:
        return
    with torch.cuda.device_of(x):
        kernel[(triton.cdiv(num_octets, _TILE),)](
            *arguments,
            num_octets,
            x.shape[-1] // 8,
            **constants,
            T=_TILE,
            num_warps=_WARPS,
            # 4over6: a product and a sum rounded once would be another error.
            enable_fp_fusion=False,
        )
