"""4over6 in plain torch: NVFP4 whose block scales map the largest magnitude to 6 or to 4.

Legend: as `reference`. Between 4 and 6 the ladder has nothing, so that a block with values just
below its largest loses much; mapping the largest to 4 instead costs range and gains steps. For each
block both are tried:

    six  = E4M3(amax / (6 * global scale)),  four = E4M3(1.5 * amax / (6 * global scale))
    four is kept only where its error is strictly smaller

The block scales of `six` stay below 256 (`global_scale_from_amax` sees to it), so that 1.5 of them
fits E4M3: 384 = 1.5 * 256 does, and so do all steps below. With 448 instead of 256, as Transformer
Engine offers, `four` is clamped to 448 in the largest blocks.

What is stored is NVFP4: the scale byte says which was chosen, `decode`, `guided_codes` and `guided`
are those of `reference`, and a trainer never chooses. Rules at the edges beyond those there:
* The error of a block is the sum, in FP32 and from the first column to the last, of the squares (or
  magnitudes) of (dequantised - x). Another order changes a choice only where the two errors agree
  to about 1e-5; for this reason too choices are recorded and not recomputed.
* Errors that are equal, NaN, or both overflow or vanish in FP32 keep six.
* The default error is `mse`, as in the paper's repository and ModelOpt; that of Transformer Engine
  is `mae`. Both sides must use the same.

Source: arXiv 2512.02010; fouroversix 1.0.5; Transformer Engine 2.20.2.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from megatron_trace.formats import minifloat, scales_e4m3
from megatron_trace.formats.blocks import fp32_blocks, rounded_like, split
from megatron_trace.formats.checks import (
    as_row_scales,
    require_input,
    require_num_bits,
    require_scales,
)
from megatron_trace.formats.constants import BLOCK_SIZE, E2M1_MAX
from megatron_trace.formats.minifloat import E2M1
from megatron_trace.formats.packing import pack_hint
from megatron_trace.formats.reference import decode, guided, guided_codes

__all__ = [
    "E4M3_MAX_SIX",
    "decode",
    "encode",
    "global_scale_from_amax",
    "guided",
    "guided_codes",
    "own_scale_bytes",
    "rtn",
    "rtn_record",
    "scale_distance",
]

ErrorRule = Literal["mse", "mae"]

# Largest block scale of `six`.
E4M3_MAX_SIX = 256.0


def global_scale_from_amax(
    amax: torch.Tensor | float, power_of_two: bool = False, *, e4m3_max: float = E4M3_MAX_SIX
) -> torch.Tensor:
    """Gives the global scale with which `amax` takes a block scale of 256 and the largest code.

    Args:
        amax: FP32 of any shape, or a number; largest magnitudes of the tensor, or of its rows.
        power_of_two: Whether to round up to a power of two.
        e4m3_max: Largest block scale of `six`; 448 is Transformer Engine's other choice.

    Returns:
        FP32 in the shape of amax, amax / (6 * e4m3_max).
    """
    return scales_e4m3.global_scale_from_amax(amax, power_of_two, e4m3_max=e4m3_max)


def encode(
    x: torch.Tensor, global_scale: torch.Tensor | float, *, error: ErrorRule = "mse"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives codes and block scales of x, rounded to nearest even.

    Args:
        x: float [..., K].
        global_scale: FP32 0-d tensor or number, or one for each row, decode side.
        error: What decides between 4 and 6.

    Returns:
        codes: uint8 [..., K], 0 to 15.
        scale_bytes: uint8 [..., B], E4M3.

    Raises:
        ValueError: K is not a multiple of 16, or the error rule is unknown.
    """
    blocks, scale_bytes, effective = _chosen_scales(x, global_scale, error)
    return minifloat.nearest_codes(E2M1, blocks, effective).reshape(x.shape), scale_bytes


def own_scale_bytes(
    x: torch.Tensor, global_scale: torch.Tensor | float, *, error: ErrorRule = "mse"
) -> torch.Tensor:
    """Gives the block scales that `encode` gives, without its codes.

    Args:
        x: float [..., K].
        global_scale: FP32 0-d tensor or number, or one for each row, decode side.
        error: What decides between 4 and 6.

    Returns:
        uint8 [..., B], E4M3.

    Raises:
        ValueError: K is not a multiple of 16, or the error rule is unknown.
    """
    return _chosen_scales(x, global_scale, error)[1]


