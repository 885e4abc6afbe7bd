"""Rewards: reasoning-gym's scorers on the extracted answer."""

import runpy
import sys

import pytest
import torch

from megatron_trace.hints.types import RolloutSample
from megatron_trace.rl import rewards, task
from megatron_trace.rl.rewards import answer_of, score_answer, score_samples
from megatron_trace.rl.tasks import END_TOKEN, PADDING_TOKEN, CharTokenizer, TaskItem
from megatron_trace.rl_config import TaskConfig

ITEM = TaskItem("1+2=", "3", "chain_sum", {"answer": "3"})
TOKENIZER = CharTokenizer("+123=")


def sample(response):
    prompt = tuple(TOKENIZER.encode(ITEM.prompt))
    return RolloutSample(
        sample_id="s",
        prompt_tokens=prompt,
        response_tokens=tuple(response),
        logprobs=torch.zeros(len(response)),
        routing=torch.zeros(len(prompt) + len(response) - 1, 1, 1, dtype=torch.int16),
        policy_version=0,
        settings_digest="",
        finish_reason="stop",
    )


@pytest.mark.parametrize(
    ("text", "answer_format", "answer"),
    [
        ("3", "whole", "3"),
        (" 3 ", "whole", "3"),
        ("", "whole", None),
        ("  ", "whole", None),
        ("so <answer>4</answer> no, <answer> 3 </answer>.", "tagged", "3"),
        ("the answer is 3", "tagged", None),
        ("<answer></answer>", "tagged", None),
        ("7\n12\n3", "last_line", "3"),
        ("3", "last_line", "3"),
        ("7\n12\n", "last_line", None),
    ],
)
def test_extracted_answer(text, answer_format, answer):
    assert answer_of(text, answer_format) == answer


@pytest.mark.parametrize(
    ("answer", "score"),
    # 13 contains the right answer in 1 of 2 characters: the partial credit is the scorer's own.
    [("3", 1.0), ("+3", 1.0), ("03", 1.0), ("4", 0.0), ("13", 0.5), ("", 0.0), (None, 0.0)],
)
def test_score_of_an_answer(answer, score):
    assert score_answer(answer, ITEM) == score


def test_unknown_task_raises():
    with pytest.raises(ValueError, match="'no such task' not registered"):
        score_answer("3", TaskItem("1+2=", "3", "no such task", {}))


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ([*TOKENIZER.encode("3"), END_TOKEN], 1.0),
        ([*TOKENIZER.encode("2"), END_TOKEN], 0.0),
        ([END_TOKEN], 0.0),
        ([], 0.0),
        (TOKENIZER.encode("3"), 0.0),
        (TOKENIZER.encode("33"), 0.0),
        ([PADDING_TOKEN, END_TOKEN], 0.0),
    ],
    ids=[
        "right",
        "wrong",
        "only the end",
        "empty",
        "cut before its end",
        "cut later",
        "padding sampled",
    ],
)
def test_reward_of_a_sample(response, reward):
    assert score_samples([sample(response)], [ITEM], TOKENIZER) == [reward]


def test_other_number_of_items_raises():
    with pytest.raises(ValueError, match="shorter"):
        score_samples([sample([END_TOKEN])], [], TOKENIZER)


def test_rewards_of_ones_own_need_no_reasoning_gym(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    runpy.run_path(rewards.__file__)
    with pytest.raises(ImportError, match="give --trace-reward FILE:FUNCTION"):
        task.open_task("prompts.jsonl", TaskConfig())
