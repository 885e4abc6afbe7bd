"""What the Triton kernels of formats are given, and how they are launched.

Legend: an octet is 8 neighbouring values. A tile is [T, 8], T octets, one for each thread: 16 bytes
of BF16, loaded and stored at once, whose hint bits are packed without leaving the thread. A program
handles several tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from megatron_trace.formats import kernels_octets as octets
from megatron_trace.formats.checks import (
    as_row_scales,
    require_guide,
    require_input,
    require_no_global_scale,
    require_num_bits,
)
from megatron_trace.formats.number_format import NumberFormat

# x, words of the hint, scale bytes, global scales, constants.
GuidedInputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, object]]


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched.

    Attributes:
        tiles: Tiles of a program.
        num_warps: Warps of a program.
    """

    tiles: int
    num_warps: int


# For FP32 and FP16, and for up to 512 tokens of 2048 values: docs/measurements.md.
GENERAL_LAUNCH = Launch(tiles=1, num_warps=2)
SMALL_LAUNCH = Launch(tiles=1, num_warps=4)
_SMALL_VALUES = 512 * 2048
# An octet of a hint, by its bits; 8 bits are stored value by value.
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.uint8}
INTERPRETED = isinstance(octets.load_tile, InterpretedFunction)
_TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


def chosen(x: torch.Tensor, large: Launch) -> Launch:
    """Gives the launch for x, where `large` is that for many values of BF16."""
    if x.numel() <= _SMALL_VALUES:
        return SMALL_LAUNCH
    return large if x.dtype == torch.bfloat16 else GENERAL_LAUNCH


def launch_octets(
    kernel,
    x: torch.Tensor,
    launch: Launch,
    *tensors: torch.Tensor,
    fuses: bool = False,
    **others: object,
) -> None:
    """Launches a kernel over the octets of x, if there is one.

    Args:
        kernel: Takes the tensors, `num_octets`, T and the others.
        x: Whose octets are counted.
        launch: Tiles and warps of a program.
        tensors: Given first, in this order.
        fuses: Whether a product and a sum may round once, which would be another error in 4over6.
        others: Given by name.
    """
    num_octets = x.numel() // 8
    if num_octets == 0:
        return
    tile = 32 * launch.num_warps
    with torch.cuda.device_of(x):
        kernel[(triton.cdiv(num_octets, tile * launch.tiles),)](
            *tensors,
            num_octets=num_octets,
            **others,
            T=tile,
            num_warps=launch.num_warps,
            enable_fp_fusion=fuses,
        )


def guided_inputs(
    x: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    number_format: NumberFormat,
    num_bits: int,
    dtype: torch.dtype | None = None,
) -> GuidedInputs:
    """Gives what a kernel that reads hints takes: x, words, scale bytes, global scales, constants.

    Args:
        x: float [..., K] on a GPU.
        hint: uint8 [..., K * num_bits / 8].
        scale_bytes: uint8 [..., B].
        global_scale: FP32 0-d tensor or number, or one for each row; None if there is none.
        number_format: The format.
        num_bits: Bits a value of the hint.
        dtype: dtype in which the dequantised values are rounded; None is that of x.

    Raises:
        ValueError: Shapes disagree, num_bits is not that of a hint, or a tensor is not on the GPU
            of x.
    """
    words, scale_bytes = given_hint(x, hint, scale_bytes, num_bits, number_format)
    x, scales = prepared(x, global_scale, number_format)
    constants = constants_of(x, scales, number_format, dtype)
    return x, words, scale_bytes, scales, constants | {"NUM_BITS": num_bits}


def prepared(
    x: torch.Tensor, global_scale: torch.Tensor | float | None, number_format: NumberFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives x contiguous and aligned, and global scales FP32: 0-d, [R], or x where there are none.

    Raises:
        ValueError: x has another dtype or length, is not on a GPU, or the scales do not fit it.
    """
    require_input(x, number_format.block_size)
    if not number_format.has_global_scale:
        require_no_global_scale(global_scale)
        x = prepared_values(x)
        return x, x
    assert global_scale is not None, f"{number_format.name} has a global scale"
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
    has_rows = number_format.has_global_scale and scales.dim() > 0
    return {
        "FORMAT": number_format.name,
        "RULE": number_format.rule,
        # How many octets share a global scale, 0 for all.
        "ROW": x.shape[-1] // 8 if has_rows else 0,
        "BLOCK": number_format.block_size // 8,
        "ROUNDED": triton_dtype(rounded_to),
        # The interpreter knows neither PTX nor an fma that rounds once.
        "PAIRS": x.dtype == rounded_to == torch.bfloat16 and not INTERPRETED,
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
    # What is flattened alone may be a view of every second byte.
    flat, dtype = hint.contiguous().flatten(), WORDS[num_bits]
    # Codes of 8 bits are loaded an octet at a time.
    alignment = 8 if num_bits == 8 else dtype.itemsize
    return (flat if flat.data_ptr() % alignment == 0 else flat.clone()).view(dtype)


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    """Gives the dtype in Triton; raises ValueError where the kernels do not take it."""
    try:
        return _TRITON_DTYPES[dtype]
    except KeyError:
        names = ", ".join(str(name) for name in _TRITON_DTYPES)
        raise ValueError(f"implementation triton takes {names}; got {dtype}") from None
