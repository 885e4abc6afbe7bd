"""What one way of training costs over another, from turns that they took beside each other."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

_RESAMPLES = 4000
_CHUNK = 500


@dataclass(frozen=True)
class Ratio:
    """A ratio of times, with its interval.

    Attributes:
        median: Median of the ratios of the pairs.
        low: Lower end of the interval of 95 % of that median, by bootstrap over the pairs.
        high: Upper end.
        num_pairs: Pairs.
    """

    median: float
    low: float
    high: float
    num_pairs: int

    def verdict(self, most: float) -> str:
        """Says by the interval whether the ratio is at most `most`."""
        if self.high <= most:
            return "within"
        return "beyond" if self.low > most else "not resolved"

    def as_dict(self, most: float) -> dict[str, Any]:
        """Gives plain values for JSON."""
        return asdict(self) | {"verdict": self.verdict(most)}

    def __str__(self) -> str:
        """Gives what tables show."""
        parts = (self.median, self.low, self.high)
        median, low, high = (f"{part - 1:+.1%}" for part in parts)
        return f"{median} [{low}, {high}]"


def shuffled_groups[T](
    items: Sequence[T], group_of: Callable[[T], Hashable], order: random.Random
) -> list[T]:
    """Gives items in another order, in which those of a group stay together.

    Args:
        items: What takes turns.
        group_of: Gives what an item has in common with those it is compared with.
        order: Decides the order of the groups and of the items of each.
    """
    groups: dict[Hashable, list[T]] = {}
    for item in order.sample(items, len(items)):
        groups.setdefault(group_of(item), []).append(item)
    return [item for group in groups.values() for item in group]


def paired_ratio(ours: Sequence[float], plain: Sequence[float], *, seed: int = 0) -> Ratio:
    """Gives how much longer the turns of one case took than those of another in the same rounds.

    Args:
        ours: Time of each round.
        plain: Time of each round of what is compared with.
        seed: Seed of the bootstrap.

    Raises:
        ValueError: There are no pairs, or not as many of both.
    """
    if len(ours) != len(plain) or not ours:
        raise ValueError(f"pairs need as many rounds of both; got {len(ours)} and {len(plain)}")
    ratios = torch.tensor(ours, dtype=torch.float64) / torch.tensor(plain, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    medians = torch.cat(
        [
            ratios[torch.randint(len(ratios), (_CHUNK, len(ratios)), generator=generator)].quantile(
                0.5, dim=1
            )
            for _ in range(_RESAMPLES // _CHUNK)
        ]
    )
    low, high = medians.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Ratio(ratios.quantile(0.5).item(), low, high, len(ratios))
