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
        self.zero_centered = self._is_zero_centered(config)
        fill = 0.0 if self.zero_centered else 1.0
        self.weight = torch.nn.Parameter(
            torch.full((hidden_size,), fill, dtype=config.params_dtype)
        )
        # Megatron sums the gradients of parameters marked so over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gives x normalised over its last dim, in x's dtype."""
        if not self.zero_centered:
            return torch.nn.functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        # In FP32, as published models do: in BF16, 1 + weight loses most bits of a small weight.
        weight = 1 + self.weight.float()
        return torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), weight, self.eps).to(x.dtype)

    @staticmethod
    def _is_zero_centered(config: TransformerConfig) -> bool:
        return config.layernorm_zero_centered_gamma


class UncentredRMSNorm(RMSNorm):
    """RMSNorm whose weight is stored as it is, also in a model whose other norms store weight - 1.

    Published Qwen models have one in Gated DeltaNet. Megatron would store its weight less one,
    which BF16 cannot hold for every weight.
    """

    @staticmethod
    def _is_zero_centered(config: TransformerConfig) -> bool:
        return False
