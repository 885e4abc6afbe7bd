"""Expert weights by the engine's quantiser rule, cached by content, and their digest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.models.hybrid.hybrid_model import HybridModel

from megatron_trace.formats import decode, encode, global_scale_from_amax, pack_codes
from megatron_trace.hints.weight_digest import combine_digests, matrix_digest
from megatron_trace.models.hybrid import decoder_layers, named_expert_linears

if TYPE_CHECKING:
    from megatron_trace.training.sites import TraceSites

# A 128-bit sum as int64 limbs, which all-reduce can add for 2**47 ranks without overflow.
LIMB_BITS = 16
NUM_LIMBS = 128 // LIMB_BITS


@dataclass(frozen=True)
class WeightRule:
    """How expert weights are quantised, beyond what never differs.

    Attributes:
        operand_dtype: dtype in which dequantised operands are rounded.
        power_of_two_scales: Whether global scales are rounded up to powers of two.
    """

    operand_dtype: torch.dtype
    power_of_two_scales: bool


@dataclass(frozen=True)
class QuantisedWeight:
    """One expert matrix as the engine holds it.

    Attributes:
        source_bits: int16, shape of the matrix; bits of the BF16 weight that was quantised.
        packed_codes: uint8 [rows, K / 2].
        scale_bytes: uint8 [rows, K / 16].
        global_scale: FP32 0-d.
        values: BF16, shape of the matrix; the dequantised operand.
        rule: How it was quantised.
    """

    source_bits: torch.Tensor
    packed_codes: torch.Tensor
    scale_bytes: torch.Tensor
    global_scale: torch.Tensor
    values: torch.Tensor
    rule: WeightRule


@torch.no_grad()
def quantise_weight(weight: torch.Tensor, rule: WeightRule) -> QuantisedWeight:
    """Quantises one expert matrix: 1x16 blocks, rounding to nearest, one global scale.

    The BF16 weight is quantised, whatever the trainer computes in, because that is what the engine
    gets. Gate and up are one matrix and share its amax.

    Args:
        weight: float [rows, K].
        rule: How the engine quantises weights.
    """
    source = weight.detach().to(torch.bfloat16)
    global_scale = global_scale_from_amax(source.abs().amax(), rule.power_of_two_scales)
    codes, scale_bytes = encode(source, global_scale)
    return QuantisedWeight(
        source_bits=source.clone().view(torch.int16),
        packed_codes=pack_codes(codes),
        scale_bytes=scale_bytes,
        global_scale=global_scale,
        values=decode(codes, scale_bytes, global_scale, rule.operand_dtype),
        rule=rule,
    )


class ExpertWeight:
    """The quantised form of one expert matrix, as long as the matrix does not change.

    Nothing announces reliably that a weight changed: Megatron's optimizers and its parameter
    gathers write through `.data` and buffers, which leaves `_version` as it was. So the BF16 bits
    that were quantised are kept (2 bytes per value), and each use compares them.
    """

    def __init__(self) -> None:
        self._quantised: QuantisedWeight | None = None

    def current(self, weight: torch.Tensor, rule: WeightRule) -> tuple[QuantisedWeight, bool]:
        """Gives the quantised weight and whether it had to be quantised now."""
        known = self._quantised
        if (
            known is not None
            and known.rule == rule
            and known.source_bits.device == weight.device
            and torch.equal(known.source_bits, weight.detach().to(torch.bfloat16).view(torch.int16))
        ):
            return known, False
        self._quantised = quantise_weight(weight, rule)
        return self._quantised, True


def expert_weight_digest(model: HybridModel, sites: TraceSites) -> str:
    """Gives the digest of the quantised expert weights; equal to the engine's after a push.

    A collective over the expert-parallel group: every rank of it must call.

    Args:
        model: The trainer model.
        sites: Its `TraceSites`; the method must be qat or trace.

    Returns:
        32 hexadecimal digits, equal on all ranks and for every expert-parallel size.

    Raises:
        ValueError: The method quantises no weights, or the model has no routed experts.
    """
    if not sites.quantises:
        raise ValueError(
            f"method {sites.trace.method} quantises no expert weights, so they have no digest"
        )
    if not sites.shape.num_experts:
        raise ValueError(
            "a model without MoE layers has no quantised weights, so they have no digest; compare "
            "the digest of its plain weights"
        )
    total, group = 0, None
    for layer in decoder_layers(model):
        if layer.moe is None:
            continue
        group = layer.moe.ep_group
        for expert, matrix, module in named_expert_linears(layer):
            linear: Any = module
            weight, _ = linear.place.weight.current(linear.weight, sites.weight_rule)
            total += matrix_digest(
                layer.index,
                expert,
                matrix,
                weight.packed_codes,
                weight.scale_bytes,
                weight.global_scale,
            )
    if group is not None and group.size() > 1:
        total = _sum_over_ranks(total, group)
    return combine_digests([total])


def _sum_over_ranks(value: int, group: dist.ProcessGroup) -> int:
    value %= 1 << 128
    mask = (1 << LIMB_BITS) - 1
    device = "cpu" if dist.get_backend(group) == "gloo" else torch.cuda.current_device()
    limbs = torch.tensor(
        [(value >> (LIMB_BITS * i)) & mask for i in range(NUM_LIMBS)],
        dtype=torch.int64,
        device=device,
    )
    dist.all_reduce(limbs, group=group)
    return sum(limb << (LIMB_BITS * i) for i, limb in enumerate(limbs.tolist()))
