"""The order of prompts."""

import pytest

from megatron_trace.rl.prompt_order import rows_of_step


def test_every_item_is_taken_once_per_pass():
    taken = [row for cursor in range(0, 12, 3) for row in rows_of_step(6, cursor, 3, seed=0)]
    assert sorted(taken[:6]) == sorted(taken[6:]) == list(range(6))
    assert taken[:6] != taken[6:]


def test_order_depends_on_cursor_and_seed_only():
    # A resumed run asks in the middle, with other sizes before it.
    whole = rows_of_step(50, 0, 50, seed=3)
    assert rows_of_step(50, 20, 10, seed=3) == whole[20:30]
    assert rows_of_step(50, 0, 50, seed=4) != whole


def test_step_across_two_passes():
    assert rows_of_step(5, 3, 4, seed=0) == (
        rows_of_step(5, 0, 5, seed=0)[3:] + rows_of_step(5, 5, 5, seed=0)[:2]
    )


def test_more_prompts_than_items_raises():
    with pytest.raises(ValueError, match="takes 6 distinct prompts, but there are 5"):
        rows_of_step(5, 0, 6, seed=0)
