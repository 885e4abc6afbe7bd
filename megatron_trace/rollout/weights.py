"""Weights from the trainer into the engine: copied by name, routed experts quantised and folded.

Legend: O output features, K input features of a matrix.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import cast

import torch
from modelopt.torch.quantization.nn import TensorQuantizer

from megatron_trace import compat
from megatron_trace.config import Implementation
from megatron_trace.formats import NumberFormat, decode, ops, unpack_codes
from megatron_trace.formats.packed_matrix import PackedMatrix
from megatron_trace.hints.weight_digest import combine_digests, matrix_digest
from megatron_trace.models.hybrid import DecoderLayer, named_expert_linears
from megatron_trace.rollout.packed_experts import PackedRoutedExperts
from megatron_trace.rollout.sites import OPERAND_DTYPE

# Decoder layer, expert, and fc1 (gate above up) or fc2.
MatrixPlace = tuple[int, int, str]
# Gives the NVFP4 codes and scales of a matrix [O, K] at a place.
WeightRule = Callable[[MatrixPlace, torch.Tensor], PackedMatrix]


@contextlib.contextmanager
def kept_on_failure(model: torch.nn.Module) -> Iterator[None]:
    """Puts the model's parameters and buffers back if what is done inside the context fails.

    They are kept in host memory meanwhile, as a device seldom has room for them twice. They stay
    where they are, so that graphs that read them stay valid.
    """
    tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
    kept = [torch.empty_like(tensor, device="cpu").copy_(tensor) for tensor in tensors]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for tensor, value in zip(tensors, kept, strict=True):
                tensor.copy_(value)
        raise


@torch.no_grad()
def copy_weights(model: torch.nn.Module, named: Mapping[str, torch.Tensor]) -> None:
    """Copies the trainer's parameters, cast to the engine's dtype.

    Args:
        model: Model of the engine.
        named: Parameters by name; all of the model's and no others.

    Raises:
        ValueError: A parameter is missing, unknown or of another shape; nothing was copied then.
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
    for name, parameter in own.items():
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
    """Replaces the routed experts' weights by their fake-quantised values.

    Every matrix has its own amax; gate and up are one matrix. ModelOpt's weight quantisers run
    once here and are off in the forward.

    Args:
        layers: Decoder layers of the engine's model, with BF16 weights.
        number_format: Format of the weights.
        power_of_two_scales: Whether global scales are rounded up to powers of two.
        implementation: Kernels of the number formats.
        keep: Gets codes and scales of every matrix, in host memory; for formats with global scales.
        rule: Chooses codes and scales in NVFP4; None rounds to nearest in the format.

    Returns:
        Digest over packed codes, scale bytes and global scales.

    Raises:
        ValueError: A weight is NaN or Inf, also of an expert that no token reaches; none was
            quantised then.
    """
    layers = list(layers)
    _require_finite_experts(layers)
    digests = []
    for layer in layers:
        for expert, matrix, linear in named_expert_linears(layer):
            quantiser = (
                _WeightQuantiser(number_format, power_of_two_scales, implementation)
                if rule is None
                else _RuleQuantiser(rule, (layer.index, expert, matrix))
            )
            tensor_quantizer = cast(
                "TensorQuantizer", cast("torch.nn.Module", linear).weight_quantizer
            )
            weight = cast("torch.Tensor", linear.weight)
            if number_format.has_global_scale:
                tensor_quantizer.amax = weight.abs().amax().float()
            compat.set_quantizer_action(tensor_quantizer, quantiser)
            tensor_quantizer.enable()
            try:
                weight.copy_(tensor_quantizer(weight))
            finally:
                tensor_quantizer.disable()
            assert quantiser.record is not None, "ModelOpt did not call the weight quantiser"
            digests.append(matrix_digest(layer.index, expert, matrix, *quantiser.record))
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
    return combine_digests(digests)


def _require_finite_experts(layers: Iterable[DecoderLayer]) -> None:
    named = [
        (f"layer {layer.index}, expert {expert}, {matrix}", cast("torch.Tensor", linear.weight))
        for layer in layers
        for expert, matrix, linear in named_expert_linears(layer)
    ]
    # The device is asked once for all.
    finite = torch.stack([weight.abs().amax() for _, weight in named]).isfinite().tolist()
    bad = [name for (name, _), is_finite in zip(named, finite, strict=True) if not is_finite]
    if bad:
        raise ValueError(
            f"{len(bad)} of {len(named)} pushed expert matrices hold NaN or Inf: "
            f"{'; '.join(bad[:5])}; check the trainer's weights, or push the last good ones"
        )


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
