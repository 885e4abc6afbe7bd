"""RMSNorm of the rollout engine: the trainer's, by one kernel on a GPU."""

from __future__ import annotations

import torch

from megatron_trace.models.norm import RMSNorm


class EngineRMSNorm(RMSNorm):
    """RMSNorm without gradients; the sum of squares is in another order than torch's on a GPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gives x normalised over its last dim, in x's dtype."""
        if self.zero_centered and x.is_cuda:
            # Only here: Triton looks for a GPU driver when it is imported.
            from megatron_trace.rollout.kernels import norm

            if norm.fits(x):
                return norm.uncentred_norm(x, self.weight, self.eps)
        return super().forward(x)
