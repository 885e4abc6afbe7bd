"""Routed experts of a layer in NVFP4 in plain torch: the specification of `experts.cu`.

Legend: T tokens of a step, k expert slots of a token, E experts, H hidden size, F intermediate
size of an expert.

Both operands of a product are code * block scale, which is exact in BF16; products are summed in
FP32, and the FP32 global scales of weight and input multiply the sums. Values are rounded to BF16
where Megatron's experts in BF16 round them: fc1's output, SiLU of the gate, its product with up,
fc2's output. The probability multiplies fc2's output in FP32, and a token's slots are added up in
FP32, in their order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron_trace.formats import ops
from megatron_trace.formats.ops import Implementation


@dataclass(frozen=True)
class PackedExperts:
    """The routed experts of a layer as ModelOpt packs them, and the scales of their inputs.

    Attributes:
        fc1_codes: uint8 [E, 2 F, H / 2], gate rows above up rows; even columns in low nibbles.
        fc1_scales: uint8 [E, 2 F, H / 16], E4M3.
        fc1_global_scales: FP32 [E], ModelOpt's `weight_scale_2`.
        fc2_codes: uint8 [E, H, F / 2].
        fc2_scales: uint8 [E, H, F / 16].
        fc2_global_scales: FP32 [E].
        fc1_input_scale: FP32 0-d, static global scale of fc1's input.
        fc2_input_scale: FP32 0-d, of fc2's input.
    """

    fc1_codes: torch.Tensor
    fc1_scales: torch.Tensor
    fc1_global_scales: torch.Tensor
    fc2_codes: torch.Tensor
    fc2_scales: torch.Tensor
    fc2_global_scales: torch.Tensor
    fc1_input_scale: torch.Tensor
    fc2_input_scale: torch.Tensor

    @property
    def num_experts(self) -> int:
        """E."""
        return self.fc1_codes.shape[0]

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.fc2_codes.shape[1]

    @property
    def width(self) -> int:
        """F."""
        return self.fc1_codes.shape[1] // 2

    @property
    def expert_bytes(self) -> int:
        """Bytes of an expert's codes and block scales."""
        parts = (self.fc1_codes, self.fc1_scales, self.fc2_codes, self.fc2_scales)
        return sum(part[0].numel() for part in parts)


@dataclass(frozen=True)
class RoutedOutput:
    """What the experts gave, and what their quantisers did.

    Attributes:
        output: BF16 [T, H].
        fc1_codes: uint8 [T, H / 2], packed codes of fc1's input.
        fc1_scales: uint8 [T, H / 16], its block scales.
        fc2_codes: uint8 [T, k, F / 2], of fc2's input; undefined where a slot has no expert.
        fc2_scales: uint8 [T, k, F / 16].
        activations: BF16 [T, k, F], fc2's input before it was quantised; None if not asked for.
    """

    output: torch.Tensor
    fc1_codes: torch.Tensor
    fc1_scales: torch.Tensor
    fc2_codes: torch.Tensor
    fc2_scales: torch.Tensor
    activations: torch.Tensor | None


def routed_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    probabilities: torch.Tensor,
    weights: PackedExperts,
    *,
    implementation: Implementation = "torch",
) -> RoutedOutput:
    """Gives the weighted sum of each token's experts.

    Args:
        x: BF16 [T, H].
        experts: int64 [T, k], expert of each slot; negative where a slot has none.
        probabilities: FP32 [T, k].
        weights: The experts.
        implementation: Of the number format.
    """
    fc1_codes, fc1_scales = ops.encode(x, weights.fc1_input_scale, implementation=implementation)
    activations = expert_activations(fc1_codes, fc1_scales, experts, weights)
    fc2_codes, fc2_scales = ops.encode(
        activations, weights.fc2_input_scale, implementation=implementation
    )
    output = expert_output(fc2_codes, fc2_scales, experts, probabilities, weights)
    return RoutedOutput(output, fc1_codes, fc1_scales, fc2_codes, fc2_scales, activations)


def expert_activations(
    codes: torch.Tensor, scales: torch.Tensor, experts: torch.Tensor, weights: PackedExperts
) -> torch.Tensor:
    """Gives fc2's input from fc1's packed input.

    Args:
        codes: uint8 [T, H / 2].
        scales: uint8 [T, H / 16].
        experts: int64 [T, k].
        weights: The experts.

    Returns:
        BF16 [T, k, F]; 0 where a slot has no expert.
    """
    x = _operand(codes, scales)
    activations = x.new_zeros((*experts.shape, weights.width), dtype=torch.bfloat16)
    for expert, tokens, slots in _by_expert(experts):
        weight = _operand(weights.fc1_codes[expert], weights.fc1_scales[expert])
        factor = weights.fc1_input_scale * weights.fc1_global_scales[expert]
        gate, up = ((x[tokens] @ weight.t()) * factor).bfloat16().chunk(2, dim=-1)
        activations[tokens, slots] = F.silu(gate) * up
    return activations


def expert_output(
    codes: torch.Tensor,
    scales: torch.Tensor,
    experts: torch.Tensor,
    probabilities: torch.Tensor,
    weights: PackedExperts,
) -> torch.Tensor:
    """Gives the weighted sum of each token's experts from fc2's packed input.

    Args:
        codes: uint8 [T, k, F / 2].
        scales: uint8 [T, k, F / 16].
        experts: int64 [T, k].
        probabilities: FP32 [T, k].
        weights: The experts.

    Returns:
        BF16 [T, H].
    """
    num_tokens, num_slots = experts.shape
    products = codes.new_zeros((num_tokens, num_slots, weights.hidden_size), dtype=torch.bfloat16)
    for expert, tokens, slots in _by_expert(experts):
        weight = _operand(weights.fc2_codes[expert], weights.fc2_scales[expert])
        factor = weights.fc2_input_scale * weights.fc2_global_scales[expert]
        x = _operand(codes[tokens, slots], scales[tokens, slots])
        products[tokens, slots] = ((x @ weight.t()) * factor).bfloat16()
    total = torch.zeros_like(products[:, 0], dtype=torch.float32)
    for slot in range(num_slots):
        total += probabilities[:, slot, None] * products[:, slot].float()
    return total.bfloat16()


def _by_expert(experts: torch.Tensor) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """Gives (expert, tokens, slots) of every expert that a slot has."""
    chosen = [expert for expert in experts.unique().tolist() if expert >= 0]
    return [(expert, *(experts == expert).nonzero(as_tuple=True)) for expert in chosen]


def _operand(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Gives code * block scale, FP32."""
    return ops.decode(codes, scales, 1.0)
