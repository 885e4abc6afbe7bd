"""Recipes in the rollout engine: what serves, what is exported, experts that no token reached."""

from typing import cast

import pytest
import torch

from megatron_trace.formats import decode, unpack_codes
from megatron_trace.models.hybrid import named_expert_linears
from megatron_trace.ptq.hessian import calibrate_with_hessians
from megatron_trace.ptq.recipes import RECIPES
from megatron_trace.ptq.weights import scale_search
from megatron_trace.testing.tiny_rollout import (
    calibration_tokens,
    random_prompts,
    roll_out,
    tiny_engine,
    tiny_weights,
)

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def weights():
    return tiny_weights(seed=1)


@pytest.fixture(scope="module")
def engine(weights):
    return tiny_engine(weights, "qat", limits={"keep_packed_weights": True})


def name_of(layer, expert, matrix):
    position = 2 * layer + 1
    return f"decoder.layers.{position}.mlp.experts.local_experts.{expert}.linear_{matrix}.weight"


@pytest.fixture(scope="module")
def hessians(engine, weights):
    engine.load_weights(weights)
    return calibrate_with_hessians(engine, calibration_tokens())


def test_vanilla_serves_what_a_push_without_recipe_serves(engine, weights):
    assert engine.push_weights(weights, 0) == engine.push_weights(
        weights, 1, rule=RECIPES["vanilla"].rule()
    )


@pytest.mark.parametrize("name", RECIPES)
def test_what_serves_is_what_the_recipe_chose_and_what_is_exported(engine, weights, hessians, name):
    rule = RECIPES[name].rule(hessians)
    engine.push_weights(weights, 0, rule=rule)
    _, exported, _ = engine.quantised_model()
    served = {
        (layer.index, expert, matrix): cast("torch.Tensor", linear.weight)
        for layer in engine.layers
        for expert, matrix, linear in named_expert_linears(layer)
    }
    assert served.keys() == exported.keys()
    for place, packed in exported.items():
        chosen = rule(place, weights[name_of(*place)].bfloat16())
        assert torch.equal(packed.scale_bytes, chosen.scale_bytes.cpu()), place
        assert torch.equal(packed.packed_codes, chosen.packed_codes.cpu()), place
        values = decode(
            unpack_codes(packed.packed_codes),
            packed.scale_bytes,
            packed.global_scale,
            torch.bfloat16,
        )
        assert torch.equal(served[place].cpu(), values), place


def test_recipes_serve_different_weights_and_all_generate(engine, weights, hessians):
    digests = set()
    for name, recipe in RECIPES.items():
        digests.add(engine.push_weights(weights, 0, rule=recipe.rule(hessians)))
        samples, _ = roll_out(engine, random_prompts(3), greedy=True)
        assert all(sample.response_tokens for sample in samples), name
    assert len(digests) == len(RECIPES)


def test_calibration_with_hessians_gives_the_scales_of_one_without(weights, hessians, engine):
    assert engine.settings == tiny_engine(weights, "qat").settings


def test_rows_of_all_experts_are_those_that_were_dispatched(engine, hessians):
    num_tokens = sum(batch.numel() for batch in calibration_tokens())
    top_k = engine.model.config.moe_router_topk
    for layer in engine.layers:
        if layer.moe is None:
            continue
        for matrix in ("fc1", "fc2"):
            rows = [
                h.num_rows for (at, _, m), h in hessians.items() if (at, m) == (layer.index, matrix)
            ]
            assert sum(rows) == num_tokens * top_k


def test_experts_that_no_token_reached_are_quantised_by_squared_error(weights):
    engine = tiny_engine(None, "qat", limits={"keep_packed_weights": True})
    engine.load_weights(weights)
    hessians = calibrate_with_hessians(engine, [torch.tensor([[3]])])
    dead = [place for place, hessian in hessians.items() if not hessian.num_rows]
    assert len(dead) > len(hessians) / 2
    engine.push_weights(weights, 0, rule=RECIPES["h_scale"].rule(hessians))
    _, exported, _ = engine.quantised_model()
    for place in dead:
        expected = scale_search(weights[name_of(*place)].bfloat16())
        assert torch.equal(exported[place].scale_bytes, expected.scale_bytes), place
    samples, _ = roll_out(engine, random_prompts(2), greedy=True)
    assert len(samples) == 2


@pytest.mark.parametrize(
    ("method", "trace"),
    [
        ("bf16", {}),
        ("qat", {"number_format": "mxfp4"}),
        ("qat", {"quantised_parts": "kv"}),
        ("qat", {"power_of_two_scales": True}),
    ],
)
def test_a_rule_where_nothing_is_rounded_as_it_says_is_refused(weights, method, trace):
    engine = tiny_engine(weights, method, **trace)
    with pytest.raises(ValueError, match="a rule chooses NVFP4"):
        engine.push_weights(weights, 1, rule=RECIPES["vanilla"].rule())
