"""The engine's sampler."""

from __future__ import annotations

import pytest
import torch
from megatron.core.inference.sampling import TorchSampling

from megatron_trace.rollout.sampling import Float32Sampling


def test_megatrons_sampler_gets_fp32_logits(monkeypatch):
    seen = []

    def record(self, logits, n, context, **kwargs):
        seen.append(logits)
        return torch.zeros(n, dtype=torch.int64)

    monkeypatch.setattr(TorchSampling, "sample_kernel", record)
    logits = torch.randn(3, 16).bfloat16()
    Float32Sampling.sample_kernel(object.__new__(Float32Sampling), logits, 2, None)
    assert seen[0].dtype == torch.float32
    torch.testing.assert_close(seen[0], logits.float(), atol=0, rtol=0)


def test_logits_that_are_not_finite_are_refused():
    logits = torch.zeros(2, 16)
    logits[1, 3] = torch.nan
    with pytest.raises(RuntimeError, match="NaN or Inf logits"):
        Float32Sampling.sample_kernel(object.__new__(Float32Sampling), logits, 2, None)
