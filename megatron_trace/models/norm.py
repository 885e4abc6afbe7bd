"""RMSNorm for specs without Transformer Engine."""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig


class RMSNorm(torch.nn.Module):
    """RMSNorm over the last dim that works under sequence parallelism and with (1 + weight).

    Megatron's `WrappedTorchNorm` (0.19.2, transformer/torch_norm.py) refuses both.

    Args:
        config: Model configuration; `layernorm_zero_centered_gamma` stores weight - 1.
        hidden_size: Size of the last dim.
        eps: Added to the mean square.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object
    ) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        fill = 0.0 if self.zero_centered else 1.0
        self.weight = torch.nn.Parameter(
            torch.full((hidden_size,), fill, dtype=config.params_dtype)
        )
        # Megatron sums the gradients of parameters marked so over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gives x normalised over its last dim, in x's dtype."""
        weight = 1 + self.weight if self.zero_centered else self.weight
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, self.eps)
