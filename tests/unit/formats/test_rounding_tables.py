"""The rules of rounding as literal tables, and an oracle that shares no trick with the code."""

import math

import pytest
import torch

from megatron_trace.formats import (
    E2M1_VALUES,
    decode,
    encode,
    guided_codes,
    pack_bits,
    pack_codes,
    pack_hint,
)
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.hard_inputs import MIDPOINTS, hard_inputs, near

ONE = 0x38  # E4M3 byte of 1.0
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CASES = {dtype: {case.name: case for case in hard_inputs(dtype)} for dtype in DTYPES}

# |x| / scale -> code of rounding to nearest; ties go to the even code.
NEAREST = {
    0.0: 0,
    0.2: 0,
    0.25: 0,
    0.3: 1,
    0.5: 1,
    0.7: 1,
    0.75: 2,
    1.0: 2,
    1.25: 2,
    1.3: 3,
    1.5: 3,
    1.7: 3,
    1.75: 4,
    2.0: 4,
    2.4: 4,
    2.5: 4,
    2.6: 5,
    3.0: 5,
    3.4: 5,
    3.5: 6,
    4.0: 6,
    5.0: 6,
    5.1: 7,
    6.0: 7,
    6.3: 7,
}

# |x| / scale -> (code if the bit is 0, code if the bit is 1).
GUIDED_1_BIT = {
    0.0: (0, 0),
    1e-30: (0, 1),
    0.25: (0, 1),
    0.49: (0, 1),
    0.5: (1, 1),
    0.51: (2, 1),
    0.99: (2, 1),
    1.0: (2, 2),
    1.01: (2, 3),
    1.49: (2, 3),
    1.5: (3, 3),
    1.51: (4, 3),
    1.99: (4, 3),
    2.0: (4, 4),
    2.49: (4, 5),
    2.51: (4, 5),
    3.0: (5, 5),
    3.01: (6, 5),
    3.99: (6, 5),
    4.0: (6, 6),
    4.01: (6, 7),
    5.0: (6, 7),
    5.99: (6, 7),
    6.0: (6, 7),
    6.01: (6, 7),
    100.0: (6, 7),
    math.inf: (6, 7),
    math.nan: (6, 7),
}

# |x| / scale -> the code that a rollout's code of 0 to 7, of the same sign, leads to.
GUIDED_4_BITS = {
    0.0: (0, 0, 0, 0, 0, 0, 0, 0),
    0.25: (0, 1, 1, 1, 1, 1, 1, 1),
    0.5: (1, 1, 1, 1, 1, 1, 1, 1),
    0.75: (1, 1, 2, 2, 2, 2, 2, 2),
    1.25: (2, 2, 2, 3, 3, 3, 3, 3),
    1.5: (3, 3, 3, 3, 3, 3, 3, 3),
    1.75: (3, 3, 3, 3, 4, 4, 4, 4),
    2.5: (4, 4, 4, 4, 4, 5, 5, 5),
    3.0: (5, 5, 5, 5, 5, 5, 5, 5),
    3.5: (5, 5, 5, 5, 5, 5, 6, 6),
    4.0: (6, 6, 6, 6, 6, 6, 6, 6),
    5.0: (6, 6, 6, 6, 6, 6, 6, 7),
    6.0: (6, 6, 6, 6, 6, 6, 6, 7),
    50.0: (6, 6, 6, 6, 6, 6, 6, 7),
    math.inf: (6, 6, 6, 6, 6, 6, 6, 7),
    math.nan: (6, 6, 6, 6, 6, 6, 6, 7),
}

# |x| / scale -> the code that the two lowest bits 0 to 3 of the rollout's code lead to.
GUIDED_2_BITS = {
    0.0: (0, 0, 0, 0),
    1e-30: (0, 1, 1, 1),
    0.25: (0, 1, 1, 1),
    0.49: (0, 1, 1, 1),
    0.5: (1, 1, 1, 1),
    0.51: (1, 1, 2, 2),
    0.99: (1, 1, 2, 2),
    1.0: (2, 2, 2, 2),
    1.25: (3, 2, 2, 3),
    1.5: (3, 3, 3, 3),
    1.75: (4, 4, 3, 3),
    2.0: (4, 4, 4, 4),
    2.5: (4, 5, 5, 4),
    3.0: (5, 5, 5, 5),
    3.01: (5, 5, 6, 6),
    3.99: (5, 5, 6, 6),
    4.0: (6, 6, 6, 6),
    4.01: (6, 6, 6, 7),
    5.0: (6, 6, 6, 7),
    5.99: (6, 6, 6, 7),
    6.0: (6, 6, 6, 7),
    50.0: (6, 6, 6, 7),
    math.inf: (6, 6, 6, 7),
    math.nan: (6, 6, 6, 7),
}


