"""The CUDA source of the routed experts, run on a CPU, against the specification."""

from __future__ import annotations

import ctypes

import pytest
import torch

from megatron_trace.testing import experts_on_cpu
from megatron_trace.testing.packed_experts import (
    assert_as_specified,
    compared,
    random_experts,
    random_routing,
)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if reason := experts_on_cpu.why_not():
        pytest.skip(reason)
    return experts_on_cpu.build(tmp_path_factory.mktemp("experts"), num_warps=3)


# Experts, top-k, hidden size, width, tokens: groups of up to 8 and 16 slots, an expert with more.
@pytest.mark.parametrize("late_copies", [False, True])
@pytest.mark.parametrize("shape", [(4, 2, 512, 512, 9), (2, 1, 512, 1024, 40)])
def test_records_equal_the_specification_in_any_order_of_warps(library, shape, late_copies):
    num_experts, top_k, hidden, width, num_tokens = shape
    weights = random_experts(num_experts, hidden, width, device="cpu")
    x = torch.randn(num_tokens, hidden).bfloat16()
    x[1], x[2, :40], x[3, 5], x[4, 100] = 0.0, -0.0, float("inf"), float("nan")
    experts, probabilities = random_routing(num_tokens, num_experts, top_k, device="cpu")
    experts[::3, -1] = -1
    with experts_on_cpu.on_cpu(library, 2, late_copies=late_copies):
        result = compared(x, experts, probabilities, weights)
    assert_as_specified(result)


@pytest.fixture(scope="module")
def divisors():
    """Powers of two, random numbers, and those whose quotients lie next to midpoints of codes."""
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
    hard = (torch.arange(128, 256, 9) / midpoints[:, None]).float().flatten()
    powers = torch.exp2(torch.arange(-140.0, 120.0, 9.0))
    every = (torch.rand(60) + 0.5, powers, hard, hard * (1 + 2**-23), hard * (1 - 2**-24))
    return torch.cat(every).contiguous()


@pytest.mark.parametrize("of", ["codes", "scales"])
def test_codes_and_scales_are_those_of_a_division(library, divisors, of):
    wrong = getattr(library, f"{of}_unlike_division")
    assert wrong(ctypes.c_void_p(divisors.data_ptr()), len(divisors)) == 0


def test_swish_is_that_of_a_division(library):
    assert library.swish_unlike_division() == 0


def test_ptx_without_a_translation_is_refused():
    with pytest.raises(ValueError, match="no translation: asm"):
        experts_on_cpu.translated('void new_function() {\nasm("bar.sync 0;");\n}')
