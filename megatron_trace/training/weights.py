"""Expert weights by the engine's quantiser rule, cached by content, and their digest."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_trace.formats import NVFP4, NumberFormat, ops
from megatron_trace.hints.weight_digest import DigestSum, combine_digests
from megatron_trace.models.hybrid import DecoderModel, decoder_layers, named_expert_linears
from megatron_trace.training.over_ranks import device_of

if TYPE_CHECKING:
    from megatron_trace.formats.kernels_changed import Words
    from megatron_trace.training.sites import TraceSites

# A 128-bit sum as int64 limbs, which all-reduce can add for 2**47 ranks without overflow.
LIMB_BITS = 16
NUM_LIMBS = 128 // LIMB_BITS
# Values of the matrices that are quantised together, 1 GiB in BF16. They end side by side, so that
# a grouped product takes them as one (`training.products`): 256 experts of Qwen3.5-35B have 2^29.
_GROUP_VALUES = 1 << 29


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

    @functools.cached_property
    def source_words(self) -> Words | None:
        """Where `source_bits` lie, as the kernel that compares them takes it."""
        # Only here: Triton looks for a GPU driver when it is imported.
        from megatron_trace.formats.kernels_changed import words_of

        return words_of(self.source_bits)


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
    """Quantises one expert matrix, see `quantise_weights`.

    Args:
        weight: float [rows, K].
        rule: How the engine quantises weights.
        amax: FP32 0-d; that of the whole matrix if this is a shard, see `shared_amax`.
    """
    return quantise_weights([weight], rule, [amax])[0]


@torch.no_grad()
def quantise_weights(
    weights: Sequence[torch.Tensor], rule: WeightRule, amax: Sequence[torch.Tensor | None]
) -> list[QuantisedWeight]:
    """Quantises expert matrices: blocks along K, rounding to nearest, a global scale for each.

    The BF16 weight is quantised, whatever the trainer computes in, because that is what the engine
    gets. Gate and up are one matrix and share its amax. Matrices of one shape are quantised
    together, some at a time, as each by itself would have the host launch dozens of kernels.

    Args:
        weights: float [rows, K] each.
        rule: How the engine quantises weights.
        amax: FP32 0-d each; that of the whole matrix where the weight is a shard.
    """
    groups: dict[tuple[torch.Size, bool], list[int]] = {}
    for index, (weight, whole) in enumerate(zip(weights, amax, strict=True)):
        groups.setdefault((weight.shape, whole is None), []).append(index)
    found: dict[int, QuantisedWeight] = {}
    for (shape, _), members in groups.items():
        size = max(_GROUP_VALUES // max(shape.numel(), 1), 1)
        for first in range(0, len(members), size):
            part = members[first : first + size]
            forms = _quantised_group([weights[i] for i in part], rule, [amax[i] for i in part])
            found |= dict(zip(part, forms, strict=True))
    return [found[index] for index in range(len(weights))]


def _quantised_group(
    weights: Sequence[torch.Tensor], rule: WeightRule, amax: Sequence[torch.Tensor | None]
) -> list[QuantisedWeight]:
    """Quantises matrices [rows, K] of one shape, all of which are whole, or none."""
    source = torch.stack([weight.detach().to(torch.bfloat16) for weight in weights])
    shared = [whole for whole in amax if whole is not None]
    largest = torch.stack(shared) if shared else _amax(source)
    number_format = rule.number_format
    scales = number_format.global_scale_from_amax(largest, rule.power_of_two_scales)
    of_rows = None if scales is None else scales.view(-1, 1, 1)
    if rule.operand_dtype == source.dtype:
        values, packed_codes, scale_bytes = ops.rtn_record(
            source, of_rows, num_bits=number_format.code_bits, number_format=number_format
        )
    else:
        packed_codes, scale_bytes = ops.encode(source, of_rows, number_format=number_format)
        coded = packed_codes, scale_bytes, of_rows
        values = ops.decode(*coded, number_format=number_format, dtype=rule.operand_dtype)
    return [
        QuantisedWeight(
            source[index].view(torch.int16),
            packed_codes[index],
            scale_bytes[index],
            None if scales is None else scales[index],
            values[index],
            rule,
            whole,
        )
        for index, whole in enumerate(amax)
    ]


def _amax(matrices: torch.Tensor) -> torch.Tensor:
    """Gives the largest magnitude of each of [matrices, rows, K], without their magnitudes."""
    flat = matrices.flatten(1)
    if not flat.shape[1]:
        return flat.new_zeros(len(flat))
    return torch.maximum(flat.amax(1), -flat.amin(1)).abs()


class ExpertWeight:
    """The quantised form of one expert matrix, as long as the matrix does not change.

    Nothing announces reliably that a weight changed: Megatron's optimizers and its parameter
    gathers write through `.data` and buffers, which leaves `_version` as it was. So the BF16 bits
    that were quantised are kept (2 bytes per value), and each use compares them.

    Attributes:
        known: The form that was last asked for; None if there is none.
    """

    def __init__(self) -> None:
        self.known: QuantisedWeight | None = None

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

    def comparable(
        self, weight: torch.Tensor, rule: WeightRule, amax: torch.Tensor | None
    ) -> QuantisedWeight | None:
        """Gives the known form if it was quantised in this way, of such a weight; else None."""
        known = self.known
        if (
            known is None
            or (known.rule is not rule and known.rule != rule)
            or known.source_bits.device != weight.device
            or known.source_bits.shape != weight.shape
            or (known.amax is None) != (amax is None)
        ):
            return None
        return known


@torch.inference_mode(False)  # Weights that it made could not be saved for a backward pass later.
@torch.no_grad()
def current_weights(
    forms: Sequence[ExpertWeight],
    weights: Sequence[torch.Tensor],
    rule: WeightRule,
    amax: Sequence[torch.Tensor | None],
) -> list[tuple[QuantisedWeight, bool]]:
    """Gives several quantised weights, and whether each had to be quantised now.

    Asks the device for all of them at once: each answer that the host waits for stops the queue.

    Args:
        forms: Quantised forms of the matrices, as far as they are known.
        weights: float [rows, K] each.
        rule: How the engine quantises weights.
        amax: FP32 0-d each; that of the whole matrix where the weight is a shard.
    """
    parts = list(zip(forms, weights, amax, strict=True))
    asked = {
        index: known
        for index, (form, weight, whole) in enumerate(parts)
        if (known := form.comparable(weight, rule, whole)) is not None
    }
    stale = set(range(len(parts))) - asked.keys()
    if asked:
        answers = _changed(asked, weights, amax)
        stale |= {index for index, changed in zip(asked, answers, strict=True) if changed}
    anew = sorted(stale)
    for index in anew:
        forms[index].known = None  # Of a group, the last one frees its memory.
    quantised = quantise_weights([weights[i] for i in anew], rule, [amax[i] for i in anew])
    for index, form in zip(anew, quantised, strict=True):
        forms[index].known = form
    found = []
    for index, form in enumerate(forms):
        assert form.known is not None, "it was known, or quantised now"
        found.append((form.known, index in stale))
    return found


def _changed(
    asked: Mapping[int, QuantisedWeight],
    weights: Sequence[torch.Tensor],
    amax: Sequence[torch.Tensor | None],
) -> list[bool]:
    """Gives whether bits or amax of each weight differ from those that were quantised."""
    values = [_as_bf16(weights[index]) for index in asked]
    changed = _changed_bits(values, list(asked.values()))
    old = [known.amax for known in asked.values() if known.amax is not None]
    new = [whole for index in asked if (whole := amax[index]) is not None]
    if not old:
        return changed.tolist()
    differs = iter((torch.stack(old) != torch.stack(new)).tolist())
    pairs = zip(asked.values(), changed.tolist(), strict=True)
    return [of_bits | (known.amax is not None and next(differs)) for known, of_bits in pairs]


def _as_bf16(weight: torch.Tensor) -> torch.Tensor:
    # Hundreds of calls that change nothing take the host a millisecond.
    return weight if weight.dtype == torch.bfloat16 else weight.detach().to(torch.bfloat16)


def _changed_bits(values: Sequence[torch.Tensor], known: Sequence[QuantisedWeight]) -> torch.Tensor:
    """Gives which BF16 tensors have other bits than those that were quantised, as bool."""
    if values[0].is_cuda:
        from megatron_trace.formats import kernels_changed

        changed = kernels_changed.changed_bits(values, [of.source_words for of in known])
        if changed is not None:
            return changed
    pairs = zip(values, known, strict=True)
    return torch.stack([(of.view(torch.int16) != form.source_bits).any() for of, form in pairs])


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
    digests, group = DigestSum(), None
    for layer in decoder_layers(model):
        if layer.moe is None:
            continue
        group = layer.moe.ep_group
        linears: list[Any] = list(named_expert_linears(layer))
        experts: Any = layer.moe.experts
        etp_group = experts.tp_group
        amax = shared_amax([linear.weight for _, _, linear in linears], etp_group)
        forms = [linear.place.weight for _, _, linear in linears]
        weights = [linear.weight for _, _, linear in linears]
        known = current_weights(forms, weights, sites.weight_rule, amax)
        for (expert, matrix, _), (weight, _) in zip(linears, known, strict=True):
            gated = matrix == "fc1" and model.config.gated_linear_unit
            packed_codes, scale_bytes = (
                _whole_matrix(part, matrix, etp_group, gated=gated)
                for part in (weight.packed_codes, weight.scale_bytes)
            )
            digests.add(layer.index, expert, matrix, packed_codes, scale_bytes, weight.global_scale)
    total = digests.total()
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
