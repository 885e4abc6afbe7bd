"""MXFP4 and MXFP8: scale rules and codes as literal tables, and an oracle in exact arithmetic."""

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch

from megatron_trace.formats import E2M1_VALUES, mxfp4, mxfp8, pack_bits, pack_codes
from megatron_trace.formats.minifloat import E2M1, E4M3
from megatron_trace.formats.scales_e8m0 import decode as decode_scales
from megatron_trace.formats.scales_e8m0 import scale_bytes_of
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.hard_inputs import MIDPOINTS, near

UP, DOWN = math.inf, -math.inf


def beside(value: float, direction: float) -> float:
    """Gives the FP32 neighbour of a value."""
    return float(torch.nextafter(torch.tensor(value), torch.tensor(direction)))


# Largest magnitude of a block -> exponent of the scale under rceil, floor, even, ceil.
E2M1_EXPONENTS = {
    1.0: (-2, -2, -2, -2),
    beside(1.0, UP): (-2, -2, -2, -1),
    1.5: (-2, -2, -2, -1),
    beside(1.5, UP): (-1, -2, -2, -1),
    beside(1.75, DOWN): (-1, -2, -2, -1),
    1.75: (-1, -2, -1, -1),
    beside(2.0, DOWN): (-1, -2, -1, -1),
    4.0: (0, 0, 0, 0),
    6.0: (0, 0, 0, 1),
    beside(6.0, UP): (1, 0, 0, 1),
    7.0: (1, 0, 1, 1),
    8.0: (1, 1, 1, 1),
    6 * 2.0**100: (100, 100, 100, 101),
    3.4028234663852886e38: (126, 125, 126, 126),
    math.inf: (127, 126, 126, 126),
}
E4M3_EXPONENTS = {
    448.0: (0, 0, 0, 1),
    beside(448.0, UP): (1, 0, 0, 1),
    480.0: (1, 0, 0, 1),
    beside(496.0, DOWN): (1, 0, 0, 1),
    496.0: (1, 0, 1, 1),
    512.0: (1, 1, 1, 1),
    1.0: (-8, -8, -8, -8),
    1.75: (-8, -8, -8, -7),
    1.9: (-7, -8, -8, -7),
    math.inf: (127, 119 + 1, 119 + 1, 119 + 1),
}
# Where the scale would be 2^-127 or less: its biased exponent, of which 0 means a block of zeros.
E2M1_SMALL_BYTES = {
    0.0: (0, 0, 0, 0),
    1e-45: (0, 0, 0, 0),
    6 * 2.0**-127: (0, 0, 0, 1),
    6.001 * 2.0**-127: (1, 0, 0, 1),
    6 * 2.0**-126: (1, 1, 1, 2),
    2.0**-124: (1, 1, 1, 1),
    beside(2.0**-124, DOWN): (1, 0, 1, 1),
    2.0**-126: (0, 0, 0, 0),
}
RULES = ("rceil", "floor", "even", "ceil")


@pytest.mark.parametrize(
    ("element", "table", "bias"),
    [(E2M1, E2M1_EXPONENTS, 127), (E4M3, E4M3_EXPONENTS, 127), (E2M1, E2M1_SMALL_BYTES, 0)],
)
def test_scale_rules_follow_the_table(element, table: dict, bias: int) -> None:
    amax = torch.tensor(list(table))
    got = torch.stack([scale_bytes_of(amax, element, rule) for rule in RULES], dim=1)
    expected = torch.tensor(list(table.values())) + bias
    for row, value in enumerate(table):
        assert got[row].tolist() == expected[row].tolist(), value


@pytest.mark.parametrize("rule", RULES)
def test_nan_has_the_nan_byte(rule) -> None:
    for nan in (math.nan, -math.nan):
        assert scale_bytes_of(torch.tensor([nan]), E2M1, rule).item() == 255


