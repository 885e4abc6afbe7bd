"""Records of one place, hints or full codes, as rows beside an operand's rows.

Legend: N rows of the operand, M of the records, A payload bytes and B blocks of a row, s rows that
have one flag in common.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from megatron_trace.config import Implementation
from megatron_trace.formats import ops, residue_bytes
from megatron_trace.formats.number_format import NVFP4, NumberFormat
from megatron_trace.hints.guided import rows_in_order
from megatron_trace.metrics import UsedHints

RowMove = Callable[[torch.Tensor], torch.Tensor]


def move_together(move: RowMove, *parts: torch.Tensor) -> list[torch.Tensor]:
    """Gives rows of bytes, uint8 [N, bytes] each, where a move of rows takes them."""
    moved = move(torch.cat(parts, dim=-1))
    return [part.contiguous() for part in moved.split([part.shape[-1] for part in parts], dim=-1)]


@dataclass(frozen=True)
class HintRows:
    """Records of one place, in the order of an operand's rows unless `order` says another.

    Attributes:
        payload: uint8 [M, A]; packed lowest bits or packed codes.
        scale_bytes: uint8 [M, B]; the rollout's block scales, or their residues, unpacked.
        num_bits: Bits per value.
        has_hint: bool [M / s]; False where s rows, one after the other, have none; s = 1 without
            `order`.
        scale_form: `raw`: the scales are those of the rollout; `residue`: their residues modulo 8;
            `restored`: what the residues stand for beside the trainer's values; `packed`: residues
            as they are stored, before `unpacked`.
        number_format: Format of the values.
        order: int32 [N]; which row of these each row of the operand has, of 0 to M - 1, which a GPU
            does not check (`hints.guided.guided_values`). None: its own, and M = N.
    """

    payload: torch.Tensor
    scale_bytes: torch.Tensor
    num_bits: int
    has_hint: torch.Tensor
    scale_form: Literal["raw", "residue", "restored", "packed"] = "raw"
    number_format: NumberFormat = NVFP4
    order: torch.Tensor | None = None

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
        assert self.order is None, "rows are moved in the order of the operand's"
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

    def in_order(self) -> HintRows:
        """Gives the rows in the order of the operand's."""
        if self.order is None:
            return self
        given = self.payload, self.scale_bytes, self.has_hint
        payload, scale_bytes, has_hint = rows_in_order(*given, self.order)
        return replace(
            self, payload=payload, scale_bytes=scale_bytes, has_hint=has_hint, order=None
        )

    def restored(
        self,
        values: torch.Tensor,
        global_scale: torch.Tensor | float | None,
        implementation: Implementation,
    ) -> HintRows:
        """Gives the rows with block scales, where they have residues: what these stand for.

        Args:
            values: float [N, K]; the trainer's values beside which they stand, in order.
            global_scale: Static decode-side scale of the place, a number or FP32 0-d; None if its
                format has none.
            implementation: Kernels of the number formats.
        """
        if self.scale_form != "residue":
            return self
        assert self.order is None, "residues are restored in the order of the operand's rows"
        assert global_scale is not None, "formats that have residues have a global scale"
        scale_bytes = ops.restored_scales(
            values,
            self.payload,
            self.scale_bytes,
            global_scale,
            num_bits=self.num_bits,
            implementation=implementation,
        )
        return replace(self, scale_bytes=scale_bytes, scale_form="restored")

    def moved(self, move: RowMove) -> HintRows:
        """Gives the rows where a move takes them; a row of zeros that it adds has no hint."""
        assert self.order is None, "rows are moved in the order of the operand's"
        present = self.has_hint.to(torch.uint8).unsqueeze(-1)
        payload, scale_bytes, present = move_together(move, self.payload, self.scale_bytes, present)
        return replace(
            self, payload=payload, scale_bytes=scale_bytes, has_hint=present.squeeze(-1) != 0
        )

    def used_at(self, rows: torch.Tensor) -> UsedHints:
        """Gives some of the rows, by number or mask, as a comparison of codes takes them."""
        assert self.order is None, "rows are compared in the order of the operand's"
        return UsedHints(
            self.has_hint[rows],
            self.payload[rows],
            self.scale_bytes[rows],
            self.num_bits,
            restored=self.scale_form == "restored",
        )
