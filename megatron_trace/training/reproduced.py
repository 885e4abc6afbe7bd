"""Which of the rollout's quantiser settings the trainer reproduces; anything else is refused."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron_trace.config import TraceConfig
from megatron_trace.hints.types import QuantizerSettings
from megatron_trace.training.shape import Place

OPERAND_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# What engine and trainer are both configured with.
SHARED_SETTINGS = ("number_format", "quantised_parts", "power_of_two_scales", "residual_share")
REPRODUCED_SETTINGS = {
    "prefill_attends_to": ("quantized",),
    "operand_dtype": tuple(OPERAND_DTYPES),
}


def require_reproduced(
    settings: QuantizerSettings, trace: TraceConfig, places: Iterable[Place]
) -> None:
    """Checks that a trainer can round as the rollout engine did.

    Args:
        settings: Settings of the engine.
        trace: The trainer's configuration.
        places: Places that are quantised.

    Raises:
        ValueError: The trainer cannot reproduce a setting, or is set otherwise.
        LookupError: A place was not calibrated.
    """
    for name, reproduced in REPRODUCED_SETTINGS.items():
        if getattr(settings, name) not in reproduced:
            raise ValueError(
                f"the trainer reproduces {name} {' or '.join(map(str, reproduced))}; the "
                f"rollout's settings say {getattr(settings, name)}"
            )
    for name in SHARED_SETTINGS:
        theirs, own = getattr(settings, name), getattr(trace, name)
        if theirs != own:
            raise ValueError(
                f"{name}={theirs} in the rollout's settings, but {own} in the trainer's; set both "
                "alike"
            )
    for place in places:
        settings.global_scale(*place)
