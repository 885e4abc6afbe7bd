"""Expert weights by the engine's quantiser rule, cached by content, and their digest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_trace.formats import NVFP4, NumberFormat, ops
from megatron_trace.hints.weight_digest import combine_digests, matrix_digest
from megatron_trace.models.hybrid import DecoderModel, decoder_layers, named_expert_linears
from megatron_trace.training.over_ranks import device_of

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
        number_format: Format of the weights.
    """

    operand_dtype: torch.dtype
    power_of_two_scales: bool
    number_format: NumberFormat = NVFP4


@dataclass(frozen=True)
class QuantisedWeight:
    """One expert matrix as the engine holds it.

    Attributes:
        source_bits: int16, shape of the matrix; bits of the BF16 weight that was quantised.
        packed_codes: uint8 [rows, K / 2].
        scale_bytes: uint8 [rows, blocks of a row].
        global_scale: FP32 0-d; None if the format has none.
        values: BF16, shape of the matrix; the dequantised operand.
        rule: How it was quantised.
        amax: FP32 0-d; that of the whole matrix if this is a shard.
    """

    source_bits: torch.Tensor
    packed_codes: torch.Tensor
    scale_bytes: torch.Tensor
    global_scale: torch.Tensor | None
    values: torch.Tensor
    rule: WeightRule
    amax: torch.Tensor | None = None


