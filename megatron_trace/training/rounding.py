"""How one operand is rounded: to nearest, or by the rollout's hints where it has them.

Legend: N rows, K values of a row, B blocks of a row, A = K * num_bits / 8 payload bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from megatron_trace.config import Implementation, TraceConfig
from megatron_trace.formats import E2M1_MAX, E4M3_MAX, ops, residue_bytes
from megatron_trace.formats.blocks import split
from megatron_trace.formats.number_format import NVFP4, NumberFormat
from megatron_trace.hints.guard import THRESHOLDS, GuardThresholds, guided_rows
from megatron_trace.metrics import UsedHints

RowMove = Callable[[torch.Tensor], torch.Tensor]


def move_together(move: RowMove, *parts: torch.Tensor) -> list[torch.Tensor]:
    """Gives rows of bytes, uint8 [N, bytes] each, where a move of rows takes them."""
    moved = move(torch.cat(parts, dim=-1))
    return [part.contiguous() for part in moved.split([part.shape[-1] for part in parts], dim=-1)]


class NonFiniteError(ValueError):
    """A value that is trained on, an activation, log-prob or loss, is NaN or Inf."""


@dataclass(frozen=True)
class HintRows:
    """Records of one place in the order of some rows.

    Attributes:
        payload: uint8 [N, A]; packed lowest bits or packed codes.
        scale_bytes: uint8 [N, B]; the rollout's block scales, or their residues, unpacked.
        num_bits: Bits per value.
        has_hint: bool [N]; False where there is none.
        scale_form: `raw`: the scales are those of the rollout; `residue`: their residues modulo 8;
            `restored`: what the residues stand for beside the trainer's values; `packed`: residues
            as they are stored, before `unpacked`.
        number_format: Format of the values.
    """

    payload: torch.Tensor
    scale_bytes: torch.Tensor
    num_bits: int
    has_hint: torch.Tensor
    scale_form: Literal["raw", "residue", "restored", "packed"] = "raw"
    number_format: NumberFormat = NVFP4

    @property
    def stored_bytes(self) -> int:
        """Bytes that a row takes in the store."""
        num_blocks = self.scale_bytes.shape[-1]
        scales = num_blocks if self.scale_form == "raw" else residue_bytes(num_blocks)
        return self.payload.shape[-1] + scales

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        return self.payload.nbytes + self.scale_bytes.nbytes + self.has_hint.nbytes

    def to(self, device: torch.device) -> HintRows:
        """Gives the same rows on a device."""
        return self.mapped(lambda tensor: tensor.to(device))

    def mapped(self, move: RowMove) -> HintRows:
        """Gives the same rows in other tensors, such as copies."""
        return replace(
            self,
            payload=move(self.payload),
            scale_bytes=move(self.scale_bytes),
            has_hint=move(self.has_hint),
        )

    def unpacked(self, implementation: Implementation = "auto") -> HintRows:
        """Gives the same rows with a byte for each block, where residues are packed."""
        if self.scale_form != "packed":
            return self
        num_values = self.payload.shape[-1] * 8 // self.num_bits
        residues = ops.unpack_residues(
            self.scale_bytes,
            num_values // self.number_format.block_size,
            implementation=implementation,
        )
        return replace(self, scale_bytes=residues, scale_form="residue")

    def moved(self, move: RowMove) -> HintRows:
        """Gives the rows where a move takes them; a row of zeros that it adds has no hint."""
        present = self.has_hint.to(torch.uint8).unsqueeze(-1)
        payload, scale_bytes, present = move_together(move, self.payload, self.scale_bytes, present)
        return replace(
            self, payload=payload, scale_bytes=scale_bytes, has_hint=present.squeeze(-1) != 0
        )

    def used_at(self, rows: torch.Tensor) -> UsedHints:
        """Gives some of the rows, by number or mask, as a comparison of codes takes them."""
        return UsedHints(
            self.has_hint[rows],
            self.payload[rows],
            self.scale_bytes[rows],
            self.num_bits,
            restored=self.scale_form == "restored",
        )

    def judged(
        self,
        values: torch.Tensor,
        global_scale: torch.Tensor | float | None,
        trace: TraceConfig,
        add_up: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> HintRows:
        """Gives the hints by which values may be rounded: with block scales, and guarded.

        Args:
            values: float [N, K]; the trainer's values.
            global_scale: Static decode-side scale of the place, a number or FP32 0-d; None if its
                format has none.
            trace: Thresholds of the guard.
            add_up: Gives sums over the ranks that have other columns of the rows; None if there are
                none. Whether it is called does not depend on the values.
        """
        rows = self._restored(values, global_scale, trace)
        return replace(rows, has_hint=rows._accepted(values, global_scale, trace, add_up))

    def _restored(
        self, values: torch.Tensor, global_scale: torch.Tensor | float | None, trace: TraceConfig
    ) -> HintRows:
        if self.scale_form != "residue":
            return self
        assert global_scale is not None, "formats that have residues have a global scale"
        scale_bytes = ops.restored_scales(
            values,
            self.payload,
            self.scale_bytes,
            global_scale,
            num_bits=self.num_bits,
            implementation=trace.implementation,
        )
        return replace(self, scale_bytes=scale_bytes, scale_form="restored")

    def _accepted(
        self,
        values: torch.Tensor,
        global_scale: torch.Tensor | float | None,
        trace: TraceConfig,
        add_up: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> torch.Tensor:
        """Gives bool [N]: which rows have a hint that the guard accepts."""
        if not trace.guard:
            return self.has_hint
        return guided_rows(
            values,
            self.payload,
            self.scale_bytes,
            self.has_hint,
            global_scale,
            num_bits=self.num_bits,
            thresholds=guard_thresholds(trace, self.number_format),
            number_format=self.number_format,
            add_up=add_up,
            implementation=trace.implementation,
        )


def guard_thresholds(trace: TraceConfig, number_format: NumberFormat) -> GuardThresholds:
    """Gives the guard's thresholds: those that are set, and the format's where none is."""
    default = THRESHOLDS[number_format.name]
    chosen = {
        name: getattr(trace, f"guard_{name}")
        for name in ("max_far_blocks", "max_scale_steps", "min_parity_agreement")
    }
    return replace(default, **{name: value for name, value in chosen.items() if value is not None})


@dataclass(frozen=True)
class PackedRows:
    """An operand as the codes and block scales that it was quantised to.

    Attributes:
        packed_codes: uint8 [N, K * bits of a code / 8].
        scale_bytes: uint8 [N, B].
        global_scale: Static decode-side scale; None if the format has none.
        operand_dtype: dtype in which dequantised values are rounded.
        number_format: Format of the codes.
    """

    packed_codes: torch.Tensor
    scale_bytes: torch.Tensor
    global_scale: float | None
    operand_dtype: torch.dtype
    number_format: NumberFormat = NVFP4

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """Gives the dequantised operand, dtype [N, K]."""
        return ops.decode(
            self.packed_codes,
            self.scale_bytes,
            self.global_scale,
            number_format=self.number_format,
            dtype=self.operand_dtype,
        ).to(dtype)

    def moved(self, move: RowMove) -> PackedRows:
        """Gives the rows where a move takes them."""
        packed_codes, scale_bytes = move_together(move, self.packed_codes, self.scale_bytes)
        return replace(self, packed_codes=packed_codes, scale_bytes=scale_bytes)

    def taken(self, rows: slice) -> PackedRows:
        """Gives some of the rows."""
        return replace(
            self, packed_codes=self.packed_codes[rows], scale_bytes=self.scale_bytes[rows]
        )


@dataclass(frozen=True)
class Rounding:
    """How one operand is quantised.

    Attributes:
        global_scale: Static decode-side scale; None if the format has none.
        hint: Hints in the order of the operand's rows; None rounds every row to nearest.
        operand_dtype: dtype in which dequantised values are rounded.
        power_of_two_scales: Whether the global scale of the weight beside it is a power of two.
        implementation: Kernels of the number formats.
        number_format: Format of the operand.
        scale_on_device: FP32 0-d, the global scale where the values are; None where it is put
            there for each call.
    """

    global_scale: float | None
    hint: HintRows | None = None
    operand_dtype: torch.dtype = torch.bfloat16
    power_of_two_scales: bool = False
    implementation: ops.Implementation = "auto"
    number_format: NumberFormat = NVFP4
    scale_on_device: torch.Tensor | None = None

    @property
    def scale(self) -> torch.Tensor | float | None:
        """The global scale, as kernels take it without another one."""
        return self.global_scale if self.scale_on_device is None else self.scale_on_device

    def guided_by(
        self,
        hint: HintRows | None,
        values: torch.Tensor,
        trace: TraceConfig,
        add_up: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> Rounding:
        """Gives the rounding by those hints that the guard accepts; see `HintRows.judged`."""
        if hint is None:
            return self
        return replace(self, hint=hint.judged(values, self.scale, trace, add_up))

    def quantised(self, values: torch.Tensor) -> torch.Tensor:
        """Gives the fake-quantised values, without gradient.

        Args:
            values: float [N, K].

        Raises:
            ValueError: The hints have another number of rows or columns than the values.
        """
        values = values.detach()
        if self.hint is None:
            return ops.rtn(
                values,
                self.scale,
                number_format=self.number_format,
                dtype=self.operand_dtype,
                implementation=self.implementation,
            )
        return ops.guided(
            values,
            self.hint.payload,
            self.hint.scale_bytes,
            self.scale,
            num_bits=self.hint.num_bits,
            has_hint=self.hint.has_hint,
            number_format=self.number_format,
            dtype=self.operand_dtype,
            implementation=self.implementation,
        )

    def packed(self, values: torch.Tensor) -> PackedRows:
        """Gives the codes whose dequantised values `quantised` gives.

        Args:
            values: float [N, K], finite: a NaN that is guided has no code.
        """
        how = {"number_format": self.number_format, "implementation": self.implementation}
        values, hint = values.detach(), self.hint
        if hint is None:
            packed_codes, scale_bytes = ops.encode(values, self.scale, **how)
        else:
            packed_codes, scale_bytes = ops.guided_packed(
                values,
                hint.payload,
                hint.scale_bytes,
                self.scale,
                num_bits=hint.num_bits,
                has_hint=hint.has_hint,
                **how,
            )
        return PackedRows(
            packed_codes, scale_bytes, self.global_scale, self.operand_dtype, self.number_format
        )


def saturated_blocks(
    values: torch.Tensor, global_scale: float | None, number_format: NumberFormat
) -> torch.Tensor:
    """Counts the blocks of float [N, K] whose amax exceeds what the global scale can hold.

    The block scales of MX formats, which have no global scale, are never too small.
    """
    if global_scale is None:
        return values.new_zeros((), dtype=torch.int64)
    limit = E2M1_MAX * E4M3_MAX * global_scale
    if values.is_cuda:
        return ops.checks(values).num_blocks_beyond(values, limit, number_format.block_size)
    amax = split(values, number_format.block_size).abs().amax(-1)
    return (amax > limit).sum()


def require_finite(values: torch.Tensor, where: str, row_name: Callable[[int], str]) -> None:
    """Raises NonFiniteError naming the first NaN or Inf of float [N, K].

    Args:
        values: What is about to be quantised.
        where: Layer and site.
        row_name: Gives the name of a row.
    """
    if values.is_cuda and not ops.checks(values).num_non_finite(values):
        return
    finite = values.isfinite()
    if finite.all():
        return
    row, column = (~finite).nonzero()[0].tolist()
    raise NonFiniteError(
        f"{values[row, column].item()} at {where}, {row_name(row)}, column {column}: quantisers "
        "need finite values; look at the loss and the gradient norm of the steps before"
    )
