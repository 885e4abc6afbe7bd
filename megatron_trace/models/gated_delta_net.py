"""Gated DeltaNet layers (pattern letter G): Megatron's parameters and layouts, kernels of choice.

Legend: S positions, B sequences, N sequences, T tokens of each, X columns of the input projection
on this rank, C channels of the convolution, W its taps, H value heads, K key dim, V value dim.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import (
    GatedDeltaNet,
    GatedDeltaNetSubmodules,
    get_parameter_local_cp,
    tensor_a2a_cp2hp,
    tensor_a2a_hp2cp,
)
from megatron.core.transformer import TransformerConfig

from megatron_trace import compat
from megatron_trace.config import DeltaRule
from megatron_trace.models.delta_rule import delta_rule_kernels, mix


class LocalGatedDeltaNet(GatedDeltaNet):
    """Megatron's Gated DeltaNet without the need for flash-linear-attention.

    Megatron 0.19.2 refuses to build the layer without fla, calls fla's normalisation also in its
    deterministic mode, and has no torch path for packed sequences. Parameters, their names and
    their checkpoint are Megatron's, but for `out_norm`, which is never zero-centred here, as in
    published models; Megatron's is if the other norms are. Nothing of the layer is ever quantised.

    `A_log` has the model's dtype, as all parameters: with some in FP32 in a BF16 model, Megatron's
    optimizers (0.19.2) save states under other parameters: the distributed one lists FP32
    parameters first, but counts them last.

    Under context parallelism each rank computes some heads of all positions, exchanged before and
    after as Megatron does.

    Args:
        config: Model configuration.
        submodules: Linears and output norm.
        *args: Further arguments of Megatron's layer.
        delta_rule: Kernels, see `delta_rule.delta_rule_kernels`.
        pg_collection: Process groups.
        **kwargs: Further arguments of Megatron's layer.

    Attributes:
        trains: Whether there may be a backward pass.

    Raises:
        ValueError: The configuration asks for something that would be computed wrongly.
        RuntimeError: The kernels are not here, or have no backward pass.
    """

    trains: ClassVar[bool] = True

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaNetSubmodules,
        *args: Any,
        delta_rule: DeltaRule = "auto",
        pg_collection: ProcessGroupCollection | None = None,
        **kwargs: Any,
    ) -> None:
        assert pg_collection is not None, "Megatron's layer specs pass the process groups"
        _require_supported(config, pg_collection)
        with compat.fla_not_needed():
            super().__init__(config, submodules, *args, pg_collection=pg_collection, **kwargs)
        self.kernels = delta_rule_kernels(
            delta_rule, deterministic=config.deterministic_mode, trains=self.trains
        )
        self.v_heads_per_key_head = self.num_v_heads_local_tp // self.num_k_heads_local_tp

    @property
    def conv_state_shape(self) -> tuple[int, int]:
        """What the convolution keeps of a sequence: (C, W)."""
        weight = self.conv1d.weight
        return weight.shape[0], weight.shape[2]

    @property
    def recurrent_state_shape(self) -> tuple[int, int, int]:
        """What the delta rule keeps of a sequence: (H, K, V)."""
        key_dim, value_dim = self.key_head_dim, self.value_head_dim
        assert key_dim, "linear_key_head_dim has a default"
        assert value_dim, "linear_value_head_dim has a default"
        return self.num_v_heads_local_tp, key_dim, value_dim

    @property
    def split_sections(self) -> dict[str, tuple[int, ...]]:
        """Rows of each part of a parameter on this rank; tensor parallelism splits each alone.

        Dims of `A_log` and `dt_bias` are one part, so they are left out.
        """
        in_proj: Any = self.in_proj_split_sections
        qkv = (self.qk_dim_local_tp, self.qk_dim_local_tp, self.v_dim_local_tp)
        return {"in_proj.weight": in_proj, "conv1d.weight": qkv, "conv1d.bias": qkv}

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gives the layer's output [S, B, hidden] and the bias of its last linear.

        Args:
            hidden_states: [S, B, hidden], this rank's positions.
            attention_mask: Not read: the layer is causal.
            inference_context: Must be None.
            packed_seq_params: Bounds of packed sequences; B is 1 then.

        Raises:
            ValueError: Packed sequences under context parallelism, or with wrong bounds.
        """
        assert inference_context is None, "the rollout engine has a Gated DeltaNet of its own"
        projected = self.in_proj(hidden_states)[0]
        bounds = self._bounds(packed_seq_params, len(projected))
        cp_group = self.pg_collection.cp
        if self.cp_size > 1:
            sections = self.split_sections["in_proj.weight"]
            order = compat.head_order_of_cp(sections, self.cp_size)
            projected = projected[..., order]
        # Both do nothing on one rank.
        projected = tensor_a2a_cp2hp(projected, seq_dim=0, head_dim=-1, cp_group=cp_group)
        mixed = self.advance(projected.transpose(0, 1), bounds=bounds)[0]
        mixed = mixed.transpose(0, 1).contiguous()
        mixed = tensor_a2a_hp2cp(mixed, seq_dim=0, head_dim=-1, cp_group=cp_group)
        return self.out_proj(mixed)

    def advance(
        self,
        projected: torch.Tensor,
        conv_state: torch.Tensor | None = None,
        recurrent_state: torch.Tensor | None = None,
        bounds: torch.Tensor | None = None,
        *,
        keep_states: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Gives what the last linear reads, and the states after these tokens.

        Args:
            projected: [N, T, X], or packed [1, T, X], output of the input projection.
            conv_state: [N, C, W] before the tokens; None at the start of sequences.
            recurrent_state: FP32 [N, H, K, V] before the tokens; None at the start.
            bounds: integer [N + 1], bounds of packed sequences.
            keep_states: Whether the states after the tokens are asked for.

        Returns:
            [N, T, H * V] in projected's dtype, and both states.
        """
        qkv, gate, beta, alpha = projected.split(self.feat_dim_split, dim=-1)
        weight, bias = self._conv_parameters()
        qkv, conv_state = self.kernels.convolve(
            qkv, weight, bias, conv_state, bounds, keep_state=keep_states
        )
        query, key, value = self._heads(qkv)
        a_log, dt_bias = (self._of_cp_rank(p) for p in (self.A_log, self.dt_bias))
        # In FP32 as the published models do; Megatron takes exp in the parameters' dtype.
        decay = -a_log.float().exp() * F.softplus(alpha.float() + dt_bias.float())
        mixed, recurrent_state = self.kernels.mix(
            query,
            key,
            value,
            decay,
            beta.sigmoid(),
            recurrent_state,
            bounds,
            keep_state=keep_states,
        )
        normed = self.out_norm(mixed)
        gated = normed * F.silu(gate.unflatten(-1, (-1, self.value_head_dim)).float())
        return gated.to(projected.dtype).flatten(-2), conv_state, recurrent_state

    def _setup_variant_attrs(self) -> None:
        super()._setup_variant_attrs()
        # Megatron asserts that there is one, and fla's is None without fla.
        self.gated_delta_rule: Any = mix

    def _bounds(self, packed: PackedSeqParams | None, num_positions: int) -> torch.Tensor | None:
        if packed is None or packed.qkv_format != "thd":
            return None
        if self.cp_size > 1:
            raise ValueError(
                "packed sequences contradict context parallelism in a Gated DeltaNet layer; set "
                "context_parallel_size=1, or pad the sequences"
            )
        return self._resolve_cu_seqlens(
            packed.cu_seqlens_q_padded, packed.cu_seqlens_q, num_positions, "cu_seqlens_q"
        )

    def _conv_parameters(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        sections = list(self.split_sections["conv1d.weight"])
        weight = self._of_cp_rank(self.conv1d.weight, sections)[:, 0]
        bias = self.conv1d.bias
        return weight, None if bias is None else self._of_cp_rank(bias, sections)

    def _of_cp_rank(self, parameter: Any, sections: list[int] | None = None) -> torch.Tensor:
        return get_parameter_local_cp(
            parameter, dim=0, cp_group=self.pg_collection.cp, split_sections=sections
        )

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gives query and key [N, T, H, K], normalised, and value [N, T, H, V]."""
        qk_dim, v_dim = self.qk_dim_local_tp // self.cp_size, self.v_dim_local_tp // self.cp_size
        query_key, value = qkv.split([2 * qk_dim, v_dim], dim=-1)
        query_key = query_key.unflatten(-1, (-1, self.key_head_dim))
        if self.use_qk_l2norm:
            query_key = self.kernels.normalise(query_key)
        repeats = self.v_heads_per_key_head
        query, key = (x.repeat_interleave(repeats, dim=2) for x in query_key.chunk(2, dim=2))
        return query, key, value.unflatten(-1, (-1, self.value_head_dim))


def _require_supported(config: TransformerConfig, groups: ProcessGroupCollection) -> None:
    tp_size, num_ranks = groups.tp.size(), groups.tp.size() * groups.cp.size()
    key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    assert key_heads, "linear_num_key_heads has a default"
    assert value_heads, "linear_num_value_heads has a default"
    if config.activation_func is not F.silu:
        raise ValueError(
            f"Gated DeltaNet layers have SiLU; got activation_func={config.activation_func}"
        )
    if value_heads % key_heads:
        raise ValueError(
            f"linear_num_value_heads={value_heads} must be a multiple of "
            f"linear_num_key_heads={key_heads}"
        )
    for name, heads in (("key", key_heads), ("value", value_heads)):
        if heads % num_ranks:
            raise ValueError(
                f"linear_num_{name}_heads={heads} must be a multiple of the {num_ranks} ranks that "
                "tensor and context parallelism give a Gated DeltaNet layer"
            )
    if tp_size > 1 and not config.sequence_parallel:
        # Megatron sums its gradient over the ranks only if sequence_parallel says so.
        raise ValueError(
            f"tensor_model_parallel_size={tp_size} contradicts sequence_parallel=False in a model "
            "with Gated DeltaNet layers, whose output norm would get each rank's own gradient; "
            "set sequence_parallel"
        )
    if "gdn_norm_out" in (config.recompute_modules or ()):
        raise ValueError(
            "recompute_modules=gdn_norm_out is not supported by our Gated DeltaNet; leave it out"
        )
