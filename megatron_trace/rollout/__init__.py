"""Rollouts on Megatron's dynamic inference engine, in FP4 and with recorded hints."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_trace.rollout.engine import RolloutEngine
    from megatron_trace.rollout.sampling import SamplingSettings

__all__ = ["RolloutEngine", "SamplingSettings"]

_MODULE_OF = {"RolloutEngine": "engine", "SamplingSettings": "sampling"}


def __getattr__(name: str) -> Any:
    """Gives what the package exports, imported when it is first asked for.

    So who wants a kernel or a table of pages alone does not wait for Megatron and ModelOpt.
    """
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
