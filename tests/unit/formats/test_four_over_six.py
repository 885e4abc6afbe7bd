"""4over6: the choice of each block by an oracle, and that nobody chooses twice."""

import math

import pytest
import torch

from megatron_trace.formats import (
    E2M1_VALUES,
    encode,
    four_over_six,
    global_scale_from_amax,
    reference,
)
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.hard_inputs import hard_inputs
from megatron_trace.testing.integer_inputs import integer_inputs


def e4m3(value: float) -> float:
    """Gives a positive value rounded to E4M3, ties to even, clamped to [2^-9, 448]."""
    value = min(max(value, 2.0**-9), 448.0)
    step = 2.0 ** (max(math.frexp(value)[1] - 1, -6) - 3)
    return round(value / step) * step


def nearest(value: float) -> float:
    """Gives the magnitude of E2M1 nearest to a positive value, of two the even code's."""
    code = min(range(8), key=lambda code: (abs(value - E2M1_VALUES[code]), code % 2))
    return E2M1_VALUES[code]


def oracle_error(block: list[float], scale: float, error: str) -> float:
    terms = (abs(nearest(min(abs(x) / scale, 6.0)) * scale - abs(x)) for x in block)
    return math.fsum(term**2 if error == "mse" else term for term in terms)


@pytest.mark.parametrize("error", ["mse", "mae"])
def test_choices_follow_the_oracle_in_double_precision(error) -> None:
    # Scales of a power-of-two global scale, so that only errors are rounded, not candidates.
    x = integer_inputs(torch.float32)["bell"][:64, :256]
    scale = four_over_six.global_scale_from_amax(x.abs().max(), power_of_two=True)
    _, scale_bytes = four_over_six.encode(x, scale, error=error)
    chosen = scale_bytes.view(torch.float8_e4m3fn).float()
    num_fours = 0
    for block, got in zip(x.reshape(-1, 16).tolist(), chosen.flatten().tolist(), strict=True):
        quotient = max(map(abs, block)) / (6 * scale.item())
        six, four = e4m3(quotient), e4m3(1.5 * quotient)
        errors = [oracle_error(block, s * scale.item(), error) for s in (six, four)]
        if abs(errors[0] - errors[1]) > 1e-5 * errors[0]:
            assert got == (four if errors[1] < errors[0] else six)
        num_fours += got == four
    assert 200 <= num_fours <= 800, num_fours  # of 1024; measured 447 and 329


def test_a_block_with_values_near_5_sixths_takes_4() -> None:
    # 5 lies between 4 and 6; with the largest at 4, 5/6 of it is 3.33, next to 3.
    x = torch.tensor([[6.0] + [5.0] * 15])
    codes, scale_bytes = four_over_six.encode(x, 1.0)
    assert (codes[0, :2].tolist(), scale_bytes.item()) == ([6, 5], 0x3C)  # scale 1.5
    assert encode(x, 1.0)[1].item() == 0x38  # scale 1


def test_a_block_with_values_on_the_ladder_keeps_6() -> None:
    x = torch.tensor([[6.0, 4.0, 3.0, 2.0, 1.5, 1.0, 0.5, 0.0] * 2])
    codes, scale_bytes = four_over_six.encode(x, 1.0)
    assert (codes[0, :8].tolist(), scale_bytes.item()) == ([7, 6, 5, 4, 3, 2, 1, 0], 0x38)


def test_equal_errors_keep_6() -> None:
    # Both candidates hold 6 exactly.
    x = torch.zeros(1, 16)
    x[0, 7] = 6.0
    for error in ("mse", "mae"):
        codes, scale_bytes = four_over_six.encode(x, 1.0, error=error)
        assert (codes[0, 7].item(), scale_bytes.item()) == (7, 0x38)


def test_error_rules_can_choose_differently() -> None:
    x = integer_inputs(torch.float32)["bell"]
    scale = four_over_six.global_scale_from_amax(x.abs().max())
    mse, mae = (four_over_six.encode(x, scale, error=error)[1] for error in ("mse", "mae"))
    share = (mse != mae).float().mean().item()
    assert 0.1 <= share <= 0.2, share  # measured .163


def test_either_rule_lowers_its_own_error_and_never_raises_it() -> None:
    x = integer_inputs(torch.float32)["bell"]
    scale = four_over_six.global_scale_from_amax(x.abs().max())
    six = four_over_six.decode(*encode(x, scale), scale)
    for error, exponent in (("mse", 2), ("mae", 1)):
        y = four_over_six.rtn(x, scale, error=error)
        before, after = (
            ((values - x).abs() ** exponent).unflatten(-1, (-1, 16)).sum(-1) for values in (six, y)
        )
        assert bool((after <= before * (1 + 1e-5)).all())
        assert after.sum() <= 0.96 * before.sum()  # measured .832 and .946


def test_errors_that_overflow_keep_6() -> None:
    x = torch.full((1, 16), 5.0e30)
    x[0, 0] = 6.0e30
    assert four_over_six.encode(x, 1e30)[1].item() == encode(x, 1e30)[1].item()


def test_trainers_take_the_recorded_scale_and_choose_nothing() -> None:
    x = integer_inputs(torch.float32)["bell"]
    scale = four_over_six.global_scale_from_amax(x.abs().max())
    y, hint, scale_bytes = four_over_six.rtn_record(x, scale, num_bits=1, error="mse")
    noisy = x * (1 + 0.003 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)))
    guided = four_over_six.guided(noisy, hint, scale_bytes, scale, num_bits=1)
    assert (guided != y).float().mean() <= 1e-5  # measured 0
    again = four_over_six.encode(noisy, scale, error="mse")[1]
    assert (again != scale_bytes).float().mean() >= 0.02  # measured .049: recomputing would differ


def test_what_is_stored_is_nvfp4() -> None:
    assert four_over_six.guided is reference.guided
    assert four_over_six.guided_codes is reference.guided_codes
    assert four_over_six.decode is reference.decode


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_block_has_one_of_its_two_scales(dtype: torch.dtype) -> None:
    for case in hard_inputs(dtype):
        _, chosen = four_over_six.encode(case.x, case.global_scale)
        _, six = encode(case.x, case.global_scale)
        # The 4 of x is the 6 of 1.5 x.
        _, four = encode(1.5 * case.x.float(), case.global_scale)
        fits = (chosen == six) | ((chosen.int() - four.int()).abs() <= 1)
        assert bool(fits.all()), case.name


def test_256_leaves_room_for_one_and_a_half_and_448_does_not() -> None:
    x = integer_inputs(torch.float32)["bell"]
    amax = x.abs().max()
    for e4m3_max, largest in ((256.0, 384.0), (448.0, 448.0)):
        scale = four_over_six.global_scale_from_amax(amax, e4m3_max=e4m3_max)
        _, scale_bytes = four_over_six.encode(x, scale)
        assert scale_bytes.view(torch.float8_e4m3fn).float().max().item() <= largest
    assert_same_bytes(
        four_over_six.global_scale_from_amax(amax, e4m3_max=448.0), global_scale_from_amax(amax)
    )


def test_unknown_errors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"error must be one of mse, mae; got 'max'"):
        four_over_six.encode(torch.ones(1, 16), 1.0, error="max")
