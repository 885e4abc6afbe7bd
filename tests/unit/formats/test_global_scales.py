"""Global scales of a tensor, of its rows, and rounded up to powers of two."""

import math

import pytest
import torch

from megatron_trace.formats import decode, encode, global_scale_from_amax, guided_codes, reference
from megatron_trace.testing.assertions import assert_same_bytes

# amax -> power-of-two global scale; 2688 = 6 * 448.
POWERS_OF_TWO = {
    2688.0: 1.0,
    2688.001: 2.0,
    2687.0: 1.0,
    1344.0: 0.5,
    1.0: 2.0**-11,
    3e38: 2.0**117,
    math.inf: math.inf,
    0.0: 0.0,
    # The least is a normal number.
    1e-45 * 2688: 2.0**-126,
    1e-38: 2.0**-126,
}


@pytest.mark.parametrize(("amax", "expected"), POWERS_OF_TWO.items())
def test_power_of_two_scales_round_up(amax: float, expected: float) -> None:
    assert global_scale_from_amax(amax, power_of_two=True).item() == expected
    assert global_scale_from_amax(torch.tensor([amax]), True).tolist() == [expected]


def test_nan_stays_nan() -> None:
    assert global_scale_from_amax(math.nan, power_of_two=True).isnan()


def test_global_scales_keep_the_shape_of_amax() -> None:
    amax = torch.rand(3, 5, 1)
    assert global_scale_from_amax(amax).shape == (3, 5, 1)
    assert_same_bytes(global_scale_from_amax(amax)[2, 1], global_scale_from_amax(amax[2, 1]))


def test_products_with_power_of_two_scales_are_exact_in_bf16() -> None:
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    for amax in (x.abs().max(), x.abs().amax(-1, keepdim=True)):
        scale = global_scale_from_amax(amax, power_of_two=True)
        y = reference.rtn(x, scale)
        assert_same_bytes(y.bfloat16().float(), y)
        assert bool((y.abs() <= x.abs().max() * (1 + 2.0**-4)).all())


def test_codes_and_values_do_not_depend_on_which_power_of_two_it_is() -> None:
    # Hence a power-of-two scale may even be dynamic: a token is coded alike in every batch, as long
    # as no block scale leaves E4M3's normal numbers.
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    codes, scale_bytes = encode(x, 2.0**-9)
    for exponent in (-8, -6, -4):
        other_codes, other_bytes = encode(x, 2.0**exponent)
        assert_same_bytes(other_codes, codes)
        assert bool((other_bytes.int() == scale_bytes.int() - 8 * (exponent + 9)).all())
        assert_same_bytes(reference.rtn(x, 2.0**exponent), reference.rtn(x, 2.0**-9))
    assert (encode(x, 0.0015)[0] != codes).float().mean() > 0.05  # another mantissa: other codes


def test_no_block_saturates_under_a_power_of_two_scale() -> None:
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    _, scale_bytes = encode(x, global_scale_from_amax(x.abs().max(), power_of_two=True))
    largest = scale_bytes.view(torch.float8_e4m3fn).float().max().item()
    assert 224 <= largest <= 448


@pytest.mark.parametrize("shape", [(6, 64), (3, 2, 64), (1, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_quantised_as_tensors_of_their_own(shape: tuple, dtype: torch.dtype) -> None:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    scale = global_scale_from_amax(x.abs().amax(-1, keepdim=True))
    codes, scale_bytes = encode(x, scale)
    y, hint, _ = reference.rtn_record(x, scale, num_bits=1)
    trainer = x * 1.01
    guided = reference.guided(trainer, hint, scale_bytes, scale, num_bits=1)
    chosen = guided_codes(trainer, hint, scale_bytes, scale, num_bits=1)
    for row in range(math.prod(shape[:-1])):
        at = torch.unravel_index(torch.tensor(row), shape[:-1])
        one = scale[at].item()
        expected = encode(x[at], one)
        assert_same_bytes(codes[at], expected[0], f"row {row}, codes")
        assert_same_bytes(scale_bytes[at], expected[1], f"row {row}, scale bytes")
        assert_same_bytes(y[at], reference.rtn(x[at], one), f"row {row}, values")
        assert_same_bytes(
            guided[at], reference.guided(trainer[at], hint[at], scale_bytes[at], one, num_bits=1)
        )
        assert_same_bytes(decode(codes, scale_bytes, scale, dtype)[at], y[at], f"row {row}, decode")
        assert_same_bytes(
            decode(chosen, scale_bytes, scale, dtype)[at], guided[at], f"row {row}, guided"
        )


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    scale = global_scale_from_amax(x.abs().amax(-1, keepdim=True))
    alone = encode(x[3:4], scale[3:4])
    x[2] *= 1000
    together = encode(x, global_scale_from_amax(x.abs().amax(-1, keepdim=True)))
    assert_same_bytes(together[0][3:4], alone[0])
    assert_same_bytes(together[1][3:4], alone[1])


def test_one_scale_serves_rows_along_broadcast_axes() -> None:
    # [S, B, K] with a scale for each sample of the batch.
    x = torch.randn(5, 2, 32, generator=torch.Generator().manual_seed(0))
    scale = torch.tensor([0.01, 0.03]).reshape(1, 2, 1)
    y = reference.rtn(x, scale)
    for sample in range(2):
        assert_same_bytes(y[:, sample], reference.rtn(x[:, sample], scale[0, sample]))


def test_a_row_of_zeros_among_others_stays_zero() -> None:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    x[2] = 0
    scale = global_scale_from_amax(x.abs().amax(-1, keepdim=True))
    codes, scale_bytes = encode(x, scale)
    assert scale_bytes[2].tolist() == [0, 0]
    assert_same_bytes(decode(codes, scale_bytes, scale)[2], torch.zeros(32))


@pytest.mark.parametrize("shape", [(2,), (3,), (3, 2), (1, 3, 1), (2, 1), (3, 1, 1)])
def test_a_scale_that_does_not_fit_the_rows_is_refused(shape: tuple) -> None:
    x, scale = torch.ones(3, 32), torch.ones(shape)
    _, hint, scale_bytes = reference.rtn_record(x, 1.0, num_bits=1)
    message = r"global_scale must hold one value, or one for each row .* \(3, 1\); got shape \("
    for call in (
        lambda: encode(x, scale),
        lambda: decode(x.to(torch.uint8), scale_bytes, scale),
        lambda: reference.guided(x, hint, scale_bytes, scale, num_bits=1),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_no_tokens_have_no_scales() -> None:
    x = torch.ones(0, 32)
    codes, scale_bytes = encode(x, global_scale_from_amax(torch.ones(0, 1)))
    assert codes.shape == (0, 32)
    assert scale_bytes.shape == (0, 2)
