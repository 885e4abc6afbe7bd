"""How one operand is rounded: to nearest, or by the rollout's hints where it has them.

Legend: N rows, K values of a row, B blocks of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_trace.config import TraceConfig
from megatron_trace.formats import E2M1_MAX, E4M3_MAX, ops
from megatron_trace.formats.number_format import NVFP4, NumberFormat
from megatron_trace.hints.guard import THRESHOLDS, GuardThresholds, guided_rows
from megatron_trace.hints.guided import guided_codes, guided_values
from megatron_trace.training.hint_rows import HintRows, RowMove, move_together


class NonFiniteError(ValueError):
    """A value that is trained on, an activation, log-prob or loss, is NaN or Inf."""


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
class Guard:
    """Judges the hints of rows beside the values that they are to round.

    Attributes:
        thresholds: What decides.
        rejected: int64 [1] where the values are, to which the number of rows is added whose hint is
            not accepted, as often as they are rounded; None if they are not counted.
    """

    thresholds: GuardThresholds
    rejected: torch.Tensor | None = None


@dataclass(frozen=True)
class Rounding:
    """How one operand is quantised.

    Attributes:
        global_scale: Static decode-side scale; None if the format has none.
        hint: Hints of the operand's rows; None rounds every row to nearest.
        operand_dtype: dtype in which dequantised values are rounded.
        power_of_two_scales: Whether the global scale of the weight beside it is a power of two.
        implementation: Kernels of the number formats.
        number_format: Format of the operand.
        scale_on_device: FP32 0-d, the global scale where the values are; None where it is put
            there for each call.
        guard: Which of the hints are used, decided when values are rounded; None uses all.
    """

    global_scale: float | None
    hint: HintRows | None = None
    operand_dtype: torch.dtype = torch.bfloat16
    power_of_two_scales: bool = False
    implementation: ops.Implementation = "auto"
    number_format: NumberFormat = NVFP4
    scale_on_device: torch.Tensor | None = None
    guard: Guard | None = None

    @property
    def scale(self) -> torch.Tensor | float | None:
        """The global scale, as kernels take it without another one."""
        return self.global_scale if self.scale_on_device is None else self.scale_on_device

    @property
    def largest(self) -> float | None:
        """The largest magnitude that the global scale can hold; None if the format has none.

        The block scales of MX formats, which have no global scale, are never too small.
        """
        return None if self.global_scale is None else E2M1_MAX * E4M3_MAX * self.global_scale

    def guided_by(self, hint: HintRows, guard: Guard | None) -> Rounding:
        """Gives the rounding by hints; see `guard`."""
        # Not by `replace`, which takes the host several times as long, at every place.
        return Rounding(
            self.global_scale,
            hint,
            self.operand_dtype,
            self.power_of_two_scales,
            self.implementation,
            self.number_format,
            self.scale_on_device,
            guard,
        )

    def judged(
        self, values: torch.Tensor, add_up: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> Rounding:
        """Gives the same rounding without a guard: by those hints that it accepts.

        `quantised` and `packed` judge and round in one call. This is for those who ask which hints
        are used, for rows that move before they are rounded, and where the columns of a row are
        split over ranks.

        Args:
            values: float [N, K]; the trainer's values.
            add_up: Gives sums over the ranks that have other columns of the rows; None if there are
                none. Whether it is called does not depend on the values.
        """
        if self.hint is None:
            return self
        hint = self.hint.in_order().restored(values, self.scale, self.implementation)
        guard = self.guard
        if guard is None:
            return self.guided_by(hint, None)
        accepted = guided_rows(
            values,
            hint.payload,
            hint.scale_bytes,
            hint.has_hint,
            self.scale,
            thresholds=guard.thresholds,
            add_up=add_up,
            **self._form_of(hint),
        )
        if guard.rejected is not None:
            guard.rejected.add_((hint.has_hint & ~accepted).sum())
        return self.guided_by(replace(hint, has_hint=accepted), None)

    def quantised(self, values: torch.Tensor) -> torch.Tensor:
        """Gives the fake-quantised values, without gradient.

        Args:
            values: float [N, K].

        Raises:
            ValueError: The hints have another number of rows or columns than the values.
        """
        values = values.detach()
        hint, dtype = self._hint_beside(values), self.operand_dtype
        if hint is None:
            how = {"number_format": self.number_format, "implementation": self.implementation}
            return ops.rtn(values, self.scale, dtype=dtype, **how)
        given = values, hint.payload, hint.scale_bytes
        how, has_hint = self._form_of(hint), hint.has_hint
        if self.guard is None:
            return ops.guided(*given, self.scale, has_hint=has_hint, dtype=dtype, **how)
        how |= self._judging(self.guard, hint)
        return guided_values(*given, has_hint, self.scale, dtype=dtype, **how)[0]

    def packed(self, values: torch.Tensor) -> PackedRows:
        """Gives the codes whose dequantised values `quantised` gives.

        Args:
            values: float [N, K], finite: a NaN that is guided has no code.
        """
        values = values.detach()
        hint = self._hint_beside(values)
        if hint is None:
            how = {"number_format": self.number_format, "implementation": self.implementation}
            codes = ops.encode(values, self.scale, **how)
        else:
            given = values, hint.payload, hint.scale_bytes
            how, has_hint = self._form_of(hint), hint.has_hint
            if self.guard is None:
                codes = ops.guided_packed(*given, self.scale, has_hint=has_hint, **how)
            else:
                how |= self._judging(self.guard, hint)
                codes = guided_codes(*given, has_hint, self.scale, **how)[:2]
        return PackedRows(*codes, self.global_scale, self.operand_dtype, self.number_format)

    def _hint_beside(self, values: torch.Tensor) -> HintRows | None:
        """Gives the hints as what rounds takes them: only the guard's calls take an order."""
        hint = self.hint
        if hint is None or (self.guard is not None and hint.scale_form != "residue"):
            return hint
        return hint.in_order().restored(values, self.scale, self.implementation)

    def _form_of(self, hint: HintRows) -> dict[str, Any]:
        return {
            "num_bits": hint.num_bits,
            "number_format": self.number_format,
            "implementation": self.implementation,
        }

    @staticmethod
    def _judging(guard: Guard, hint: HintRows) -> dict[str, Any]:
        return {
            "thresholds": guard.thresholds,
            "rejected": guard.rejected,
            "order": hint.order,
        }
