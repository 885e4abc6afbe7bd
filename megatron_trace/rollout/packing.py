"""Weights from the trainer into packed experts that have no BF16 weights beside them.

Matrices of a layer are quantised some at a time, as each by itself would have the host launch
dozens of kernels, and digested on the host meanwhile.

Legend: N experts that are packed together, O output features, K input features of a matrix.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

import torch

from megatron_trace.config import Implementation
from megatron_trace.formats import NVFP4, ops
from megatron_trace.formats.packed_matrix import PackedMatrix
from megatron_trace.hints.weight_digest import DigestSum, combine_digests
from megatron_trace.models.hybrid import DecoderLayer, named_expert_linears
from megatron_trace.rollout.moe import EngineMoELayer
from megatron_trace.rollout.packed_experts import PackedRoutedExperts
from megatron_trace.rollout.sites import OPERAND_DTYPE
from megatron_trace.rollout.weights import MatrixPlace, WeightRule, require_finite

# Values of expert matrices that are packed together, 256 MiB in BF16.
_GROUP_VALUES = 1 << 27


@torch.no_grad()
def pack_experts(
    layers: Iterable[DecoderLayer],
    given: Mapping[int, torch.Tensor],
    *,
    power_of_two_scales: bool,
    implementation: Implementation,
    keep: dict[MatrixPlace, PackedMatrix] | None = None,
    rule: WeightRule | None = None,
) -> str:
    """Gives packed experts the codes of a trainer's weights, as `weights.quantise_experts` would.

    Args:
        layers: Decoder layers of an engine that holds no experts in BF16.
        given: The trainer's weights by the `id` of the engine's parameter; cast to BF16.
        power_of_two_scales: As of `quantise_experts`, and so are the others.
        implementation: Kernels of the number formats.
        keep: Gets codes and scales of every matrix.
        rule: Chooses codes and scales.

    Returns:
        The digest.

    Raises:
        ValueError: A weight is NaN or Inf.
    """
    digests = DigestSum()
    for layer, matrix, members in _expert_groups(layers):
        places = [(layer.index, expert, matrix) for expert, _ in members]
        matrices = _packed_group(
            [given[id(weight)] for _, weight in members],
            places,
            power_of_two_scales=power_of_two_scales,
            implementation=implementation,
            rule=rule,
        )
        moe = cast("EngineMoELayer", layer.moe)
        packed = cast("PackedRoutedExperts", moe.routed_experts)
        packed.take_several(members[0][0], matrix, matrices)
        # What is kept is not to be in pinned memory, of which there is little.
        on_host = [
            _on_host(part, pinned=keep is None)
            for part in (matrices.packed_codes, matrices.scale_bytes, matrices.global_scale)
        ]
        for place, *parts in zip(places, *on_host, strict=True):
            digests.add(*place, *parts)
            if keep is not None:
                keep[place] = PackedMatrix(*parts)
    return combine_digests([digests.total()])


def _on_host(tensor: torch.Tensor, *, pinned: bool) -> torch.Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=pinned and tensor.is_cuda).copy_(
        tensor
    )


def _expert_groups(
    layers: Iterable[DecoderLayer],
) -> Iterator[tuple[DecoderLayer, str, list[tuple[int, torch.Tensor]]]]:
    """Gives layer, matrix, and (expert, weight) of some of the layer's experts in their order."""
    for layer in layers:
        for matrix in ("fc1", "fc2"):
            members = [
                (expert, cast("torch.Tensor", linear.weight))
                for expert, name, linear in named_expert_linears(layer)
                if name == matrix
            ]
            size = max(1, _GROUP_VALUES // members[0][1].numel()) if members else 1
            for first in range(0, len(members), size):
                yield layer, matrix, members[first : first + size]


def _packed_group(
    weights: Sequence[torch.Tensor],
    places: Sequence[MatrixPlace],
    *,
    power_of_two_scales: bool,
    implementation: Implementation,
    rule: WeightRule | None,
) -> PackedMatrix:
    """Gives codes, scales and global scales of matrices of one shape, side by side."""
    device = torch.cuda.current_device()
    together = torch.stack([weight.detach().to(device, OPERAND_DTYPE) for weight in weights])
    amax = torch.maximum(together.amax((1, 2)), -together.amin((1, 2)))
    require_finite(amax, places)
    if rule is not None:
        chosen = [rule(place, weight) for place, weight in zip(places, together, strict=True)]
        return PackedMatrix(
            torch.stack([one.packed_codes for one in chosen]),
            torch.stack([one.scale_bytes for one in chosen]),
            torch.stack([one.global_scale for one in chosen]),
        )
    scales = NVFP4.global_scale_from_amax(amax.abs(), power_of_two_scales)
    assert scales is not None, "NVFP4 has global scales"
    codes = ops.encode(together, scales.view(-1, 1, 1), implementation=implementation)
    return PackedMatrix(*codes, scales)
