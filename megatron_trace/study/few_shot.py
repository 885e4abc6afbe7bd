"""Few-shot problems for a pretrained model: does it solve a task well enough to be reinforced?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_trace.rl.rewards import answer_of, score_answer
from megatron_trace.rl.tasks import TaskItem
from megatron_trace.rollout import RolloutEngine, SamplingSettings

if TYPE_CHECKING:
    from tokenizers import Tokenizer  # pyright: ignore[reportMissingImports]

NUM_EXAMPLES = 4
# A sum of four numbers of one digit, its sign, and the line's end.
MAX_ANSWER_TOKENS = 8


@dataclass(frozen=True)
class FewShot:
    """Problems that follow the same solved ones.

    Attributes:
        examples: Solved problems, a line each.
        items: Problems to solve.
    """

    examples: str
    items: tuple[TaskItem, ...]

    def prompt(self, item: TaskItem) -> str:
        """Gives the text that a problem's answer continues."""
        return self.examples + item.prompt


def few_shot(items: Sequence[TaskItem], count: int) -> FewShot:
    """Gives `count` problems to solve after the first `NUM_EXAMPLES` ones as examples.

    Raises:
        ValueError: There are fewer items, or an example has no answer.
    """
    examples, rest = items[:NUM_EXAMPLES], items[NUM_EXAMPLES : NUM_EXAMPLES + count]
    if len(rest) < count:
        raise ValueError(f"{NUM_EXAMPLES} examples and {count} problems are more than {len(items)}")
    for item in examples:
        if item.answer is None:
            raise ValueError(f"{item} has no answer, so that it is no example")
    return FewShot("".join(f"{item.prompt}{item.answer}\n" for item in examples), tuple(rest))


def solved(engine: RolloutEngine, tokenizer: Tokenizer, problems: FewShot) -> list[bool]:
    """Gives which problems an engine answers right, greedily, in one line that it ends.

    Args:
        engine: The engine; its end token is that of a line's end.
        tokenizer: Tokenizer of the model.
        problems: The problems.
    """
    samples = engine.generate(
        [tokenizer.encode(problems.prompt(item)).ids for item in problems.items],
        [f"problem-{number}" for number in range(len(problems.items))],
        store=None,
        sampling=SamplingSettings(max_new_tokens=MAX_ANSWER_TOKENS, greedy=True),
        seed=0,
    )
    right = []
    for sample, item in zip(samples, problems.items, strict=True):
        is_ended = sample.finish_reason == "stop"
        text = tokenizer.decode(list(sample.response_tokens)[: -1 if is_ended else None])
        right.append(is_ended and score_answer(answer_of(text, "whole"), item) >= 1.0)
    return right
