"""Public fake quantisation: torch or Triton, with straight-through gradients.

The gradient to x is the identity, also where |x| exceeds what the format can hold.
"""

from __future__ import annotations

from types import ModuleType
from typing import Literal

import torch

from megatron_trace.formats import packing
from megatron_trace.formats.checks import require_num_bits
from megatron_trace.formats.number_format import NVFP4, NumberFormat
from megatron_trace.formats.residues import restored

Implementation = Literal["auto", "torch", "triton"]


def rtn(
    x: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    *,
    number_format: NumberFormat = NVFP4,
    dtype: torch.dtype | None = None,
    implementation: Implementation = "auto",
) -> torch.Tensor:
    """Gives `rtn` of a format with the identity as gradient to x.

    Args:
        x: float [..., K].
        global_scale: FP32 0-d tensor or number, or one for each row, decode side; None for a format
            without.
        number_format: The format.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
        implementation: `torch`, `triton`, or `auto` (Triton where x is on a GPU).

    Returns:
        [..., K] in the dtype of x.

    Raises:
        ValueError: K is not a multiple of the block size, or the implementation cannot run on x.
    """
    values = x.detach()
    if takes_triton(implementation, x):
        y = _kernels().rtn(values, global_scale, number_format, dtype=dtype)
    else:
        y = _nearest(values, global_scale, number_format, dtype)
    return straight_through(x, y)


