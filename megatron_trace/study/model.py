"""StudyModel: a model with trained weights, and what a rollout of it starts from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer import TransformerConfig

from megatron_trace.models.hybrid import HybridModules, build_hybrid_model


@dataclass(frozen=True, eq=False)
class StudyModel:
    """A model with trained weights, ready to roll out and to train on.

    Attributes:
        name: Name for tables and files, such as `tiny_moe`.
        config: Model configuration, as `build_trainer_model` and `RolloutEngine` take it.
        pattern: Hybrid layer pattern, such as `*E*E`.
        vocab_size: Rows of the embedding.
        context: Longest prompt and response together, in tokens.
        weights: FP32 or BF16 parameters by name of the trainer model, on the CPU.
        prompts: Token ids of the prompts to roll out from.
        calibration: int64 [B, S] each, without padding; fixes the global scales.
        eod_token: Token that ends a response.
        rotary_base: Base period of RoPE.
        facts: What the report prints: parameters, training steps, held-out accuracy, pairwise
            cosine of expert outputs by layer, seed.
    """

    name: str
    config: TransformerConfig
    pattern: str
    vocab_size: int
    context: int
    weights: Mapping[str, torch.Tensor]
    prompts: Sequence[Sequence[int]]
    calibration: Sequence[torch.Tensor]
    eod_token: int
    rotary_base: int = 10_000
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ValueError when there is nothing to roll out from, or it does not fit."""
        if not self.prompts:
            raise ValueError(f"{self.name}: a study needs prompts; got none")
        longest = max(map(len, self.prompts))
        if longest >= self.context:
            raise ValueError(
                f"{self.name}: a prompt of {longest} tokens leaves no room for a response in the "
                f"context of {self.context}; shorten it or raise the context"
            )

    @torch.no_grad()
    def unquantised(self, dtype: torch.dtype) -> HybridModel:
        """Builds the model from plain modules, with its weights, in evaluation mode.

        Args:
            dtype: dtype of parameters and computation, BF16 or FP32.
        """
        config = dataclasses.replace(
            self.config,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=dtype == torch.bfloat16,
        )
        hybrid = build_hybrid_model(
            config,
            pattern=self.pattern,
            vocab_size=self.vocab_size,
            max_sequence_length=self.context,
            modules=HybridModules(),
            rotary_base=self.rotary_base,
        ).eval()
        for name, parameter in hybrid.named_parameters():
            parameter.copy_(self.weights[name])
        return hybrid


def plain_logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Gives the logits [B, S, V] of a model of plain modules, or of its DDP wrapper.

    Args:
        model: The model. Its attention is causal by itself and gets no mask, which at 8K positions
            would only be carried along.
        tokens: int64 [B, S] from position 0, on any device.
    """
    tokens = tokens.to(next(model.parameters()).device)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return model(tokens, positions, None)
