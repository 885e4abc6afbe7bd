"""Answers of a quantised policy against those of the same policy in BF16, to the same problems."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_Z = 1.959964


@dataclass(frozen=True)
class Comparison:
    """What one recipe showed.

    Attributes:
        recipe: Its name; `bf16` is the policy as it was trained.
        right: Problems that were solved.
        asked: Problems that were asked.
        low: Lower end of the 95 % interval of the share (Wilson).
        high: Upper end.
        lost: Problems solved in BF16 only.
        gained: Problems solved under the recipe only.
        p: Of the exact sign test on these two; 1 without any.
    """

    recipe: str
    right: int
    asked: int
    low: float
    high: float
    lost: int
    gained: int
    p: float

    @classmethod
    def of(cls, recipe: str, answers: Sequence[bool], reference: Sequence[bool]) -> Comparison:
        """Compares whether each problem was solved.

        Args:
            recipe: Name of the recipe.
            answers: Under the recipe.
            reference: In BF16, in the same order.

        Raises:
            ValueError: There is none, or not as many.
        """
        if not answers or len(answers) != len(reference):
            raise ValueError(
                f"{recipe} was asked {len(answers)} problems, and the policy in BF16 "
                f"{len(reference)}; they must be the same ones, at least one"
            )
        pairs = list(zip(reference, answers, strict=True))
        lost = sum(before and not after for before, after in pairs)
        gained = sum(after and not before for before, after in pairs)
        right, asked = sum(answers), len(answers)
        return cls(
            recipe, right, asked, *wilson(right, asked), lost, gained, sign_test(lost, gained)
        )

    def cells(self) -> list[str]:
        """Gives a row of a table under `HEADS`; nothing is said of the reference against itself."""
        shares = [f"{self.right}/{self.asked}", f"{self.right / self.asked:.3f}"]
        interval = f"{self.low:.3f}-{self.high:.3f}"
        against = [str(self.lost), str(self.gained), f"{self.p:.3f}"]
        return [
            self.recipe,
            *shares,
            interval,
            *(against if self.recipe != REFERENCE else ["", "", ""]),
        ]


REFERENCE = "bf16"
HEADS = ("recipe", "right", "accuracy", "95%", "lost", "gained", "p")


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Gives rows of cells as lines, the first column to the left and the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def sign_test(lost: int, gained: int) -> float:
    """Gives the two-sided probability of a split at least as uneven, if both were as likely."""
    total, least = lost + gained, min(lost, gained)
    tail = sum(math.comb(total, k) for k in range(least + 1)) / 2**total
    return min(1.0, 2 * tail)


def wilson(right: int, asked: int) -> tuple[float, float]:
    """Gives the 95 % interval of a share by Wilson's score."""
    share, z2 = right / asked, _Z**2
    middle = (share + z2 / (2 * asked)) / (1 + z2 / asked)
    half = _Z * math.sqrt(share * (1 - share) / asked + z2 / (4 * asked**2)) / (1 + z2 / asked)
    return max(0.0, middle - half), min(1.0, middle + half)
