"""Every objective and correction against values computed by hand."""

import math

import pytest
import torch

from megatron_trace.rl.corrections import importance_weights
from megatron_trace.rl.losses import count_units, policy_loss, summed_loss
from megatron_trace.rl.objectives.settings import LossSettings, loss_settings
from megatron_trace.rl.objectives.values import PolicyBatch, response_tokens
from megatron_trace.rl_config import LossConfig
from megatron_trace.training.rounding import NonFiniteError

OBJECTIVES = ["grpo", "dapo", "gspo", "tbpo", "score_centering"]


def settings_of(objective, **changes):
    return loss_settings("qat", LossConfig(objective=objective, **changes))


def batch_of(ratios, advantages, importance=None, **more):
    """Gives a batch of responses by their ratios theta / old, and old / rollout (1 if left out)."""
    width = max(map(len, ratios))
    old = torch.full((len(ratios), width), math.log(0.3))
    mask = torch.tensor([[n < len(row) for n in range(width)] for row in ratios])

    def padded(rows):
        return torch.tensor([[*row, *[1.0] * (width - len(row))] for row in rows])

    theta = old + padded(ratios).log()
    rollout = old - padded(importance or [[]] * len(ratios)).log()
    return PolicyBatch(theta, old, rollout, torch.tensor(advantages), mask, **more)


def gradient(batch, settings, num_units):
    theta = batch.theta.clone().requires_grad_()
    loss, _ = policy_loss(
        PolicyBatch(**{**vars(batch), "theta": theta}), num_units=num_units, settings=settings
    )
    loss.backward()
    return theta.grad


@pytest.mark.parametrize(
    ("correction", "cap", "expected"),
    [
        # One response with ratios 2, .4 and 8, whose product is 6.4, and one with 1.5.
        ("none", 1.0, [1.0, 1.0, 1.0, 1.0]),
        ("tis", 5.0, [2.0, 0.4, 5.0, 1.5]),
        ("icepop", 5.0, [2.0, 0.0, 0.0, 1.5]),
        ("mis_token", 2.5, [2.0, 0.4, 0.0, 1.5]),
        ("mis_sequence", 2.5, [0.0, 0.0, 0.0, 1.5]),
        ("mis_sequence", 7.0, [6.4, 6.4, 6.4, 1.5]),
    ],
)
def test_weights_of_a_correction(correction, cap, expected):
    batch = batch_of([[1.0] * 3, [1.0]], [1.0, 1.0], [[2.0, 0.4, 8.0], [1.5]])
    settings = LossSettings(correction=correction, importance_cap=cap, importance_floor=0.5)
    weights = importance_weights(response_tokens(batch), settings)
    torch.testing.assert_close(weights.weight, torch.tensor(expected))
    assert weights.masked.tolist() == [value == 0 for value in expected]
    assert weights.capped.tolist() == [correction == "tis" and value == 5 for value in expected]


def test_bounds_of_icepop_are_kept_themselves():
    batch = batch_of([[1.0, 1.0]], [1.0], [[0.5, 5.0]])
    tokens = response_tokens(batch)
    ratio = torch.exp(tokens.old - tokens.rollout)
    settings = LossSettings(
        correction="icepop", importance_floor=float(ratio[0]), importance_cap=float(ratio[1])
    )
    assert not importance_weights(tokens, settings).masked.any()


def test_gspo_equals_hand_computed_values():
    # A = +1, ratios 4 and 1: geometric mean 2, clipped at 1.2. Weights 2 and 1: mean 1.5, 1.8.
    # A = -2, ratio .5: min(-1, .8 * -2) = -1.6. Sum .2, over 2 sequences .1, negated.
    settings = settings_of("gspo", clip_low=0.2, clip_high=0.2)
    batch = batch_of([[4.0, 1.0], [0.5]], [1.0, -2.0], [[2.0, 1.0], [1.0]])
    loss, sums = policy_loss(batch, num_units=2, settings=settings)
    assert loss.item() == pytest.approx(-0.1, abs=1e-6)
    assert sums.clipped == 3
    assert not gradient(batch, settings, 2).any()


def test_gspo_has_the_gradient_of_its_sequence_ratio():
    # Geometric mean of .25 and 1 is .5 = s, within the bounds for A = +1: ds = s / 2 for each log
    # ratio, over 2 sequences: -.5 / 2 / 2 = -.125.
    settings = settings_of("gspo", clip_low=0.2, clip_high=0.2)
    grads = gradient(batch_of([[0.25, 1.0], [1.0]], [1.0, 0.0]), settings, 2)
    torch.testing.assert_close(grads, torch.tensor([[-0.125, -0.125], [0.0, 0.0]]))


