"""The routed experts of a layer side by side as packed codes, from what a push quantised.

Legend: E experts, H hidden size, F intermediate size of an expert.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_trace.formats.packed_matrix import PackedMatrix
from megatron_trace.rollout.kernels.experts_reference import PackedExperts
from megatron_trace.rollout.weights import MatrixPlace


def packed_experts(
    matrices: Mapping[MatrixPlace, PackedMatrix],
    layer: int,
    *,
    fc1_input_scale: torch.Tensor,
    fc2_input_scale: torch.Tensor,
) -> PackedExperts:
    """Gives the experts of a layer on the device of the scales.

    Args:
        matrices: By (decoder layer, expert, `fc1` or `fc2`); fc1 is gate above up.
        layer: Decoder layer.
        fc1_input_scale: FP32 0-d, static global scale of fc1's input.
        fc2_input_scale: FP32 0-d, of fc2's input.

    Raises:
        ValueError: The layer has no matrices.
    """
    num_experts = sum(place[0] == layer and place[2] == "fc1" for place in matrices)
    if num_experts == 0:
        raise ValueError(f"decoder layer {layer} has no packed experts")
    device = fc1_input_scale.device

    def side_by_side(matrix: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        parts = [matrices[layer, expert, matrix] for expert in range(num_experts)]
        fields = ("packed_codes", "scale_bytes", "global_scale")
        codes, scales, global_scales = (
            torch.stack([getattr(part, field) for part in parts]).to(device) for field in fields
        )
        return codes, scales, global_scales.float().reshape(num_experts)

    return PackedExperts(
        *side_by_side("fc1"), *side_by_side("fc2"), fc1_input_scale, fc2_input_scale
    )
