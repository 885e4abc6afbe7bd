"""How the rollout samples tokens, and a sampler that samples from what it reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.inference.sampling.torch_sampling import TorchSampling
from megatron.core.inference.sampling_params import SamplingParams


@dataclass(frozen=True)
class SamplingSettings:
    """Settings of one call of `RolloutEngine.generate`.

    Attributes:
        max_new_tokens: Tokens sampled per prompt at most, the end token included.
        temperature: Divides the logits.
        top_p: Share of the probability that the kept tokens reach; 0 keeps all.
        top_k: Number of most probable tokens kept; 0 keeps all.
        greedy: Take the most probable token. The log-probs reported are then those of the
            model at temperature 1, because a choice without chance has none of its own.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 0.0
    top_k: int = 0
    greedy: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError on a value out of range or on contradictory settings."""
        for name, ok, expected in (
            ("max_new_tokens", self.max_new_tokens >= 1, ">= 1"),
            ("temperature", self.temperature > 0, "> 0 (greedy=True takes the best token)"),
            ("top_p", 0 <= self.top_p <= 1, "from 0 to 1"),
            ("top_k", self.top_k >= 0, ">= 0"),
        ):
            if not ok:
                raise ValueError(f"{name} must be {expected}; got {getattr(self, name)}")
        if self.top_k and self.top_p:
            raise ValueError(
                f"top_k={self.top_k} and top_p={self.top_p} cannot be combined in Megatron's "
                "sampler; set one of them to 0"
            )
        if self.greedy and (self.top_k or self.top_p or self.temperature != 1.0):
            raise ValueError("greedy=True contradicts temperature, top_k and top_p; leave them out")

    @property
    def logprobs_mode(self) -> Literal["raw_logprobs", "processed_logprobs"]:
        """Megatron's name for the distribution whose log-probs are reported."""
        return "raw_logprobs" if self.greedy else "processed_logprobs"

    def to_megatron(self, eod_token: int) -> SamplingParams:
        """Gives Megatron's sampling parameters of one request."""
        return SamplingParams(
            temperature=self.temperature,
            top_k=1 if self.greedy else self.top_k,
            top_p=self.top_p,
            return_log_probs=True,
            skip_prompt_log_probs=True,
            num_tokens_to_generate=self.max_new_tokens,
            termination_id=eod_token,
        )


class Float32Sampling(TorchSampling):
    """Megatron's sampler on FP32 logits.

    Megatron 0.19.2 samples from the softmax of the model's BF16 logits, yet reports log-probs from
    FP32: probabilities differ by up to 0.4 %, and with top-p a sampled token may have log-prob
    -inf, since the two sets of kept tokens differ.
    """

    def sample_kernel(
        self, logits: torch.Tensor, n: int, context: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Gives token ids int64 [n] sampled from logits [rows >= n, vocabulary].

        Raises:
            RuntimeError: A logit is NaN or Inf.
        """
        logits = logits.float()
        if not torch.isfinite(logits[:n]).all():
            raise RuntimeError(
                "NaN or Inf logits in the rollout; check the weights that were pushed"
            )
        return super().sample_kernel(logits, n, context, **kwargs)