@torch.no_grad()
def shared_amax(
    weights: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> list[torch.Tensor | None]:
    """Gives the amax of matrices of which every rank of a group has a shard; one collective.

    Which matrices changed is each rank's own finding, so that asking only for those would leave
    ranks waiting for others: every forward asks for all of a layer.

    Args:
        weights: float; this rank's shards, in the same order on all ranks.
        group: The ranks.

    Returns:
        FP32 0-d each, of the BF16 values; None if the group is one rank.
    """
    if group.size() == 1:
        return [None] * len(weights)
    amax = torch.stack([w.detach().to(torch.bfloat16).abs().amax().float() for w in weights])
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    return list(amax.unbind())


@torch.no_grad()
def quantise_weight(
    weight: torch.Tensor, rule: WeightRule, amax: torch.Tensor | None = None
) -> QuantisedWeight:
    """Quantises one expert matrix: blocks along K, rounding to nearest, one global scale.

    The BF16 weight is quantised, whatever the trainer computes in, because that is what the engine
    gets. Gate and up are one matrix and share its amax.

    Args:
        weight: float [rows, K].
        rule: How the engine quantises weights.
        amax: FP32 0-d; that of the whole matrix if this is a shard, see `shared_amax`.
    """
    source = weight.detach().to(torch.bfloat16)
    number_format = rule.number_format
    global_scale = number_format.global_scale_from_amax(
        source.abs().amax() if amax is None else amax, rule.power_of_two_scales
    )
    coded = *ops.encode(source, global_scale, number_format=number_format), global_scale
    return QuantisedWeight(
        source.clone().view(torch.int16),
        *coded,
        values=ops.decode(*coded, number_format=number_format, dtype=rule.operand_dtype),
        rule=rule,
        amax=amax,
    )


class ExpertWeight:
    """The quantised form of one expert matrix, as long as the matrix does not change.

    Nothing announces reliably that a weight changed: Megatron's optimizers and its parameter
    gathers write through `.data` and buffers, which leaves `_version` as it was. So the BF16 bits
    that were quantised are kept (2 bytes per value), and each use compares them.
    """

    def __init__(self) -> None:
        self._quantised: QuantisedWeight | None = None

    def current(
        self, weight: torch.Tensor, rule: WeightRule, amax: torch.Tensor | None = None
    ) -> tuple[QuantisedWeight, bool]:
        """Gives the quantised weight and whether it had to be quantised now.

        Args:
            weight: float [rows, K].
            rule: How the engine quantises weights.
            amax: FP32 0-d; that of the whole matrix if this is a shard.
        """
        return current_weights([self], [weight], rule, [amax])[0]

    def has_changed(
        self, weight: torch.Tensor, rule: WeightRule, amax: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Gives whether bits or amax differ from those quantised, bool 0-d on the weight's device.

        None if nothing was quantised in this way there.
        """
        known = self._quantised
        if (
            known is None
            or known.rule != rule
            or known.source_bits.device != weight.device
            or (known.amax is None) != (amax is None)
        ):
            return None
        bits = weight.detach().to(torch.bfloat16).view(torch.int16)
        changed = (known.source_bits != bits).any()
        return changed if amax is None else changed | (known.amax != amax)

    def quantised(
        self, weight: torch.Tensor, rule: WeightRule, amax: torch.Tensor | None, *, anew: bool
    ) -> QuantisedWeight:
        """Gives the quantised weight; `anew` quantises it again."""
        if anew or self._quantised is None:
            self._quantised = quantise_weight(weight, rule, amax)
        return self._quantised


def current_weights(
    known: Sequence[ExpertWeight],
    weights: Sequence[torch.Tensor],
    rule: WeightRule,
    amax: Sequence[torch.Tensor | None],
) -> list[tuple[QuantisedWeight, bool]]:
    """Gives several quantised weights, and whether each had to be quantised now.

    Asks the device for all of them at once: each answer that the host waits for stops the queue.

    Args:
        known: Quantised forms of the matrices, as far as they are known.
        weights: float [rows, K] each.
        rule: How the engine quantises weights.
        amax: FP32 0-d each; that of the whole matrix where the weight is a shard.
    """
    parts = list(zip(known, weights, amax, strict=True))
    changed = [form.has_changed(weight, rule, whole) for form, weight, whole in parts]
    asked = [flag for flag in changed if flag is not None]
    answers = iter(torch.stack(asked).tolist() if asked else ())
    stale = [True if flag is None else next(answers) for flag in changed]
    return [
        (form.quantised(weight, rule, whole, anew=anew), anew)
        for (form, weight, whole), anew in zip(parts, stale, strict=True)
    ]


def expert_weight_digest(
    model: DecoderModel, sites: TraceSites, *more_chunks: tuple[DecoderModel, TraceSites]
) -> str:
    """Gives the digest of the quantised expert weights; equal to the engine's after a push.

    A collective over the expert-parallel, expert-tensor-parallel and pipeline-parallel groups: all
    ranks must call. The shards of a split matrix are gathered, one matrix after another.

    Args:
        model: The trainer model, or the first chunk of this rank.
        sites: Its `TraceSites`; the method must quantise expert weights.
        *more_chunks: The further chunks of this rank, with virtual pipeline stages.

    Returns:
        32 hexadecimal digits, equal on all ranks and for every size of these groups.

    Raises:
        ValueError: The method quantises no weights, or the model has no routed experts.
    """
    if not sites.trace.quantises_experts:
        raise ValueError(
            f"method {sites.trace.method} with quantised_parts={sites.trace.quantised_parts} "
            "quantises no expert weights, so they have no digest"
        )
    if not sites.shape.num_experts:
        raise ValueError(
            "a model without MoE layers has no quantised weights, so they have no digest; compare "
            "the digest of its plain weights"
        )
    total = sum(_chunk_digest(*chunk) for chunk in ((model, sites), *more_chunks))
    stages = model.pg_collection.pp
    if stages.size() > 1:
        total = _sum_over_ranks(total, stages)
    return combine_digests([total])


def _chunk_digest(model: DecoderModel, sites: TraceSites) -> int:
    """Gives the sum of the matrices' digests over the expert-parallel ranks of a stage."""
    total, group = 0, None
    for layer in decoder_layers(model):
        if layer.moe is None:
            continue
        group = layer.moe.ep_group
        linears: list[Any] = list(named_expert_linears(layer))
        experts: Any = layer.moe.experts
        etp_group = experts.tp_group
        amax = shared_amax([linear.weight for _, _, linear in linears], etp_group)
        for (expert, matrix, linear), whole_amax in zip(linears, amax, strict=True):
            weight, _ = linear.place.weight.current(linear.weight, sites.weight_rule, whole_amax)
            gated = matrix == "fc1" and model.config.gated_linear_unit
            packed_codes, scale_bytes = (
                _whole_matrix(part, matrix, etp_group, gated=gated)
                for part in (weight.packed_codes, weight.scale_bytes)
            )
            total += matrix_digest(
                layer.index, expert, matrix, packed_codes, scale_bytes, weight.global_scale
            )
    if group is not None and group.size() > 1:
        total = _sum_over_ranks(total, group)
    return total


def _whole_matrix(
    shard: torch.Tensor, matrix: str, group: dist.ProcessGroup, *, gated: bool
) -> torch.Tensor:
    """Gives codes or block scales of a matrix of which every rank has rows (fc1) or columns (fc2).

    A rank's rows of a gated fc1 are its part of the gate, then its part of up.
    """
    if group.size() == 1:
        return shard
    shards = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(shards, shard, group=group)
    if matrix == "fc2":
        return torch.cat(shards, dim=1)
    if gated:
        shards = [
            half for halves in zip(*(s.chunk(2) for s in shards), strict=True) for half in halves
        ]
    return torch.cat(shards)


def _sum_over_ranks(value: int, group: dist.ProcessGroup) -> int:
    value %= 1 << 128
    mask = (1 << LIMB_BITS) - 1
    limbs = torch.tensor(
        [(value >> (LIMB_BITS * i)) & mask for i in range(NUM_LIMBS)],
        dtype=torch.int64,
        device=device_of(group),
    )
    dist.all_reduce(limbs, group=group)
    return sum(limb << (LIMB_BITS * i) for i, limb in enumerate(limbs.tolist()))
