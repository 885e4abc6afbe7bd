"""Samples that went wrong in a way that their tokens show: loops of one token, garbled tails.

They are flagged and counted, not dropped: whether they are trained on is for the caller to say.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Degeneration = Literal["loop", "garbled"]


@dataclass(frozen=True)
class DegenerationRule:
    """When a sample counts as degenerate.

    Attributes:
        loop_tokens: A sample with one token this many times in a row is a `loop`.
        tail_tokens: Number of last sampled tokens that are its tail; shorter samples have none.
        garbled_logprob: A sample whose tail has a mean log-prob under this, in nats, is `garbled`:
            it goes on with tokens that the model itself finds improbable. A model that guesses
            among 150 tokens has -5; one that writes at temperature 1 is above -2.
    """

    loop_tokens: int = 32
    tail_tokens: int = 64
    garbled_logprob: float = -5.0

    def __post_init__(self) -> None:
        """Raises ValueError on a value out of range."""
        for name, ok, expected in (
            ("loop_tokens", self.loop_tokens >= 2, ">= 2"),
            ("tail_tokens", self.tail_tokens >= 1, ">= 1"),
            ("garbled_logprob", self.garbled_logprob < 0, "< 0"),
        ):
            if not ok:
                raise ValueError(f"{name} must be {expected}; got {getattr(self, name)}")

    def degeneration(self, tokens: Sequence[int], logprobs: torch.Tensor) -> Degeneration | None:
        """Says what is wrong with a sample; None if nothing is.

        Args:
            tokens: The tokens that were sampled.
            logprobs: FP32 [tokens], their log-probs.
        """
        longest = max((len(list(run)) for _, run in itertools.groupby(tokens)), default=0)
        if longest >= self.loop_tokens:
            return "loop"
        tail = logprobs[-self.tail_tokens :]
        if len(tail) == self.tail_tokens and float(tail.mean()) < self.garbled_logprob:
            return "garbled"
        return None
