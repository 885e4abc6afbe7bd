"""Weights from the trainer into the engine: copied by name, routed experts quantised and folded.

Legend: O output features, K input features of a matrix.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

import torch
from modelopt.torch.quantization.nn import TensorQuantizer

from megatron_trace import compat
from megatron_trace.config import Implementation
from megatron_trace.formats import NumberFormat, decode, ops, unpack_codes
from megatron_trace.formats.packed_matrix import PackedMatrix
from megatron_trace.hints.weight_digest import DigestSum, combine_digests
from megatron_trace.models.hybrid import DecoderLayer, ExpertLinear, named_expert_linears
from megatron_trace.rollout.packed_experts import PackedRoutedExperts
from megatron_trace.rollout.sites import OPERAND_DTYPE

# Decoder layer, expert, and fc1 (gate above up) or fc2.
MatrixPlace = tuple[int, int, str]
# Gives the NVFP4 codes and scales of a matrix [O, K] at a place.
WeightRule = Callable[[MatrixPlace, torch.Tensor], PackedMatrix]


def require_fitting(model: torch.nn.Module, named: Mapping[str, torch.Tensor]) -> None:
    """Checks that parameters are those of a model, before any of them is copied.

    Args:
        model: Model of the engine.
        named: Parameters by name; all of the model's and no others.

    Raises:
        ValueError: A parameter is missing, unknown or of another shape.
    """
    own = dict(model.named_parameters())
    missing = sorted(own.keys() - named.keys())
    unknown = sorted(named.keys() - own.keys())
    misshaped = [
        f"{name} {tuple(named[name].shape)} instead of {tuple(parameter.shape)}"
        for name, parameter in own.items()
        if name in named and named[name].shape != parameter.shape
    ]
    for problem, names in (
        ("missing", missing),
        ("unknown to the engine", unknown),
        ("of another shape", misshaped),
    ):
        if names:
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if names[5:] else "")
            raise ValueError(
                f"{len(names)} of {len(named)} pushed parameters are {problem}: {shown}; push all "
                "parameters of a model with the engine's configuration"
            )


@torch.no_grad()
def copy_weights(model: torch.nn.Module, named: Mapping[str, torch.Tensor]) -> None:
    """Copies the trainer's parameters, cast to the engine's dtype.

    Args:
        model: Model of the engine; weights of which it has the shape only stay so.
        named: Parameters by name, which fit (`require_fitting`).
    """
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            parameter.copy_(named[name])


@torch.no_grad()
def quantise_experts(
    layers: Iterable[DecoderLayer],
    *,
    number_format: NumberFormat,
    power_of_two_scales: bool,
    implementation: Implementation,
    keep: dict[MatrixPlace, PackedMatrix] | None = None,
    rule: WeightRule | None = None,
) -> str:
    """Quantises the routed experts' weights: packed ones get codes, BF16 ones the codes' values.

    Every matrix has its own amax; gate and up are one matrix. ModelOpt's weight quantisers run
    once here and are off in the forward.

    Args:
        layers: Decoder layers of the engine's model, whose BF16 weights are loaded.
        number_format: Format of the weights.
        power_of_two_scales: Whether global scales are rounded up to powers of two.
        implementation: Kernels of the number formats.
        keep: Gets codes and scales of every matrix, in host memory; for formats with global scales.
        rule: Chooses codes and scales in NVFP4; None rounds to nearest in the format.

    Returns:
        Digest over packed codes, scale bytes and global scales.

    Raises:
        ValueError: A weight is NaN or Inf, also of an expert that no token reaches.
    """
    digests = DigestSum()
    for layer in layers:
        matrices = [
            (expert, matrix, linear, cast("torch.Tensor", linear.weight))
            for expert, matrix, linear in named_expert_linears(layer)
        ]
        if matrices:
            require_finite(
                torch.stack([weight.abs().amax() for *_, weight in matrices]),
                [(layer.index, expert, matrix) for expert, matrix, *_ in matrices],
            )
        for expert, matrix, linear, weight in matrices:
            quantiser = (
                _WeightQuantiser(number_format, power_of_two_scales, implementation)
                if rule is None
                else _RuleQuantiser(rule, (layer.index, expert, matrix))
            )
            _quantise_in_place(linear, weight, quantiser, number_format)
            assert quantiser.record is not None, "ModelOpt did not call the weight quantiser"
            digests.add(layer.index, expert, matrix, *quantiser.record)
            packed = getattr(layer.moe, "routed_experts", None)
            if isinstance(packed, PackedRoutedExperts):
                packed_codes, scale_bytes, scale = quantiser.record
                assert scale is not None, "NVFP4 has global scales"
                packed.take(expert, matrix, packed_codes, scale_bytes, scale)
            if keep is not None:
                packed_codes, scale_bytes, scale = quantiser.record
                assert scale is not None, "the caller's format has global scales"
                keep[layer.index, expert, matrix] = PackedMatrix(
                    packed_codes.cpu(), scale_bytes.cpu(), scale.float().cpu()
                )
    return combine_digests([digests.total()])


def require_finite(amax: torch.Tensor, places: Sequence[MatrixPlace]) -> None:
    """Checks the amax of several matrices on the device, which is asked once.

    Args:
        amax: [N].
        places: Of each matrix.

    Raises:
        ValueError: One is NaN or Inf.
    """
    bad = [
        f"layer {layer}, expert {expert}, {matrix}"
        for (layer, expert, matrix), is_finite in zip(places, amax.isfinite().tolist(), strict=True)
        if not is_finite
    ]
    if bad:
        raise ValueError(
            f"{len(bad)} of {len(places)} pushed expert matrices of layers {places[0][0]} to "
            f"{places[-1][0]} hold NaN or Inf: {'; '.join(bad[:5])}; later ones were "
            f"not looked at; check the trainer's weights, or push the last good ones"
        )


def _quantise_in_place(
    linear: ExpertLinear,
    weight: torch.Tensor,
    quantiser: _WeightQuantiser | _RuleQuantiser,
    number_format: NumberFormat,
) -> None:
    """Lets ModelOpt's quantiser of a linear call ours once, and puts its values into the weight."""
    tensor_quantizer = cast("TensorQuantizer", cast("torch.nn.Module", linear).weight_quantizer)
    if number_format.has_global_scale:
        tensor_quantizer.amax = weight.abs().amax().float()
    compat.set_quantizer_action(tensor_quantizer, quantiser)
    tensor_quantizer.enable()
    try:
        weight.copy_(tensor_quantizer(weight))
    finally:
        tensor_quantizer.disable()