def rtn_record(
    x: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    *,
    num_bits: int,
    number_format: NumberFormat = NVFP4,
    dtype: torch.dtype | None = None,
    implementation: Implementation = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives `rtn_record` of a format, without gradient.

    Args:
        x: float [..., K].
        global_scale: As `rtn`.
        num_bits: Bits per value of the hint, one of `number_format.hint_bits`; `code_bits` gives
            packed codes.
        number_format: The format.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
        implementation: `torch`, `triton`, or `auto` (Triton where x is on a GPU).

    Returns:
        y: [..., K] in the dtype of x.
        hint: uint8 [..., K * num_bits / 8].
        scale_bytes: uint8 [..., B].

    Raises:
        ValueError: K is not a multiple of the block size, num_bits is not that of a hint, or the
            implementation cannot run on x.
    """
    if takes_triton(implementation, x):
        return _kernels().rtn_record(
            x.detach(), global_scale, number_format, num_bits=num_bits, dtype=dtype
        )
    return number_format.specification.rtn_record(
        x.detach(), global_scale, num_bits=num_bits, dtype=dtype, **number_format.rules
    )


def guided(
    x: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    *,
    num_bits: int,
    has_hint: torch.Tensor | None = None,
    number_format: NumberFormat = NVFP4,
    dtype: torch.dtype | None = None,
    implementation: Implementation = "auto",
) -> torch.Tensor:
    """Gives `guided` of a format, and `rtn` in rows without hint; the identity as gradient to x.

    Args:
        x: float [..., K]; the trainer's values.
        hint: uint8 [..., K * num_bits / 8]; packed lowest bits, or codes.
        scale_bytes: uint8 [..., B]; the rollout's block scales.
        global_scale: As `rtn`; the rollout's.
        num_bits: One of `number_format.hint_bits`.
        has_hint: bool [...]; rows that have a hint. None says that all have.
        number_format: The format.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
        implementation: `torch`, `triton`, or `auto` (Triton where x is on a GPU).

    Returns:
        [..., K] in the dtype of x.

    Raises:
        ValueError: Shapes disagree, K is not a multiple of the block size, num_bits is not that of
            a hint, or the implementation cannot run on x.
    """
    values = x.detach()
    options = {"num_bits": num_bits, "dtype": dtype}
    if has_hint is not None:
        _require_rows(has_hint, x)
    if takes_triton(implementation, x):
        tensors = (values, hint, scale_bytes)
        if has_hint is None:
            y = _kernels().guided(*tensors, global_scale, number_format, **options)
        else:
            y = _rows_kernels().guided(*tensors, has_hint, global_scale, number_format, **options)
        return straight_through(x, y)
    y = number_format.specification.guided(values, hint, scale_bytes, global_scale, **options)
    if has_hint is None:
        return straight_through(x, y)
    if isinstance(global_scale, torch.Tensor) and global_scale.numel() > 1:
        nearest = _nearest(values, global_scale, number_format, dtype)
        return straight_through(x, torch.where(has_hint.unsqueeze(-1), y, nearest))
    y[~has_hint] = _nearest(values[~has_hint], global_scale, number_format, dtype)
    return straight_through(x, y)


def encode(
    x: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    *,
    number_format: NumberFormat = NVFP4,
    implementation: Implementation = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives packed codes and block scales of x, rounded to nearest.

    Args:
        x: float [..., K].
        global_scale: As `rtn`.
        number_format: The format.
        implementation: `torch`, `triton`, or `auto` (Triton where x is on a GPU).

    Returns:
        packed_codes: uint8 [..., K * code_bits / 8].
        scale_bytes: uint8 [..., B].

    Raises:
        ValueError: K is not a multiple of the block size, or the implementation cannot run on x.
    """
    if takes_triton(implementation, x):
        return _rows_kernels().encode(x.detach(), global_scale, number_format)
    codes, scale_bytes = number_format.specification.encode(
        x.detach(), global_scale, **number_format.rules
    )
    return packing.pack_hint(codes, number_format.code_bits), scale_bytes


def decode(
    packed_codes: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    *,
    number_format: NumberFormat = NVFP4,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Gives the values of packed codes.

    Args:
        packed_codes: uint8 [..., K * code_bits / 8].
        scale_bytes: uint8 [..., B].
        global_scale: As `rtn`.
        number_format: The format.
        dtype: dtype of the result; the FP32 products are rounded to it.

    Returns:
        dtype [..., K].

    Raises:
        ValueError: Shapes disagree, or K is not a multiple of the block size.
    """
    codes = packing.unpack_hint(packed_codes, number_format.code_bits)
    return number_format.specification.decode(codes, scale_bytes, global_scale, dtype)


def guided_packed(
    x: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    *,
    num_bits: int,
    has_hint: torch.Tensor | None = None,
    number_format: NumberFormat = NVFP4,
    implementation: Implementation = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives packed codes and block scales whose values `guided` gives, where x is finite.

    Args:
        x: float [..., K]; the trainer's values.
        hint: uint8 [..., K * num_bits / 8]; packed lowest bits, or codes.
        scale_bytes: uint8 [..., B]; the rollout's block scales.
        global_scale: As `rtn`; the rollout's.
        num_bits: One of `number_format.hint_bits`.
        has_hint: bool [...]; rows that have a hint. None says that all have.
        number_format: The format.
        implementation: `torch`, `triton`, or `auto` (Triton where x is on a GPU).

    Returns:
        packed_codes: uint8 [..., K * code_bits / 8].
        scale_bytes: uint8 [..., B]; those given, and own ones in rows without hint.

    Raises:
        ValueError: As `guided`.
    """
    if has_hint is not None:
        _require_rows(has_hint, x)
    if takes_triton(implementation, x):
        if has_hint is None:
            has_hint = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
        return _rows_kernels().guided_packed(
            x.detach(),
            hint,
            scale_bytes,
            has_hint,
            global_scale,
            number_format,
            num_bits=num_bits,
        )
    codes = number_format.specification.guided_codes(
        x.detach(), hint, scale_bytes, global_scale, num_bits=num_bits
    )
    packed = packing.pack_hint(codes, number_format.code_bits)
    if has_hint is None:
        return packed, scale_bytes
    present = has_hint.unsqueeze(-1)
    own, own_bytes = encode(
        x, global_scale, number_format=number_format, implementation=implementation
    )
    return torch.where(present, packed, own), torch.where(present, scale_bytes, own_bytes)


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
        global_scale: FP32 0-d tensor or number, or one for each row; the rollout's, decode side.
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
    packed_codes: torch.Tensor,
    num_bits: int,
    *,
    number_format: NumberFormat = NVFP4,
    implementation: Implementation = "auto",
) -> torch.Tensor:
    """Gives the hint of codes that are packed already.

    Args:
        packed_codes: uint8 [..., K * code_bits / 8], K % 8 == 0.
        num_bits: One of `number_format.hint_bits`; with that of codes, the argument itself is
            given.
        number_format: The format.
        implementation: `torch`, `triton`, or `auto` (Triton where the codes are on a GPU; torch
            for codes of 8 bits, which has no kernel).

    Returns:
        uint8 [..., K * num_bits / 8].

    Raises:
        ValueError: num_bits is not that of a hint, or there is no kernel.
    """
    require_num_bits(num_bits, number_format.code_bits)
    if number_format.code_bits == 8:
        if implementation == "triton":
            raise ValueError(
                f"codes of {number_format.name} are narrowed by torch only; use torch or auto"
            )
        return packing.pack_hint(packed_codes, num_bits)
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


def takes_triton(name: Implementation, values: torch.Tensor) -> bool:
    """Says whether Triton is to compute something from values.

    Raises:
        ValueError: There is no such implementation.
    """
    if name not in ("auto", "torch", "triton"):
        raise ValueError(f"implementation must be auto, torch or triton; got {name!r}")
    return name == "triton" or (name == "auto" and values.is_cuda)


def _nearest(
    values: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    number_format: NumberFormat,
    dtype: torch.dtype | None,
) -> torch.Tensor:
    return number_format.specification.rtn(values, global_scale, dtype=dtype, **number_format.rules)


def _kernels() -> ModuleType:
    # Only here: Triton looks for a GPU driver when it is imported.
    from megatron_trace.formats import kernels_whole

    return kernels_whole


def _codec(name: Implementation, values: torch.Tensor) -> ModuleType | None:
    """Gives the kernels of the hint codec; None if torch is to do it."""
    if not takes_triton(name, values):
        return None
    # Only here: Triton looks for a GPU driver when it is imported.
    from megatron_trace.formats import hint_kernels

    return hint_kernels


def _rows_kernels() -> ModuleType:
    from megatron_trace.formats import kernels_rows

    return kernels_rows


def _require_rows(has_hint: torch.Tensor, x: torch.Tensor) -> None:
    if has_hint.dtype != torch.bool or has_hint.shape != x.shape[:-1]:
        raise ValueError(
            f"has_hint must be bool {tuple(x.shape[:-1])}, one for each row; got "
            f"{has_hint.dtype} {tuple(has_hint.shape)}"
        )
