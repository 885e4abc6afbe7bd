"""Routed experts in CUDA C++ against the specification."""

from __future__ import annotations

import pytest
import torch

from megatron_trace.rollout.kernels import experts as kernel
from megatron_trace.testing.packed_experts import (
    assert_as_specified,
    compared,
    random_experts,
    random_routing,
)

NUM_EXPERTS, TOP_K = 16, 4


def test_says_why_it_cannot_run_on_a_cpu():
    assert "needs a GPU" in str(kernel.why_not(2048, 512, 256, torch.device("cpu")))


@pytest.mark.gpu
class TestOnGPU:
    @pytest.fixture(scope="class")
    def weights(self):
        reason = kernel.why_not(1024, 512, NUM_EXPERTS, torch.device("cuda"))
        assert reason is None, reason
        return random_experts(NUM_EXPERTS, 1024, 512, device="cuda")

    @pytest.mark.parametrize("num_tokens", [1, 7, 64, 300])
    @pytest.mark.parametrize("skewed", [False, True])
    def test_records_equal_the_specification_and_values_are_near(self, weights, num_tokens, skewed):
        x = torch.randn(num_tokens, 1024, device="cuda").bfloat16()
        x[-1, :16] = 0.0
        routing = random_routing(num_tokens, NUM_EXPERTS, TOP_K, device="cuda", skewed=skewed)
        result = compared(x, *routing, weights)
        assert_as_specified(result)

    def test_a_nan_reaches_only_its_own_token(self, weights):
        x = torch.randn(8, 1024, device="cuda").bfloat16()
        x[3, 40] = float("nan")
        routing = random_routing(8, NUM_EXPERTS, TOP_K, device="cuda")
        output = kernel.routed_experts(x, *routing, weights).output
        assert output.isnan().any(-1).tolist() == [row == 3 for row in range(8)]

    def test_a_graph_that_is_replayed_follows_its_inputs(self, weights):
        x = torch.randn(8, 1024, device="cuda").bfloat16()
        experts, probabilities = random_routing(8, NUM_EXPERTS, TOP_K, device="cuda")
        kernel.routed_experts(x, experts, probabilities, weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = kernel.routed_experts(x, experts, probabilities, weights)
        x.copy_(torch.randn_like(x))
        other, _ = random_routing(8, NUM_EXPERTS, TOP_K, device="cuda", skewed=True)
        experts.copy_(other)
        graph.replay()
        expected = kernel.routed_experts(x, experts, probabilities, weights)
        assert torch.equal(captured.output, expected.output)

    def test_rows_are_the_same_in_parts_of_a_step(self, weights):
        num_tokens = kernel.MAX_TOKENS + 3
        x = torch.randn(num_tokens, 1024, device="cuda").bfloat16()
        experts, probabilities = random_routing(num_tokens, NUM_EXPERTS, TOP_K, device="cuda")
        whole = kernel.routed_experts(x, experts, probabilities, weights)
        last = kernel.routed_experts(x[-5:], experts[-5:], probabilities[-5:], weights)
        assert torch.equal(whole.output[-5:], last.output)
        assert torch.equal(whole.fc2_codes[-5:], last.fc2_codes)

    def test_refuses_a_tensor_of_another_shape(self, weights):
        x = torch.randn(8, 512, device="cuda").bfloat16()
        routing = random_routing(8, NUM_EXPERTS, TOP_K, device="cuda")
        with pytest.raises(ValueError, match=r"x must be torch.bfloat16 \(8, 1024\)"):
            kernel.routed_experts(x, *routing, weights)
