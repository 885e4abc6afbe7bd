"""What holds for each format: its functions agree with one another on every hard input."""

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron_trace.formats import four_over_six, mxfp4, mxfp8, ops, reference
from megatron_trace.formats.packing import pack_hint
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.hard_inputs import HardInput, hard_inputs

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CASES = {dtype: hard_inputs(dtype) for dtype in DTYPES}


@dataclass(frozen=True)
class Format:
    """A module of the common functions, and how to call it.

    Attributes:
        module: Where the functions are.
        settings: Keyword arguments of those that round by themselves.
        block_size: Values of a block.
        code_bits: Bits of a code.
        scale: "tensor", "rows" or None: what the global scale is.
    """

    module: ModuleType
    settings: dict[str, Any]
    block_size: int
    code_bits: int
    scale: str | None

    def arguments(self, case: HardInput) -> tuple[torch.Tensor, Any]:
        """Gives x in whole blocks and a global scale."""
        x = torch.nn.functional.pad(case.x, (0, -case.x.shape[-1] % self.block_size))
        if self.scale is None:
            return x, None
        if self.scale == "tensor":
            return x, case.global_scale
        return x, case.global_scale * self.row_factors(x)

    def scale_of(self, x: torch.Tensor, value: float) -> Any:
        """Gives a global scale of about `value` for x."""
        return {None: None, "tensor": value, "rows": value * self.row_factors(x)}[self.scale]

    def row_factors(self, x: torch.Tensor) -> torch.Tensor:
        """Gives FP32 [..., 1], 1 to 1.5, another for each of 5 neighbouring rows."""
        factors = 1 + torch.arange(math.prod(x.shape[:-1]), dtype=torch.float32) % 5 / 8
        return factors.reshape(*x.shape[:-1], 1)


FORMATS = {
    "nvfp4": Format(reference, {}, 16, 4, "tensor"),
    "nvfp4_rows": Format(reference, {}, 16, 4, "rows"),
    "four_over_six_mse": Format(four_over_six, {"error": "mse"}, 16, 4, "tensor"),
    "four_over_six_mae_rows": Format(four_over_six, {"error": "mae"}, 16, 4, "rows"),
    "mxfp4_rceil": Format(mxfp4, {}, 32, 4, None),
    "mxfp4_floor": Format(mxfp4, {"scale_rule": "floor"}, 32, 4, None),
    "mxfp4_even": Format(mxfp4, {"scale_rule": "even"}, 32, 4, None),
    "mxfp4_ceil": Format(mxfp4, {"scale_rule": "ceil"}, 32, 4, None),
    "mxfp8_rceil": Format(mxfp8, {}, 32, 8, None),
    "mxfp8_floor": Format(mxfp8, {"scale_rule": "floor"}, 32, 8, None),
}


@pytest.fixture(params=FORMATS)
def fmt(request: pytest.FixtureRequest) -> Format:
    return FORMATS[request.param]


@pytest.fixture(params=DTYPES, ids=str)
def cases(request: pytest.FixtureRequest) -> list[HardInput]:
    return CASES[request.param]


@pytest.mark.parametrize("rounded_to", [None, torch.bfloat16])
def test_rtn_is_decode_of_encode(fmt: Format, cases: list[HardInput], rounded_to) -> None:
    for case in cases:
        x, scale = fmt.arguments(case)
        codes, scale_bytes = fmt.module.encode(x, scale, **fmt.settings)
        expected = fmt.module.decode(codes, scale_bytes, scale, rounded_to or x.dtype).to(x.dtype)
        got = fmt.module.rtn(x, scale, dtype=rounded_to, **fmt.settings)
        assert_same_bytes(got, expected, case.name, any_nan=True)


def test_rtn_record_gives_rtn_and_its_codes(fmt: Format, cases: list[HardInput]) -> None:
    for case in cases:
        x, scale = fmt.arguments(case)
        codes, expected_bytes = fmt.module.encode(x, scale, **fmt.settings)
        expected = fmt.module.rtn(x, scale, **fmt.settings)
        for num_bits in (1, 2, fmt.code_bits):
            y, hint, scale_bytes = fmt.module.rtn_record(
                x, scale, num_bits=num_bits, **fmt.settings
            )
            assert_same_bytes(y, expected, case.name, any_nan=True)
            assert_same_bytes(hint, pack_hint(codes, num_bits), f"{case.name}, hint")
            assert_same_bytes(scale_bytes, expected_bytes, f"{case.name}, scale bytes")


def test_guiding_by_its_own_hints_gives_rtn(fmt: Format, cases: list[HardInput]) -> None:
    for case in cases:
        x, scale = fmt.arguments(case)
        for num_bits in (1, 2, fmt.code_bits):
            y, hint, scale_bytes = fmt.module.rtn_record(
                x, scale, num_bits=num_bits, **fmt.settings
            )
            got = fmt.module.guided(x, hint, scale_bytes, scale, num_bits=num_bits)
            assert_same_bytes(got, y, f"{case.name}, {num_bits} bits", any_nan=True)