def guide_one(x: float, code: int, num_bits: int) -> int:
    """Gives the code of one value at scale 1 under the rollout's code."""
    row = torch.full((16,), x)
    hint = torch.full((16,), code, dtype=torch.uint8)
    packed = pack_hint(hint, num_bits)
    scale_bytes = torch.tensor([ONE], dtype=torch.uint8)
    codes = guided_codes(row, packed, scale_bytes, 1.0, num_bits=num_bits).unique()
    assert codes.numel() == 1, f"16 equal values of {x} got codes {codes.tolist()}"
    return int(codes)


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize(("a", "code"), NEAREST.items())
def test_rounds_to_nearest_even_code(a: float, code: int, negative: bool) -> None:
    x = torch.zeros(32)
    x[0], x[5] = 6.0, -a if negative else a
    codes, scale_bytes = encode(x, 1.0)
    assert scale_bytes[0] == ONE
    assert codes[5] == code + 8 * negative


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize(("a", "expected"), GUIDED_1_BIT.items())
def test_mantissa_bit_chooses_between_the_two_candidates(
    a: float, expected: tuple[int, int], negative: bool
) -> None:
    got = tuple(guide_one(math.copysign(a, -1 if negative else 1), bit, 1) for bit in (0, 1))
    assert got == tuple(code + 8 * negative for code in expected)


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize(("a", "expected"), GUIDED_2_BITS.items())
def test_two_bits_choose_the_candidate_nearer_to_the_index_that_they_stand_for(
    a: float, expected: tuple[int, ...], negative: bool
) -> None:
    sign = 8 * negative
    x = math.copysign(a, -1 if negative else 1)
    assert tuple(guide_one(x, pair, 2) for pair in range(4)) == tuple(
        code + sign for code in expected
    )


def test_the_signs_of_the_rollout_do_not_matter_to_two_bits() -> None:
    for a in GUIDED_2_BITS:
        for code in range(16):
            assert guide_one(a, code, 2) == guide_one(a, code & 3, 2), f"{a}, code {code}"


def test_two_bits_equal_full_codes_within_the_window_of_four() -> None:
    """The rollout's index is at most 1 below x's lower candidate, or 1 above its upper one."""
    for a, by_code in GUIDED_4_BITS.items():
        lower = sum(value <= a for value in E2M1_VALUES[:-1]) - 1 if a < 6 else 6
        for code in range(max(lower - 1, 0), min(lower + 2, 7) + 1):
            assert guide_one(a, code, 2) == by_code[code], f"{a}, code {code}"


def test_two_bits_are_the_nearest_congruent_index_by_enumeration() -> None:
    for lower in range(7):
        x = (E2M1_VALUES[lower] + E2M1_VALUES[lower + 1]) / 2
        for pair in range(4):
            indices = [index for index in range(8) if index % 4 == pair]
            distances = [abs(index - lower - 0.5) for index in indices]
            assert distances.count(min(distances)) == 1, "a tie would need a rule"
            rollout = indices[distances.index(min(distances))]
            assert guide_one(x, pair, 2) == (lower if rollout <= lower else lower + 1)


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize(("a", "expected"), GUIDED_4_BITS.items())
def test_full_code_chooses_the_nearer_candidate(
    a: float, expected: tuple[int, ...], negative: bool
) -> None:
    sign = 8 * negative
    x = math.copysign(a, -1 if negative else 1)
    assert tuple(guide_one(x, code + sign, 4) for code in range(8)) == tuple(
        code + sign for code in expected
    )


@pytest.mark.parametrize("a", GUIDED_4_BITS)
def test_full_code_of_the_other_sign_chooses_the_candidate_nearer_zero(a: float) -> None:
    lower = GUIDED_4_BITS[a][0]
    assert {guide_one(a, code, 4) for code in range(8, 16)} == {lower}
    assert {guide_one(-a, code, 4) for code in range(8)} == {lower + 8}


def test_full_code_never_lands_further_from_the_rollout_than_rounding_to_nearest() -> None:
    x = torch.linspace(-7, 7, 1600).reshape(-1, 16)
    scale_bytes = torch.full((100, 1), ONE, dtype=torch.uint8)
    ladder = torch.tensor(E2M1_VALUES)
    table = torch.cat((ladder, -ladder))
    distance = (x.clamp(-6, 6).unsqueeze(-1) - table).abs().amin(-1)
    for code in range(16):
        hint = pack_codes(torch.full((100, 16), code, dtype=torch.uint8))
        guided = table[guided_codes(x, hint, scale_bytes, 1.0, num_bits=4).int()]
        # Of two nearest values, the one nearer to the rollout's: the strictest bound.
        nearest = (x.clamp(-6, 6).unsqueeze(-1) - table).abs() == distance.unsqueeze(-1)
        to_rollout = (table - table[code]).abs()
        best = torch.where(nearest, to_rollout, math.inf).amin(-1)
        assert bool(((guided - table[code]).abs() <= best).all()), f"rollout code {code}"


