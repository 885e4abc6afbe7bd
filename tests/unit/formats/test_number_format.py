"""The formats by name, and `ops` on each of them."""

import pytest
import torch

from megatron_trace.formats import (
    FORMAT_SETS,
    NUMBER_FORMATS,
    NumberFormat,
    format_set,
    mxfp8,
    ops,
    pack_hint,
)
from megatron_trace.formats.minifloat import nearest_codes
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.hard_inputs import hard_inputs

CASES = [case for case in hard_inputs() if case.x.numel() and case.x.shape[-1] % 32 == 0]


@pytest.fixture(params=NUMBER_FORMATS)
def fmt(request: pytest.FixtureRequest) -> NumberFormat:
    return NUMBER_FORMATS[request.param]


def _scale(fmt: NumberFormat, value: float) -> float | None:
    return value if fmt.has_global_scale else None


def _values(seed: int = 0) -> torch.Tensor:
    return torch.randn(64, 128, generator=torch.Generator().manual_seed(seed))


def test_ops_give_what_the_specification_of_each_format_gives(fmt: NumberFormat) -> None:
    specified = fmt.specification
    for case in CASES:
        x, scale = case.x, _scale(fmt, case.global_scale)
        expected = specified.rtn(x, scale, **fmt.rules)
        assert_same_bytes(ops.rtn(x, scale, number_format=fmt), expected, case.name, any_nan=True)
        codes, scale_bytes = specified.encode(x, scale, **fmt.rules)
        packed, got_bytes = ops.encode(x, scale, number_format=fmt)
        assert_same_bytes(packed, pack_hint(codes, fmt.code_bits), case.name)
        assert_same_bytes(got_bytes, scale_bytes, case.name)
        values = ops.decode(packed, got_bytes, scale, number_format=fmt, dtype=torch.bfloat16)
        expected = specified.decode(codes, scale_bytes, scale, torch.bfloat16)
        assert_same_bytes(values, expected, case.name, any_nan=True)
        assert_same_bytes(
            specified.own_scale_bytes(x, scale, **fmt.rules), scale_bytes, f"{case.name} own"
        )
        for bits in fmt.hint_bits:
            _, hint, _ = ops.rtn_record(x, scale, num_bits=bits, number_format=fmt)
            assert_same_bytes(ops.narrowed(packed, bits, number_format=fmt), hint, case.name)
            got = ops.guided(x * 1.01, hint, scale_bytes, scale, num_bits=bits, number_format=fmt)
            expected = specified.guided(x * 1.01, hint, scale_bytes, scale, num_bits=bits)
            assert_same_bytes(got, expected, case.name, any_nan=True)


def test_rows_without_hint_are_rounded_to_nearest_under_their_own_scales(fmt: NumberFormat) -> None:
    rollout, x = _values(), _values() * 1.05
    scale = _scale(fmt, 0.002)
    has_hint = torch.arange(64) % 3 != 0
    for bits in fmt.hint_bits:
        _, hint, scale_bytes = ops.rtn_record(rollout, scale, num_bits=bits, number_format=fmt)
        y = ops.guided(
            x, hint, scale_bytes, scale, num_bits=bits, has_hint=has_hint, number_format=fmt
        )
        guided = ops.guided(x, hint, scale_bytes, scale, num_bits=bits, number_format=fmt)
        assert_same_bytes(y[has_hint], guided[has_hint])
        nearest = ops.rtn(x, scale, number_format=fmt)
        assert_same_bytes(y[~has_hint], nearest[~has_hint])
        assert (guided != nearest).any()


def test_guided_codes_decode_to_the_guided_values(fmt: NumberFormat) -> None:
    rollout, x = _values(), _values() * 1.05
    scale = _scale(fmt, 0.002)
    has_hint = torch.arange(64) % 3 != 0
    for bits in fmt.hint_bits:
        _, hint, scale_bytes = ops.rtn_record(rollout, scale, num_bits=bits, number_format=fmt)
        for rows in (None, has_hint):
            packed, used_bytes = ops.guided_packed(
                x, hint, scale_bytes, scale, num_bits=bits, has_hint=rows, number_format=fmt
            )
            values = ops.decode(packed, used_bytes, scale, number_format=fmt)
            expected = ops.guided(
                x, hint, scale_bytes, scale, num_bits=bits, has_hint=rows, number_format=fmt
            )
            assert_same_bytes(values, expected, f"{bits} bits")


