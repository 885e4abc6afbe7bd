"""What a run asks of its task, and where tasks come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from megatron_trace.hints.types import RolloutSample
from megatron_trace.rl.own_task import OwnTask, Scores
from megatron_trace.rl.prompt_files import load_records, make_items, plain_texts
from megatron_trace.rl.rewards import AnswerFormat, require_reasoning_gym, score_samples
from megatron_trace.rl.tasks import CharTokenizer, TaskItem, load_tasks
from megatron_trace.rl.tokenizer import Tokenizer
from megatron_trace.rl_config import TaskConfig
from megatron_trace.rollout.callbacks import NextTurn


class Task(Protocol):
    """Scores samples, and may answer their turns."""

    tokenizer: Tokenizer
    next_turn: NextTurn | None

    def begin(self, items: Mapping[str, TaskItem]) -> None:
        """Tells which item each sample of the next rollout answers."""
        ...

    def scores(self, samples: Sequence[RolloutSample], items: Sequence[TaskItem]) -> Scores:
        """Gives the rewards of its samples."""
        ...

    def close(self) -> None:
        """Ends what the task started."""
        ...


@dataclass
class ReasoningGymTask:
    """Scores by reasoning-gym's scorers; a sample has one turn.

    Attributes:
        tokenizer: Tokenizer of the model.
        answer_format: How the answer is extracted, see `rewards.answer_of`.
        next_turn: None.
    """

    tokenizer: Tokenizer
    answer_format: AnswerFormat = "whole"
    next_turn: NextTurn | None = None

    def begin(self, items: Mapping[str, TaskItem]) -> None:
        """Does nothing: scores follow from samples and items alone."""

    def scores(self, samples: Sequence[RolloutSample], items: Sequence[TaskItem]) -> Scores:
        """Gives the rewards of samples."""
        return Scores(
            score_samples(samples, items, self.tokenizer, answer_format=self.answer_format)
        )

    def close(self) -> None:
        """Does nothing."""


def open_task(
    path: str | Path, config: TaskConfig, *, answer_format: AnswerFormat = "whole"
) -> tuple[list[TaskItem], Task]:
    """Reads a prompt file, and gives its items and its task, which is to be closed.

    Args:
        path: Prompts: one's own (`prompt_files`) if a reward function is named, else as
            `tools/export_tasks.py` writes them.
        config: Reward, environment and tokenizer.
        answer_format: Of reasoning-gym's tasks.

    Raises:
        ValueError: There are no prompts, or a record, a function or the tokenizer cannot be used.
        OSError: The file cannot be read.
        ImportError: A package for the file or the tokenizer is missing.
    """
    if config.reward is None:
        require_reasoning_gym()
    if not Path(path).exists():
        raise ValueError(
            f"the prompts {path} do not exist; docs/my_data.md says what they may be, and "
            "tools/export_tasks.py writes some"
        )
    if config.reward is None:
        items = load_tasks(path)
        tokenizer = _tokenizer(config) or CharTokenizer.of_tasks(items)
        items = [replace(item, prompt=tokenizer.prompt_text(item.prompt)) for item in items]
        return items, ReasoningGymTask(tokenizer, answer_format)
    records = load_records(path)
    tokenizer = _tokenizer(config)
    if tokenizer is None:
        texts = plain_texts(records, prompt_field=config.prompt_field)
        tokenizer = CharTokenizer("".join(sorted(set("".join(texts)))))
    items = make_items(records, tokenizer, prompt_field=config.prompt_field)
    return items, OwnTask(config, tokenizer)


def _tokenizer(config: TaskConfig) -> Tokenizer | None:
    if config.tokenizer is None:
        return None
    from megatron_trace.rl.hf_tokenizer import HfTokenizer  # An extra.

    return HfTokenizer(config.tokenizer)
