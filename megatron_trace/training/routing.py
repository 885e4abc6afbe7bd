"""Replay of the rollout's routing by key.

Legend: L MoE layers, N rows of a micro-batch in the model's [S, B] order, k top-k.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.router_replay import RouterReplay

from megatron_trace.models.hybrid import DecoderModel, decoder_layers
from megatron_trace.training.sites import TraceSites


class KeyedRouterReplay(RouterReplay):
    """Gives one router the experts that the rollout chose for the rows of the current micro-batch.

    Megatron's own class (0.19.2, transformer/moe/router_replay.py) enters itself into a list of the
    process and replays recomputation from a FIFO. This one asks its model's `TraceSites` each time,
    so recomputation, a second pass and a second live model all get what belongs to them. Outside a
    micro-batch, or with replay off, the router chooses for itself.
    """

    def __init__(self, sites: TraceSites, moe_layer: int) -> None:
        # Without super().__init__(), which would enter the instance into the process-global list.
        self.sites = sites
        self.moe_layer = moe_layer
        self.router_replay_action = None
        self.static_buffer = None
        self.clear_indices()

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gives scores [N, k] and expert ids [N, k] of the rows."""
        assert default_compute_topk is not None, "Megatron passes its own top-k"
        target = self.sites.replayed_experts(self.moe_layer, scores.shape[0])
        if target is None:
            values, own = default_compute_topk(scores, topk, num_groups, group_topk)
            self.sites.compare_routing(self.moe_layer, partial(are_others, own))
            return values, own
        if self.sites.compares_replayed_routing:
            with torch.no_grad():
                if group_topk:
                    _, own = default_compute_topk(scores, topk, num_groups, group_topk)
                    differs = partial(are_others, own)
                else:
                    differs = partial(would_be_others, scores)
                self.sites.compare_routing(self.moe_layer, differs)
        return scores.gather(1, target), target


def are_others(experts: torch.Tensor, recorded: torch.Tensor) -> torch.Tensor:
    """Says which rows go to another set of experts than was recorded; bool [N].

    Args:
        experts: int64 [N, k]; of each row.
        recorded: int64 [N, k]; what was recorded.
    """
    return (experts.sort(-1).values != recorded.sort(-1).values).any(-1)


def would_be_others(scores: torch.Tensor, recorded: torch.Tensor) -> torch.Tensor:
    """Says which rows would go to other experts by their k highest scores; bool [N].

    Without sorting them: some other expert then has a higher score than one of those recorded.
    Where such two are equal, either could be taken, and the recorded one counts as it.

    Args:
        scores: float [N, experts].
        recorded: int64 [N, k]; what was recorded.
    """
    lowest = scores.gather(1, recorded).amin(1)
    return scores.scatter(1, recorded, -torch.inf).amax(1) > lowest


def install_keyed_replay(model: DecoderModel, sites: TraceSites) -> int:
    """Replaces the replay instances of the model's MoE layers and gives their number, L.

    Routers without an instance (`moe_enable_routing_replay` off) stay without.
    """
    moe_layers: list[Any] = [layer.moe for layer in decoder_layers(model) if layer.moe is not None]
    for ordinal, moe in enumerate(moe_layers):
        if moe.router.router_replay is not None:
            moe.router.router_replay = KeyedRouterReplay(sites, ordinal)
    return len(moe_layers)
