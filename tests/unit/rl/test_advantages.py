"""Group-relative advantages against values computed by hand."""

import pytest
import torch

from megatron_trace.rl.advantages import group_advantages


def test_advantages_equal_hand_computed_values():
    # [1, 0, 0, 1]: mean 1/2, std sqrt(4 * (1/2)^2 / 3) = .577350; 0.5 / .577450 = .865876
    # [0, 1/2, 1, 1/2]: mean 1/2, std sqrt(2 * (1/2)^2 / 3) = .408248; 0.5 / .408348 = 1.224446
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 0.5, 1.0, 0.5]])
    expected = torch.tensor(
        [[0.865876, -0.865876, -0.865876, 0.865876], [-1.224446, 0.0, 1.224446, 0.0]]
    )
    torch.testing.assert_close(group_advantages(rewards), expected, rtol=0, atol=2e-6)


def test_eps_is_added_to_the_standard_deviation():
    # [2, 0]: mean 1, std sqrt(2) = 1.414214; 1 / 1.914214 = .522408
    advantages = group_advantages(torch.tensor([[2.0, 0.0]]), eps=0.5)
    torch.testing.assert_close(advantages, torch.tensor([[0.522408, -0.522408]]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1.0 / 3.0])
def test_group_without_spread_is_exactly_zero(reward):
    # The FP32 mean of three times 0.1 is not 0.1: without the rule a residue would remain.
    advantages = group_advantages(torch.full((2, 3), reward))
    assert torch.equal(advantages, torch.zeros(2, 3))


def test_groups_do_not_see_each_other():
    rewards = torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 9.0]])
    together = group_advantages(rewards)
    alone = torch.cat([group_advantages(row[None]) for row in rewards])
    assert torch.equal(together, alone)


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (torch.zeros(4), r"\[prompt groups, samples\]; got torch.float32 \(4,\)"),
        (torch.zeros(2, 2, dtype=torch.int64), "floating point"),
        (torch.zeros(2, 1), "at least 2 samples"),
        (torch.tensor([[0.0, 1.0], [0.0, float("nan")]]), "group 1, sample 1 must be finite"),
    ],
)
def test_bad_rewards_raise(rewards, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(rewards)
