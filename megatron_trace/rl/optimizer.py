"""Megatron's DDP wrapper and optimizer around a trainer model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer


@dataclass(frozen=True)
class OptimizerSettings:
    """Settings of Adam.

    Attributes:
        learning_rate: Constant over the run.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        weight_decay: Decoupled weight decay.
        max_grad_norm: Gradients are scaled down to this norm; 0 does not.
    """

    learning_rate: float = 3e-5
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        """Raises ValueError on a value out of range, NaN and Inf included."""
        for name in ("learning_rate", "weight_decay", "max_grad_norm"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be >= 0 and finite; got {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} must be in [0, 1); got {getattr(self, name)}")


def build_optimizer(
    model: HybridModel, settings: OptimizerSettings
) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    """Wraps a model in Megatron's DDP and gives its optimizer; BF16 models get FP32 masters.

    The optimizer is not the distributed one: with `torch.optim.Adam` (no Apex, no Transformer
    Engine) Megatron 0.19.2 cannot load the distributed optimizer's state in a fresh process.

    Raises:
        ValueError: More than one data-parallel rank; the loss is averaged over one rank's tokens.
    """
    data_parallel_size = parallel_state.get_data_parallel_world_size()
    if data_parallel_size > 1:
        raise ValueError(
            f"the RL loop runs on one data-parallel rank; got {data_parallel_size}: its loss is a "
            "mean over the tokens of one rank"
        )
    ddp = DistributedDataParallel(
        model.config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=False, overlap_grad_reduce=False
        ),
        model,
    )
    dtype = model.config.params_dtype
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.learning_rate,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        weight_decay=settings.weight_decay,
        # At 0 Megatron computes no norm, and gradients that are not finite would pass unnoticed.
        clip_grad=settings.max_grad_norm or math.inf,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
    )
    return ddp, get_megatron_optimizer(config, [ddp])
