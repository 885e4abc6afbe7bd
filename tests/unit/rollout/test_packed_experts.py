"""Routed experts as packed codes: the numbers of Megatron's experts on fake-quantised operands."""

from __future__ import annotations

import pytest
import torch

from megatron_trace.formats import ops
from megatron_trace.hints import Site
from megatron_trace.rollout.kernels.experts_reference import routed_experts
from megatron_trace.rollout.packed_experts import packed_experts
from megatron_trace.testing.tiny_rollout import tiny_engine

LAYER = 1


@pytest.fixture(scope="module")
def forward(weights, exact_products):
    """Gives (input, output, values of fc2 by expert, chosen experts) of a layer, and its packing.

    Under power-of-two global scales the fake-quantised operands are exact in BF16.
    """
    engine = tiny_engine(weights, power_of_two_scales=True, limits={"keep_packed_weights": True})
    moe = engine.layers[LAYER].moe
    quantised = {}
    for expert, module in enumerate(moe.experts.local_experts):
        module.linear_fc2.input_quantizer.register_forward_hook(
            lambda _, __, y, expert=expert: quantised.__setitem__(expert, y.clone())
        )
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 1, 128, generator=generator).bfloat16()
    with torch.no_grad():
        probabilities, chosen = moe.route(x)[0].topk(4)
        output, _ = moe(x)
    packed = packed_experts(
        engine._packed,
        LAYER,
        fc1_input_scale=engine.sites.scale(LAYER, Site.FC1),
        fc2_input_scale=engine.sites.scale(LAYER, Site.FC2),
    )
    ours = routed_experts(x[:, 0], chosen, probabilities.float(), packed)
    return output[:, 0], quantised, chosen, packed, ours


def test_fc2_gets_the_values_of_the_experts_one_by_one(forward):
    _, quantised, chosen, packed, ours = forward
    values = ops.decode(ours.fc2_codes, ours.fc2_scales, packed.fc2_input_scale)
    for expert, expected in quantised.items():
        tokens, slots = (chosen == expert).nonzero(as_tuple=True)
        assert torch.equal(values[tokens, slots], expected.float()), expert


def test_the_output_is_that_of_the_experts_one_by_one_but_for_roundings_of_the_sum(forward):
    output, _, _, _, ours = forward
    error = (ours.output.float() - output.float()).abs().amax(-1)
    # Megatron rounds to BF16 each weighted product and each of the 4 partial sums.
    assert (error <= 2.0**-7 * output.float().abs().amax(-1)).all()


def test_a_slot_without_expert_adds_nothing(forward):
    _, _, chosen, packed, _ = forward
    x = torch.randn(3, 128).bfloat16()
    probabilities = torch.full((3, 4), 0.25)
    without = chosen[:3].clone()
    without[:, 1] = -1
    expected = routed_experts(x, chosen[:3][:, [0, 2, 3]], probabilities[:, :3], packed)
    assert torch.equal(routed_experts(x, without, probabilities, packed).output, expected.output)


def test_a_layer_without_experts_is_refused():
    with pytest.raises(ValueError, match="layer 7 has no packed experts"):
        packed_experts({}, 7, fc1_input_scale=torch.ones(()), fc2_input_scale=torch.ones(()))
