"""Few-shot problems: what a prompt holds, and which answers count."""

from types import SimpleNamespace

import pytest

from megatron_trace.study.few_shot import few_shot, solved
from megatron_trace.study.task_mix import CHAIN_SUMS, items_of_mix

ITEMS = items_of_mix([CHAIN_SUMS])[:8]


class Characters:
    """A tokenizer whose tokens are the characters' numbers."""

    def encode(self, text):
        return SimpleNamespace(ids=[ord(character) for character in text])

    def decode(self, tokens):
        return "".join(map(chr, tokens))


class Answering:
    """An engine that gives prepared lines, and keeps what it was asked."""

    def __init__(self, *lines):
        self.lines = lines
        self.asked = []

    def generate(self, prompts, names, **_):
        self.asked = [Characters().decode(prompt) for prompt in prompts]
        return [
            SimpleNamespace(
                response_tokens=[ord(character) for character in line],
                finish_reason="stop" if line.endswith("\n") else "length",
            )
            for line in self.lines
        ]


def test_four_solved_problems_stand_before_each_of_the_next_ones():
    problems = few_shot(ITEMS, 4)
    first = ITEMS[0]
    assert problems.items == tuple(ITEMS[4:])
    assert problems.examples.startswith(f"{first.prompt}{first.answer}\n")
    assert problems.examples.count("\n") == 4
    assert problems.prompt(ITEMS[4]) == problems.examples + ITEMS[4].prompt


def test_an_answer_counts_if_it_is_right_and_its_line_ends():
    problems = few_shot(ITEMS, 4)
    right = [item.answer for item in problems.items]
    engine = Answering(f"{right[0]}\n", right[1], f"{int(right[2]) + 1}\n", f" {right[3]}\n")
    assert solved(engine, Characters(), problems) == [True, False, False, True]
    assert engine.asked == [problems.prompt(item) for item in problems.items]


def test_more_problems_than_there_are_is_refused():
    with pytest.raises(ValueError, match="4 examples and 5 problems are more than 8"):
        few_shot(ITEMS, 5)