def scale_distance(
    x: torch.Tensor, scale_bytes: torch.Tensor, global_scale: torch.Tensor | float
) -> torch.Tensor:
    """Gives how far block scales are from the nearer of the two that x may have.

    Args:
        x: float [..., K].
        scale_bytes: uint8 [..., B], E4M3.
        global_scale: FP32 0-d tensor or number, or one for each row, decode side.

    Returns:
        int16 [..., B], steps of E4M3.

    Raises:
        ValueError: Shapes disagree, or K is not a multiple of 16.
    """
    require_input(x)
    require_scales(x, scale_bytes)
    amax = split(x, BLOCK_SIZE).abs().amax(-1).to(torch.float32)
    (four_bytes, _), (six_bytes, _) = _candidates(amax, as_row_scales(global_scale, x))
    given = scale_bytes.to(torch.int16)
    distances = ((own.to(torch.int16) - given).abs_() for own in (four_bytes, six_bytes))
    return torch.minimum(*distances)


def rtn(
    x: torch.Tensor,
    global_scale: torch.Tensor | float,
    *,
    dtype: torch.dtype | None = None,
    error: ErrorRule = "mse",
) -> torch.Tensor:
    """Gives x fake-quantised by rounding to nearest even under the better of its two scales.

    Args:
        x: float [..., K].
        global_scale: FP32 0-d tensor or number, or one for each row, decode side.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
        error: What decides between 4 and 6.

    Returns:
        [..., K] in the dtype of x: the decoded codes of `encode`.

    Raises:
        ValueError: K is not a multiple of 16, or the error rule is unknown.
    """
    blocks, _, effective = _chosen_scales(x, global_scale, error)
    return rounded_like(minifloat.nearest_values(E2M1, blocks, effective), x, dtype)


def rtn_record(
    x: torch.Tensor,
    global_scale: torch.Tensor | float,
    *,
    num_bits: int,
    dtype: torch.dtype | None = None,
    error: ErrorRule = "mse",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives what `rtn` gives, with the hint and the block scales that it chose.

    Args:
        x: float [..., K].
        global_scale: FP32 0-d tensor or number, or one for each row, decode side.
        num_bits: 1, 2 (lowest bits) or 4 (codes) per value of the hint.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
        error: What decides between 4 and 6.

    Returns:
        y: [..., K] in the dtype of x.
        hint: uint8 [..., K * num_bits / 8].
        scale_bytes: uint8 [..., B], E4M3.

    Raises:
        ValueError: K is not a multiple of 16, num_bits is not 1, 2 or 4, or the error rule is
            unknown.
    """
    require_num_bits(num_bits)
    blocks, scale_bytes, effective = _chosen_scales(x, global_scale, error)
    codes, values = minifloat.nearest(E2M1, blocks, effective)
    hint = pack_hint(codes.reshape(x.shape), num_bits)
    return rounded_like(values, x, dtype), hint, scale_bytes


def _chosen_scales(
    x: torch.Tensor, global_scale: torch.Tensor | float, error: ErrorRule
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives blocks FP32 [..., B, 16], scale bytes, effective scales FP32 [..., B]."""
    if error not in get_args(ErrorRule):
        raise ValueError(f"error must be one of {', '.join(get_args(ErrorRule))}; got {error!r}")
    require_input(x)
    scale = as_row_scales(global_scale, x)
    blocks = fp32_blocks(x, BLOCK_SIZE)
    (four_bytes, four), (six_bytes, six) = _candidates(blocks.abs().amax(-1), scale)
    keeps_four = _errors(blocks, four, error) < _errors(blocks, six, error)
    scale_bytes = torch.where(keeps_four, four_bytes, six_bytes)
    return blocks, scale_bytes, torch.where(keeps_four, four, six)


def _candidates(
    amax: torch.Tensor, scale: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Gives scale bytes and effective scales [..., B] that map the largest to 4, and to 6."""
    quotients = amax / (scale * E2M1_MAX)
    four = scales_e4m3.nearest(1.5 * quotients, amax, scale)
    return four, scales_e4m3.nearest(quotients, amax, scale)


def _errors(blocks: torch.Tensor, effective: torch.Tensor, error: ErrorRule) -> torch.Tensor:
    """Gives the error of each block FP32 [..., B] under its scale."""
    differences = minifloat.nearest_values(E2M1, blocks, effective).sub_(blocks)
    terms = differences.square_() if error == "mse" else differences.abs_()
    total = torch.zeros_like(effective)
    for column in range(BLOCK_SIZE):
        total += terms[..., column]
    return total
