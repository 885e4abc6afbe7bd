"""A mix of reasoning-gym tasks as short prompts, for models that are trained from nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_trace.rl.tasks import TaskItem


@dataclass(frozen=True)
class TaskOfMix:
    """One reasoning-gym task of the mix.

    Attributes:
        task: Name of the task.
        template: Template of the prompt over the fields of an entry.
        parameters: Fields of the task's configuration.
        size: Items to generate.
    """

    task: str
    template: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    size: int = 20_000


# Three or four numbers of one digit: "6-4+8=" is answered by "10".
CHAIN_SUMS = TaskOfMix(
    "chain_sum",
    "{metadata[expression]}=",
    {"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 1},
    size=60_000,
)

# Eight to ten of them, for answers that are written with all steps: `with_running_sums`.
LONG_CHAIN_SUMS = TaskOfMix(
    "chain_sum",
    "{metadata[expression]}=",
    {"min_terms": 8, "max_terms": 10, "min_digits": 1, "max_digits": 1},
)


def with_running_sums(item: TaskItem) -> TaskItem:
    """Gives a chain_sum item whose answer has every sum on the way, a line each, before it.

    "6-4+8=" is answered by the lines "-4=2", "+8=10" and "10". The entry stays, so that the scorer
    of reasoning-gym judges the last line (`answer_format="last_line"`), and no other.

    Raises:
        ValueError: The last sum is not the answer of the entry.
    """
    first, *rest = item.entry["metadata"]["expression"].split()
    total, lines = int(first), []
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        total += int(sign + number)
        lines.append(f"{sign}{number}={total}")
    if str(total) != item.entry["answer"]:
        raise ValueError(f"{item}: its sum is {total}, its answer {item.entry['answer']}")
    return replace(item, answer="\n".join([*lines, str(total)]))


def items_of_mix(
    mix: Iterable[TaskOfMix], *, seed: int = 0, drop_characters: str = " "
) -> list[TaskItem]:
    """Gives the problems of the mix, made by reasoning-gym, in the order of the tasks.

    Args:
        mix: The tasks.
        seed: Seed of every task.
        drop_characters: Characters removed from prompts.
    """
    # Here only: machines that train may lack reasoning-gym, and have the problems in a file.
    from megatron_trace.rl.export import make_items

    items: list[TaskItem] = []
    for part in mix:
        items += make_items(
            part.task,
            size=part.size,
            seed=seed,
            parameters=part.parameters,
            prompt_template=part.template,
            drop_characters=drop_characters,
        )
    return items