def test_rows_with_hint_must_be_named_one_by_one(fmt: NumberFormat) -> None:
    x, scale = _values(), _scale(fmt, 0.002)
    _, hint, scale_bytes = ops.rtn_record(x, scale, num_bits=1, number_format=fmt)
    for wrong in (torch.ones(63, dtype=torch.bool), torch.ones(64)):
        with pytest.raises(ValueError, match=r"has_hint must be bool \(64,\), one for each row"):
            ops.guided(x, hint, scale_bytes, scale, num_bits=1, has_hint=wrong, number_format=fmt)


def test_effective_scales_are_those_that_codes_were_made_with(fmt: NumberFormat) -> None:
    x, scale = _values(), _scale(fmt, 0.002)
    codes, scale_bytes = fmt.specification.encode(x, scale, **fmt.rules)
    effective = fmt.effective_scales(scale_bytes, scale)
    blocks = x.unflatten(-1, (-1, fmt.block_size))
    again = nearest_codes(fmt.element, blocks, effective).reshape(x.shape)
    assert_same_bytes(again, codes)


def test_own_scales_are_at_distance_0_and_those_of_another_size_are_not(fmt: NumberFormat) -> None:
    x, scale = _values(), _scale(fmt, 0.02)
    own = fmt.specification.own_scale_bytes(x, scale, **fmt.rules)
    assert int(fmt.scale_distance(x, own, scale).max()) == 0
    # Four times as large: two powers of two.
    other = fmt.specification.own_scale_bytes(4 * x, scale, **fmt.rules)
    distance = fmt.scale_distance(x, other, scale)
    # 4over6 may have chosen its larger scale, which is 4 to 6 steps nearer.
    assert int(distance.min()) >= (10 if fmt.name == "nvfp4_4over6" else 16)
    assert int(distance.max()) == 16


def test_a_block_of_4over6_counts_as_near_whichever_scale_it_has() -> None:
    fmt = NUMBER_FORMATS["nvfp4_4over6"]
    x = _values()
    mse, mae = (fmt.specification.own_scale_bytes(x, 0.002, error=e) for e in ("mse", "mae"))
    assert (mse != mae).float().mean() > 0.1
    assert int(fmt.scale_distance(x, mae, 0.002).max()) == 0


def test_global_scales_leave_the_largest_block_scale_of_the_format(fmt: NumberFormat) -> None:
    scale = fmt.global_scale_from_amax(6.0)
    expected = {"nvfp4": 1 / 448, "nvfp4_4over6": 1 / 256}
    if fmt.name in expected:
        assert scale is not None
        assert scale.item() == torch.tensor(expected[fmt.name]).item()
    else:
        assert scale is None


def test_a_format_without_global_scale_takes_none() -> None:
    x = _values()
    for name in ("mxfp4", "mxfp8"):
        with pytest.raises(ValueError, match="MX formats have no global scale: pass None"):
            ops.rtn(x, 0.5, number_format=NUMBER_FORMATS[name])


def test_the_sets_have_the_formats_that_their_names_say() -> None:
    found = {
        name: (fmts.weights.name, fmts.activations.name, fmts.kv_cache.name)
        for name, fmts in FORMAT_SETS.items()
    }
    assert found == {
        "nvfp4": ("nvfp4",) * 3,
        "nvfp4_4over6": ("nvfp4_4over6",) * 3,
        "mxfp4": ("mxfp4",) * 3,
        "mxfp4_w4a8": ("mxfp4", "mxfp8", "mxfp4"),
    }


def test_an_unknown_set_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match="one of nvfp4, nvfp4_4over6, mxfp4, mxfp4_w4a8; got 'fp4"):
        format_set("fp4")


def test_codes_of_eight_bits_are_narrowed_by_torch_only() -> None:
    fmt = NUMBER_FORMATS["mxfp8"]
    packed, _ = ops.encode(_values(), None, number_format=fmt)
    codes, _ = mxfp8.encode(_values())
    assert_same_bytes(packed, codes)
    with pytest.raises(ValueError, match="narrowed by torch only"):
        ops.narrowed(packed, 1, number_format=fmt, implementation="triton")
    with pytest.raises(ValueError, match=r"num_bits must be 1 .* or 8"):
        ops.narrowed(packed, 4, number_format=fmt)
