"""How the rollout samples: settings, the sampling distribution, random numbers of each sample.

Legend: N rows, a logit row per request of a step; V tokens of the vocabulary; K most probable
tokens that are kept.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Literal

import numpy as np
import torch
from megatron.core.inference.sampling_params import SamplingParams

LogprobKind = Literal["sampling", "raw"]

# Values of one chunk of rows in FP64, so that a large vocabulary does not need much memory.
_CHUNK_VALUES = 2**24
_UINT64 = 2**64


@dataclass(frozen=True)
class SamplingSettings:
    """Settings of one call of `RolloutEngine.generate`.

    Attributes:
        max_new_tokens: Tokens sampled per prompt at most, the end token included.
        temperature: Divides the logits.
        top_p: The most probable tokens that together reach this probability are kept; 0 keeps all.
        top_k: Number of most probable tokens kept; 0 keeps all. With top_p too, top_p is a share
            of what top_k kept. Tokens as probable as the last one kept are kept too.
        greedy: Take the most probable token. The log-probs reported are then those of the
            model at temperature 1, because a choice without chance has none of its own.
        logprobs: Which distribution the reported log-probs are of: the one that is sampled from
            (`sampling`: after temperature, top_k and top_p), or the model's at temperature 1
            (`raw`).
        top_logprobs: Number of most probable tokens reported with each sampled one, with their
            log-probs in the same distribution; 0 reports none.
        stop_tokens: Tokens that end a turn, beside the engine's end token.
        samples_per_prompt: Samples of each prompt.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 0.0
    top_k: int = 0
    greedy: bool = False
    logprobs: LogprobKind = "sampling"
    top_logprobs: int = 0
    stop_tokens: tuple[int, ...] = ()
    samples_per_prompt: int = 1

    def __post_init__(self) -> None:
        """Raises ValueError on a value out of range or on contradictory settings."""
        for name in ("max_new_tokens", "top_k", "top_logprobs", "samples_per_prompt"):
            if not _is_integer(value := getattr(self, name)):
                raise ValueError(f"{name} must be an integer; got {value!r}")
        if not all(_is_integer(token) for token in self.stop_tokens):
            raise ValueError(f"stop_tokens must be integers; got {self.stop_tokens}")
        for name, ok, expected in (
            ("max_new_tokens", self.max_new_tokens >= 1, ">= 1"),
            # Logits divided by less may leave FP32.
            (
                "temperature",
                1e-6 <= self.temperature < math.inf,
                "at least 1e-6 (greedy=True takes the best token) and finite",
            ),
            ("top_p", 0 <= self.top_p <= 1, "from 0 to 1"),
            ("top_k", self.top_k >= 0, ">= 0"),
            ("logprobs", self.logprobs in ("sampling", "raw"), "sampling or raw"),
            ("top_logprobs", self.top_logprobs >= 0, ">= 0"),
            ("samples_per_prompt", self.samples_per_prompt >= 1, ">= 1"),
        ):
            if not ok:
                raise ValueError(f"{name} must be {expected}; got {getattr(self, name)}")
        if self.greedy and (self.top_k or self.top_p or self.temperature != 1.0):
            raise ValueError("greedy=True contradicts temperature, top_k and top_p; leave them out")

    def to_megatron(self, end_token: int) -> SamplingParams:
        """Gives Megatron's parameters of one request; `RowSampler` does what they leave out."""
        return SamplingParams(
            num_tokens_to_generate=self.max_new_tokens,
            termination_id=end_token,
            skip_prompt_log_probs=True,
        )


def _is_integer(value: object) -> bool:
    """Whether it is a Python or numpy integer, and no truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def sampling_logprobs(logits: torch.Tensor, settings: SamplingSettings) -> torch.Tensor:
    """Gives the log-probs of the distribution that tokens are sampled from.

    Args:
        logits: FP32 [N, V].
        settings: Temperature, top_k and top_p.

    Returns:
        FP32 [N, V]; -inf for tokens that are filtered out.
    """
    # A division by 1 changes nothing, but reads and writes all of them.
    scaled = logits if settings.temperature == 1.0 else logits / settings.temperature
    if 0 < settings.top_k < scaled.shape[1]:
        last_kept = scaled.topk(settings.top_k, dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < last_kept, -torch.inf)
    if 0 < settings.top_p < 1:
        ordered = scaled.sort(dim=-1, descending=True).values
        probabilities = ordered.softmax(-1)
        # A token is kept if those before it do not reach top_p without it.
        is_kept = probabilities.cumsum(-1) - probabilities < settings.top_p
        is_kept[:, 0] = True
        last_kept = ordered.masked_fill(~is_kept, torch.inf).amin(-1, keepdim=True)
        scaled = scaled.masked_fill(scaled < last_kept, -torch.inf)
    return scaled.log_softmax(-1)


def draw(logprobs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Gives the tokens, int64 [N], at which the distributions pass given numbers.

    Args:
        logprobs: FP32 [N, V].
        uniform: FP64 [N], from 0 to 1.
    """
    if logprobs.is_cuda:
        # Only here: Triton looks for a GPU driver when it is imported.
        from megatron_trace.rollout.kernels import draw as kernel

        return kernel.draw(logprobs.contiguous(), uniform)
    return draw_by_torch(logprobs, uniform)


def draw_by_torch(logprobs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Gives `draw` on any device; arguments as there."""
    rows = max(1, _CHUNK_VALUES // logprobs.shape[1])
    tokens = []
    for part, numbers in zip(logprobs.split(rows), uniform.split(rows), strict=True):
        passed = part.double().exp().cumsum(-1)
        # Tokens without probability leave the sum as it is, so that none of them is first past it.
        tokens.append(torch.searchsorted(passed, numbers[:, None] * passed[:, -1:], right=True))
    return torch.cat(tokens)[:, 0]


def sample_seed(seed: int, sample_id: str) -> int:
    """Gives the 64-bit seed of one sample of a rollout, from the rollout's seed and its name."""
    digest = hashlib.sha256(f"{seed}/{sample_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def uniform_numbers(seeds: Sequence[int], positions: np.ndarray) -> np.ndarray:
    """Gives the random number of a token position of a sample, whatever else is sampled.

    Args:
        seeds: 64-bit seed of each sample, [N].
        positions: integer [N], position that the sampled token will have.

    Returns:
        FP64 [N], multiples of 2^-50 from 0 up to 1, without 1.

    Source: SplitMix64 (Steele, Lea, Flood 2014) as a counter-based generator: its state after
    `position` steps, scrambled twice.
    """
    states = np.array([int(seed) % _UINT64 for seed in seeds], dtype=np.uint64)
    with np.errstate(over="ignore"):
        states = _scrambled(states) + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (_scrambled(states) >> np.uint64(14)).astype(np.float64) * 2.0**-50


def _scrambled(states: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        states = (states ^ (states >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        states = (states ^ (states >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return states ^ (states >> np.uint64(31))
