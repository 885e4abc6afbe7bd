"""The statistics of answers under a recipe against those in BF16."""

import pytest

from megatron_trace.ptq.comparison import Comparison, sign_test, wilson


@pytest.mark.parametrize(
    ("lost", "gained", "p"), [(0, 0, 1.0), (5, 0, 2 / 32), (0, 5, 2 / 32), (3, 1, 10 / 16)]
)
def test_sign_test_by_hand(lost, gained, p):
    assert sign_test(lost, gained) == pytest.approx(p)


def test_wilsons_interval_by_hand():
    # 8 of 10: (.8 + .1921 +- 1.96 sqrt(.016 + .0096)) / 1.3841.
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(0, 10)[0] == 0.0
    assert wilson(10, 10)[1] == pytest.approx(1.0)


def test_lost_and_gained_are_counted_problem_by_problem():
    reference = [True, True, True, False, False]
    found = Comparison.of("h_scale", [True, False, False, True, False], reference)
    assert (found.right, found.asked, found.lost, found.gained) == (2, 5, 2, 1)
    assert found.p == pytest.approx(1.0)


@pytest.mark.parametrize("answers", [[], [True]])
def test_answers_to_other_problems_are_refused(answers):
    with pytest.raises(ValueError, match="must be the same ones"):
        Comparison.of("vanilla", answers, [True, False])
