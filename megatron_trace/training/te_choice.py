"""Which routed experts a trainer has; importable without Transformer Engine.

experts    products                 tokens are rounded
local      Megatron's local linears before dispatch, once
te         TE's grouped linears     before dispatch, once
te_recipe  TE's grouped linears     by the recipe's quantiser inside TE, each dispatched row
"""

from __future__ import annotations

import copy
import importlib.util
from typing import Literal

import torch
from megatron.core.transformer import TransformerConfig

from megatron_trace.config import TraceConfig

ExpertsKind = Literal["local", "te", "te_recipe"]
# Values of --fp4-quantizer-factory that give our experts.
FAKE_FACTORY = "megatron_trace.training.te_recipe.guided_fake_quantizer_factory"
NVFP4_FACTORY = "megatron_trace.training.te_recipe.guided_nvfp4_quantizer_factory"
FACTORIES = (FAKE_FACTORY, NVFP4_FACTORY)
# Below it TE's autocast refuses every recipe.
RECIPE_CAPABILITY = (8, 9)
NVFP4_CAPABILITY = (10, 0)


def chosen_experts(config: TransformerConfig, trace: TraceConfig) -> ExpertsKind:
    """Gives the routed experts that the settings ask for.

    Raises:
        ValueError: Megatron's FP4 settings and `experts` contradict each other.
    """
    recipe = (config.fp4, config.fp4_recipe, config.fp4_quantizer_factory)
    ours = config.fp4 is not None and recipe[1] == "custom" and recipe[2] in FACTORIES
    if trace.experts == "auto":
        return "te_recipe" if ours else "local"
    if ours and trace.experts != "te_recipe":
        raise ValueError(
            f"experts={trace.experts} contradicts fp4_quantizer_factory={recipe[2]}, which is for "
            "experts=te_recipe; leave one of them out"
        )
    if config.fp4 is not None and not ours:
        raise ValueError(
            f"experts={trace.experts} contradicts fp4={config.fp4} with fp4_recipe={recipe[1]} and "
            f"fp4_quantizer_factory={recipe[2]}; the factory must be one of {FACTORIES}"
        )
    return trace.experts


def with_recipe(config: TransformerConfig, experts: ExpertsKind) -> TransformerConfig:
    """Gives a configuration with the FP4 recipe that the experts need."""
    if experts != "te_recipe" or config.fp4 is not None:
        return config
    config = copy.copy(config)
    config.fp4, config.fp4_recipe = "e2m1", "custom"
    config.fp4_quantizer_factory = FAKE_FACTORY
    return config


def without_recipe(config: TransformerConfig) -> TransformerConfig:
    """Gives a configuration without what concerns only the products of a trainer's experts."""
    config = copy.copy(config)
    config.fp4 = config.fp4_quantizer_factory = None
    config.fp4_recipe = "nvfp4"
    config.gradient_accumulation_fusion = False
    return config


def require_runnable(config: TransformerConfig, trace: TraceConfig, experts: ExpertsKind) -> None:
    """Checks that grouped experts can run here under these settings.

    Raises:
        ValueError: The machine, the model or the method does not fit them.
    """
    if experts == "local":
        return
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    native = experts == "te_recipe" and config.fp4_quantizer_factory == NVFP4_FACTORY
    for problem, present in {
        "transformer_engine, which is not installed": (
            importlib.util.find_spec("transformer_engine") is None
        ),
        "a CUDA device, and there is none": capability is None,
        f"compute capability {RECIPE_CAPABILITY} or higher; got {capability}": (
            capability is not None and capability < RECIPE_CAPABILITY
        ),
        f"compute capability {NVFP4_CAPABILITY} or higher for {NVFP4_FACTORY}; got {capability}": (
            native and capability is not None and capability < NVFP4_CAPABILITY
        ),
        f"BF16; got {config.params_dtype}": config.params_dtype != torch.bfloat16,
    }.items():
        if present:
            raise ValueError(f"experts={experts} needs {problem}; use experts=local")
    if trace.method == "quads":
        raise ValueError(
            f"experts={experts} contradicts method=quads, whose experts read BF16: Transformer "
            "Engine's round their inputs; use experts=local"
        )
    if trace.save_packed_activations:
        raise ValueError(
            f"save_packed_activations contradicts experts={experts}: Transformer Engine keeps what "
            "it multiplied; switch it off, or use experts=local"
        )
    if experts == "te_recipe" and not trace.quantises_experts:
        raise ValueError(
            f"experts=te_recipe has no effect with method={trace.method} and quantised_parts="
            f"{trace.quantised_parts}, which quantise no experts; use te"
        )
    if native and trace.number_format != "nvfp4":
        raise ValueError(
            f"{NVFP4_FACTORY} contradicts number_format={trace.number_format}: its products are of "
            "NVFP4 only; use another factory"
        )
