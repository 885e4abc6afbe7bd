"""Routed experts of which an engine holds names and shapes only, as packed codes compute them.

BF16 weights of the same values would take 3.6 times what the packed ones take. They serve
calibration and nothing else: a push quantises what the trainer gives.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from megatron_trace.models.hybrid import DecoderLayer, named_expert_linears


class ExpertShape(torch.nn.Module):
    """A linear of a routed expert whose weight has a name and a shape, and no memory.

    Built as Megatron's linears are (`MLPSubmodules`).

    Args:
        input_size: Columns of the weight.
        output_size: Rows of the weight.
        config: Configuration of the model.
        **_: What else linears are built with.

    Attributes:
        weight: [output_size, input_size] on the device `meta`.
    """

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **_: Any
    ) -> None:
        super().__init__()
        weight = torch.empty(output_size, input_size, dtype=config.params_dtype, device="meta")
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def _apply(self, fn: Any, recurse: bool = True) -> ExpertShape:
        """Stays where it is when the model is moved: there is nothing to move."""
        return self

    def forward(self, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        """Raises RuntimeError: only packed experts compute, and only in steps of the engine."""
        raise RuntimeError(
            "routed experts without BF16 weights (keep_bf16_experts=False) compute in steps of the "
            "engine only; keep them to compute outside of a step"
        )


def holds_weights(layer: DecoderLayer) -> bool:
    """Whether the BF16 weights of a layer's routed experts are held, if it has any."""
    return not any(isinstance(linear, ExpertShape) for *_, linear in named_expert_linears(layer))
