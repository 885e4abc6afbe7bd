"""The number formats by name: how their codes and scales lie, and what computes them.

Legend: `...` any leading shape, K values of a row, B blocks of a row.

| name | code | block | block scale | global scale | hints of |
|---|---|---|---|---|---|
| `nvfp4` | E2M1 | 16 | E4M3 | yes | 1, 2, 4 bits |
| `nvfp4_4over6` | E2M1 | 16 | E4M3, the better of two | yes | 1, 2, 4 bits |
| `mxfp4` | E2M1 | 32 | E8M0 | no | 1, 2, 4 bits |
| `mxfp8` | E4M3 | 32 | E8M0 | no | 1, 2, 8 bits |

A `FormatSet` says which of them weights, activations and the KV cache have: what a run is set to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from megatron_trace.formats import four_over_six, reference, scales_e4m3, scales_e8m0
from megatron_trace.formats.checks import as_row_scales, require_no_global_scale
from megatron_trace.formats.constants import BLOCK_SIZE, E4M3_MAX, MX_BLOCK_SIZE
from megatron_trace.formats.minifloat import E2M1, E4M3, Minifloat
from megatron_trace.formats.mx import mxfp4, mxfp8


@dataclass(frozen=True, eq=False)
class NumberFormat:
    """One number format.

    Attributes:
        name: Its name.
        element: The small float of the codes.
        block_size: Neighbouring values that share one block scale.
        scale_encoding: What a byte of a block scale is.
        largest_block_scale: What the global scale gives the block of the largest magnitude; None
            for a format without a global scale.
        has_residues: Whether block scales may be kept as residues modulo 8. The two scales of
            4over6 are more than 3 steps apart, and MX blocks may have hints of zeros only.
        specification: What has `encode`, `decode`, `rtn`, `rtn_record`, `guided_codes`, `guided`,
            `own_scale_bytes` and `scale_distance`, in plain torch.
        rules: Arguments of the functions that choose block scales; both sides must have the same.
    """

    name: str
    element: Minifloat
    block_size: int
    scale_encoding: Literal["e4m3", "e8m0"]
    largest_block_scale: float | None
    has_residues: bool
    specification: Any
    rules: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_global_scale(self) -> bool:
        """Whether there is a global scale; otherwise None is passed for it."""
        return self.largest_block_scale is not None

    @property
    def code_bits(self) -> int:
        """Bits of a code, and of the hint that holds whole codes."""
        return self.element.code_bits

    @property
    def hint_bits(self) -> tuple[int, int, int]:
        """Bits a value that a hint may have: lowest bit, two lowest bits, code."""
        return 1, 2, self.code_bits

    @property
    def rule(self) -> str:
        """The value of the only rule; empty if there is none."""
        (rule,) = self.rules.values() or ("",)
        return rule

    def global_scale_from_amax(
        self, amax: torch.Tensor | float, power_of_two: bool = False
    ) -> torch.Tensor | None:
        """Gives the global scale of values of magnitude `amax`, FP32; None if there is none."""
        if self.largest_block_scale is None:
            return None
        return scales_e4m3.global_scale_from_amax(
            amax, power_of_two, e4m3_max=self.largest_block_scale
        )

    def effective_scales(
        self, scale_bytes: torch.Tensor, global_scale: torch.Tensor | float | None
    ) -> torch.Tensor:
        """Gives the scales that codes are multiplied by.

        Args:
            scale_bytes: uint8 [..., B].
            global_scale: FP32 0-d tensor or number, or one for each row; None if there is none.

        Returns:
            FP32 [..., B]; 0 where the byte is 0.
        """
        if self.scale_encoding == "e8m0":
            require_no_global_scale(global_scale)
            return scales_e8m0.effective(scale_bytes)
        assert global_scale is not None, f"{self.name} has a global scale"
        return scales_e4m3.effective(scale_bytes, as_row_scales(global_scale, scale_bytes))

    def scale_distance(
        self,
        x: torch.Tensor,
        scale_bytes: torch.Tensor,
        global_scale: torch.Tensor | float | None,
    ) -> torch.Tensor:
        """Gives how far block scales are from those that x may have, in eighths of a power of two.

        Args:
            x: float [..., K].
            scale_bytes: uint8 [..., B].
            global_scale: FP32 0-d tensor or number, or one for each row; None if there is none.

        Returns:
            int16 [..., B]: steps of E4M3, or 8 for each step of E8M0. Of the two scales of 4over6
            the nearer counts.
        """
        # The rule of 4over6 chooses between two scales, both of which count here.
        rules = self.rules if self.scale_encoding == "e8m0" else {}
        return self.specification.scale_distance(x, scale_bytes, global_scale, **rules)


NVFP4 = NumberFormat(
    name="nvfp4",
    element=E2M1,
    block_size=BLOCK_SIZE,
    scale_encoding="e4m3",
    largest_block_scale=E4M3_MAX,
    has_residues=True,
    specification=reference,
)
NVFP4_4OVER6 = NumberFormat(
    name="nvfp4_4over6",
    element=E2M1,
    block_size=BLOCK_SIZE,
    scale_encoding="e4m3",
    largest_block_scale=four_over_six.E4M3_MAX_SIX,
    has_residues=False,
    specification=four_over_six,
    rules={"error": "mse"},
)
MXFP4 = NumberFormat(
    name="mxfp4",
    element=E2M1,
    block_size=MX_BLOCK_SIZE,
    scale_encoding="e8m0",
    largest_block_scale=None,
    has_residues=False,
    specification=mxfp4,
    rules={"scale_rule": scales_e8m0.DEFAULT_RULE},
)
MXFP8 = NumberFormat(
    name="mxfp8",
    element=E4M3,
    block_size=MX_BLOCK_SIZE,
    scale_encoding="e8m0",
    largest_block_scale=None,
    has_residues=False,
    specification=mxfp8,
    rules={"scale_rule": scales_e8m0.DEFAULT_RULE},
)
NUMBER_FORMATS = {fmt.name: fmt for fmt in (NVFP4, NVFP4_4OVER6, MXFP4, MXFP8)}


@dataclass(frozen=True)
class FormatSet:
    """The formats of everything that a run quantises.

    Attributes:
        name: What a run is set to.
        weights: Of expert weights.
        activations: Of the experts' inputs.
        kv_cache: Of keys and values.
    """

    name: str
    weights: NumberFormat
    activations: NumberFormat
    kv_cache: NumberFormat


FORMAT_SETS = {
    formats.name: formats
    for formats in (
        FormatSet("nvfp4", NVFP4, NVFP4, NVFP4),
        FormatSet("nvfp4_4over6", NVFP4_4OVER6, NVFP4_4OVER6, NVFP4_4OVER6),
        FormatSet("mxfp4", MXFP4, MXFP4, MXFP4),
        FormatSet("mxfp4_w4a8", MXFP4, MXFP8, MXFP4),
    )
}


def format_set(name: str) -> FormatSet:
    """Gives the formats that a run of this name has.

    Raises:
        ValueError: There is no such name.
    """
    if name not in FORMAT_SETS:
        raise ValueError(f"number_format must be one of {', '.join(FORMAT_SETS)}; got {name!r}")
    return FORMAT_SETS[name]
