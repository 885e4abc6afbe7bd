"""Triton kernels that encode rows, or guide those with a hint and round the others to nearest.

Legend: as `kernels_tiles`. One pass gives what `ops.encode`, `ops.guided` with `has_hint`, and
`ops.guided_packed` specify in several, for every format.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_trace.formats import kernels_inputs as inputs
from megatron_trace.formats import kernels_octets as octets
from megatron_trace.formats import kernels_tiles as tiles
from megatron_trace.formats.kernels_inputs import GuidedInputs, Launch, guided_inputs, launch_octets
from megatron_trace.formats.number_format import NumberFormat

_LAUNCH = Launch(tiles=1, num_warps=4)


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
    x, scales = inputs.prepared(x, global_scale, number_format)
    bits = number_format.code_bits
    packed, scale_bytes = inputs.new_hint(x, bits, number_format)
    words = inputs.words_of(packed, bits)
    constants = inputs.constants_of(x, scales, number_format, None)
    launch_octets(
        _encode_kernel, x, _LAUNCH, x, words, scale_bytes, scales, NUM_BITS=bits, **constants
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
    given = guided_inputs(x, hint, scale_bytes, global_scale, number_format, num_bits, dtype)
    y = torch.empty_like(given[0])
    _guide(given, has_hint, y, y, number_format, CODES=False)
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
    given = guided_inputs(x, hint, scale_bytes, global_scale, number_format, num_bits)
    bits = number_format.code_bits
    packed, own_bytes = inputs.new_hint(given[0], bits, number_format)
    _guide(given, has_hint, inputs.words_of(packed, bits), own_bytes, number_format, CODES=True)
    return packed, own_bytes


def _guide(
    given: GuidedInputs,
    has_hint: torch.Tensor,
    out: torch.Tensor,
    out_bytes: torch.Tensor,
    number_format: NumberFormat,
    *,
    CODES: bool,
) -> None:
    x, words, scale_bytes, scales, constants = given
    row_octets = x.shape[-1] // 8
    launch_octets(
        _guided_kernel,
        x,
        _LAUNCH,
        x,
        words,
        scale_bytes,
        has_hint.contiguous().view(torch.uint8),
        out,
        out_bytes,
        scales,
        row_octets=row_octets,
        CODE_BITS=number_format.code_bits,
        CODES=CODES,
        # Whether the octets of a tile are of the same row.
        ONE_ROW=row_octets % (32 * _LAUNCH.num_warps) == 0,
        **constants,
    )


@triton.jit(do_not_specialize=["num_octets"])
def _encode_kernel(
    x_ptr,
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
