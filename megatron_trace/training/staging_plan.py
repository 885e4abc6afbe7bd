"""StagingPlan: what decides the content of a model chunk's micro-batches, without the model."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_trace.config import TraceConfig
from megatron_trace.formats import NumberFormat
from megatron_trace.hints.types import QuantizerSettings, Site, site_format
from megatron_trace.training.shape import ModelShape, Place


@dataclass(frozen=True)
class StagingPlan:
    """What to read for a model chunk on this rank; it can be sent to another process.

    Attributes:
        trace: The run's configuration.
        shape: Sizes of the model, and what this rank has of it.
        settings: Quantiser settings of the rollout; None if the method quantises nothing.
        recorded_places: Places whose hints are read.
        diagnostics: Whether full codes are read.
        forwards_packs: Whether the model can forward packed samples.
    """

    trace: TraceConfig
    shape: ModelShape
    settings: QuantizerSettings | None
    recorded_places: tuple[Place, ...]
    diagnostics: bool
    forwards_packs: bool

    @property
    def sorted_layers(self) -> tuple[int, ...]:
        """Decoder layers whose expert slots are sorted while they are read: see `slot_orders`."""
        if not self.shape.has_all_experts:
            return ()
        places = self.shape.places if self.diagnostics else self.recorded_places
        return tuple(layer for layer, site in places if site is Site.FC2)

    def format_of(self, site: Site) -> NumberFormat:
        """Gives the number format of a site."""
        return site_format(self.trace.formats, site)
