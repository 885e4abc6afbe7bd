"""A whole model without the memory of its weights, for counting and for naming them."""

from __future__ import annotations

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel

from megatron_trace.models.architecture import Architecture
from megatron_trace.models.hybrid import HybridModules, build_hybrid_model
from megatron_trace.models.local_config import architecture_config


def build_meta_model(architecture: Architecture, *, mtp: bool = False) -> HybridModel:
    """Builds a model on the meta device, in BF16; Megatron's parallel state is that of one rank.

    Megatron makes the convolution and the decays of Gated DeltaNet on the current device, which is
    less than a thousandth of the model.

    Args:
        architecture: The model.
        mtp: Whether the layer of multi-token prediction is built.
    """
    config = architecture_config(
        architecture,
        mtp=mtp,
        params_dtype=torch.bfloat16,
        bf16=True,
        perform_initialization=False,
        init_model_with_meta_device=True,
    )
    pattern = architecture.pattern(mtp=mtp)
    with torch.device("meta"):
        return build_hybrid_model(
            config,
            pattern=pattern,
            vocab_size=architecture.vocab_size,
            max_sequence_length=1,
            # Nothing is computed, so that no kernels are needed.
            modules=HybridModules(delta_rule="torch" if "G" in pattern else "auto"),
            rotary_percent=architecture.rope_share,
            rotary_base=architecture.rope_base,
        )
