"""What autograd keeps of a forward pass, measured by its hooks."""

from __future__ import annotations

import pytest
import torch

from megatron_trace.config import HINT_SITES
from megatron_trace.testing.saved_activations import saved_activation_bytes
from megatron_trace.testing.single_process import tiny_moe_config
from megatron_trace.training.micro_batch import make_micro_batch

TOP_K, HIDDEN, EXPERT = 4, 128, 64
LAYERS = 2
# The same for every method: fc1's output and the two factors of SwiGLU, and p in FP32.
SWIGLU = TOP_K * (2 * EXPERT + 2 * EXPERT)
PROBABILITY = 4 * TOP_K


@pytest.fixture
def kept(build, rollout):
    """Gives a function that measures bytes per token and layer, by part of the model."""
    rolled = rollout(((9, 8), (9, 8)), sites=HINT_SITES)

    def measure(method, dtype=torch.bfloat16, **options):
        model, sites = build(method, dtype=dtype, **options)
        if sites.quantises:
            sites.settings = rolled.settings
        micro_batch = make_micro_batch(rolled.samples, rolled.store, sites)
        assert micro_batch.valid.all(), "padding would blur the numbers"
        kept = saved_activation_bytes(model, sites, micro_batch)
        return {part: size / 32 / LAYERS for part, size in kept.items()}

    return measure


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bf16_keeps_inputs_and_outputs_of_the_experts(kept, dtype):
    values = TOP_K * (HIDDEN + EXPERT + HIDDEN) + SWIGLU
    assert kept("bf16", dtype)["experts"] == dtype.itemsize * values + PROBABILITY


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("method", ["qat", "trace"])
def test_qat_and_trace_do_not_keep_the_output(kept, method, dtype):
    values = TOP_K * (HIDDEN + EXPERT) + SWIGLU
    assert kept(method, dtype)["experts"] == dtype.itemsize * values + PROBABILITY


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("hint_sites", [("fc1", "k", "v"), HINT_SITES])
@pytest.mark.parametrize("method", ["qat", "trace"])
def test_packed_inputs_take_four_and_a_half_bits_a_value(kept, method, hint_sites, dtype):
    """Nothing else is kept in their place, and hints are not kept again."""
    got = kept(method, dtype, hint_sites=hint_sites, save_packed_activations=True)
    packed = TOP_K * (HIDDEN + EXPERT) * 9 / 16
    assert got["experts"] == packed + dtype.itemsize * SWIGLU + PROBABILITY
    plain = kept(method, dtype, hint_sites=hint_sites)
    assert {p: got[p] for p in got if p != "experts"} == {
        p: plain[p] for p in plain if p != "experts"
    }


def test_sizes_are_those_of_the_tiny_model():
    config = tiny_moe_config("*E*E")
    sizes = (config.moe_router_topk, config.hidden_size, config.moe_ffn_hidden_size)
    assert sizes == (TOP_K, HIDDEN, EXPERT)
