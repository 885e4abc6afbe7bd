"""Routed experts that both sides share: probability after fc2, input hook before dispatch.

Legend: S positions, B sequences, H hidden size, N dispatched rows (token, expert slot).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher


class UnweightedSequentialMLP(SequentialMLP):
    """Experts one after another, with the router's probability applied after fc2.

    Megatron multiplies the activation by the probability before fc2 (0.19.2, transformer/mlp.py);
    inference engines multiply fc2's output. FP4 codes of fc2's input agree on both sides only if
    both quantise the unweighted activation, so both sides of TRACE use this class.
    """

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        """Gives the weighted outputs of the local experts.

        Args:
            permuted_local_hidden_states: [N, H], rows of one expert after those of another.
            tokens_per_expert: integer [local experts].
            permuted_probs: [N], router probability of each row.

        Returns:
            [N, H] in the input's dtype, and no bias.
        """
        rows = torch.split(permuted_local_hidden_states, tokens_per_expert.tolist())
        outputs = [
            expert(rows_of_expert, None)[0]
            for expert, rows_of_expert in zip(self.local_experts, rows, strict=True)
        ]
        return weighted_rows(torch.cat(outputs), permuted_probs), None


def weighted_rows(rows: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """Gives rows [N, H] times their probabilities [N], in the dtype of the rows."""
    return (rows * probabilities.unsqueeze(-1)).to(rows.dtype)


class _Passed(torch.nn.Module):
    """Stands where a linear is, and gives what it gets."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x, None


def beside_products(config: Any) -> list[str]:
    """Gives the settings with which experts do more than two products and an activation."""
    names = ("add_bias_linear", "moe_expert_capacity_factor", "moe_apply_probs_on_input")
    return [name for name in names if getattr(config, name)]


def activation_of(expert: Any) -> MLP:
    """Gives Megatron's MLP without its linears: what an expert does between fc1 and fc2."""

    def passed(*_: Any, **__: Any) -> Any:
        return _Passed()

    submodules = MLPSubmodules(linear_fc1=passed, linear_fc2=passed)
    size = expert.config.moe_ffn_hidden_size
    activation = MLP(
        expert.config, submodules, is_expert=True, ffn_hidden_size=size, tp_group=expert.tp_group
    )
    activation.activation_func = expert.activation_func
    return activation


class HostSplitsDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's all-to-all dispatcher whose split sizes are host lists also on the CPU.

    Megatron 0.19.2 converts them only if they are CUDA tensors (transformer/moe/moe_utils.py,
    `maybe_move_tensor_to_cpu`), and gloo's all-to-all refuses tensors.
    """

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Any = None) -> Any:
        tokens_per_expert = super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)
        if point == self.cuda_dtoh_point:
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                splits = getattr(self, name)
                if torch.is_tensor(splits) and splits.device.type == "cpu":
                    setattr(self, name, splits.numpy())
        return tokens_per_expert


def use_host_splits(moe: MoELayer, pg_collection: ProcessGroupCollection | None) -> None:
    """Gives a layer that dispatches all-to-all the `HostSplitsDispatcher`.

    Args:
        moe: A layer that was just built.
        pg_collection: Its process groups; None are Megatron's default ones.
    """
    if moe.config.moe_token_dispatcher_type == "alltoall":
        moe.token_dispatcher = HostSplitsDispatcher(
            moe.num_local_experts,
            moe.local_expert_indices,
            config=moe.config,
            pg_collection=pg_collection or get_default_pg_collection(),
        )


class DispatchInputMoELayer(MoELayer):
    """MoE layer with a hook on the routed copy of its input, before tokens are dispatched.

    Subclasses override `transform_dispatch_input` to quantise each token once. The router and the
    shared experts read the untouched input.

    Raises:
        ValueError: A feature is configured whose input would bypass the hook.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        for name, present in {
            "moe_shared_expert_overlap": config.moe_shared_expert_overlap,
            "moe_latent_size": config.moe_latent_size is not None,
            "moe_token_dispatcher_type=flex": config.moe_token_dispatcher_type == "flex",
            "fp8": config.fp8 is not None,
            "fp4": config.fp4 is not None,
        }.items():
            if present:
                raise ValueError(
                    f"{name} is not supported by {type(self).__name__}: the routed input would "
                    "not pass its quantiser; switch it off"
                )
        super().__init__(config, *args, **kwargs)
        use_host_splits(self, kwargs.get("pg_collection"))

    def transform_dispatch_input(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Gives what is dispatched to the routed experts, [S, B, H]; here the input itself."""
        return hidden_states

    def preprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Prepares the dispatch of the transformed input (Megatron's `MoELayer.preprocess`)."""
        return super().preprocess(self.transform_dispatch_input(hidden_states), probs, routing_map)
