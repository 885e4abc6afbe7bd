"""Proof that the quantisers of a method ran, and no others."""

from __future__ import annotations

from collections.abc import Collection

import torch

from megatron_trace.models.hybrid import DecoderModel, decoder_layers, named_expert_linears
from megatron_trace.training.shape import ModelShape, Place, place_name
from megatron_trace.training.tally import Tally
from megatron_trace.training.te_choice import FACTORIES

QUANTISED_CONFIG_FIELDS = ("fp8", "fp4", "quant_recipe")


def foreign_quantisers(model: DecoderModel) -> list[str]:
    """Names whatever in a model quantises, or could, beside the places of TRACE.

    These are: ModelOpt's quantisers, Megatron's own low-precision settings, parameters that are not
    plain BF16 or FP32 tensors, and quantising modules of ours outside of routed experts, their
    input, and K/V.
    """
    own = _own_modules(model)
    found = []
    for name, module in model.named_modules():
        if any(base.__name__ == "TensorQuantizer" for base in type(module).__mro__):
            found.append(f"module {name} ({type(module).__name__})")
        elif getattr(module, "place", None) is not None and id(module) not in own:
            found.append(f"module {name} ({type(module).__name__}) outside of TRACE's places")
    for name, parameter in model.named_parameters():
        plain = type(parameter) is torch.nn.Parameter
        if not plain or parameter.dtype not in (torch.bfloat16, torch.float32):
            found.append(f"parameter {name} ({type(parameter).__name__}, {parameter.dtype})")
    for name in QUANTISED_CONFIG_FIELDS:
        value = getattr(model.config, name, None)
        ours = name == "fp4" and model.config.fp4_quantizer_factory in FACTORIES
        if value is not None and not ours:
            found.append(f"config.{name}={value}")
    return found


def unexpected_quantising(
    tally: Tally, shape: ModelShape, *, places: Collection[Place], weights: bool
) -> list[str]:
    """Names the places and weights that were not quantised but should be, or the reverse.

    Args:
        tally: What ran.
        shape: What the model has.
        places: Places that are to be quantised.
        weights: Whether expert weights are.
    """
    calls = [(place_name(place), tally.calls[place] > 0, place in places) for place in shape.places]
    calls += [
        (
            f"the {matrix} weight of layer {layer}, expert {expert}",
            tally.weight_uses[layer, expert, matrix] > 0,
            weights,
        )
        for layer, expert, matrix in shape.expert_matrices
    ]
    return [
        f"{name} was {'not ' if expected else ''}quantised"
        for name, ran, expected in calls
        if ran != expected
    ]


def _own_modules(model: DecoderModel) -> set[int]:
    own = set()
    for layer in decoder_layers(model):
        if layer.attention is not None:
            own.add(id(layer.attention.core_attention))
        own.add(id(layer.moe))
        own.add(id(getattr(layer.moe, "experts", None)))
        own.update(id(linear) for _, _, linear in named_expert_linears(layer))
    return own
