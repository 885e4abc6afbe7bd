"""A source of roundings kept in a dictionary, for tests and tools of the TE experts.

Legend: N rows, K values of a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from megatron_trace.config import TraceConfig
from megatron_trace.formats import ops
from megatron_trace.hints.types import Site
from megatron_trace.training.hint_rows import HintRows
from megatron_trace.training.rounding import Rounding
from megatron_trace.training.shape import ExpertMatrix, Place
from megatron_trace.training.weights import WeightRule


class RecordedRoundings:
    """Stands in for a model's `TraceSites` where a MoE layer is tested by itself.

    Gives the roundings that were put in, counts the calls of each place's quantiser and the uses of
    each weight. The roundings of fc2 are those of the dispatched rows.
    """

    trace = TraceConfig()
    weight_rule = WeightRule(torch.bfloat16, power_of_two_scales=False)

    def __init__(self) -> None:
        self.roundings: dict[Place, Rounding] = {}
        self.calls: Counter[Place] = Counter()
        self.weight_uses: Counter[ExpertMatrix] = Counter()
        self.weights_quantised = 0

    def rounding(self, layer: int, site: Site, values: torch.Tensor | None = None) -> Rounding:
        """Gives the rounding of a place.

        Raises:
            LookupError: None was put in.
        """
        try:
            return self.roundings[layer, site]
        except KeyError:
            raise LookupError(f"no rounding was recorded for layer {layer}, site {site}") from None

    def quantise_rows(self, x: torch.Tensor, place: Place) -> torch.Tensor:
        """Fake-quantises float [S, B, K]."""
        rows = x.detach().flatten(0, 1)
        rounding = self.rounding(*place, rows)
        self.count_call(*place)
        return ops.straight_through(x, rounding.quantised(rows).view(x.shape))

    def dispatched_slots(self, place: Place, dispatcher: Any) -> None:
        """Gives nothing: the roundings of fc2 are in the order of the dispatched rows already."""

    def slot_rounding(self, x: torch.Tensor, place: Place, *_: Any) -> Rounding:
        """Gives the rounding of fc2's rows [N, K], and counts the call."""
        self.count_call(*place)
        return self.rounding(*place, x)

    def count_call(self, layer: int, site: Site) -> None:
        """Counts one call."""
        self.calls[layer, site] += 1

    def count_weights(self, matrices: Sequence[ExpertMatrix], *, num_fresh: int) -> None:
        """Counts one use of each of some weights."""
        self.weight_uses.update(matrices)
        self.weights_quantised += num_fresh


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
