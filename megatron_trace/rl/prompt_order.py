"""The order in which a run takes its prompts: a function of a seed and a cursor, nothing else."""

from __future__ import annotations

import functools
import random


def rows_of_step(num_items: int, cursor: int, num_prompts: int, *, seed: int) -> list[int]:
    """Gives the items that come after `cursor` prompts were taken.

    Every item is taken once before any is taken again; each pass has its own order.

    Args:
        num_items: Items to choose from.
        cursor: Prompts taken so far in the run.
        num_prompts: Prompts to take.
        seed: Seed of the order.

    Raises:
        ValueError: More prompts than items, so that a step would hold one twice.
    """
    if num_prompts > num_items:
        raise ValueError(
            f"a step takes {num_prompts} distinct prompts, but there are {num_items} training "
            "items; export more tasks or take fewer prompts"
        )
    rows = []
    for position in range(cursor, cursor + num_prompts):
        epoch, place = divmod(position, num_items)
        rows.append(_epoch_order(num_items, epoch, seed)[place])
    return rows


@functools.lru_cache(maxsize=2)
def _epoch_order(num_items: int, epoch: int, seed: int) -> tuple[int, ...]:
    order = list(range(num_items))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return tuple(order)