def oracle_codes(x: torch.Tensor, scale_bytes: torch.Tensor, global_scale: float) -> torch.Tensor:
    """Gives nearest codes by comparing FP32 quotients with a table of bounds."""
    effective = scale_bytes.view(torch.float8_e4m3fn).float() * torch.tensor(global_scale)
    blocks = x.float().unflatten(-1, (x.shape[-1] // 16, 16))
    a = blocks.abs() / effective.unsqueeze(-1)
    codes = torch.zeros(blocks.shape, dtype=torch.uint8)
    for index, bound in enumerate(MIDPOINTS):
        # The bound below an even code belongs to it.
        codes += (a >= bound) if index % 2 else (a > bound)
    codes[a.isnan()] = 7
    codes += torch.signbit(blocks) * torch.tensor(8, dtype=torch.uint8)
    return codes.masked_fill_((scale_bytes == 0).unsqueeze(-1), 0).reshape(x.shape)


def oracle_guided(
    x: torch.Tensor, bits: torch.Tensor, scale_bytes: torch.Tensor, global_scale: float
) -> torch.Tensor:
    """Gives the table of guided rounding, with the floor found by comparisons."""
    effective = scale_bytes.view(torch.float8_e4m3fn).float() * torch.tensor(global_scale)
    blocks = x.float().unflatten(-1, (x.shape[-1] // 16, 16))
    a = blocks.abs() / effective.unsqueeze(-1)
    bit = bits.reshape(blocks.shape)
    ladder = torch.tensor(E2M1_VALUES)
    floor = (a.unsqueeze(-1) >= ladder).sum(-1) - 1
    exact = (a.unsqueeze(-1) == ladder).any(-1)
    codes = torch.where(exact | (floor % 2 == bit), floor, floor + 1)
    codes = torch.where(~(a < 6), 6 + bit, codes)
    codes = codes + torch.signbit(blocks) * 8
    zero = (scale_bytes == 0) | (effective == 0)
    return codes.to(torch.uint8).masked_fill_(zero.unsqueeze(-1), 0).reshape(x.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES[torch.float32])
def test_hard_inputs_follow_the_oracle(name: str, dtype: torch.dtype) -> None:
    case = CASES[dtype][name]
    codes, scale_bytes = encode(case.x, case.global_scale)
    assert_same_bytes(codes, oracle_codes(case.x, scale_bytes, case.global_scale), "codes")
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 2, case.x.shape, dtype=torch.uint8, generator=generator)
    assert_same_bytes(
        guided_codes(case.x, pack_bits(bits), scale_bytes, case.global_scale, num_bits=1),
        oracle_guided(case.x, bits, scale_bytes, case.global_scale),
        "guided codes",
    )


def test_neighbours_of_every_bound_follow_the_oracle_under_every_scale_byte() -> None:
    scale_bytes = torch.arange(1, 0x7F, dtype=torch.uint8)
    global_scale = 0.0123
    effective = scale_bytes.view(torch.float8_e4m3fn).float() * torch.tensor(global_scale)
    bounds = torch.tensor(MIDPOINTS + E2M1_VALUES[1:])
    rows = [near(bounds * scale, ulps=3) for scale in effective]
    x = torch.nn.functional.pad(torch.stack(rows), (0, -rows[0].numel() % 16))
    scale_bytes = scale_bytes.unsqueeze(1).expand(-1, x.shape[1] // 16).contiguous()
    for bit in (0, 1):
        bits = torch.full(x.shape, bit, dtype=torch.uint8)
        assert_same_bytes(
            guided_codes(x, pack_bits(bits), scale_bytes, global_scale, num_bits=1),
            oracle_guided(x, bits, scale_bytes, global_scale),
            f"guided codes, bit {bit}",
        )


def test_every_code_and_scale_byte_decodes_to_its_product() -> None:
    codes = torch.arange(16, dtype=torch.uint8).expand(127, 16).contiguous()
    scale_bytes = torch.arange(127, dtype=torch.uint8).unsqueeze(1)
    values = decode(codes, scale_bytes, 2.0**-5)
    for byte in range(127):
        exponent, mantissa = byte >> 3, byte & 7
        scale = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        for code in range(16):
            expected = math.copysign(E2M1_VALUES[code & 7] * scale / 32, -1 if code > 7 else 1)
            assert values[byte, code] == expected, f"byte {byte}, code {code}"
