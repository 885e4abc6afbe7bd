"""Relative noise on a trainer's forward pass: a diagnostic, never a way to train.

It stands for a trainer whose arithmetic is further from the rollout's than ours is, so that one can
ask at which distance a method fails. The rollout is not touched.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch.utils.hooks import RemovableHandle


def perturb_layers(model: HybridModel, size: float) -> list[RemovableHandle]:
    """Multiplies the output of every layer by 1 + size * noise from now on.

    The noise is standard normal, its own in each layer, and the same in every forward pass of
    inputs of one shape: old and new policy see the same trainer. Gradients pass through the factor.

    Args:
        model: A trainer model.
        size: Standard deviation of the relative noise; 0 does nothing.

    Returns:
        Handles, whose `remove` ends it.

    Raises:
        ValueError: The size is negative.
    """
    if size < 0:
        raise ValueError(f"relative noise must be >= 0; got {size}")
    if size == 0:
        return []
    stack: Any = model.decoder
    return [
        layer.register_forward_hook(partial(_perturbed, number, size))
        for number, layer in enumerate(stack.layers)
    ]


def _perturbed(number: int, size: float, _: torch.nn.Module, __: Any, output: Any) -> Any:
    hidden, *rest = output if isinstance(output, tuple) else (output,)
    generator = torch.Generator(device=hidden.device).manual_seed(number)
    noise = torch.randn(
        hidden.shape, generator=generator, device=hidden.device, dtype=torch.float32
    )
    noisy = (hidden.float() * (1 + size * noise)).to(hidden.dtype)
    return (noisy, *rest) if isinstance(output, tuple) else noisy
