"""Samples whose rows are handled by one call: short ones together, long ones alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

# What is held twice meanwhile stays small, and is more than enough to hide the cost of a call.
ROWS_AT_ONCE = 8192


def groups_of_rows(num_rows: Sequence[int], most: int = ROWS_AT_ONCE) -> Iterator[slice]:
    """Gives slices of neighbouring samples that have at most some rows together, or are one.

    Args:
        num_rows: Rows of each sample.
        most: Rows of a group of several samples.
    """
    start = total = 0
    for index, rows in enumerate(num_rows):
        if index > start and total + rows > most:
            yield slice(start, index)
            start, total = index, 0
        total += rows
    if num_rows:
        yield slice(start, len(num_rows))
