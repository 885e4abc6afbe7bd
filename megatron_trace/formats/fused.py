"""Quantisation together with what stands before it, in plain torch: the specification.

Legend: `...` any leading shape, K values of a row, B blocks of a row.

* RMSNorm stands before fc1. Its result is given too: router and shared experts read it unquantised.
  Its arithmetic is fixed here, so that every implementation gives equal bits: squares are added in
  FP32, those of 8 columns as neighbours, then neighbours of these sums, and so on; lane l of 128
  adds up the sums number l, l + 128, ... in this order; lanes are added as neighbours again. Then
  round(x * (1 / sqrt(sum / K + eps)) * weight), where all but the last step is FP32.
* SwiGLU stands before fc2: silu(gate) * up, each rounded to the dtype of x, as torch does it on the
  device of x: its exp differs in the last bits of FP32 between processors, and with it about one of
  10^4 values in BF16.

The rest is the specification of a number format: the same names, with what stands before.
"""

from __future__ import annotations

import torch

from megatron_trace.formats.number_format import NVFP4, NumberFormat

NORM_LANES = 128


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Gives silu(gate) * up.

    Args:
        gate_up: float [..., 2 K], gate before up.

    Returns:
        [..., K].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def swiglu_rtn(
    gate_up: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    *,
    number_format: NumberFormat = NVFP4,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Gives `rtn` of `swiglu`.

    Args:
        gate_up: float [..., 2 K].
        global_scale: FP32 0-d tensor or number, or one for each row, decode side; None for a format
            without.
        number_format: The format.
        dtype: dtype in which the dequantised values are rounded; None is that of gate_up.

    Returns:
        [..., K] in the dtype of gate_up.
    """
    return number_format.specification.rtn(
        swiglu(gate_up), global_scale, dtype=dtype, **number_format.rules
    )


def swiglu_rtn_record(
    gate_up: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    *,
    num_bits: int,
    number_format: NumberFormat = NVFP4,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives `rtn_record` of `swiglu`.

    Args:
        gate_up: float [..., 2 K].
        global_scale: FP32 0-d tensor or number, or one for each row, decode side; None for a format
            without.
        number_format: The format.
        num_bits: Bits per value of the hint.
        dtype: dtype in which the dequantised values are rounded; None is that of gate_up.

    Returns:
        y: [..., K] in the dtype of gate_up.
        hint: uint8 [..., K * num_bits / 8].
        scale_bytes: uint8 [..., B].
    """
    return number_format.specification.rtn_record(
        swiglu(gate_up), global_scale, num_bits=num_bits, dtype=dtype, **number_format.rules
    )


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
    """Gives `guided` of `swiglu`.

    Args:
        gate_up: float [..., 2 K]; the trainer's values.
        hint: uint8 [..., K * num_bits / 8].
        scale_bytes: uint8 [..., B]; the rollout's block scales.
        global_scale: The rollout's, as `swiglu_rtn`.
        number_format: The format.
        num_bits: Bits per value of the hint.
        dtype: dtype in which the dequantised values are rounded; None is that of gate_up.

    Returns:
        [..., K] in the dtype of gate_up.
    """
    x = swiglu(gate_up)
    return number_format.specification.guided(
        x, hint, scale_bytes, global_scale, num_bits=num_bits, dtype=dtype
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Gives x normalised over its last axis.

    Args:
        x: float [..., K].
        weight: float [K].
        eps: Added to the mean square.

    Returns:
        [..., K] in the dtype of x.
    """
    values = x.to(torch.float32)
    length = x.shape[-1]
    squares = torch.nn.functional.pad(values.square(), (0, -length % (8 * NORM_LANES)))
    octets = _sum_of_neighbours(squares.unflatten(-1, (-1, NORM_LANES, 8))).squeeze(-1)
    lanes = torch.zeros_like(octets[..., 0, :])
    for sums in octets.unbind(-2):
        lanes = lanes + sums
    sums = _sum_of_neighbours(lanes)
    # Tensors, because a GPU multiplies by the rounded reciprocal of a number.
    mean = sums / torch.full((), float(length), device=x.device)
    # Through FP64, because torch's FP32 root on a CPU is not the correctly rounded one.
    root = (mean + eps).to(torch.float64).sqrt().to(torch.float32)
    inverse = torch.ones_like(mean) / root
    return (values * inverse * weight.to(torch.float32)).to(x.dtype)


def _sum_of_neighbours(values: torch.Tensor) -> torch.Tensor:
    """Gives the sum over the last axis, a power of two long, which is kept."""
    while values.shape[-1] > 1:
        values = values[..., 0::2] + values[..., 1::2]
    return values


def rms_norm_rtn(
    x: torch.Tensor,
    weight: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    *,
    eps: float,
    number_format: NumberFormat = NVFP4,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives `rms_norm`, and `rtn` of it.

    Args:
        x: float [..., K].
        weight: float [K].
        global_scale: FP32 0-d tensor or number, or one for each row, decode side; None for a format
            without.
        number_format: The format.
        eps: Added to the mean square.
        dtype: dtype in which the dequantised values are rounded; None is that of x.

    Returns:
        normed: [..., K] in the dtype of x.
        y: [..., K] in the dtype of x.
    """
    normed = rms_norm(x, weight, eps)
    y = number_format.specification.rtn(normed, global_scale, dtype=dtype, **number_format.rules)
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
    """Gives `rms_norm`, and `rtn_record` of it.

    Args:
        x: float [..., K].
        weight: float [K].
        global_scale: FP32 0-d tensor or number, or one for each row, decode side; None for a format
            without.
        number_format: The format.
        eps: Added to the mean square.
        num_bits: Bits per value of the hint.
        dtype: dtype in which the dequantised values are rounded; None is that of x.

    Returns:
        normed: [..., K] in the dtype of x.
        y: [..., K] in the dtype of x.
        hint: uint8 [..., K * num_bits / 8].
        scale_bytes: uint8 [..., B].
    """
    normed = rms_norm(x, weight, eps)
    record = number_format.specification.rtn_record(
        normed, global_scale, num_bits=num_bits, dtype=dtype, **number_format.rules
    )
    return normed, *record


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
    """Gives `rms_norm`, and `guided` of it.

    Args:
        x: float [..., K]; the trainer's values.
        weight: float [K].
        hint: uint8 [..., K * num_bits / 8].
        scale_bytes: uint8 [..., B]; the rollout's block scales.
        global_scale: The rollout's, as `swiglu_rtn`.
        number_format: The format.
        eps: Added to the mean square.
        num_bits: Bits per value of the hint.
        dtype: dtype in which the dequantised values are rounded; None is that of x.

    Returns:
        normed: [..., K] in the dtype of x.
        y: [..., K] in the dtype of x.
    """
    normed = rms_norm(x, weight, eps)
    y = number_format.specification.guided(
        normed, hint, scale_bytes, global_scale, num_bits=num_bits, dtype=dtype
    )
    return normed, y
