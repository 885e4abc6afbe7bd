"""Activations of a dense model under two precisions, and how far their codes differ."""

from __future__ import annotations

import pytest
import torch

from megatron_trace.hints.types import Site
from megatron_trace.study import smollm2
from megatron_trace.study.activations import captured_activations, code_mismatches
from megatron_trace.study.gguf_llama import hybrid_weights
from megatron_trace.study.model import StudyModel
from megatron_trace.testing.llama_reference import TINY, random_tensors


@pytest.fixture(scope="module")
def model():
    weights = hybrid_weights(random_tensors(TINY, seed=1), TINY)
    return StudyModel(
        name="tiny",
        config=smollm2.dense_config(TINY),
        pattern="*-*-",
        vocab_size=TINY.vocab_size,
        context=TINY.context,
        weights={name: value.bfloat16() for name, value in weights.items()},
        prompts=[[1]],
        calibration=[],
        eod_token=0,
        rotary_base=TINY.rotary_base,
    )


@pytest.fixture(scope="module")
def tokens():
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 32, (3, 40), generator=generator) for _ in range(2)]


def test_every_dense_mlp_and_attention_is_seen(model, tokens):
    seen = captured_activations(model, tokens, dtype=torch.float32)
    widths = {Site.FC1: 96, Site.FC2: 160, Site.K: 32, Site.V: 32}
    assert {place: tuple(rows.shape) for place, rows in seen.items()} == {
        (layer, site): (240, width) for layer in range(2) for site, width in widths.items()
    }


def test_fc2_sees_the_product_of_gate_and_up(model, tokens):
    seen = captured_activations(model, tokens[:1], dtype=torch.float32)
    fc1 = model.weights["decoder.layers.1.mlp.linear_fc1.weight"].float()
    gate, up = (seen[0, Site.FC1] @ fc1.T).chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(seen[0, Site.FC2], expected, atol=1e-4, rtol=1e-4)


def test_one_step_mismatches_of_another_precision_are_closed_by_the_hints(model, tokens):
    """Measured .9 to 3.7 % to nearest, all one step; guided .003 % at fc2 and 0 elsewhere."""
    train, rollout = (
        captured_activations(model, tokens, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    for place, counts in code_mismatches(train, rollout).items():
        assert counts.rtn_share > 2e-3, place
        assert counts.one_step_share > 0.98, place
        assert counts.guided_values == counts.values
        assert counts.guided_share < 0.05 * counts.rtn_share, place
        assert counts.unexplained == 0


def test_the_same_forward_has_the_same_codes(model, tokens):
    seen = captured_activations(model, tokens, dtype=torch.float32)
    for counts in code_mismatches(seen, seen).values():
        assert (counts.rtn_different, counts.guided_different) == (0, 0)


def test_forwards_of_other_tokens_are_refused(model, tokens):
    two = [captured_activations(model, tokens[:n], dtype=torch.float32) for n in (1, 2)]
    with pytest.raises(ValueError, match="forwards of the same tokens"):
        code_mismatches(*two)
