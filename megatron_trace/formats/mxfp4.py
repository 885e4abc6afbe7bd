"""MXFP4 in plain torch: E2M1 codes in blocks of 32 under power-of-two scales.

Legend: `...` any leading shape, K values of a row (a multiple of 32), B = K / 32 blocks of a row.
value = code * 2^(scale byte - 127). There is no global scale: the argument is there so that every
format is called alike, and must be None. Beside weights of this format, activations are of it too
(W4A4) or of `mxfp8` (W4A8).

The rounding of codes is `minifloat`'s, the rules of the scale are `scales_e8m0`'s. At the edges:
* The default rule is rceil: what ModelOpt, Transformer Engine and Blackwell's instruction do, hence
  what a rollout does and its trainer must do. docs/formats.md has the errors of each rule.
* A block whose byte is 0 has codes 0, and `guided` gives zeros for it, whatever the trainer has;
  `decode` multiplies by the 2^-127 that OCP says.
* A block with a NaN has byte 255 and decodes to NaN. A block with an Inf has the byte of the
  largest scale, and products beyond FP32 are Inf.

Source: OCP Microscaling Formats MX 1.0, sections 5.3.3 and 6.3.
"""

from __future__ import annotations

import torch

from megatron_trace.formats import mx
from megatron_trace.formats.minifloat import E2M1
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
        codes: uint8 [..., K], 0 to 15.
        scale_bytes: uint8 [..., B], E8M0.

    Raises:
        ValueError: K is not a multiple of 32, a global scale is given, or the rule is unknown.
    """
    return mx.encode(E2M1, x, global_scale, scale_rule)


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
    return mx.own_scale_bytes(E2M1, x, global_scale, scale_rule)


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
    return mx.scale_distance(E2M1, x, scale_bytes, global_scale, scale_rule)


def decode(
    codes: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Gives the values of codes.

    Args:
        codes: uint8 [..., K], 0 to 15.
        scale_bytes: uint8 [..., B], E8M0.
        global_scale: None.
        dtype: dtype of the result; the FP32 products are rounded to it.

    Returns:
        dtype [..., K].

    Raises:
        ValueError: Shapes disagree, K is not a multiple of 32, or a global scale is given.
    """
    return mx.decode(E2M1, codes, scale_bytes, global_scale, dtype)


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
    return mx.rtn(E2M1, x, global_scale, dtype, scale_rule)


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
        num_bits: 1, 2 (lowest bits) or 4 (codes) per value of the hint.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
        scale_rule: How the scale follows from the largest magnitude of a block.

    Returns:
        y: [..., K] in the dtype of x.
        hint: uint8 [..., K * num_bits / 8].
        scale_bytes: uint8 [..., B], E8M0.

    Raises:
        ValueError: K is not a multiple of 32, num_bits is not 1, 2 or 4, a global scale is given,
            or the rule is unknown.
    """
    return mx.rtn_record(E2M1, x, global_scale, num_bits, dtype, scale_rule)


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
        hint: uint8 [..., K * num_bits / 8]; packed lowest bits (1, 2) or codes (4).
        scale_bytes: uint8 [..., B]; the rollout's block scales.
        global_scale: None.
        num_bits: 1, 2 or 4.

    Returns:
        uint8 [..., K], with the sign of x.

    Raises:
        ValueError: Shapes disagree, K is not a multiple of 32, num_bits is not 1, 2 or 4, or a
            global scale is given.
    """
    return mx.guided_codes(E2M1, x, hint, scale_bytes, global_scale, num_bits)


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
        hint: uint8 [..., K * num_bits / 8]; packed lowest bits (1, 2) or codes (4).
        scale_bytes: uint8 [..., B]; the rollout's block scales.
        global_scale: None.
        num_bits: 1, 2 or 4.
        dtype: dtype in which the dequantised values are rounded; None is that of x.

    Returns:
        [..., K] in the dtype of x: the decoded `guided_codes`, but NaN where x is NaN.

    Raises:
        ValueError: Shapes disagree, K is not a multiple of 32, num_bits is not 1, 2 or 4, or a
            global scale is given.
    """
    return mx.guided(E2M1, x, hint, scale_bytes, global_scale, num_bits, dtype)
