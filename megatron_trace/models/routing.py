"""Routing replay of one model, without Megatron's process-global list.

Megatron 0.19.2 (transformer/moe/router_replay.py) appends every router's `RouterReplay` to one
list of the process, in construction order, and replays backward by popping a FIFO. Two live models,
pipelining or recomputation then mix. Here each model keeps its own instances.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router_replay import RouterReplay


def replay_instances(model: HybridModel) -> list[RouterReplay]:
    """Gives the replay instances of the model's MoE layers, in pattern order; empty if off."""
    stack: Any = model.decoder
    return [
        layer.mlp.router.router_replay
        for layer in stack.layers
        if isinstance(getattr(layer, "mlp", None), MoELayer)
        and layer.mlp.router.router_replay is not None
    ]


def forget_global_replay_instances(model: torch.nn.Module) -> None:
    """Takes the model's routers (those of MTP too) out of the process-global list."""
    own = {
        id(module.router_replay)
        for module in model.modules()
        if isinstance(getattr(module, "router_replay", None), RouterReplay)
    }
    instances = RouterReplay.global_router_replay_instances
    instances[:] = [instance for instance in instances if id(instance) not in own]


@contextlib.contextmanager
def global_replay_instances(model: HybridModel) -> Iterator[None]:
    """Makes the model's instances the process-global list, as Megatron's engine expects it."""
    instances = RouterReplay.global_router_replay_instances
    previous = list(instances)
    instances[:] = replay_instances(model)
    try:
        yield
    finally:
        instances[:] = previous
