"""Items of any reasoning-gym task, in the form of a JSONL prompt file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import reasoning_gym

from megatron_trace.rl.rewards import score_answer
from megatron_trace.rl.tasks import TaskItem


def make_items(
    task: str,
    *,
    size: int,
    seed: int,
    parameters: Mapping[str, Any],
    prompt_template: str = "{question}",
    drop_characters: str = "",
) -> list[TaskItem]:
    """Gives the distinct prompts among the first `size` items of a task, in the task's order.

    Args:
        task: Name of the reasoning-gym task.
        size: Items to generate, repeated prompts included.
        seed: Seed of the task; the same seed gives the same items.
        parameters: Fields of the task's configuration, such as `min_terms`.
        prompt_template: `str.format` template over the fields of an entry, such as
            `{metadata[expression]}=`.
        drop_characters: Characters removed from prompts.

    Raises:
        ValueError: Unknown task or parameter, a template that names a missing field, or an entry
            that its scorer no longer accepts after a round trip through JSON.
    """
    try:
        dataset = reasoning_gym.create_dataset(task, size=size, seed=seed, **parameters)
    except (TypeError, AssertionError) as error:
        raise ValueError(
            f"reasoning-gym's {task} does not accept {dict(parameters)}: {error}"
        ) from error
    removed = str.maketrans("", "", drop_characters)
    items: dict[str, TaskItem] = {}
    for index in range(size):
        entry = dataset[index]
        prompt = _prompt(prompt_template, entry, task).translate(removed)
        if prompt not in items:
            items[prompt] = _item(task, prompt, entry, index)
    return list(items.values())


def _prompt(template: str, entry: dict[str, Any], task: str) -> str:
    try:
        return template.format(**entry)
    except (KeyError, IndexError) as error:
        raise ValueError(
            f"prompt template {template!r} names {error}, which an entry of {task} does not have; "
            f"it has {sorted(entry)} and metadata {sorted(entry['metadata'])}"
        ) from error


def _item(task: str, prompt: str, entry: dict[str, Any], index: int) -> TaskItem:
    source = f"reasoning-gym {task}, index {index}"
    try:
        stored = json.loads(json.dumps(entry))
    except TypeError as error:
        raise ValueError(f"{source}: entry cannot be written as JSON: {error}") from error
    answer = entry["answer"]
    if answer is not None and not isinstance(answer, str):
        raise ValueError(f"{source}: answer must be a string or None; got {type(answer).__name__}")
    item = TaskItem(prompt, answer, task, stored, source)
    before = score_answer(answer, TaskItem(prompt, answer, task, entry, source))
    if score_answer(answer, item) != before:
        raise ValueError(
            f"{source}: after a round trip through JSON the scorer gives "
            f"{score_answer(answer, item)} for the right answer, before it {before}; this task "
            "cannot be exported"
        )
    return item
