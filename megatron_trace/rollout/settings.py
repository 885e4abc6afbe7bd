"""Settings of an engine's quantisers, which its samples and a trainer share."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping

from megatron_trace.config import TraceConfig
from megatron_trace.hints import QuantizerSettings
from megatron_trace.rollout.recorder import Place

_logger = logging.getLogger(__name__)


def settings_of(
    trace: TraceConfig, model_id: str, scales: Mapping[Place, float]
) -> QuantizerSettings:
    """Gives the settings of an engine.

    Args:
        trace: Settings of TRACE.
        model_id: Name of the model.
        scales: Global scales; none in formats that have none.
    """
    return QuantizerSettings(
        dict(scales),
        number_format=trace.number_format,
        quantised_parts=trace.quantised_parts,
        power_of_two_scales=trace.power_of_two_scales,
        model_id=model_id,
        residual_share=trace.residual_share,
    )


def require_settings_like(
    own: QuantizerSettings, places: Collection[Place], settings: QuantizerSettings
) -> None:
    """Checks that settings are those of another engine of the same model.

    Args:
        own: Settings of this engine; its scales may be others, or none yet.
        places: Where it has global scales.
        settings: What is checked.

    Raises:
        ValueError: They differ in more than the values of scales.
    """
    # Which places have global scales depends on the other settings.
    fields = dataclasses.fields(QuantizerSettings)
    for field in sorted(fields, key=lambda field: field.name == "global_scales"):
        theirs, ours = getattr(settings, field.name), getattr(own, field.name)
        if field.name == "global_scales":
            theirs, ours = sorted(theirs), sorted(places)
        if theirs != ours:
            raise ValueError(
                f"settings with {field.name} {theirs} do not fit an engine with {ours}"
            )


def log_recalibration(before: QuantizerSettings, after: QuantizerSettings, version: int) -> None:
    """Warns of settings that replaced others, as samples and trainer must change with them."""
    ratios = [scale / before.global_scales[place] for place, scale in after.global_scales.items()]
    _logger.warning(
        "recalibrated: settings version %d (digest %s instead of %s); global scales changed by "
        "factors of %.3g to %.3g",
        version,
        after.digest(),
        before.digest(),
        min(ratios),
        max(ratios),
    )
