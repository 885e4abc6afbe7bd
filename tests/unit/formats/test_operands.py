"""Operands of GEMMs: exact where they claim to be, and equal in what they stand for."""

import pytest
import torch

from megatron_trace.formats import decode, encode, global_scale_from_amax
from megatron_trace.formats.operands import Operand, operand, product
from megatron_trace.testing.assertions import assert_same_bytes


def operand_pair(power_of_two: bool, scale_at, *, per_row: bool = False):
    """Gives operands of activations [48, 256] and weights [32, 256], and the exact FP64 product."""
    generator = torch.Generator().manual_seed(0)
    found, exact = [], []
    for rows in (48, 32):
        x = torch.randn(rows, 256, generator=generator)
        amax = x.abs().amax(-1, keepdim=True) if per_row else x.abs().max()
        scale = global_scale_from_amax(amax, power_of_two)
        codes, scale_bytes = encode(x, scale)
        found.append(operand(codes, scale_bytes, scale, scale_at=scale_at))
        exact.append(decode(codes, scale_bytes, 1.0).double() * scale.double())
    return *found, exact[0] @ exact[1].T


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("per_row", [False, True])
def test_accumulator_scales_leave_the_operands_exact(per_row: bool) -> None:
    x, w, exact = operand_pair(False, "accumulator", per_row=per_row)
    assert x.values.dtype == torch.bfloat16
    assert relative_error(product(x, w, dtype=torch.float32), exact) <= 2e-7  # measured 3.7e-8


@pytest.mark.parametrize("per_row", [False, True])
def test_scales_in_the_operands_round_them(per_row: bool) -> None:
    x, w, exact = operand_pair(False, "operand", per_row=per_row)
    error = relative_error(product(x, w, dtype=torch.float32), exact)
    assert 5e-4 <= error <= 4e-3, error  # measured 2.2e-3 and 2.4e-3


@pytest.mark.parametrize("per_row", [False, True])
def test_power_of_two_scales_are_exact_either_way(per_row: bool) -> None:
    baked = product(*operand_pair(True, "operand", per_row=per_row)[:2], dtype=torch.float32)
    x, w, exact = operand_pair(True, "accumulator", per_row=per_row)
    assert_same_bytes(baked, product(x, w, dtype=torch.float32))
    assert relative_error(baked, exact) <= 2e-7  # measured 0


def test_every_code_and_block_scale_is_exact_in_bf16() -> None:
    codes = torch.arange(16, dtype=torch.uint8).expand(127, 16).contiguous()
    scale_bytes = torch.arange(127, dtype=torch.uint8).unsqueeze(1)
    values = operand(codes, scale_bytes, 0.0123, scale_at="accumulator").values
    assert_same_bytes(values.float(), decode(codes, scale_bytes, 1.0))


def test_the_result_is_rounded_once() -> None:
    x, w = (Operand(torch.ones(1, 16).bfloat16(), torch.tensor(scale)) for scale in (0.3, 1.7))
    assert_same_bytes(product(x, w), (torch.tensor([[16.0]]) * (x.factor * w.factor)).bfloat16())


def test_an_unknown_place_is_refused() -> None:
    codes, scale_bytes = encode(torch.ones(1, 16), 1.0)
    with pytest.raises(ValueError, match="scale_at must be operand or accumulator; got 'output'"):
        operand(codes, scale_bytes, 1.0, scale_at="output")
