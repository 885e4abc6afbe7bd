"""Gated DeltaNet in the rollout engine: its states live in the engine's slots, one a request.

Megatron's dynamic engine (0.19.2) has such slots for Mamba: a state of the convolution and one of
the recurrence. It refuses Gated DeltaNet, which has the same two states in other shapes.

Legend: T tokens of a step (padded), X columns of the input projection, C channels of the
convolution, W its taps, H value heads, K key dim, V value dim, Q slots.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from megatron.core.inference.config import MambaInferenceStateConfig
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_trace.models.gated_delta_net import LocalGatedDeltaNet

if TYPE_CHECKING:
    from megatron_trace.rollout.kernels.delta_step import DeltaParameters

# One rounding of a state changes every later token, so it is kept in FP32, as served models do.
RECURRENT_STATE_DTYPE = torch.float32


@dataclass(frozen=True)
class _Piece:
    """Tokens of a request that are computed without a stop.

    Attributes:
        rows: Rows of the step.
        slot: Where the request's states are.
        snapshot: Where the states after these tokens are copied for the prefix cache; None if
            nowhere.
    """

    rows: slice
    slot: int
    snapshot: int | None


class EngineGatedDeltaNet(LocalGatedDeltaNet):
    """Gated DeltaNet over the tokens of a step: one of each decoding request, many of others.

    Prompts may come in chunks, several in one step; a request that finds its prefix in the cache
    continues from the states that were kept at the end of a block.
    """

    trains = False

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        inference_context: DynamicInferenceContext | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gives the layer's output [T, 1, hidden]; without a context that of whole sequences.

        Raises:
            ValueError: The engine decodes speculatively.
        """
        if inference_context is None:
            return super().forward(hidden_states, attention_mask, None, packed_seq_params)
        context = inference_context
        if context.num_speculative_tokens:
            raise ValueError(
                f"num_speculative_tokens={context.num_speculative_tokens} is not supported with "
                "Gated DeltaNet layers, whose states cannot go back over rejected tokens; set it "
                "to 0"
            )
        projected = self.in_proj(hidden_states)[0].squeeze(1)
        conv, recurrent = context.mamba_states_cache(self.layer_number)
        dimensions: Any = context.batch_dimensions
        if context.using_cuda_graph_this_step():
            # Padding too, whose slot is -1: the last one, of no request.
            dimensions = context.padded_batch_dimensions
        num_decode = dimensions.decode_req_count
        mixed = projected.new_zeros(0, self.v_dim_local_tp)
        if num_decode:
            metadata: Any = context.mamba_metadata
            slots = metadata.batch_indices_decode[:num_decode]
            mixed = self._step(projected[:num_decode, None], conv, recurrent, slots)[:, 0]
        if num_decode < len(projected):
            mixed = F.pad(mixed, (0, 0, 0, len(projected) - num_decode))
        pieces = _prefill_pieces(context, num_decode)
        for together in itertools.zip_longest(*pieces):
            present = [piece for piece in together if piece is not None]
            self._prefill(projected, mixed, present, conv, recurrent)
            self._keep_snapshots(present, context, conv, recurrent)
        return self.out_proj(mixed.unsqueeze(1))

    def _step(
        self,
        projected: torch.Tensor,
        conv: torch.Tensor,
        recurrent: torch.Tensor,
        slots: torch.Tensor,
        bounds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Gives what the last linear reads, and replaces the states in the slots."""
        if bounds is None and not self.kernels.are_torchs:
            # Only here: Triton looks for a GPU driver when it is imported.
            from megatron_trace.rollout.kernels.delta_step import delta_step, why_not

            key_dim, value_dim = recurrent.shape[2:]
            if why_not(key_dim, value_dim, recurrent.device) is None:
                parameters = self._parameters_of_step()
                return delta_step(projected[:, 0], conv, recurrent, slots, parameters)[:, None]
        mixed, conv_after, recurrent_after = self.advance(
            projected, conv[slots], recurrent[slots], bounds, keep_states=True
        )
        assert conv_after is not None, "asked for"
        assert recurrent_after is not None, "asked for"
        conv[slots] = conv_after.to(conv.dtype)
        recurrent[slots] = recurrent_after
        return mixed

    def _parameters_of_step(self) -> DeltaParameters:
        from megatron_trace.rollout.kernels.delta_step import DeltaParameters

        weight, bias = self._conv_parameters()
        norm: Any = self.out_norm
        return DeltaParameters(
            weight.contiguous(),
            bias,
            self.A_log,
            self.dt_bias,
            norm.weight,
            norm.eps,
            key_heads=self.num_k_heads_local_tp,
            normalises=self.use_qk_l2norm,
        )

    def _prefill(
        self,
        projected: torch.Tensor,
        mixed: torch.Tensor,
        pieces: Sequence[_Piece],
        conv: torch.Tensor,
        recurrent: torch.Tensor,
    ) -> None:
        """Computes one piece of each of several requests, packed."""
        lengths = [piece.rows.stop - piece.rows.start for piece in pieces]
        bounds = _on_device((0, *itertools.accumulate(lengths)), projected.device)
        slots = _on_device(tuple(piece.slot for piece in pieces), projected.device)
        packed = torch.cat([projected[piece.rows] for piece in pieces])[None]
        outputs = self._step(packed, conv, recurrent, slots, bounds)[0].split(lengths)
        for piece, output in zip(pieces, outputs, strict=True):
            mixed[piece.rows] = output

    def _keep_snapshots(
        self,
        pieces: Sequence[_Piece],
        context: DynamicInferenceContext,
        conv: torch.Tensor,
        recurrent: torch.Tensor,
    ) -> None:
        """Copies states to where Megatron takes them for the prefix cache after the forward."""
        layer = context.layer_map[self.layer_number - 1]
        for piece in pieces:
            if piece.snapshot is not None:
                kept = context.mamba_slot_allocator
                assert kept is not None, "only it asks for snapshots"
                kept.intermediate_conv_out[layer, piece.snapshot] = conv[piece.slot]
                kept.intermediate_ssm_out[layer, piece.snapshot] = recurrent[piece.slot]


def _prefill_pieces(context: DynamicInferenceContext, num_decode: int) -> list[list[_Piece]]:
    """Gives the pieces of every request of the step that has more than a token to compute.

    The prefix cache cuts a request where a block ends whose states it will keep.
    """
    num_prefill = context.batch_dimensions.prefill_req_count
    if not num_prefill:
        return []
    metadata: Any = context.mamba_metadata
    bounds = metadata.cu_seqlens_list[: num_prefill + 1]
    # All of this is known on the host, so that no layer waits for the device.
    first = context.paused_request_count + num_decode
    slots = metadata.request_to_mamba_state_idx[first : first + num_prefill].tolist()
    offsets, counts = None, None
    if context.mamba_slot_allocator is not None:
        offsets, counts = context.mamba_slot_allocator.get_intermediate_cpu_data()
    requests, num_snapshots = [], 0
    for request, (slot, (start, end)) in enumerate(
        zip(slots, itertools.pairwise(bounds), strict=True)
    ):
        stops: list[tuple[int, int | None]] = []
        if offsets is not None and counts is not None:
            # In ascending order, as Megatron numbers the snapshots of a step.
            for offset in offsets[request, : int(counts[request])].tolist():
                stops.append((start + offset, num_snapshots))
                num_snapshots += 1
        pieces = []
        for stop, snapshot in [*stops, (end, None)]:
            pieces.append(_Piece(slice(num_decode + start, num_decode + stop), slot, snapshot))
            start = stop
        requests.append(pieces)
    return requests


@functools.lru_cache(maxsize=16)
def _on_device(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Gives an int64 tensor; the same one again, by which fla finds what it derived from bounds."""
    return torch.tensor(values, device=device)


def state_config(model: HybridModel, block_size_tokens: int) -> MambaInferenceStateConfig:
    """Tells the engine's context which layers have which states of a request.

    A Gated DeltaNet stands as a Mamba there. Without the types of layers, the context would give
    keys and values to MoE layers too.

    Args:
        model: Model of the engine.
        block_size_tokens: Tokens of a page of the cache; states are kept where a page ends.
    """
    types = cast("Any", model.decoder).layer_type_list
    nets = delta_nets(model)
    conv, recurrent = (1, 1), (1, 1, 1)
    if nets:
        conv, recurrent = nets[0].conv_state_shape, nets[0].recurrent_state_shape
    return MambaInferenceStateConfig(
        layer_type_list=[Symbols.MAMBA if kind == Symbols.GDN else kind for kind in types],
        conv_states_shape=cast("Any", conv),
        ssm_states_shape=cast("Any", recurrent),
        # Its values are outputs of a linear in this dtype, so nothing is rounded.
        conv_states_dtype=model.config.params_dtype,
        ssm_states_dtype=RECURRENT_STATE_DTYPE,
        mamba_chunk_size=block_size_tokens,
    )


def state_bytes_per_request(model: HybridModel) -> int:
    """Gives the bytes that the states of a request take, over all Gated DeltaNets."""
    return sum(
        math.prod(net.conv_state_shape) * model.config.params_dtype.itemsize
        + math.prod(net.recurrent_state_shape) * RECURRENT_STATE_DTYPE.itemsize
        for net in delta_nets(model)
    )


def delta_nets(model: HybridModel) -> list[EngineGatedDeltaNet]:
    """Gives the model's Gated DeltaNets in the order of the layers."""
    return [module for module in model.modules() if isinstance(module, EngineGatedDeltaNet)]