class _WeightQuantiser:
    """Quantises one matrix [O, K] and keeps its packed codes, scale bytes and global scale."""

    def __init__(
        self,
        number_format: NumberFormat,
        power_of_two_scales: bool,
        implementation: Implementation,
    ) -> None:
        self.number_format = number_format
        self.power_of_two_scales = power_of_two_scales
        self.implementation: Implementation = implementation
        self.record: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        number_format = self.number_format
        scale = number_format.global_scale_from_amax(weight.abs().amax(), self.power_of_two_scales)
        y, packed_codes, scale_bytes = ops.rtn_record(
            weight,
            scale,
            num_bits=number_format.code_bits,
            number_format=number_format,
            dtype=OPERAND_DTYPE,
            implementation=self.implementation,
        )
        self.record = (packed_codes, scale_bytes, scale)
        return y


class _RuleQuantiser:
    """Quantises the matrix of one place as a rule says, and keeps the same."""

    def __init__(self, rule: WeightRule, place: MatrixPlace) -> None:
        self.rule = rule
        self.place = place
        self.record: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        chosen = self.rule(self.place, weight)
        self.record = (chosen.packed_codes, chosen.scale_bytes, chosen.global_scale)
        codes = unpack_codes(chosen.packed_codes)
        return decode(codes, chosen.scale_bytes, chosen.global_scale, OPERAND_DTYPE)


@torch.no_grad()
def holds_bits(model: torch.nn.Module, named: Mapping[str, torch.Tensor]) -> bool:
    """Whether a BF16 model holds exactly these parameters, cast to BF16; the device is asked once.

    Args:
        model: Model of the engine.
        named: Parameters by name, on its device, of a trainer (BF16 or FP32).
    """
    own = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if own.keys() != named.keys():
        return False
    same = [
        (parameter.view(torch.int16) == named[name].to(torch.bfloat16).view(torch.int16)).all()
        for name, parameter in own.items()
    ]
    return bool(torch.stack(same).all())


def plain_digest(named: Mapping[str, torch.Tensor]) -> str:
    """Gives a digest of parameters as a BF16 engine holds them, for a rollout without quantisation.

    Args:
        named: Parameters by name, of a trainer (BF16 or FP32) or of an engine.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(named.items()):
        digest.update(f"{name}/{tuple(parameter.shape)}/".encode())
        bits = parameter.detach().to(torch.bfloat16).cpu().contiguous().view(torch.uint8)
        digest.update(bits.numpy())
    return digest.hexdigest()[:32]
