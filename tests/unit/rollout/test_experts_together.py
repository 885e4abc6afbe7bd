"""Routed experts that share all but their products, against Megatron's one after another."""

from __future__ import annotations

import pytest

from megatron_trace.rollout.experts_together import ExpertsTogether
from megatron_trace.testing.rollouts import assert_same_rollout
from megatron_trace.testing.tiny_rollout import random_prompts, roll_out, tiny_engine

# 40 prompts of 1 to 9 tokens: experts get many rows, few, or none, and steps are padded.
PROMPTS = random_prompts(40)


@pytest.fixture(scope="module", params=["bf16", "trace"])
def engine(weights, request):
    if request.param == "bf16":
        return tiny_engine(weights, "bf16")
    sites = ("fc1", "fc2", "k", "v")
    return tiny_engine(weights, hint_layers="all", hint_sites=sites, diagnostic_share=1.0)


@pytest.fixture(scope="module")
def rollouts(engine):
    """Gives (samples, store, report) of the experts together, and of one after another."""
    found = []
    for together in (True, False):
        for layer in engine.layers:
            layer.moe.computes_together = together
        samples, store = roll_out(engine, PROMPTS)
        found.append((samples, store, engine.report.as_dict()))
    return found


def test_experts_compute_together_in_a_step(rollouts, engine):
    assert rollouts
    assert all(isinstance(layer.moe._together, ExpertsTogether) for layer in engine.layers)


def test_samples_and_records_are_those_of_the_experts_one_by_one(rollouts):
    assert_same_rollout(*((samples, store) for samples, store, _ in rollouts))


def test_counts_are_those_of_the_experts_one_by_one(rollouts):
    (_, _, ours), (_, _, theirs) = rollouts
    assert ours == theirs


def test_compensated_experts_compute_one_after_another(weights):
    engine = tiny_engine(weights, "quads")
    roll_out(engine, PROMPTS[:4])
    assert all(layer.moe._together is None for layer in engine.layers)