@pytest.mark.parametrize(
    ("ratio", "advantage", "importance", "value", "slope"),
    [
        # Importance weights are geometric means up to 2: that of 4 and 16 is 8.
        (1.1, 1.0, (4.0, 16.0), 2 * 1.0004, 0.0),  # min(r, 1 + 4e-4)
        (1.0002, 1.0, (1.0, 1.0), 1.0002, 1.0002),
        (0.5, 1.0, (1.0, 1.0), 0.5, 0.5),  # no lower bound for A >= 0
        (1.0006, -1.0, (0.25, 1.0), -0.5 * 1.0006, -0.5 * 1.0006),  # within 1 + 7e-4
        (1.001, -1.0, (1.0, 1.0), 0.0, 0.0),
        (0.9998, -1.0, (1.0, 1.0), -0.9998, -0.9998),
        (0.9996, -1.0, (1.0, 1.0), 0.0, 0.0),
    ],
)
def test_tbpo_equals_hand_computed_values(ratio, advantage, importance, value, slope):
    batch = batch_of([[ratio, ratio]], [advantage], [list(importance)])
    loss, _ = policy_loss(batch, num_units=1, settings=settings_of("tbpo"))
    assert loss.item() == pytest.approx(-value, abs=1e-6)
    # The mean over the two tokens: each has half of the sequence's gradient.
    expected = torch.full((1, 2), -slope / 2)
    torch.testing.assert_close(gradient(batch, settings_of("tbpo"), 1), expected)


def centering_batch(p, q, sampled, num_top, advantage=1.0):
    """One token over three; the rollout's most likely ones are its first num_top."""
    p, q = torch.tensor(p), torch.tensor(q)
    theta, rollout = p[sampled].log().view(1, 1), q[sampled].log().view(1, 1)
    top = {"top_theta": p[:num_top].log(), "top_rollout": q[:num_top].log()}
    return PolicyBatch(
        theta,
        theta,
        rollout,
        torch.tensor([advantage]),
        torch.ones(1, 1, dtype=torch.bool),
        **{name: values.view(1, 1, -1) for name, values in top.items()},
    )


@pytest.mark.parametrize(
    ("p", "q", "sampled", "expected"),
    [
        # w = min(.5 / .1, 2) = 2; rests .2 and .3: alpha = min(1, 2 * .3 / .2) = 1; head a:
        # min(.5, 2 * .1) - .5 = -.3, b: .3 - .3 = 0. Gain 2 log .5 + .3 log .5.
        ([0.5, 0.3, 0.2], [0.1, 0.6, 0.3], 0, 2.3 * math.log(0.5)),
        # w = .3 / .25 = 1.2; rests .4 and .05: alpha = 2 * .05 / .4 = .25; heads .3 - .25 * .3 =
        # .225. Gain 1.2 log .3 - .225 (log .3 + log .3).
        ([0.3, 0.3, 0.4], [0.7, 0.25, 0.05], 1, 0.75 * math.log(0.3)),
        # q is p: w = 1, alpha = 1, heads 0.
        ([0.3, 0.3, 0.4], [0.3, 0.3, 0.4], 1, math.log(0.3)),
    ],
)
def test_score_centering_equals_hand_computed_values(p, q, sampled, expected):
    batch = centering_batch(p, q, sampled, 2)
    loss, sums = policy_loss(batch, num_units=1, settings=settings_of("score_centering"))
    assert loss.item() == pytest.approx(-expected, abs=1e-6)
    assert sums.capped == (p[sampled] / q[sampled] > 2)


@pytest.mark.parametrize(
    ("p", "q", "sampled", "expected"),
    [
        # rho = .3 / .2 = 1.5; heads .1 - 1.5 * .5 = -.65, .6 - 1.5 * .3 = .15.
        ([0.5, 0.3, 0.2], [0.1, 0.6, 0.3], 0, 1.65 * math.log(0.5) - 0.15 * math.log(0.3)),
        # rho = .05 / .4 = .125; heads .7 - .0375 = .6625, .25 - .0375 = .2125.
        ([0.3, 0.3, 0.4], [0.7, 0.25, 0.05], 1, 0.125 * math.log(0.3)),
    ],
)
def test_score_centering_without_weights_equals_hand_computed_values(p, q, sampled, expected):
    settings = settings_of("score_centering", correction="none")
    loss, sums = policy_loss(centering_batch(p, q, sampled, 2), num_units=1, settings=settings)
    assert loss.item() == pytest.approx(-expected, abs=1e-6)
    assert (sums.weight, sums.capped) == (1.0, 0.0)