def exact_exponent(amax: Fraction, largest: int, rule: str) -> int:
    """Gives the exponent of the scale in exact arithmetic; E2M1's or E4M3's by `largest`."""
    top, mantissa_bits = (2, 1) if largest == 6 else (8, 3)

    def floor_log2(value: Fraction) -> int:
        exponent = value.numerator.bit_length() - value.denominator.bit_length()
        return exponent if value >= Fraction(2) ** exponent else exponent - 1

    def ceil_log2(value: Fraction) -> int:
        exponent = floor_log2(value)
        return exponent if value == Fraction(2) ** exponent else exponent + 1

    if rule == "rceil":
        return ceil_log2(amax / largest)
    if rule == "ceil":
        return ceil_log2(amax) - top
    exponent = floor_log2(amax)
    if rule == "even":
        fraction = amax / Fraction(2) ** exponent
        exponent += fraction + Fraction(1, 2 ** (mantissa_bits + 1)) >= 2
    return exponent - top


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("element", [E2M1, E4M3])
def test_scale_rules_follow_exact_arithmetic(element, rule) -> None:
    bounds = [1.0, 1.5, 1.75, 1.9375, 1.875, 2.0]
    generator = torch.Generator().manual_seed(0)
    amax = torch.cat(
        (
            near(torch.tensor([bound * 2.0**e for bound in bounds for e in range(-20, 21)]), 2),
            torch.randn(500, generator=generator).abs() + 1e-6,
        )
    )
    got = scale_bytes_of(amax, element, rule).int() - 127
    expected = [
        exact_exponent(Fraction(value), int(element.largest), rule) for value in amax.tolist()
    ]
    assert got.tolist() == expected


def test_every_scale_byte_is_its_power_of_two() -> None:
    scales = decode_scales(torch.arange(256, dtype=torch.uint8))
    assert [math.log2(scale) for scale in scales[:255].tolist()] == list(range(-127, 128))
    assert bool(scales[255].isnan())


@pytest.mark.parametrize("byte", [0, 1, 126, 127, 128, 254, 255])
def test_mxfp4_decodes_as_ocp_says(byte: int) -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(2).unsqueeze(0)
    values = mxfp4.decode(codes, torch.tensor([[byte]], dtype=torch.uint8))[0]
    for code in range(16):
        magnitude = Fraction(E2M1_VALUES[code & 7]) * Fraction(2) ** (byte - 127)
        sign = -1 if code > 7 else 1
        if byte == 255:
            assert math.isnan(values[code])
        elif magnitude > Fraction(3.4028234663852886e38):
            assert values[code] == sign * math.inf
        else:
            assert values[code] == sign * float(magnitude)
            assert math.copysign(1, values[code]) == sign


def test_mxfp8_decodes_as_torch_does() -> None:
    codes = torch.arange(256, dtype=torch.uint8).reshape(8, 32)
    scale_bytes = torch.arange(120, 128, dtype=torch.uint8).unsqueeze(1)
    expected = codes.view(torch.float8_e4m3fn).float() * decode_scales(scale_bytes)
    assert_same_bytes(mxfp8.decode(codes, scale_bytes), expected, any_nan=True)


def test_mxfp8_codes_are_those_of_torchs_cast() -> None:
    ladder = torch.tensor(E4M3.ladder)
    values = near(torch.cat((ladder, (ladder[1:] + ladder[:-1]) / 2)))
    x = torch.nn.functional.pad(values, (0, -values.numel() % 31)).reshape(-1, 31)
    x = torch.cat((torch.full((len(x), 1), 448.0), x.clamp(-448, 448)), dim=1)
    for sign in (1, -1):
        codes, scale_bytes = mxfp8.encode(sign * x)
        assert bool((scale_bytes == 127).all())
        assert_same_bytes(codes, (sign * x).to(torch.float8_e4m3fn).view(torch.uint8))


def test_mxfp4_rounds_to_nearest_even() -> None:
    bounds = near(torch.tensor(MIDPOINTS + E2M1_VALUES + (5.5, 6.0)))
    x = torch.nn.functional.pad(bounds.clamp(-6, 6), (0, -bounds.numel() % 31)).reshape(-1, 31)
    x = torch.cat((torch.full((len(x), 1), 6.0), x), dim=1)
    codes, scale_bytes = mxfp4.encode(x)
    assert bool((scale_bytes == 127).all())
    for value, code in zip(x.flatten().tolist(), codes.flatten().tolist(), strict=True):
        magnitude = abs(value)
        distance = [abs(Fraction(step) - Fraction(magnitude)) for step in E2M1_VALUES]
        nearest = [i for i in range(8) if distance[i] == min(distance)]
        expected = nearest[0] if len(nearest) == 1 else next(i for i in nearest if i % 2 == 0)
        assert code == expected + 8 * (math.copysign(1, value) < 0), value


