"""Where the routers of a captured step record the experts that they choose."""

from __future__ import annotations

import torch
from megatron.core.inference.contexts.routing_metadata import RoutingMetadata
from megatron.core.transformer.moe.router_replay import RouterReplay


class RoutingBuffer(RoutingMetadata):
    """Megatron's buffer, cut up for the layers once.

    Megatron 0.19.2 cuts it anew before each forward, while the device waits: a slice a layer.
    """

    _parts: tuple[torch.Tensor, ...] = ()

    def enable_static_buffer_recording(self) -> None:
        """Lets each layer's router record into its part of the buffer (Megatron's method)."""
        self._ensure_buffer_allocated()
        if self.routing_indices_buffer is None:
            return
        if not self._parts:
            self._parts = self.routing_indices_buffer.unbind(1)
        routers = RouterReplay.global_router_replay_instances
        for router, part in zip(routers, self._parts, strict=True):
            router.set_static_buffer(part)