@pytest.mark.parametrize("correction", ["tis", "none"])
@pytest.mark.parametrize("q", [[0.1, 0.6, 0.3], [0.7, 0.25, 0.05]])
def test_score_centering_moves_nothing_for_a_constant_advantage(q, correction):
    """The sampled tokens' gradients, weighted by the rollout's probabilities, add up to 0."""
    logits = torch.tensor([0.5, -0.2, 0.1], requires_grad=True)
    total = torch.zeros(())
    for sampled, share in enumerate(q):
        log_p = logits.log_softmax(-1)
        batch = PolicyBatch(
            log_p[sampled].view(1, 1),
            log_p[sampled].detach().view(1, 1),
            torch.tensor([[math.log(q[sampled])]]),
            torch.ones(1),
            torch.ones(1, 1, dtype=torch.bool),
            top_theta=log_p.view(1, 1, 3),
            top_rollout=torch.tensor(q).log().view(1, 1, 3),
        )
        settings = settings_of("score_centering", correction=correction)
        total = total + share * policy_loss(batch, num_units=1, settings=settings)[0]
    total.backward()
    assert logits.grad is not None
    assert logits.grad.abs().max() < 1e-6


@pytest.mark.parametrize("correction", ["tis", "none"])
def test_score_centering_of_all_probability_or_of_one_token_divides_by_nothing(correction):
    for p, q in (([1.0, 0.0, 0.0], [0.5, 0.5, 0.0]), ([0.5, 0.5, 0.0], [1.0, 0.0, 0.0])):
        batch = centering_batch([max(value, 1e-30) for value in p], q, 0, 3)
        grads = gradient(batch, settings_of("score_centering", correction=correction), 1)
        assert torch.isfinite(grads).all()


def test_score_centering_without_the_rollouts_likely_tokens_is_refused():
    with pytest.raises(ValueError, match="score_centering needs the rollout's most likely tokens"):
        policy_loss(batch_of([[1.0]], [1.0]), num_units=1, settings=settings_of("score_centering"))


def random_batch(own=None, *, num_top=4):
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1], [0, 0, 1, 0, 0]]) > 0

    def logprobs(*shape):
        return -torch.rand(*mask.shape, *shape, generator=generator) * 1e-3 - 2.0

    return PolicyBatch(
        logprobs(),
        logprobs(),
        logprobs(),
        torch.tensor([1.0, 3.0, -1.0, 0.5]),
        mask,
        own,
        logprobs(num_top),
        logprobs(num_top),
    )


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_parts_of_ranks_add_up_to_the_loss_and_gradient_of_one(objective):
    """As under context parallelism: all ranks have whole samples, and add up their positions."""
    settings = settings_of(objective)
    positions = torch.arange(5) % 4 < 2
    losses, grads, units = [], [], []
    for own in (None, positions.expand(4, 5), ~positions.expand(4, 5)):
        batch = random_batch(own)
        theta, top = batch.theta.requires_grad_(), batch.top_theta.requires_grad_()
        loss, _ = summed_loss(batch, settings)
        loss.backward()
        losses.append(loss.item())
        units.append(count_units(batch.mask, settings, own))
        grads.append((theta.grad, torch.zeros_like(top) if top.grad is None else top.grad))
    assert losses[0] == pytest.approx(losses[1] + losses[2], abs=1e-6)
    assert units[0] == units[1] + units[2] == (3 if objective in ("gspo", "tbpo") else 8)
    for whole, *parts in zip(*grads, strict=True):
        torch.testing.assert_close(whole, parts[0] + parts[1])
    assert grads[1][0].any(), "the first part must have a gradient"


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_micro_batches_add_up_to_the_batch(objective):
    settings, whole = settings_of(objective), random_batch()
    parts = [
        PolicyBatch(
            **{name: value if value is None else value[rows] for name, value in vars(whole).items()}
        )
        for rows in (slice(0, 3), slice(3, 4))
    ]
    losses = [policy_loss(of, num_units=8, settings=settings) for of in (whole, *parts)]
    assert losses[0][0].item() == pytest.approx(
        sum(loss.item() for loss, _ in losses[1:]), abs=1e-6
    )
    assert (losses[1][1] + losses[2][1]).means() == pytest.approx(losses[0][1].means(), abs=1e-6)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_batch_without_response_has_zero_loss_and_gradient(objective):
    batch = random_batch()
    theta = batch.theta.requires_grad_()
    batch = PolicyBatch(**{**vars(batch), "mask": torch.zeros_like(batch.mask)})
    loss, sums = policy_loss(batch, num_units=0, settings=settings_of(objective))
    loss.backward()
    assert loss.item() == 0.0
    assert not theta.grad.any()
    assert sums.means()["rho_asym"] is None


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_advantage_of_zero_has_no_gradient(objective):
    batch = random_batch()
    theta, top = batch.theta.requires_grad_(), batch.top_theta.requires_grad_()
    batch = PolicyBatch(**{**vars(batch), "advantages": torch.zeros(4)})
    policy_loss(batch, num_units=8, settings=settings_of(objective))[0].backward()
    assert not theta.grad.any()
    assert top.grad is None or not top.grad.any()


