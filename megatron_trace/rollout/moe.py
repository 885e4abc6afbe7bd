"""MoE layer of the rollout engine: its routed input passes one quantiser before dispatch."""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

from megatron_trace.hints import Site
from megatron_trace.models.moe import DispatchInputMoELayer
from megatron_trace.rollout.experts_together import ExpertsTogether, can_compute
from megatron_trace.rollout.sites import RolloutSites


class RoutedExperts(Protocol):
    """All routed experts of a layer at once.

    Attributes:
        quantises_input: Whether it quantises its input itself; otherwise it gets a quantised one.
    """

    quantises_input: bool

    def __call__(
        self, x: torch.Tensor, chosen: torch.Tensor, probabilities: torch.Tensor
    ) -> torch.Tensor:
        """Gives the weighted sum of each token's experts [T, H].

        Args:
            x: [T, H], tokens of a step.
            chosen: int64 [T, k], experts.
            probabilities: [T, k].
        """
        ...


class EngineMoELayer(DispatchInputMoELayer):
    """MoE layer whose `dispatch_input_quantizer`, attached by ModelOpt, quantises each token once.

    Attributes:
        place: (sites of the engine, decoder layer), set once the model is built.
        dispatch_input_quantizer: ModelOpt's quantiser; None while the layer is not quantised.
        routed_experts: Computes the routed experts in steps of the engine, without waiting for the
            device; None lets Megatron's dispatcher do it, and the experts.
        computes_together: Whether its experts then compute together what is not a product, instead
            of one after another.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.place: tuple[RolloutSites, int] | None = None
        self.dispatch_input_quantizer: Any = None
        self.routed_experts: RoutedExperts | None = None
        self.computes_together = True
        self._together: ExpertsTogether | None = None

    def forward(
        self,
        hidden_states: torch.Tensor,
        intermediate_tensors: Any = None,
        padding_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gives the layer's output [S, B, H], and no bias (Megatron's `MoELayer.forward`)."""
        if self.routed_experts is None or not self._in_step:
            return super().forward(hidden_states, intermediate_tensors, padding_mask)
        shared = self.shared_experts_compute(hidden_states)
        probabilities, chosen = self._chosen(hidden_states, padding_mask)
        x = hidden_states
        if not self.routed_experts.quantises_input:
            x = self.transform_dispatch_input(hidden_states)
        output = self.routed_experts(x.flatten(0, 1), chosen, probabilities)
        output = output.view_as(hidden_states)
        return (output if shared is None else output + shared), None

    def _chosen(
        self, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gives the probabilities [T, k] of each token's experts, and these, int64 [T, k].

        Where Megatron's router does no more than choose them, the same function gives them without
        the two maps [T, E] that its dispatchers read: eight kernels a layer.
        """
        router: Any = self.router
        if not self._only_chooses:
            probabilities, _ = self.route(hidden_states, padding_mask)
            chosen = router.router_replay.get_recorded_indices().long()
            return probabilities.gather(1, chosen), chosen
        config = self.config
        return topk_routing_with_score_function(
            router.gating(hidden_states).flatten(0, 1),
            router.topk,
            use_pre_softmax=config.moe_router_pre_softmax,
            num_groups=config.moe_router_num_groups,
            group_topk=config.moe_router_group_topk,
            scaling_factor=config.moe_router_topk_scaling_factor,
            score_function=router.score_function,
            router_replay=router.router_replay,
            dense_output=True,
        )

    @property
    def _only_chooses(self) -> bool:
        """Whether nothing of Megatron's router changes logits or choice, outside of training."""
        config, router = self.config, cast("Any", self.router)
        return not (
            router.routing_type in ("sinkhorn", "quantile_balancing")
            or router.enable_expert_bias
            or config.moe_router_fusion
            or config.moe_router_force_load_balancing
            or config.moe_router_force_biased is not None
            or config.moe_expert_capacity_factor is not None
            or config.moe_input_jitter_eps is not None
        )

    def transform_dispatch_input(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Gives the fake-quantised input [S, B, H]; the input itself if not quantised."""
        quantiser = self.dispatch_input_quantizer
        if quantiser is not None and quantiser.is_enabled:
            return quantiser(hidden_states)
        if self.place is not None:
            sites, layer = self.place
            sites.check_finite(layer, Site.FC1, hidden_states.flatten(0, 1))
        return hidden_states

    def routed_experts_compute(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Computes the dispatched rows, in steps of the engine those of all experts together."""
        together = self._experts_together()
        if together is None:
            return super().routed_experts_compute(hidden_states, probs)
        dispatcher: Any = self.token_dispatcher
        rows, splits, weights = dispatcher.dispatch_postprocess(hidden_states, probs)
        return dispatcher.combine_preprocess(together(rows, splits.tolist(), weights)), None

    @property
    def _in_step(self) -> bool:
        return self.place is not None and self.place[0].recorder.num_rows is not None

    def _experts_together(self) -> ExpertsTogether | None:
        """Gives what computes the dispatched rows; None if Megatron's experts are to."""
        if self.place is None or not (self._in_step and self.computes_together):
            return None
        if self._together is None and can_compute(self, self.place[0]):
            self._together = ExpertsTogether(self, *self.place)
        return self._together

    def token_of_row(self, expert: int, row: int) -> int:
        """Gives the token whose copy is a row of an expert's input, on one rank.

        Args:
            expert: Expert of the layer.
            row: Row of what the expert got in the running forward.
        """
        return int(self.tokens_of_expert(expert)[row])

    def tokens_of_expert(self, expert: int) -> torch.Tensor:
        """Gives the tokens whose copies are the rows of an expert's input, int64 [rows].

        Args:
            expert: Expert of the layer.
        """
        dispatcher: Any = self.token_dispatcher
        routing_map: torch.Tensor = dispatcher.routing_map
        return routing_map[:, expert].nonzero()[:, 0]

    def slots_of_expert(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Gives where the rows of an expert's input belong, in the order of the rows, on one rank.

        Slots are numbered as in the routing record of the engine's running step, from which the
        samples get theirs.

        Args:
            expert: Expert of the layer.

        Returns:
            tokens: int64 [rows], ascending.
            slots: int64 [rows], 0 to top-k - 1.
        """
        router: Any = self.router
        chosen: torch.Tensor = router.router_replay.get_recorded_indices()
        tokens, slots = (chosen == expert).nonzero(as_tuple=True)
        return tokens, slots
