"""Megatron's text generation controller without a wait in the middle of a step."""

from __future__ import annotations

from typing import Any, cast

from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)

from megatron_trace import compat
from megatron_trace.rollout.context import RolloutContext


class EngineController(TextGenerationController):
    """Leaves the routing of a step on its way to the host until its tokens have come too.

    Megatron 0.19.2 fetches it between forward and sampling: the device idles while the host writes
    it down and launches the sampling. `RolloutContext.update_requests` stores it here.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        compat.require_version("megatron-core", compat.MEGATRON_CORE, "EngineController")
        assert hasattr(TextGenerationController, "_router_record_bookkeeping"), "its hook is gone"
        super().__init__(*args, **kwargs)

    def _router_record_bookkeeping(self) -> None:
        """Starts the copy of the experts that were chosen; gives Megatron nothing to store."""
        context = cast("RolloutContext", self.inference_wrapped_model.inference_context)
        if not context.moe_enable_routing_replay:  # A dense model routes nothing.
            return
        routing = context.moe_routing_metadata.get_routing_indices()
        if routing is not None:
            context.begin_routing(routing[: context.active_token_count])
