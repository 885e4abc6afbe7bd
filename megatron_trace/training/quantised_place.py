"""What of a quantised place stays as it is from micro-batch to micro-batch: made once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_trace.config import TraceConfig
from megatron_trace.hints.guard import GuardThresholds
from megatron_trace.hints.types import QuantizerSettings, site_format
from megatron_trace.training.hint_rows import HintRows
from megatron_trace.training.layout import sum_over_columns
from megatron_trace.training.reproduced import OPERAND_DTYPES
from megatron_trace.training.rounding import Guard, Rounding, guard_thresholds
from megatron_trace.training.shape import Place, place_name


@dataclass(frozen=True)
class QuantisedPlace:
    """How a place is rounded, but for the hints of a micro-batch.

    Attributes:
        place: Decoder layer and site.
        name: What messages call it.
        nearest: Rounds every row to nearest.
        thresholds: Of the guard; None uses every hint.
        add_up: Gives sums over the ranks that have other columns of its rows; None if there are
            none.
    """

    place: Place
    name: str
    nearest: Rounding
    thresholds: GuardThresholds | None
    add_up: Callable[[torch.Tensor], torch.Tensor] | None

    @functools.cached_property
    def largest(self) -> float | None:
        """`Rounding.largest` of its values."""
        return self.nearest.largest

    def rounding(
        self,
        hint: HintRows | None,
        values: torch.Tensor,
        rejected: torch.Tensor | None,
        *,
        judged: bool,
    ) -> Rounding:
        """Gives how values are rounded.

        Args:
            hint: Hints of their rows; None if there are none.
            values: float [N, K].
            rejected: int64 [1], to which rows are added whose hint the guard rejects, once they are
                judged; None does not count them.
            judged: Whether they are judged now, and not when they are rounded.
        """
        if hint is None:
            return self.nearest
        guard = None if self.thresholds is None else Guard(self.thresholds, rejected)
        rounding = self.nearest.guided_by(hint, guard)
        if judged or (guard is not None and self.add_up is not None):
            return rounding.judged(values, self.add_up)
        return rounding


def quantised_place(
    place: Place,
    trace: TraceConfig,
    settings: QuantizerSettings,
    groups: ProcessGroupCollection,
    device: torch.device,
) -> QuantisedPlace:
    """Gives what is known of a place before there is a micro-batch.

    Args:
        place: Decoder layer and site.
        trace: The run's configuration.
        settings: Quantiser settings of the rollout.
        groups: The model's process groups.
        device: Where the values are.

    Raises:
        LookupError: The place was not calibrated.
    """
    scale, number_format = settings.global_scale(*place), site_format(trace.formats, place[1])
    # Otherwise each kernel that takes a global scale would be preceded by one that writes it.
    on_device = None
    if scale is not None and device.type == "cuda":
        on_device = torch.full((), scale, dtype=torch.float32, device=device)
    nearest = Rounding(
        scale,
        operand_dtype=OPERAND_DTYPES[settings.operand_dtype],
        power_of_two_scales=settings.power_of_two_scales,
        implementation=trace.implementation,
        number_format=number_format,
        scale_on_device=on_device,
    )
    thresholds = guard_thresholds(trace, number_format) if trace.guard else None
    return QuantisedPlace(
        place, place_name(place), nearest, thresholds, sum_over_columns(groups, place[1])
    )
