"""Rewards: reasoning-gym's own scorers, applied to the answer that a response gives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # Exporting tasks needs this module, but not torch.
    from megatron_trace.hints.types import RolloutSample
from megatron_trace.rl.tasks import TaskItem
from megatron_trace.rl.tokenizer import Tokenizer

AnswerFormat = Literal["whole", "tagged", "last_line"]


def require_reasoning_gym() -> ModuleType:
    """Gives the package, an extra: who scores by a function of one's own does not need it.

    Raises:
        ImportError: It is not installed.
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError(
            "prompts without a reward function are scored by reasoning-gym, which is not "
            "installed: give --trace-reward FILE:FUNCTION (docs/my_data.md), or install it"
        ) from error
    return reasoning_gym


def answer_of(text: str, answer_format: AnswerFormat) -> str | None:
    """Gives the answer within a response, or None if it gives none.

    The scorers credit an answer surrounded by other text in part, so a response must be reduced to
    its answer before it is scored.

    Args:
        text: The response, without its end token.
        answer_format: `whole`: the response is the answer. `tagged`: the last
            <answer>...</answer> is. `last_line`: what follows the last line break is, or the
            response where it has none.
    """
    if answer_format == "tagged":
        return require_reasoning_gym().utils.extract_answer(text) or None
    if answer_format == "last_line":
        text = text.rpartition("\n")[2]
    return text.strip() or None


def score_answer(answer: str | None, item: TaskItem) -> float:
    """Gives the score of an answer, 0 to 1; 0 for None or empty.

    Raises:
        ValueError: reasoning-gym has no task of this name.
    """
    if not answer:
        return 0.0
    return float(_scorer(item.task)(answer, dict(item.entry)))


@functools.cache
def _scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    return require_reasoning_gym().get_score_answer_fn(task)


def score_samples(
    samples: Sequence[RolloutSample],
    items: Sequence[TaskItem],
    tokenizer: Tokenizer,
    *,
    answer_format: AnswerFormat = "whole",
) -> list[float]:
    """Gives the reward of every sample; 0 for a response without end or with unknown tokens.

    Args:
        samples: Finished rollouts.
        items: The problem of each sample, in the same order.
        tokenizer: Tokenizer of the samples.
        answer_format: See `answer_of`.

    Raises:
        ValueError: Another number of samples than of items.
    """
    rewards = []
    for sample, item in zip(samples, items, strict=True):
        response = sample.response_tokens
        # A model's vocabulary may be padded beyond the tokenizer's.
        known = max(response, default=0) < tokenizer.vocab_size
        if not known or not response or response[-1] != tokenizer.end_token:
            rewards.append(0.0)
            continue
        text = tokenizer.decode(response[:-1])
        rewards.append(score_answer(answer_of(text, answer_format), item))
    return rewards
