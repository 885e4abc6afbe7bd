"""Gradients of the public entry points: the identity, everywhere."""

import pytest
import torch

from megatron_trace.formats import ops, reference
from megatron_trace.testing.assertions import assert_same_bytes


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def x(request: pytest.FixtureRequest) -> torch.Tensor:
    # The global scale of .0005 saturates a part of the values: |x| / scale > 6.
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)) * 3
    return x.to(request.param).requires_grad_()


def upstream(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.numel(), dtype=x.dtype).reshape(x.shape) + 1


def test_rtn_passes_every_gradient_on_unchanged(x: torch.Tensor) -> None:
    y = ops.rtn(x, 0.0005)
    assert bool((y.abs() < x.abs() / 2).any()), "nothing saturates: the test shows nothing"
    y.backward(upstream(x))
    assert_same_bytes(x.grad, upstream(x), "gradient")
    assert_same_bytes(y.detach(), reference.rtn(x.detach(), 0.0005), "values")


@pytest.mark.parametrize("num_bits", [1, 2, 4])
def test_guided_passes_every_gradient_on_unchanged(x: torch.Tensor, num_bits: int) -> None:
    _, hint, scale_bytes = ops.rtn_record(x, 0.0005, num_bits=num_bits)
    # A zero block gives zeros, and the gradient passes all the same.
    scale_bytes[0] = 0
    y = ops.guided(x, hint, scale_bytes, 0.0005, num_bits=num_bits)
    y.backward(upstream(x))
    assert_same_bytes(x.grad, upstream(x), "gradient")


def test_values_are_the_quantised_ones_bit_for_bit() -> None:
    # x + (q - x) would round, and lose -0.
    x = torch.tensor([1e8, -1e-30, 3.3], requires_grad=True)
    quantised = torch.tensor([0.1, -0.0, 3.0])
    assert_same_bytes(ops.straight_through(x, quantised).detach(), quantised)


def test_gradient_equals_that_of_the_loss_at_the_quantised_point() -> None:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    y = ops.rtn(x, 0.01)
    (y**3).sum().backward()
    leaf = y.detach().requires_grad_()
    (leaf**3).sum().backward()
    assert_same_bytes(x.grad, leaf.grad)


def test_recorded_values_carry_no_gradient(x: torch.Tensor) -> None:
    assert not any(tensor.requires_grad for tensor in ops.rtn_record(x, 0.01, num_bits=1))


def test_nothing_is_attached_without_gradient_mode(x: torch.Tensor) -> None:
    with torch.no_grad():
        assert not ops.rtn(x, 0.01).requires_grad


def test_a_quantised_tensor_of_another_shape_or_dtype_is_refused() -> None:
    x = torch.ones(2, 16)
    with pytest.raises(ValueError, match=r"float32 \(2, 16\) like x; got torch.float32 \(16,\)"):
        ops.straight_through(x, torch.ones(16))
    with pytest.raises(ValueError, match=r"got torch\.bfloat16"):
        ops.straight_through(x, x.bfloat16())
