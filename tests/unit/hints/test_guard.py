"""The row guard: true hints pass, misplaced and stale ones do not."""

import dataclasses
from typing import Any

import pytest
import torch

from megatron_trace import formats
from megatron_trace.hints import THRESHOLDS, GuardThresholds, RowHealth, accept_rows
from megatron_trace.testing.token_rows import rows_of, with_noise

NVFP4 = THRESHOLDS["nvfp4"]
WIDTHS = [32, 64, 128, 2048]


def guard(
    trainer: torch.Tensor, rollout: torch.Tensor, *, num_bits: int = 1, **thresholds: Any
) -> RowHealth:
    global_scale = formats.global_scale_from_amax(rollout.abs().max())
    codes, scale_bytes = formats.encode(rollout, global_scale)
    pack = formats.pack_bits if num_bits == 1 else formats.pack_codes
    return accept_rows(
        trainer,
        pack(codes),
        scale_bytes,
        global_scale,
        num_bits=num_bits,
        thresholds=dataclasses.replace(NVFP4, **thresholds),
    )


def guard_restored(trainer: torch.Tensor, rollout: torch.Tensor) -> RowHealth:
    """Gives what the guard finds where block scales were stored as residues."""
    global_scale = formats.global_scale_from_amax(rollout.abs().max())
    codes, scale_bytes = formats.encode(rollout, global_scale)
    hint, found = formats.residues.to_residues(formats.pack_bits(codes), scale_bytes, num_bits=1)
    restored = formats.residues.restored(trainer, hint, found, global_scale, num_bits=1)
    return accept_rows(trainer, hint, restored, global_scale, num_bits=1, thresholds=NVFP4)


def accepted_share(health: RowHealth) -> float:
    return health.accepted.float().mean().item()


# Measured shares of bits that agree: .995, .983, .948, the same at every width.
@pytest.mark.parametrize(("noise", "min_agreement"), [(0.003, 0.99), (0.01, 0.975), (0.03, 0.94)])
@pytest.mark.parametrize("num_values", WIDTHS)
def test_true_hints_with_small_noise_are_all_accepted(
    num_values: int, noise: float, min_agreement: float
) -> None:
    x = rows_of(num_values, seed=0)
    health = guard(with_noise(x, noise), x)
    assert health.accepted.all()
    assert health.far_block_share.max() == 0
    assert health.parity_agreement.mean() > min_agreement


# Measured: .9382, .9941, .9988, 1.0000; 2.9 % of the blocks are far, 82.5 % of the bits agree.
@pytest.mark.parametrize(
    ("num_values", "min_accepted"), list(zip(WIDTHS, [0.92, 0.985, 0.995, 1.0], strict=True))
)
def test_true_hints_with_ten_percent_noise_are_mostly_accepted(
    num_values: int, min_accepted: float
) -> None:
    x = rows_of(num_values, seed=0)
    assert accepted_share(guard(with_noise(x, 0.1), x)) >= min_accepted


# Measured for 30 % noise: .129, .112, .040, .000.
@pytest.mark.parametrize(
    ("num_values", "max_accepted"), list(zip(WIDTHS, [0.15, 0.14, 0.06, 0.0], strict=True))
)
def test_true_hints_with_thirty_percent_noise_are_mostly_rejected(
    num_values: int, max_accepted: float
) -> None:
    x = rows_of(num_values, seed=0)
    assert accepted_share(guard(with_noise(x, 0.3), x)) <= max_accepted


# Measured: .0042, .0010, .0000, .0000 (shuffled); .0046, .0005, .0000, .0000 (another sample's);
# .0037, .0012, .0000, .0000 (stale). Tiny rows have few bits to tell by.
MAX_ACCEPTED = list(zip(WIDTHS, [0.01, 0.004, 0.0005, 0.0], strict=True))


@pytest.mark.parametrize(("num_values", "max_accepted"), MAX_ACCEPTED)
def test_hints_of_shuffled_rows_are_rejected(num_values: int, max_accepted: float) -> None:
    x = rows_of(num_values, seed=0)
    health = guard(x, x.roll(1, dims=0))
    assert accepted_share(health) <= max_accepted
    # Measured .77 to .79 and .500 to .502; on real activations .78 and .51.
    assert 0.75 < health.far_block_share.mean() < 0.82
    assert 0.49 < health.parity_agreement.mean() < 0.52


