"""What a caller may be told while a rollout runs, and may answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StreamedToken:
    """A token that was just sampled.

    Attributes:
        sample_id: The sample.
        index: Its place in the response, tokens that were given included.
        token: The token.
        logprob: Its log-probability, as the sample will report it.
    """

    sample_id: str
    index: int
    token: int
    logprob: float


@dataclass(frozen=True)
class Turn:
    """A sample whose turn is over.

    Attributes:
        sample_id: The sample.
        tokens: Prompt and response so far, the token that ended the turn included.
        num_prompt_tokens: How many of them are the prompt.
        number: Turns that are over, this one included.
    """

    sample_id: str
    tokens: tuple[int, ...]
    num_prompt_tokens: int
    number: int


# Called after every step with the tokens that it sampled. It may call `RolloutEngine.abort`.
OnTokens = Callable[[Sequence[StreamedToken]], None]
# Gives the tokens with which a sample goes on (of a tool, of a user); None or nothing ends it.
NextTurn = Callable[[Turn], Sequence[int] | None]
