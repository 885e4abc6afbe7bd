"""The clipped objective against values computed by hand."""

import math

import pytest
import torch

from megatron_trace.rl.losses import LossSums, policy_loss
from megatron_trace.rl.objectives.settings import LossSettings
from megatron_trace.rl.objectives.values import PolicyBatch

# Two samples of two tokens. Ratios theta / old, and old / rollout:
#   A = +1: ratio 1.5, old / rollout 2   -> clipped at 1.28:  2 * 1.28      =   2.56
#           ratio 0.5, old / rollout 1   -> not clipped:      1 * 0.5       =   0.50
#   A = -2: ratio 1.5, old / rollout 10  -> cap 5, not clipped: 5 * -3      = -15.00
#           ratio 0.5, old / rollout 0.5 -> clipped at 0.8:   0.5 * -1.6    =  -0.80
# Sum -12.74, over 4 tokens -3.185, negated +3.185.
OLD = torch.log(torch.tensor([[0.3, 0.4], [0.5, 0.2]]))
THETA = OLD + torch.log(torch.tensor([[1.5, 0.5], [1.5, 0.5]]))
ROLLOUT = OLD - torch.log(torch.tensor([[2.0, 1.0], [10.0, 0.5]]))
ADVANTAGES = torch.tensor([1.0, -2.0])
MASK = torch.ones(2, 2, dtype=torch.bool)
SETTINGS = LossSettings(clip_low=0.2, clip_high=0.28, importance_cap=5.0)


def loss_of(theta=THETA, old=OLD, rollout=ROLLOUT, advantages=ADVANTAGES, mask=MASK, num_tokens=4):
    batch = PolicyBatch(theta, old, rollout, advantages, mask)
    return policy_loss(batch, num_units=num_tokens, settings=SETTINGS)


def test_loss_equals_hand_computed_value():
    loss, _ = loss_of()
    assert loss.item() == pytest.approx(3.185, abs=1e-6)


def test_gradient_equals_hand_computed_values():
    # -(w * A * ratio) / 4 where not clipped: -(1 * 1 * .5) / 4 and -(5 * -2 * 1.5) / 4.
    theta = THETA.clone().requires_grad_()
    loss, _ = loss_of(theta=theta)
    loss.backward()
    assert theta.grad is not None
    torch.testing.assert_close(
        theta.grad, torch.tensor([[0.0, -0.125], [3.75, 0.0]]), rtol=0, atol=1e-6
    )


def test_metrics_equal_hand_computed_values():
    _, sums = loss_of()
    means = sums.means()
    assert sums.num_tokens == 4
    assert means["clipped_share"] == 0.5
    assert means["importance_weight_mean"] == pytest.approx((2 + 1 + 5 + 0.5) / 4, abs=1e-6)
    assert means["importance_capped_share"] == 0.25
    # ratio - 1 - log ratio: .094535 at 1.5 and .193147 at .5
    assert means["kl_old"] == pytest.approx((0.0945349 + 0.1931472) / 2, abs=1e-6)
    # log rollout - log theta = -log(old/rollout * ratio): 3, .5, 15, .25
    expected = -(math.log(3) + math.log(0.5) + math.log(15) + math.log(0.25)) / 4
    assert means["kl_rollout"] == pytest.approx(expected, abs=1e-6)


def test_importance_weight_has_no_gradient():
    old = OLD.clone().requires_grad_()
    rollout = ROLLOUT.clone().requires_grad_()
    theta = THETA.clone().requires_grad_()
    loss, _ = loss_of(theta=theta, old=old, rollout=rollout)
    loss.backward()
    assert old.grad is None
    assert rollout.grad is None


def test_old_equal_to_theta_keeps_the_gradient():
    # One update per rollout: the ratio is 1 in value, its gradient is -w * A / num_tokens.
    theta = OLD.clone().requires_grad_()
    loss, _ = loss_of(theta=theta, old=theta)
    loss.backward()
    assert theta.grad is not None
    torch.testing.assert_close(
        theta.grad, torch.tensor([[-0.5, -0.25], [2.5, 0.25]]), rtol=0, atol=1e-6
    )


def test_masked_positions_are_never_read():
    mask = torch.tensor([[True, False], [False, True]])
    nan = torch.where(mask, 0.0, math.nan)
    theta = (THETA + nan).requires_grad_()
    loss, sums = loss_of(theta=theta, old=OLD + nan, rollout=ROLLOUT + nan, mask=mask, num_tokens=2)
    loss.backward()
    # -(2.56 - 0.8) / 2
    assert loss.item() == pytest.approx(-0.88, abs=1e-6)
    assert sums.num_tokens == 2
    assert theta.grad is not None
    assert torch.equal(theta.grad, torch.zeros(2, 2))


def test_empty_response_adds_nothing():
    with_empty = torch.tensor([[True, True], [False, False]])
    loss, sums = loss_of(mask=with_empty, num_tokens=2)
    alone, _ = loss_of(
        theta=THETA[:1],
        old=OLD[:1],
        rollout=ROLLOUT[:1],
        advantages=ADVANTAGES[:1],
        mask=MASK[:1],
        num_tokens=2,
    )
    assert torch.equal(loss, alone)
    assert sums.num_tokens == 2


def test_batch_of_empty_responses_has_zero_loss_and_gradient():
    theta = THETA.clone().requires_grad_()
    loss, sums = loss_of(theta=theta, mask=torch.zeros_like(MASK), num_tokens=0)
    loss.backward()
    assert loss.item() == 0.0
    assert theta.grad is not None
    assert torch.equal(theta.grad, torch.zeros(2, 2))
    assert set(sums.means().values()) == {None}


def test_micro_batches_add_up_to_the_whole_batch():
    whole, whole_sums = loss_of()
    parts = [
        loss_of(
            theta=THETA[row],
            old=OLD[row],
            rollout=ROLLOUT[row],
            advantages=ADVANTAGES[row],
            mask=MASK[row],
        )
        for row in (slice(0, 1), slice(1, 2))
    ]
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole.item(), abs=1e-6)
    total = LossSums() + parts[0][1] + parts[1][1]
    assert total.means() == pytest.approx(whole_sums.means(), abs=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"theta": THETA[:1]}, r"theta must be FP32 \(2, 2\).*got torch.float32 \(1, 2\)"),
        ({"old": OLD.double()}, r"old must be FP32 \(2, 2\).*got torch.float64"),
        ({"advantages": torch.ones(3)}, r"advantages must be FP32 \(2,\)"),
        ({"mask": MASK.float()}, "mask must be bool"),
        ({"num_tokens": 3}, "got 3, but this micro-batch alone has 4"),
        ({"rollout": ROLLOUT * math.nan}, "rollout must be finite"),
    ],
)
def test_bad_input_raises(change, message):
    with pytest.raises(ValueError, match=message):
        loss_of(**change)