def test_guided_decodes_the_guided_codes(fmt: Format, cases: list[HardInput]) -> None:
    for case in cases:
        rollout, scale = fmt.arguments(case)
        x = rollout * 1.01
        for num_bits in (1, 2, fmt.code_bits):
            _, hint, scale_bytes = fmt.module.rtn_record(
                rollout, scale, num_bits=num_bits, **fmt.settings
            )
            codes = fmt.module.guided_codes(x, hint, scale_bytes, scale, num_bits=num_bits)
            expected = fmt.module.decode(codes, scale_bytes, scale, x.dtype)
            nan = x.isnan() & (scale_bytes != 0).repeat_interleave(fmt.block_size, -1)
            got = fmt.module.guided(x, hint, scale_bytes, scale, num_bits=num_bits)
            assert_same_bytes(got, torch.where(nan, x, expected), case.name, any_nan=True)


def test_guided_values_follow_the_rollout_under_noise_where_rtn_does_not(fmt: Format) -> None:
    generator = torch.Generator().manual_seed(0)
    rollout = torch.randn(512, 512, generator=generator)
    trainer = rollout * (1 + 0.003 * torch.randn(512, 512, generator=generator))
    scale = fmt.scale_of(rollout, 0.002)
    y, hint, scale_bytes = fmt.module.rtn_record(rollout, scale, num_bits=1, **fmt.settings)
    guided = fmt.module.guided(trainer, hint, scale_bytes, scale, num_bits=1)
    # Measured 0, and 5.3e-3 to 4.8e-2.
    assert (guided != y).float().mean() <= 1e-5
    assert (fmt.module.rtn(trainer, scale, **fmt.settings) != y).float().mean() >= 2e-3


def test_full_codes_never_lead_further_from_the_rollout_than_rounding_to_nearest(
    fmt: Format,
) -> None:
    generator = torch.Generator().manual_seed(0)
    rollout = torch.randn(64, 512, generator=generator)
    trainer = rollout * (1 + 0.1 * torch.randn(64, 512, generator=generator))
    scale = fmt.scale_of(rollout, 0.002)
    y, hint, scale_bytes = fmt.module.rtn_record(
        rollout, scale, num_bits=fmt.code_bits, **fmt.settings
    )
    guided = fmt.module.guided(trainer, hint, scale_bytes, scale, num_bits=fmt.code_bits)
    all_bits = (torch.full((64, 64), bits, dtype=torch.uint8) for bits in (0, 0xFF))
    low, high = (
        fmt.module.guided(trainer, bits, scale_bytes, scale, num_bits=1) for bits in all_bits
    )
    nearest = torch.where((low - trainer).abs() <= (high - trainer).abs(), low, high)
    assert bool(((guided == low) | (guided == high)).all())
    assert bool(((guided - y).abs() <= (nearest - y).abs()).all())
    assert bool(((guided - y).abs() < (nearest - y).abs()).any())


def test_inputs_are_left_as_they_were(fmt: Format) -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    before, scale = x.clone(), fmt.scale_of(x, 0.01)
    _, hint, scale_bytes = fmt.module.rtn_record(x, scale, num_bits=fmt.code_bits, **fmt.settings)
    kept = hint.clone(), scale_bytes.clone()
    fmt.module.guided(x, hint, scale_bytes, scale, num_bits=fmt.code_bits)
    fmt.module.guided_codes(x, hint, scale_bytes, scale, num_bits=fmt.code_bits)
    fmt.module.rtn(x, scale, **fmt.settings)
    assert_same_bytes(x, before, "x")
    assert_same_bytes(hint, kept[0], "hint")
    assert_same_bytes(scale_bytes, kept[1], "scale bytes")


def test_gradients_pass_straight_through(fmt: Format) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    scale = fmt.scale_of(x, 0.0005)
    y = ops.straight_through(x, fmt.module.rtn(x.detach(), scale, **fmt.settings))
    gradient = torch.arange(y.numel(), dtype=torch.float32).reshape(y.shape)
    y.backward(gradient)
    assert_same_bytes(x.grad, gradient)


@pytest.mark.parametrize("length", [8, 17, 24])
def test_a_last_axis_of_no_whole_blocks_is_refused(fmt: Format, length: int) -> None:
    scale = None if fmt.scale is None else 1.0
    message = rf"multiple of {fmt.block_size} long; got shape \(3, {length}\)"
    for call in (fmt.module.encode, fmt.module.rtn):
        with pytest.raises(ValueError, match=message):
            call(torch.ones(3, length), scale)


def test_hints_of_other_widths_are_refused(fmt: Format) -> None:
    scale = None if fmt.scale is None else 1.0
    x = torch.ones(2, 32)
    message = rf"num_bits must be 1 .*, 2 .* or {fmt.code_bits} .*; got 3"
    with pytest.raises(ValueError, match=message):
        fmt.module.rtn_record(x, scale, num_bits=3)
    _, hint, scale_bytes = fmt.module.rtn_record(x, scale, num_bits=1)
    with pytest.raises(ValueError, match=r"hint must be uint8 \(2, \d+\); .* \(2, 4\)"):
        fmt.module.guided(x, hint, scale_bytes, scale, num_bits=fmt.code_bits)
    with pytest.raises(ValueError, match="scale_bytes must be uint8"):
        fmt.module.guided(x, hint, scale_bytes[:1], scale, num_bits=1)
