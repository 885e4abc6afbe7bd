"""Public fake quantisation: torch or Triton, with straight-through gradients.

The gradient to x is the identity, also where |x| exceeds what the format can hold.
"""

from __future__ import annotations

from types import ModuleType
from typing import Literal

import torch

from megatron_trace.formats import packing, reference
from megatron_trace.formats.residues import restored

Implementation = Literal["auto", "torch", "triton"]


def rtn(
    x: torch.Tensor,
    global_scale: torch.Tensor | float,
    *,
    dtype: torch.dtype | None = None,
    implementation: Implementation = "auto",
) -> torch.Tensor:
    """Gives `reference.rtn` with the identity as gradient to x.

    Args:
        x: float [..., K].
        global_scale: FP32 0-d tensor or number, or one for each row, decode side.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
        implementation: `torch`, `triton`, or `auto` (Triton where x is on a GPU).

    Returns:
        [..., K] in the dtype of x.

    Raises:
        ValueError: K is not a multiple of 16, or the implementation cannot run on x.
    """
    module = _implementation(implementation, x)
    return straight_through(x, module.rtn(x.detach(), global_scale, dtype=dtype))


def rtn_record(
    x: torch.Tensor,
    global_scale: torch.Tensor | float,
    *,
    num_bits: int,
    dtype: torch.dtype | None = None,
    implementation: Implementation = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives `reference.rtn_record`, without gradient.

    Args:
        x: float [..., K].
        global_scale: FP32 0-d tensor or number, or one for each row, decode side.
        num_bits: 1, 2 (lowest bits) or 4 (codes) per value of the hint.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
        implementation: `torch`, `triton`, or `auto` (Triton where x is on a GPU).

    Returns:
        y: [..., K] in the dtype of x.
        hint: uint8 [..., K * num_bits / 8].
        scale_bytes: uint8 [..., B], E4M3.

    Raises:
        ValueError: K is not a multiple of 16, num_bits is not 1, 2 or 4, or the implementation
            cannot run on x.
    """
    module = _implementation(implementation, x)
    return module.rtn_record(x.detach(), global_scale, num_bits=num_bits, dtype=dtype)


def guided(
    x: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor | float,
    *,
    num_bits: int,
    dtype: torch.dtype | None = None,
    implementation: Implementation = "auto",
) -> torch.Tensor:
    """Gives `reference.guided` with the identity as gradient to x.

    Args:
        x: float [..., K]; the trainer's values.
        hint: uint8 [..., K * num_bits / 8]; packed lowest bits (1, 2) or codes (4).
        scale_bytes: uint8 [..., B]; the rollout's block scales.
        global_scale: FP32 0-d tensor or number, or one for each row; the rollout's, decode side.
        num_bits: 1, 2 or 4.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
        implementation: `torch`, `triton`, or `auto` (Triton where x is on a GPU).

    Returns:
        [..., K] in the dtype of x.

    Raises:
        ValueError: Shapes disagree, K is not a multiple of 16, num_bits is not 1, 2 or 4, or the
            implementation cannot run on x.
    """
    module = _implementation(implementation, x)
    y = module.guided(x.detach(), hint, scale_bytes, global_scale, num_bits=num_bits, dtype=dtype)
    return straight_through(x, y)


def restored_scales(
    x: torch.Tensor,
    hint: torch.Tensor,
    residues: torch.Tensor,
    global_scale: torch.Tensor | float,
    *,
    num_bits: int,
    implementation: Implementation = "auto",
) -> torch.Tensor:
    """Gives `residues.restored`: the rollout's block scales, from residues and the trainer's own.

    Args:
        x: float [..., K]; the trainer's values.
        hint: uint8 [..., K * num_bits / 8]; packed lowest bits (1, 2) or codes (4).
        residues: uint8 [..., B], 0 to 7.
        global_scale: FP32 0-d tensor or number; the rollout's global scale, decode side.
        num_bits: 1, 2 or 4.
        implementation: `torch`, `triton`, or `auto` (Triton where x is on a GPU).

    Returns:
        uint8 [..., B], E4M3.

    Raises:
        ValueError: Shapes disagree, K is not a multiple of 16, num_bits is not 1, 2 or 4, or the
            implementation cannot run on x.
    """
    module = _codec(implementation, x)
    function = restored if module is None else module.restored
    return function(x.detach(), hint, residues, global_scale, num_bits=num_bits)


def narrowed(
    packed_codes: torch.Tensor, num_bits: int, *, implementation: Implementation = "auto"
) -> torch.Tensor:
    """Gives `packing.narrowed`: the hint of codes that are packed already.

    Args:
        packed_codes: uint8 [..., K / 2], K % 8 == 0.
        num_bits: 1, 2 or 4; at 4, the argument itself is given.
        implementation: `torch`, `triton`, or `auto` (Triton where the codes are on a GPU).

    Returns:
        uint8 [..., K * num_bits / 8].
    """
    module = _codec(implementation, packed_codes) or packing
    return module.narrowed(packed_codes, num_bits)


def pack_residues(
    residues: torch.Tensor, *, implementation: Implementation = "auto"
) -> torch.Tensor:
    """Gives `packing.pack_residues`: 3 bits each.

    Args:
        residues: uint8 [..., B], 0 to 7.
        implementation: `torch`, `triton`, or `auto` (Triton where the residues are on a GPU).

    Returns:
        uint8 [..., residue_bytes(B)].
    """
    return (_codec(implementation, residues) or packing).pack_residues(residues)


def unpack_residues(
    packed: torch.Tensor, num_blocks: int, *, implementation: Implementation = "auto"
) -> torch.Tensor:
    """Gives `packing.unpack_residues`.

    Args:
        packed: uint8 [..., residue_bytes(B)].
        num_blocks: B.
        implementation: `torch`, `triton`, or `auto` (Triton where the bytes are on a GPU).

    Returns:
        uint8 [..., B], 0 to 7.

    Raises:
        ValueError: A row has another number of bytes.
    """
    module = _codec(implementation, packed) or packing
    return module.unpack_residues(packed, num_blocks)


def straight_through(x: torch.Tensor, quantised: torch.Tensor) -> torch.Tensor:
    """Gives `quantised`, bit for bit, with the identity as gradient to x.

    Args:
        x: float, any shape.
        quantised: Same shape and dtype as x; no gradient flows into it.

    Returns:
        `quantised`, attached to x.

    Raises:
        ValueError: Shapes or dtypes differ.
    """
    if quantised.shape != x.shape or quantised.dtype != x.dtype:
        raise ValueError(
            f"quantised must be {x.dtype} {tuple(x.shape)} like x; got {quantised.dtype} "
            f"{tuple(quantised.shape)}"
        )
    if not (x.requires_grad and torch.is_grad_enabled()):
        return quantised.detach()
    return _StraightThrough.apply(x, quantised)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, quantised):
        return quantised.view_as(quantised)

    @staticmethod
    def backward(ctx, *grad_outputs):
        return grad_outputs[0], None


def _implementation(name: Implementation, x: torch.Tensor) -> ModuleType:
    if not _takes_triton(name, x):
        return reference
    # Only here: Triton looks for a GPU driver when it is imported.
    from megatron_trace.formats import kernels

    return kernels


def _codec(name: Implementation, values: torch.Tensor) -> ModuleType | None:
    """Gives the kernels of the hint codec; None if torch is to do it."""
    if not _takes_triton(name, values):
        return None
    from megatron_trace.formats import hint_kernels

    return hint_kernels


def _takes_triton(name: Implementation, values: torch.Tensor) -> bool:
    if name not in ("auto", "torch", "triton"):
        raise ValueError(f"implementation must be auto, torch or triton; got {name!r}")
    return name == "triton" or (name == "auto" and values.is_cuda)
