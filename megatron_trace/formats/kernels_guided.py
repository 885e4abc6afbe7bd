"""Guard and rounding in one kernel, `kernels_guided_rows`: what it is given, and its launch.

Legend: N rows of x, K values of a row, B blocks; M rows of a hint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from megatron_trace.formats import kernels_inputs as inputs
from megatron_trace.formats.checks import (
    as_row_scales,
    require_input,
    require_no_global_scale,
    require_num_bits,
)
from megatron_trace.formats.kernels_guard import require_length
from megatron_trace.formats.kernels_guided_rows import guided_kernel
from megatron_trace.formats.number_format import NumberFormat

# Most steps between block scales, share of far blocks, least share of lowest bits that agree.
Limits = tuple[int, float, float]


@dataclass(frozen=True)
class RowLaunch:
    """How rows are shared out among threads.

    Attributes:
        lanes: Octets of a row that are handled at once, a power of two.
        num_warps: Warps of a program; it has 32 * num_warps / lanes rows.
        tiles: Times `lanes` octets that are loaded before the first is used, at most.
    """

    lanes: int
    num_warps: int
    tiles: int


@dataclass(eq=False)
class _Plan:
    """What calls of equal kinds have in common.

    Attributes:
        payload_bytes: Bytes of a row's hint.
        num_blocks: Blocks of a row.
        word_bytes: Alignment that the hint needs.
        rows: Rows of a program.
        constants: Constants of the kernel, by name, in its order.
        num_warps: Warps of a program.
        compiled: The kernel as Triton compiled it for pointers to 16 aligned bytes; None before.
    """

    payload_bytes: int
    num_blocks: int
    word_bytes: int
    rows: int
    constants: dict[str, Any]
    num_warps: int
    compiled: Any = None


_plans: dict[tuple, _Plan] = {}


def guided_values(
    x: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    has_hint: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    number_format: NumberFormat,
    limits: Limits,
    *,
    num_bits: int,
    dtype: torch.dtype | None = None,
    order: torch.Tensor | None = None,
    rejected: torch.Tensor | None = None,
    launch: RowLaunch | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives `hints.guided.guided_values`, without gradient.

    Args:
        x: float [N, K] on a GPU; the trainer's values.
        hint: uint8 [M, K * num_bits / 8].
        scale_bytes: uint8 [M, B]; the rollout's block scales.
        has_hint: bool [M / s]; which s rows of the hint there are.
        global_scale: FP32 0-d tensor or number, or one for each row of x; None if there is none.
        number_format: The format.
        limits: What the guard decides by.
        num_bits: Bits a value of the hint.
        dtype: dtype in which the dequantised values are rounded; None is that of x.
        order: int32 [N]; which row of the hint a row of x has. None: its own, and s is 1.
        rejected: int64 [1], to which the number of rows is added whose hint is not accepted.
        launch: How; None is what was fastest.

    Returns:
        y: [N, K] in the dtype of x.
        accepted: bool [N].

    Raises:
        ValueError: Shapes disagree, num_bits is not that of a hint, or a tensor is not on the GPU
            of x.
    """
    x = inputs.prepared_values(x)
    y = torch.empty_like(x)
    given = x, hint, scale_bytes, has_hint, global_scale, order, rejected, y, None
    return y, _launch(*given, number_format, limits, num_bits, dtype, launch)


