"""Model configurations that Megatron's local modules, and ours, can build."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend

from megatron_trace.models.architecture import Architecture


def local_config(**fields: Any) -> TransformerConfig:
    """Gives a configuration in FP32 with gated SiLU, RMSNorm, q/k norm, no bias and no dropout.

    Args:
        **fields: Fields of `TransformerConfig`: the sizes, and what is to be otherwise.
    """
    common: dict[str, Any] = {
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "bias_activation_fusion": False,
        # Megatron's fused softmax is a CUDA extension.
        "masked_softmax_fusion": False,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "attention_backend": AttnBackend.local,
        "use_cpu_initialization": True,
        "inference_rng_tracker": True,
        "params_dtype": torch.float32,
    }
    return TransformerConfig(**(common | fields))


def local_moe_config(**fields: Any) -> TransformerConfig:
    """Gives a `local_config` with an FP32 router whose choices can be replayed.

    Args:
        **fields: Fields of `TransformerConfig`, with those of the experts.
    """
    common: dict[str, Any] = {
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
        "moe_enable_routing_replay": True,
    }
    return local_config(**(common | fields))


def architecture_config(
    architecture: Architecture, *, mtp: bool = False, **fields: Any
) -> TransformerConfig:
    """Gives the configuration of a published model, or of one with its structure.

    Args:
        architecture: The model.
        mtp: Whether the layer of multi-token prediction is built.
        **fields: Fields of `TransformerConfig` that are to be otherwise.
    """
    return local_moe_config(**architecture.transformer_fields(mtp=mtp) | fields)
