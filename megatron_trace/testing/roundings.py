"""A source of roundings kept in a dictionary, for tests and tools of the TE experts.

Legend: N rows, K values of a row.
"""

from __future__ import annotations

from collections import Counter

import torch

from megatron_trace.formats import ops
from megatron_trace.hints.types import Site
from megatron_trace.training.rounding import HintRows, Rounding


class RecordedRoundings:
    """Gives the roundings that were put in, and counts the calls of each place's quantiser."""

    def __init__(self) -> None:
        self.roundings: dict[tuple[int, Site], Rounding] = {}
        self.calls: Counter[tuple[int, Site]] = Counter()

    def rounding(self, layer: int, site: Site, values: torch.Tensor | None) -> Rounding:
        """Gives the rounding of a place.

        Raises:
            LookupError: None was put in.
        """
        try:
            return self.roundings[layer, site]
        except KeyError:
            raise LookupError(f"no rounding was recorded for layer {layer}, site {site}") from None

    def count_call(self, layer: int, site: Site) -> None:
        """Counts one call."""
        self.calls[layer, site] += 1


def recorded_rounding(
    rollout_values: torch.Tensor,
    global_scale: float,
    *,
    num_bits: int,
    has_hint: torch.Tensor | None = None,
    implementation: ops.Implementation = "auto",
) -> Rounding:
    """Gives the rounding that a rollout's quantiser recorded.

    Args:
        rollout_values: float [N, K]; what the rollout quantised.
        global_scale: Static decode-side scale.
        num_bits: 1, 2 or 4 bits per value.
        has_hint: bool [N], False where the hint is missing; None if every row has one.
        implementation: Kernels that record, and that will guide.
    """
    _, payload, scale_bytes = ops.rtn_record(
        rollout_values,
        global_scale,
        num_bits=num_bits,
        dtype=torch.bfloat16,
        implementation=implementation,
    )
    if has_hint is None:
        has_hint = torch.ones(len(payload), dtype=torch.bool, device=payload.device)
    hint = HintRows(payload, scale_bytes, num_bits, has_hint)
    return Rounding(global_scale, hint, implementation=implementation)