def guided_codes(
    x: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    has_hint: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    number_format: NumberFormat,
    limits: Limits,
    *,
    num_bits: int,
    order: torch.Tensor | None = None,
    rejected: torch.Tensor | None = None,
    launch: RowLaunch | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives `hints.guided.guided_codes`.

    Args:
        x: float [N, K] on a GPU; the trainer's values.
        hint: See `guided_values`, like the others.
        scale_bytes: See there.
        has_hint: See there.
        global_scale: See there.
        number_format: See there.
        limits: See there.
        num_bits: See there.
        order: See there.
        rejected: See there.
        launch: See there.

    Returns:
        packed_codes: uint8 [N, K * code_bits / 8].
        scale_bytes: uint8 [N, B].
        accepted: bool [N].

    Raises:
        ValueError: See there.
    """
    x = inputs.prepared_values(x)
    packed, own_bytes = inputs.new_hint(x, number_format.code_bits, number_format)
    given = x, hint, scale_bytes, has_hint, global_scale, order, rejected, packed, own_bytes
    return packed, own_bytes, _launch(*given, number_format, limits, num_bits, None, launch)


def accepted_rows(
    x: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    has_hint: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    number_format: NumberFormat,
    limits: Limits,
    *,
    num_bits: int,
    launch: RowLaunch | None = None,
) -> torch.Tensor:
    """Gives which rows have a hint that the guard accepts: `hints.guard.guided_rows`.

    Args:
        x: See `guided_values`, like the others.
        hint: uint8 [N, K * num_bits / 8].
        scale_bytes: uint8 [N, B].
        has_hint: bool [N].
        global_scale: See there.
        number_format: See there.
        limits: See there.
        num_bits: See there.
        launch: See there.

    Returns:
        bool [N].

    Raises:
        ValueError: See there.
    """
    x = inputs.prepared_values(x)
    given = x, hint, scale_bytes, has_hint, global_scale, None, None, None, None
    return _launch(*given, number_format, limits, num_bits, None, launch)


def _launch(
    x: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    has_hint: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    order: torch.Tensor | None,
    rejected: torch.Tensor | None,
    out: torch.Tensor | None,
    out_bytes: torch.Tensor | None,
    number_format: NumberFormat,
    limits: Limits,
    num_bits: int,
    dtype: torch.dtype | None,
    launch: RowLaunch | None,
) -> torch.Tensor:
    """Checks what is given, launches the kernel, and gives which rows it accepted.

    With few tokens a step waits for the host. So what depends on the kinds of arguments only is
    done once, and a compiled kernel is launched as such: Triton's own binder looks at every
    argument of every call.
    """
    if x.dim() != 2:
        raise ValueError(f"x must be [N, K]; got {tuple(x.shape)}")
    num_rows, length = x.shape
    num_hints, num_flags, slots = num_rows, has_hint.shape[0], 1
    if order is not None:
        num_hints = hint.shape[0]
        slots = num_hints // (num_flags or 1)
    device = x.get_device()
    scale, scale_kind = _scale_of(global_scale, x, number_format, device)
    kind = (device, x.dtype, length, number_format, num_bits, dtype, slots, scale_kind, launch)
    kind += (order is None, rejected is None, out is None, out_bytes is None)
    plan = _plans.get(kind) or _new_plan(kind, x)
    if not (
        hint.shape == (num_hints, plan.payload_bytes)
        and scale_bytes.shape == (num_hints, plan.num_blocks)
        and has_hint.shape == (num_flags,)
        and num_flags * slots == num_hints
        and (num_hints or not num_rows)
        and hint.dtype is scale_bytes.dtype is torch.uint8
        and has_hint.dtype is torch.bool
        and hint.get_device() == scale_bytes.get_device() == has_hint.get_device() == device
        and (order is None or _is(order, torch.int32, num_rows, device))
        and (rejected is None or _is(rejected, torch.int64, 1, device))
    ):
        raise ValueError(_mismatch(x, hint, scale_bytes, has_hint, order, rejected, plan))
    hint, scale_bytes, has_hint = hint.contiguous(), scale_bytes.contiguous(), has_hint.contiguous()
    if order is not None:
        order = order.contiguous()
    accepted = has_hint.new_empty(num_rows)
    if num_rows == 0:
        return accepted
    if hint.data_ptr() % plan.word_bytes:
        hint = hint.clone()
    tensors = (x, hint, scale_bytes, has_hint, order, scale, out, out_bytes, accepted, rejected)
    grid = (-(-num_rows // plan.rows), 1, 1)
    aligned = not (x.data_ptr() | hint.data_ptr()) & 15
    if aligned and plan.compiled is not None and device == torch.cuda.current_device():
        pointers = [one.data_ptr() if isinstance(one, torch.Tensor) else one for one in tensors]
        plan.compiled[grid](*pointers, num_rows, *limits, *plan.constants.values())
        return accepted
    with torch.cuda.device_of(x):
        compiled = guided_kernel[grid](
            *tensors,
            num_rows,
            *limits,
            **plan.constants,
            num_warps=plan.num_warps,
            enable_fp_fusion=False,
        )
    if aligned and not inputs.INTERPRETED:
        plan.compiled = compiled
    return accepted


def _is(tensor: torch.Tensor, dtype: torch.dtype, length: int, device: int) -> bool:
    return tensor.dtype is dtype and tensor.shape == (length,) and tensor.get_device() == device


def _scale_of(
    global_scale: torch.Tensor | float | None,
    x: torch.Tensor,
    number_format: NumberFormat,
    device: int,
) -> tuple[torch.Tensor | float | None, str]:
    """Gives the global scale as the kernel takes it, and what it is: SCALE of the kernel."""
    if not number_format.has_global_scale:
        require_no_global_scale(global_scale)
        return None, "none"
    assert global_scale is not None, f"{number_format.name} has a global scale"
    if not isinstance(global_scale, torch.Tensor):
        return float(global_scale), "number"
    if global_scale.numel() == 1:
        is_taken = global_scale.dtype is torch.float32 and global_scale.get_device() == device
        return global_scale if is_taken else as_row_scales(global_scale, x), "one"
    return as_row_scales(global_scale, x).expand(len(x), 1).contiguous(), "rows"


def _new_plan(kind: tuple, x: torch.Tensor) -> _Plan:
    """Gives what calls of a kind have in common, and keeps it."""
    _, _, length, number_format, num_bits, dtype, slots, scale_kind, launch, *absent = kind
    has_no_order, _, _, has_no_codes = absent
    require_input(x, number_format.block_size)
    require_num_bits(num_bits, number_format.code_bits)
    require_length(length)
    row_octets = length // 8
    of_format = inputs.constants_of(x, x, number_format, dtype)
    of_format.pop("ROW")
    if launch is None:
        lean = bool(of_format["PAIRS"]) and number_format.has_global_scale
        launch = _fastest(row_octets, ordered=not has_no_order, lean=lean)
    if scale_kind == "rows":
        # A program has one global scale.
        launch = RowLaunch(32 * launch.num_warps, launch.num_warps, launch.tiles)
    num_tiles = triton.cdiv(row_octets, launch.lanes)
    loops = triton.cdiv(num_tiles, launch.tiles)
    threads = 32 * launch.num_warps
    constants = {
        "NUM_BITS": num_bits,
        "CODE_BITS": number_format.code_bits,
        "CODES": not has_no_codes,
        "SLOTS": slots,
        "SCALE": scale_kind,
        **of_format,
        "ROW_OCTETS": row_octets,
        "LANES": launch.lanes,
        "LOOPS": loops,
        "TILES": triton.cdiv(num_tiles, loops) if loops else 0,
        "T": threads,
    }
    plan = _Plan(
        payload_bytes=length * num_bits // 8,
        num_blocks=length // number_format.block_size,
        word_bytes=8 if num_bits == 8 else inputs.WORDS[num_bits].itemsize,
        rows=threads // launch.lanes,
        constants=constants,
        num_warps=launch.num_warps,
    )
    _plans[kind] = plan
    return plan


def _fastest(row_octets: int, *, ordered: bool, lean: bool) -> RowLaunch:
    """Gives the launch that was fastest on an H200: docs/measurements.md.

    Args:
        row_octets: Octets of a row.
        ordered: Whether rows have their hints in an order.
        lean: Whether eight octets of a thread fit its registers: pairs of NVFP4 and 4over6.
    """
    # A block of MX formats has 4 octets.
    lanes = max(4, triton.next_power_of_2(row_octets))
    if ordered:
        return RowLaunch(lanes=min(16, lanes), num_warps=1, tiles=4)
    return RowLaunch(lanes=min(32, lanes), num_warps=1, tiles=8 if lean and lanes <= 256 else 4)


def _mismatch(
    x: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    has_hint: torch.Tensor,
    order: torch.Tensor | None,
    rejected: torch.Tensor | None,
    plan: _Plan,
) -> str:
    """Says what is wrong with tensors that do not fit x."""

    def said(tensor: torch.Tensor | None) -> str:
        return "None" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)} {tensor.device}"

    rows = "N" if order is None else "M"
    return (
        f"x [N, K] {tuple(x.shape)} on {x.device} needs hint uint8 [{rows}, {plan.payload_bytes}], "
        f"scale_bytes uint8 [{rows}, {plan.num_blocks}], has_hint bool [{rows}] or a divisor of M, "
        "order int32 [N] or None, and rejected int64 [1] or None, on the same device; got "
        + "; ".join(said(one) for one in (hint, scale_bytes, has_hint, order, rejected))
    )
