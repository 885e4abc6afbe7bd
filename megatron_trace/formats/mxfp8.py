"""MXFP8 in plain torch: E4M3 codes in blocks of 32 under power-of-two scales.

Legend: `...` any leading shape, K values of a row (a multiple of 32), B = K / 32 blocks of a row.
These are the activations of W4A8, whose weights are `mxfp4`. A code is the byte of
torch.float8_e4m3fn; value = code * 2^(scale byte - 127). There is no global scale: the argument
must be None.

A hint of 1 bit says which of the two E4M3 values beside x is the rollout's, as it does for E2M1:
neighbours differ in the lowest bit of the code. A hint of 8 bits is the code. The rules of the
scale and at the edges are those of `mxfp4`; beyond 448 lies 448, or 416 or 448 when guided.

Source: OCP Microscaling Formats MX 1.0, sections 5.3.1 and 6.3.
"""

from __future__ import annotations

import torch

from megatron_trace.formats import mx
from megatron_trace.formats.minifloat import E4M3
from megatron_trace.formats.scales_e8m0 import DEFAULT_RULE, ScaleRule


def encode(
    x: torch.Tensor, global_scale: None = None, *, scale_rule: ScaleRule = DEFAULT_RULE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives codes and block scales of x, rounded to nearest even.

    Args:
        x: float [..., K].
        global_scale: None.
        scale_rule: How the scale follows from the largest magnitude of a block.

    Returns:
        codes: uint8 [..., K], E4M3.
        scale_bytes: uint8 [..., B], E8M0.

    Raises:
        ValueError: K is not a multiple of 32, a global scale is given, or the rule is unknown.
    """
    return mx.encode(E4M3, x, global_scale, scale_rule)


def own_scale_bytes(
    x: torch.Tensor, global_scale: None = None, *, scale_rule: ScaleRule = DEFAULT_RULE
) -> torch.Tensor:
    """Gives the block scales that `encode` gives, without its codes.

    Args:
        x: float [..., K].
        global_scale: None.
        scale_rule: How the scale follows from the largest magnitude of a block.

    Returns:
        uint8 [..., B], E8M0.

    Raises:
        ValueError: K is not a multiple of 32, a global scale is given, or the rule is unknown.
    """
    return mx.own_scale_bytes(E4M3, x, global_scale, scale_rule)


def scale_distance(
    x: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: None = None,
    *,
    scale_rule: ScaleRule = DEFAULT_RULE,
) -> torch.Tensor:
    """Gives how far block scales are from those that x has, in eighths of a power of two.

    Args:
        x: float [..., K].
        scale_bytes: uint8 [..., B], E8M0.
        global_scale: None.
        scale_rule: How the scale follows from the largest magnitude of a block.

    Returns:
        int16 [..., B], multiples of 8; 0 only where the bytes are equal.

    Raises:
        ValueError: Shapes disagree, K is not a multiple of 32, a global scale is given, or the
            rule is unknown.
    """
    return mx.scale_distance(E4M3, x, scale_bytes, global_scale, scale_rule)


def decode(
    codes: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Gives the values of codes.

    Args:
        codes: uint8 [..., K], E4M3.
        scale_bytes: uint8 [..., B], E8M0.
        global_scale: None.
        dtype: dtype of the result; the FP32 products are rounded to it.

    Returns:
        dtype [..., K].

    Raises:
        ValueError: Shapes disagree, K is not a multiple of 32, or a global scale is given.
    """
    return mx.decode(E4M3, codes, scale_bytes, global_scale, dtype)


def rtn(
    x: torch.Tensor,
    global_scale: None = None,
    *,
    dtype: torch.dtype | None = None,
    scale_rule: ScaleRule = DEFAULT_RULE,
) -> torch.Tensor:
    """Gives x fake-quantised by rounding to nearest even under its own block scales.

    Args:
        x: float [..., K].
        global_scale: None.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
        scale_rule: How the scale follows from the largest magnitude of a block.

    Returns:
        [..., K] in the dtype of x: the decoded codes of `encode`.

    Raises:
        ValueError: K is not a multiple of 32, a global scale is given, or the rule is unknown.
    """
    return mx.rtn(E4M3, x, global_scale, dtype, scale_rule)


def rtn_record(
    x: torch.Tensor,
    global_scale: None = None,
    *,
    num_bits: int,
    dtype: torch.dtype | None = None,
    scale_rule: ScaleRule = DEFAULT_RULE,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives what `rtn` gives, with the hint and the block scales that it used.

    Args:
        x: float [..., K].
        global_scale: None.
        num_bits: 1, 2 (lowest bits) or 8 (codes) per value of the hint.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
        scale_rule: How the scale follows from the largest magnitude of a block.

    Returns:
        y: [..., K] in the dtype of x.
        hint: uint8 [..., K * num_bits / 8].
        scale_bytes: uint8 [..., B], E8M0.

    Raises:
        ValueError: K is not a multiple of 32, num_bits is not 1, 2 or 8, a global scale is given,
            or the rule is unknown.
    """
    return mx.rtn_record(E4M3, x, global_scale, num_bits, dtype, scale_rule)


def guided_codes(
    x: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: None = None,
    *,
    num_bits: int,
) -> torch.Tensor:
    """Gives, of the two codes beside x, the one that the rollout's hint says.

    Args:
        x: float [..., K]; the trainer's values.
        hint: uint8 [..., K * num_bits / 8]; packed lowest bits (1, 2) or codes (8).
        scale_bytes: uint8 [..., B]; the rollout's block scales.
        global_scale: None.
        num_bits: 1, 2 or 8.

    Returns:
        uint8 [..., K], with the sign of x.

    Raises:
        ValueError: Shapes disagree, K is not a multiple of 32, num_bits is not 1, 2 or 8, or a
            global scale is given.
    """
    return mx.guided_codes(E4M3, x, hint, scale_bytes, global_scale, num_bits)


def guided(
    x: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: None = None,
    *,
    num_bits: int,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Gives x fake-quantised to the codes that the rollout's hint says.

    Args:
        x: float [..., K]; the trainer's values.
        hint: uint8 [..., K * num_bits / 8]; packed lowest bits (1, 2) or codes (8).
        scale_bytes: uint8 [..., B]; the rollout's block scales.
        global_scale: None.
        num_bits: 1, 2 or 8.
        dtype: dtype in which the dequantised values are rounded; None is that of x.

    Returns:
        [..., K] in the dtype of x: the decoded `guided_codes`, but NaN where x is NaN.

    Raises:
        ValueError: Shapes disagree, K is not a multiple of 32, num_bits is not 1, 2 or 8, or a
            global scale is given.
    """
    return mx.guided(E4M3, x, hint, scale_bytes, global_scale, num_bits, dtype)
