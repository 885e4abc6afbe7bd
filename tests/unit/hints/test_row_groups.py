"""Samples whose rows are handled together."""

import pytest

from megatron_trace.hints.row_groups import groups_of_rows


@pytest.mark.parametrize(
    ("num_rows", "expected"),
    [
        ([], []),
        ([3, 4, 5], [slice(0, 2), slice(2, 3)]),
        ([20, 1, 1], [slice(0, 1), slice(1, 3)]),
        ([1, 20, 1], [slice(0, 1), slice(1, 2), slice(2, 3)]),
        ([0, 0, 8, 0], [slice(0, 4)]),
    ],
)
def test_neighbours_share_a_group_up_to_eight_rows(num_rows, expected):
    assert list(groups_of_rows(num_rows, 8)) == expected
