"""Where an engine quantises, and what of it is recorded in which form."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_trace.config import DEFAULT_HINT_SITES, TraceConfig
from megatron_trace.formats import ops
from megatron_trace.hints import Site, site_format, stored_bits
from megatron_trace.models.hybrid import DecoderLayer
from megatron_trace.rollout.recorder import Place, Recorder


def quantised_places(layers: Sequence[DecoderLayer], trace: TraceConfig) -> list[Place]:
    """Gives every (decoder layer, site) that an engine quantises, in the order of the layers."""
    return [
        (layer.index, site)
        for layer in layers
        for site in _sites_of(layer)
        if site in trace.quantised_sites
    ]


def hint_sites(layers: Sequence[DecoderLayer], trace: TraceConfig) -> tuple[Site, ...]:
    """Gives the sites whose hints a trainer gets: none but with method trace.

    Raises:
        ValueError: The settings name a site that no layer has.
    """
    available = dict.fromkeys(site for layer in layers for site in _sites_of(layer))
    chosen = trace.sites_in(tuple(site for site in Site if site in available))
    return tuple(map(Site, chosen)) if trace.method == "trace" else ()


def recorded_places(layers: Sequence[DecoderLayer], trace: TraceConfig) -> list[Place]:
    """Gives the places whose rows are kept: those of hints, and of the codes of diagnostic samples.

    Raises:
        ValueError: The settings name a site or layer that the model does not have.
    """
    sites = set(hint_sites(layers, trace))
    if not trace.quantised_sites:
        return []
    if trace.diagnostic_share > 0:
        sites |= {*DEFAULT_HINT_SITES, *trace.hint_sites}
    recorded = trace.recorded_layers(1 + max(layer.index for layer in layers))
    return [
        (layer, site)
        for layer, site in quantised_places(layers, trace)
        if layer in recorded and site in sites
    ]


def make_recorder(layers: Sequence[DecoderLayer], trace: TraceConfig) -> Recorder:
    """Gives a recorder of the recorded places, which keeps as many bits as are stored.

    Raises:
        ValueError: As of `recorded_places`.
    """

    def narrowed(site: Site, packed_codes: torch.Tensor) -> torch.Tensor:
        number_format = site_format(trace.formats, site)
        bits = stored_bits(number_format, trace.recorded_bits)
        return ops.narrowed(packed_codes, bits, number_format=number_format)

    return Recorder(recorded_places(layers, trace), narrowed)


def _sites_of(layer: DecoderLayer) -> tuple[Site, ...]:
    experts = () if layer.moe is None else (Site.FC1, Site.FC2)
    return experts + (() if layer.attention is None else (Site.K, Site.V))