@pytest.mark.parametrize("name", ["theta", "old", "rollout", "advantages", "top_theta"])
def test_a_nan_is_an_error_of_its_own(name):
    values = vars(random_batch()) | {}
    values[name] = values[name] * math.nan
    with pytest.raises(NonFiniteError, match="must be finite at every response token"):
        policy_loss(PolicyBatch(**values), num_units=8, settings=settings_of("score_centering"))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_likely_token_of_the_rollout_without_a_probability_is_an_error(value):
    values = vars(random_batch()) | {}
    values["top_rollout"] = values["top_rollout"] * value
    values["top_rollout"][:, :, 1:] = -math.inf
    values["top_rollout"][0, 0, 0] = value
    with pytest.raises(NonFiniteError, match="top_rollout must be finite or -Inf"):
        policy_loss(PolicyBatch(**values), num_units=8, settings=settings_of("score_centering"))


@pytest.mark.parametrize("drift", [89.0, 400.0])
@pytest.mark.parametrize("objective", ["grpo", "gspo", "tbpo"])
def test_a_ratio_beyond_fp32_that_a_bound_leaves_out_has_no_gradient(objective, drift):
    """exp(89) is Inf in FP32, and Inf times the bound's gradient of 0 is NaN."""
    theta = torch.full((1, 3), -1.0, requires_grad=True)
    before = theta.detach() - drift
    batch = PolicyBatch(theta, before, before, torch.ones(1), torch.ones(1, 3).bool())
    loss, sums = policy_loss(batch, num_units=3, settings=settings_of(objective))
    loss.backward()
    assert torch.equal(theta.grad, torch.zeros(1, 3))
    assert math.isfinite(loss.item())
    assert all(value is None or math.isfinite(value) for value in sums.means().values())


@pytest.mark.parametrize("drift", [89.0, 400.0])
@pytest.mark.parametrize("objective", ["grpo", "gspo"])
def test_a_ratio_beyond_fp32_that_nothing_bounds_has_a_gradient_whose_norm_is_known(
    objective, drift
):
    theta = torch.full((1, 3), -1.0, requires_grad=True)
    before = theta.detach() - drift
    batch = PolicyBatch(theta, before, before, -torch.ones(1), torch.ones(1, 3).bool())
    policy_loss(batch, num_units=3, settings=settings_of(objective))[0].backward()
    assert (theta.grad > 1e10).all()
    assert torch.isfinite(theta.grad.norm())


def test_rollout_probabilities_far_from_the_trainers_leave_finite_metrics():
    theta = torch.full((1, 3), -1.0, requires_grad=True)
    batch = PolicyBatch(
        theta, theta.detach(), theta.detach() - 400.0, torch.ones(1), torch.ones(1, 3).bool()
    )
    means = policy_loss(batch, num_units=3, settings=settings_of("grpo"))[1].means()
    assert math.isfinite(means["importance_ratio_std"])
    assert means["importance_capped_share"] == 1.0


def test_rho_asym_and_entropy_equal_hand_computed_values():
    # log(old / rollout): log 2 and -log 4 with A = +1, -log 8 with A = -1, log 16 with A = 0.
    # Amplifying log 2 + log 8 = 4 log 2, damping log 4 = 2 log 2.
    batch = batch_of([[1.0] * 2, [1.0], [1.0]], [1.0, -1.0, 0.0], [[2.0, 0.25], [0.125], [16.0]])
    means = policy_loss(batch, num_units=4, settings=LossSettings())[1].means()
    assert means["rho_asym"] == pytest.approx(2.0, rel=1e-5)
    # rollout = .3 / importance: .15, 1.2, 2.4, .01875
    expected = -sum(math.log(0.3 / r) for r in (2, 0.25, 0.125, 16)) / 4
    assert means["entropy"] == pytest.approx(expected, rel=1e-5)
    mean = (2 + 0.25 + 0.125 + 16) / 4
    square = (2**2 + 0.25**2 + 0.125**2 + 16**2) / 4
    assert means["importance_ratio_std"] == pytest.approx(math.sqrt(square - mean**2), rel=1e-4)
