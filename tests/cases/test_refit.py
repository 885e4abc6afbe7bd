"""Case 23: weights pushed again and again; derived scales and old buffers must not show.

21 and 22 are conversions of `tests/distributed/test_checkpoints.py`. 25 (Gated DeltaNet's state
around a sleep) needs layers that the engine does not have.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.rollouts import assert_same_rollout
from megatron_trace.testing.tiny_rollout import random_prompts, roll_out, tiny_engine, tiny_weights

pytestmark = pytest.mark.usefixtures("one_rank")

A_VALUE_OF_NO_WEIGHT = 1e4


def _poison(engine: Any) -> None:
    """Fills what a push or a rollout is to write with NaN: parameters, pages, and derived amax."""
    cache = engine._server.context.memory_buffer
    if cache.dtype == torch.uint8:
        # As an E4M3 scale 0xff is NaN.
        cache.fill_(0xFF)
    else:
        cache.fill_(torch.nan)
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.fill_(torch.nan)
    for name, module in engine.model.named_modules():
        if name.endswith("weight_quantizer") and getattr(module, "_amax", None) is not None:
            module._amax.fill_(A_VALUE_OF_NO_WEIGHT)


@pytest.mark.parametrize(
    ("method", "options"),
    [("trace", {}), ("trace", {"quantised_parts": "experts"}), ("bf16", {})],
    ids=["FP4 experts and cache", "FP4 experts", "BF16"],
)
def test_23_pushing_a_b_a_restores_rollouts_bit_for_bit(method: Any, options: Any) -> None:
    a, b = tiny_weights(1), tiny_weights(2)
    # Other amax everywhere: a scale left over from B would give other codes.
    b = {name: 3 * weight for name, weight in b.items()}
    engine = tiny_engine(a, method, hint_layers="all", **options)
    # Of unequal lengths, so that steps read beyond the shorter ones.
    prompts = random_prompts(10)
    digest = engine.push_weights(a, 0)
    first = roll_out(engine, prompts)
    folded = {name: p.clone() for name, p in engine.model.named_parameters()}
    _poison(engine)
    assert engine.push_weights(b, 1) != digest
    other, _ = roll_out(engine, prompts)
    assert all(torch.isfinite(sample.logprobs).all() for sample in other)
    assert [s.tokens for s in other] != [s.tokens for s in first[0]]
    _poison(engine)
    assert engine.push_weights(a, 0) == digest
    for name, parameter in engine.model.named_parameters():
        assert_same_bytes(parameter, folded[name], name)
    assert_same_rollout(roll_out(engine, prompts), first)


@pytest.mark.parametrize("method", ["trace", "bf16"])
def test_23_pages_that_a_broken_policy_left_behind_do_not_reach_the_next(method: Any) -> None:
    """Without checks NaN is stored; the next policy's attention reads beyond short requests."""
    weights = tiny_weights(1)
    engine = tiny_engine(weights, method, check_finite=False)
    prompts = random_prompts(10)
    expected = roll_out(engine, prompts)
    name = "embedding.word_embeddings.weight"
    engine.push_weights(weights | {name: torch.full_like(weights[name], torch.nan)}, 1)
    with pytest.raises(RuntimeError, match="NaN or Inf"):
        roll_out(engine, prompts)
    engine.push_weights(weights, 0)
    assert_same_rollout(roll_out(engine, prompts), expected)