@pytest.mark.parametrize(("num_values", "max_accepted"), MAX_ACCEPTED)
def test_hints_of_another_sample_are_rejected(num_values: int, max_accepted: float) -> None:
    health = guard(rows_of(num_values, seed=0), rows_of(num_values, seed=1))
    assert accepted_share(health) <= max_accepted


@pytest.mark.parametrize(("num_values", "max_accepted"), MAX_ACCEPTED)
def test_stale_hints_are_rejected(num_values: int, max_accepted: float) -> None:
    x = rows_of(num_values, seed=0)
    assert accepted_share(guard(with_noise(x, 1.0), x)) <= max_accepted


# Measured: .0225, .0037, .0002, .0000; with raw scales .0042, .0010, .0000, .0000.
@pytest.mark.parametrize(
    ("num_values", "max_accepted"), list(zip(WIDTHS, [0.04, 0.008, 0.001, 0.0], strict=True))
)
def test_misplaced_rows_with_residues_are_rejected_by_parity_and_distance(
    num_values: int, max_accepted: float
) -> None:
    x = rows_of(num_values, seed=0)
    health = guard_restored(x, x.roll(1, dims=0))
    assert accepted_share(health) <= max_accepted
    # Measured .367 to .374: of the nine distances, 3 and 4 look far.
    assert 0.36 < health.far_block_share.mean() < 0.39
    assert 0.49 < health.parity_agreement.mean() < 0.52


@pytest.mark.parametrize("noise", [0.003, 0.01, 0.03, 0.1])
@pytest.mark.parametrize("num_values", WIDTHS)
def test_true_rows_with_residues_are_accepted_as_with_raw_scales(
    num_values: int, noise: float
) -> None:
    x = rows_of(num_values, seed=0)
    noisy = with_noise(x, noise)
    restored, raw = guard_restored(noisy, x), guard(noisy, x)
    assert abs(accepted_share(restored) - accepted_share(raw)) <= 1e-3


def test_one_misplaced_row_is_rejected_alone() -> None:
    x = rows_of(128, seed=0)[:16]
    hinted = x.clone()
    hinted[5] = x[6]
    assert guard(x, hinted).accepted.logical_not().nonzero().flatten().tolist() == [5]


def test_full_codes_are_judged_by_their_mantissa_bits() -> None:
    x = rows_of(128, seed=0)
    one_bit = guard(with_noise(x, 0.1), x)
    four_bits = guard(with_noise(x, 0.1), x, num_bits=4)
    assert torch.equal(one_bit.parity_agreement, four_bits.parity_agreement)
    assert torch.equal(one_bit.accepted, four_bits.accepted)


def test_leading_axes_are_rows() -> None:
    x = rows_of(64, seed=0)[:12]
    flat = guard(with_noise(x, 0.3), x)
    codes, scale_bytes = formats.encode(x, formats.global_scale_from_amax(x.abs().max()))
    batched = accept_rows(
        with_noise(x, 0.3).view(4, 3, 64),
        formats.pack_bits(codes).view(4, 3, 8),
        scale_bytes.view(4, 3, 4),
        formats.global_scale_from_amax(x.abs().max()),
        num_bits=1,
        thresholds=NVFP4,
    )
    assert torch.equal(batched.accepted.flatten(), flat.accepted)
    assert torch.equal(batched.parity_agreement.flatten(), flat.parity_agreement)
    assert torch.equal(batched.far_block_share.flatten(), flat.far_block_share)


def test_ties_agree_with_the_recording_quantiser() -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    x = torch.tensor([[6.0, *ties, *(-tie for tie in ties), 0.0]])
    neighbours = torch.cat(
        [x, torch.nextafter(x, torch.zeros(1)), torch.nextafter(x, 9 * x.sign())]
    )
    neighbours[:, 0] = 6.0
    # amax 6 gives block scale 1 and leaves the ties on the ladder's own midpoints.
    codes, scale_bytes = formats.encode(neighbours, 1.0)
    health = accept_rows(
        neighbours, formats.pack_bits(codes), scale_bytes, 1.0, num_bits=1, thresholds=NVFP4
    )
    assert health.parity_agreement.tolist() == [1.0, 1.0, 1.0]


def test_rows_of_zeros_on_both_sides_are_accepted() -> None:
    x = rows_of(64, seed=0)[:4]
    x[1] = 0.0
    health = guard(x, x)
    assert health.accepted.all()
    assert health.far_block_share[1] == 0
    assert health.parity_agreement[1] == 1