# |x| / scale -> (code if the bit is 0, code if the bit is 1), as codes of E4M3: 0x7E is 448.
MXFP8_GUIDED = {
    0.0: (0x00, 0x00),
    2.0**-10: (0x00, 0x01),
    2.0**-9: (0x01, 0x01),
    2.0**-6: (0x08, 0x08),
    1.0: (0x38, 0x38),
    1.06: (0x38, 0x39),
    1.2: (0x3A, 0x39),
    430.0: (0x7E, 0x7D),
    448.0: (0x7E, 0x7D),
    1000.0: (0x7E, 0x7D),
    math.inf: (0x7E, 0x7D),
}


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize(("a", "expected"), MXFP8_GUIDED.items())
def test_one_bit_chooses_between_two_e4m3_values(
    a: float, expected: tuple[int, int], negative: bool
) -> None:
    x = torch.full((32,), -a if negative else a)
    scale_bytes = torch.tensor([127], dtype=torch.uint8)
    got = []
    for bit in (0, 1):
        hint = pack_bits(torch.full((32,), bit, dtype=torch.uint8))
        got.append(mxfp8.guided_codes(x, hint, scale_bytes, num_bits=1).unique().item())
    assert tuple(got) == tuple(code + 128 * negative for code in expected)


@pytest.mark.parametrize("byte", [1, 100, 127, 252])
def test_mxfp4_is_guided_under_the_rollouts_scale(byte: int) -> None:
    # The table of guided rounding at 2^(byte - 127), by the candidates' definition.
    scale = 2.0 ** (byte - 127)
    a = torch.tensor([low + (high - low) * 0.3 for low, high in pairwise(E2M1_VALUES)])
    x = torch.nn.functional.pad(a * scale, (0, 25))
    scale_bytes = torch.tensor([byte], dtype=torch.uint8)
    for code in range(8):
        hint = pack_codes(torch.full((32,), code, dtype=torch.uint8))
        got = mxfp4.guided_codes(x, hint, scale_bytes, num_bits=4)[:7].tolist()
        assert got == [min(max(code, index), index + 1) for index in range(7)]


@pytest.mark.parametrize("module", [mxfp4, mxfp8])
def test_a_block_with_byte_0_is_zero_whatever_the_trainer_has(module) -> None:
    _, hint, scale_bytes = module.rtn_record(torch.zeros(2, 32), num_bits=1)
    assert scale_bytes.unique().tolist() == [0]
    y = module.guided(torch.full((2, 32), -3.0), hint, scale_bytes, num_bits=1)
    assert_same_bytes(y, torch.zeros(2, 32))


@pytest.mark.parametrize("rule", ["floor", "even"])
def test_rules_that_saturate_give_the_largest_code(rule) -> None:
    x = torch.full((1, 32), 6.9)
    codes, scale_bytes = mxfp4.encode(x, scale_rule=rule)
    assert (codes.unique().item(), scale_bytes.item()) == (7, 127)
    codes, scale_bytes = mxfp8.encode(x / 6.9 * 490, scale_rule=rule)
    assert (codes.unique().item(), scale_bytes.item()) == (0x7E, 127)


@pytest.mark.parametrize("module", [mxfp4, mxfp8])
def test_a_global_scale_or_an_unknown_rule_is_refused(module) -> None:
    x = torch.ones(1, 32)
    _, hint, scale_bytes = module.rtn_record(x, num_bits=1)
    for call in (
        lambda: module.encode(x, 1.0),
        lambda: module.rtn(x, torch.tensor(1.0)),
        lambda: module.decode(module.encode(x)[0], scale_bytes, 1.0),
        lambda: module.guided(x, hint, scale_bytes, 1.0, num_bits=1),
    ):
        with pytest.raises(ValueError, match="no global scale: pass None; got"):
            call()
    with pytest.raises(ValueError, match=r"one of rceil, floor, even, ceil; got 'round'"):
        module.rtn(x, scale_rule="round")


def test_weights_in_mxfp4_and_activations_in_mxfp8_multiply_exactly_in_fp32() -> None:
    # W4A8: products have 2 + 4 significant bits and powers of two, so that FP32 sums of few are
    # exact, and the operands are exact in BF16.
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(4, 32, generator=generator), torch.randn(8, 32, generator=generator)
    for module, operand in ((mxfp8, x), (mxfp4, w)):
        y = module.rtn(operand)
        assert_same_bytes(y.bfloat16().float(), y)
    exact = mxfp8.rtn(x).double() @ mxfp4.rtn(w).double().T
    assert_same_bytes((mxfp8.rtn(x) @ mxfp4.rtn(w).T).double(), exact)
