"""rtn, rtn_record and guided against the codes that they stand for."""

import math

import pytest
import torch

from megatron_trace.formats import (
    decode,
    encode,
    guided_codes,
    ops,
    own_scale_bytes,
    pack_hint,
    reference,
)
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.hard_inputs import hard_inputs

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CASES = {dtype: {case.name: case for case in hard_inputs(dtype)} for dtype in DTYPES}
NAMES = list(CASES[torch.float32])


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
def test_own_scale_bytes_are_those_of_encode(name: str, dtype: torch.dtype) -> None:
    case = CASES[dtype][name]
    expected = encode(case.x, case.global_scale)[1]
    assert_same_bytes(own_scale_bytes(case.x, case.global_scale), expected)


@pytest.mark.parametrize("rounded_to", [None, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rtn_is_decode_of_encode(name: str, dtype: torch.dtype, rounded_to) -> None:
    case = CASES[dtype][name]
    codes, scale_bytes = encode(case.x, case.global_scale)
    expected = decode(codes, scale_bytes, case.global_scale, rounded_to or dtype).to(dtype)
    got = reference.rtn(case.x, case.global_scale, dtype=rounded_to)
    assert_same_bytes(got, expected, "values", any_nan=True)


@pytest.mark.parametrize("num_bits", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rtn_record_gives_rtn_and_its_codes(name: str, dtype: torch.dtype, num_bits: int) -> None:
    case = CASES[dtype][name]
    y, hint, scale_bytes = reference.rtn_record(case.x, case.global_scale, num_bits=num_bits)
    codes, expected_bytes = encode(case.x, case.global_scale)
    assert_same_bytes(y, reference.rtn(case.x, case.global_scale), "values", any_nan=True)
    assert_same_bytes(hint, pack_hint(codes, num_bits), "hint")
    assert_same_bytes(scale_bytes, expected_bytes, "scale bytes")


@pytest.mark.parametrize("rounded_to", [None, torch.bfloat16])
@pytest.mark.parametrize("num_bits", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_guided_decodes_the_guided_codes(
    name: str, dtype: torch.dtype, num_bits: int, rounded_to
) -> None:
    case = CASES[dtype][name]
    _, hint, scale_bytes = reference.rtn_record(case.x, case.global_scale, num_bits=num_bits)
    x = case.x * 1.01
    codes = guided_codes(x, hint, scale_bytes, case.global_scale, num_bits=num_bits)
    expected = decode(codes, scale_bytes, case.global_scale, rounded_to or dtype).to(dtype)
    nan = x.isnan() & (expected != 0)
    got = reference.guided(
        x, hint, scale_bytes, case.global_scale, num_bits=num_bits, dtype=rounded_to
    )
    assert_same_bytes(got, torch.where(nan, x, expected), "values", any_nan=True)


@pytest.mark.parametrize("num_bits", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_guiding_by_its_own_hints_gives_rtn(name: str, dtype: torch.dtype, num_bits: int) -> None:
    case = CASES[dtype][name]
    y, hint, scale_bytes = reference.rtn_record(case.x, case.global_scale, num_bits=num_bits)
    got = reference.guided(case.x, hint, scale_bytes, case.global_scale, num_bits=num_bits)
    assert_same_bytes(got, y, "values", any_nan=True)


def test_guided_values_follow_the_rollout_under_noise_where_rtn_does_not() -> None:
    generator = torch.Generator().manual_seed(0)
    rollout = torch.randn(512, 512, generator=generator)
    trainer = rollout * (1 + 0.003 * torch.randn(512, 512, generator=generator))
    y, hint, scale_bytes = reference.rtn_record(rollout, 0.002, num_bits=1)
    one_bit = reference.guided(trainer, hint, scale_bytes, 0.002, num_bits=1)
    assert (one_bit != y).float().mean() <= 1e-5  # measured 0
    assert (reference.rtn(trainer, 0.002) != y).float().mean() >= 5e-3  # measured 2.2e-2


def test_a_nan_is_never_hidden_by_a_hint() -> None:
    x = torch.ones(1, 32)
    _, hint, scale_bytes = reference.rtn_record(x, 0.002, num_bits=1)
    x[0, 3] = math.nan
    y = reference.guided(x, hint, scale_bytes, 0.002, num_bits=1)
    assert y.isnan().nonzero().tolist() == [[0, 3]]


def test_hint_of_a_zero_block_gives_zeros_whatever_the_trainer_has() -> None:
    _, hint, scale_bytes = reference.rtn_record(torch.zeros(2, 16), 0.002, num_bits=1)
    y = reference.guided(torch.full((2, 16), -3.0), hint, scale_bytes, 0.002, num_bits=1)
    assert_same_bytes(y, torch.zeros(2, 16))


def test_codes_under_byte_0_decode_to_plus_zero() -> None:
    # Deployed kernels leave codes of +-6 in a block whose scale underflowed.
    y = decode(torch.full((1, 16), 15, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.uint8), 1)
    assert_same_bytes(y, torch.zeros(1, 16))


def test_block_scale_is_clamped_to_what_e4m3_holds() -> None:
    for amax, byte in ((1e-9, 0x01), (1e9, 0x7E)):
        assert encode(torch.full((1, 16), amax), 1.0)[1].item() == byte


def test_a_number_and_a_tensor_are_the_same_global_scale() -> None:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    assert_same_bytes(reference.rtn(x, 0.0123), reference.rtn(x, torch.tensor(0.0123)))
    assert_same_bytes(reference.rtn(x, 0.0123), reference.rtn(x, torch.tensor([0.0123])))


def test_inputs_are_left_as_they_were() -> None:
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    _, hint, scale_bytes = reference.rtn_record(x, 0.01, num_bits=1)
    kept = hint.clone(), scale_bytes.clone()
    reference.guided(x, hint, scale_bytes, 0.01, num_bits=1)
    guided_codes(x, hint, scale_bytes, 0.01, num_bits=1)
    reference.rtn(x, 0.01)
    assert_same_bytes(x, before, "x")
    assert_same_bytes(hint, kept[0], "hint")
    assert_same_bytes(scale_bytes, kept[1], "scale bytes")


def bad_call(**changes) -> None:
    arguments = {
        "x": torch.ones(2, 32),
        "hint": torch.zeros(2, 4, dtype=torch.uint8),
        "scale_bytes": torch.ones(2, 2, dtype=torch.uint8),
        "global_scale": 1.0,
        "num_bits": 1,
    } | changes
    x = arguments.pop("x")
    ops.guided(x, **arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.ones(2, 24)}, r"multiple of 16.*\(2, 24\)"),
        ({"x": torch.ones(())}, r"multiple of 16.*\(\)"),
        ({"x": torch.ones(2, 32, dtype=torch.int32)}, "float tensor.*int32"),
        ({"num_bits": 3}, "num_bits must be 1 .*, 2 .* or 4 .*got 3"),
        ({"num_bits": 2}, r"hint must be uint8 \(2, 8\); got torch.uint8 \(2, 4\)"),
        ({"num_bits": 4}, r"hint must be uint8 \(2, 16\); got torch.uint8 \(2, 4\)"),
        ({"hint": torch.zeros(2, 4)}, r"hint must be uint8 \(2, 4\); got torch.float32"),
        ({"scale_bytes": torch.ones(3, 2, dtype=torch.uint8)}, r"scale_bytes .*\(2, 2\).*\(3, 2\)"),
        ({"global_scale": torch.ones(2)}, r"global_scale must hold one value.*\(2,\)"),
        ({"implementation": "cuda"}, "implementation must be auto, torch or triton; got 'cuda'"),
    ],
)
def test_bad_input_says_what_was_expected_and_given(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bad_call(**changes)


@pytest.mark.parametrize("length", [15, 17, 24])
def test_a_last_axis_of_no_whole_blocks_is_refused(length: int) -> None:
    for call in (encode, reference.rtn):
        with pytest.raises(ValueError, match=rf"multiple of 16 long; got shape \(3, {length}\)"):
            call(torch.ones(3, length), 1.0)
    with pytest.raises(ValueError, match="multiple of 16"):
        reference.rtn_record(torch.ones(3, length), 1.0, num_bits=1)