@pytest.mark.parametrize("zero_side", ["trainer", "rollout"])
def test_rows_of_zeros_on_one_side_are_rejected(zero_side: str) -> None:
    x = rows_of(64, seed=0)[:4]
    zeroed = x.clone()
    zeroed[1] = 0.0
    health = guard(zeroed, x) if zero_side == "trainer" else guard(x, zeroed)
    assert health.accepted.tolist() == [True, False, True, True]
    assert health.far_block_share[1] == 1


def test_zero_blocks_do_not_hide_a_misplaced_block() -> None:
    x = torch.zeros(1, 128)
    hinted = torch.zeros(1, 128)
    x[0, :16] = torch.linspace(1, 0, 16)
    hinted[0, :16] = torch.linspace(-4, 4, 16)
    health = guard(x, hinted)
    assert health.far_block_share.tolist() == [1.0]
    assert not health.accepted.any()


def test_thresholds_decide() -> None:
    x = rows_of(128, seed=0)
    noisy, lenient = with_noise(x, 0.3), {"max_far_blocks": 1.0, "min_parity_agreement": 0.0}
    assert guard(noisy, x, **lenient).accepted.all()
    assert not guard(noisy, x, **lenient | {"min_parity_agreement": 1.0}).accepted.any()
    far = guard(noisy, x, **lenient, max_scale_steps=0).far_block_share.mean()
    near = guard(noisy, x, **lenient, max_scale_steps=126).far_block_share.mean()
    assert far > near == 0


def test_gradients_do_not_flow_through_the_guard() -> None:
    x = rows_of(64, seed=0)[:2].requires_grad_()
    assert not guard(x, x.detach()).parity_agreement.requires_grad


def test_no_rows() -> None:
    empty = torch.zeros(0, 2, dtype=torch.uint8)
    health = accept_rows(torch.zeros(0, 16), empty, empty[:, :1], 1.0, num_bits=1, thresholds=NVFP4)
    assert health.accepted.shape == (0,)


def test_hints_of_another_shape_are_refused() -> None:
    x = rows_of(64, seed=0)[:4]
    codes, scale_bytes = formats.encode(x, 1.0)
    bits = formats.pack_bits(codes)
    for hint, scales in (
        (bits[:3], scale_bytes),
        (bits, scale_bytes[:, :3]),
        (bits[:, :6], scale_bytes),
    ):
        with pytest.raises(ValueError, match=r"must cover x \(4, 64\)"):
            accept_rows(x, hint, scales, 1.0, num_bits=1, thresholds=NVFP4)


def test_ranks_with_half_of_the_columns_each_judge_a_row_as_one_with_all():
    x = rows_of(64, seed=5)
    rollout = torch.cat((x[:, :32], with_noise(x, 0.4)[:, 32:]), dim=1)
    global_scale = formats.global_scale_from_amax(rollout.abs().max())
    codes, scale_bytes = formats.encode(rollout, global_scale)

    def judged(columns: slice, add_up: Any = None) -> RowHealth:
        blocks = slice(columns.start // 16, columns.stop // 16)
        hint = formats.pack_bits(codes[:, columns].contiguous())
        scales = scale_bytes[:, blocks].contiguous()
        how = {"num_bits": 1, "thresholds": NVFP4, "add_up": add_up}
        return accept_rows(x[:, columns].contiguous(), hint, scales, global_scale, **how)

    halves = slice(0, 32), slice(32, 64)
    counts: list[torch.Tensor] = []
    alone = [
        judged(half, lambda found: counts.append(found.clone()) or found).accepted
        for half in halves
    ]
    whole = judged(slice(0, 64))
    assert not torch.equal(alone[0], alone[1])
    for half in halves:
        together = judged(half, lambda _: counts[0] + counts[1])
        for name in ("accepted", "far_block_share", "parity_agreement"):
            assert torch.equal(getattr(together, name), getattr(whole, name)), name


def test_limits_of_kernels_are_no_integers_but_for_the_steps() -> None:
    """Triton would compile 1, an integer, into a kernel that is then launched for other shares."""
    limits = GuardThresholds(1, 2, 0).limits
    assert limits == (2, 1.0, 0.0)
    assert [type(limit) for limit in limits] == [int, float, float]
