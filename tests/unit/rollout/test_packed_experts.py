"""Routed experts as packed codes: the numbers of Megatron's experts on fake-quantised operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.router_replay import RouterReplayAction

from megatron_trace.formats import ops
from megatron_trace.hints import RecordKind, Site
from megatron_trace.rollout.decode_graphs import DecodeGraphs
from megatron_trace.rollout.kernels.experts_reference import routed_experts
from megatron_trace.testing.rollouts import assert_same_rollout, record_of
from megatron_trace.testing.tiny_rollout import (
    random_prompts,
    roll_out,
    tiny_engine,
    tiny_weights,
)

LAYER = 1


@pytest.fixture(scope="module")
def packed_engine(weights):
    """Under power-of-two global scales fake-quantised operands are exact in BF16."""
    return tiny_engine(
        weights,
        power_of_two_scales=True,
        hint_sites=("fc1", "fc2", "k", "v"),
        diagnostic_share=1.0,
        packed_experts="torch",
    )


@pytest.fixture(scope="module")
def forward(packed_engine, exact_products):
    """Gives (output, values of fc2 by expert, chosen experts, what packed experts give)."""
    moe = packed_engine.layers[LAYER].moe
    quantised = {}
    for expert, module in enumerate(moe.experts.local_experts):
        module.linear_fc2.input_quantizer.register_forward_hook(
            lambda _, __, y, expert=expert: quantised.__setitem__(expert, y.clone())
        )
    x = torch.randn(40, 1, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        probabilities, chosen = moe.route(x)[0].topk(4)
        # Outside a step Megatron's experts compute.
        output, _ = moe(x)
    ours = routed_experts(x[:, 0], chosen, probabilities.float(), moe.routed_experts.weights)
    return output[:, 0], quantised, chosen, ours


def test_fc2_gets_the_values_of_the_experts_one_by_one(forward, packed_engine):
    _, quantised, chosen, ours = forward
    scale = packed_engine.layers[LAYER].moe.routed_experts.weights.fc2_input_scale
    values = ops.decode(ours.fc2_codes, ours.fc2_scales, scale)
    for expert, expected in quantised.items():
        tokens, slots = (chosen == expert).nonzero(as_tuple=True)
        assert torch.equal(values[tokens, slots], expected.float()), expert


def test_the_output_is_that_of_the_experts_one_by_one_but_for_roundings_of_the_sum(forward):
    output, _, _, ours = forward
    error = (ours.output.float() - output.float()).abs().amax(-1)
    # Megatron rounds to BF16 each weighted product and each of the 4 partial sums.
    assert (error <= 2.0**-7 * output.float().abs().amax(-1)).all()


def test_a_slot_without_expert_adds_nothing(forward, packed_engine):
    _, _, chosen, _ = forward
    packed = packed_engine.layers[LAYER].moe.routed_experts.weights
    x = torch.randn(3, 128).bfloat16()
    probabilities = torch.full((3, 4), 0.25)
    without = chosen[:3].clone()
    without[:, 1] = -1
    expected = routed_experts(x, chosen[:3][:, [0, 2, 3]], probabilities[:, :3], packed)
    assert torch.equal(routed_experts(x, without, probabilities, packed).output, expected.output)


def test_rollouts_record_the_codes_of_the_experts_one_by_one(
    packed_engine, weights, exact_products
):
    """Of the first MoE layer, whose input no expert has touched, prompts given."""
    one_by_one = tiny_engine(
        weights,
        power_of_two_scales=True,
        hint_sites=("fc1", "fc2", "k", "v"),
        diagnostic_share=1.0,
    )
    prompts = random_prompts(6)
    (ours, store), (theirs, other_store) = (
        roll_out(engine, prompts) for engine in (packed_engine, one_by_one)
    )
    for sample, expected, prompt in zip(ours, theirs, prompts, strict=True):
        for site in (Site.FC1, Site.FC2):
            records = [
                record_of(of, one, 0, site, RecordKind.CODES)
                for of, one in ((store, sample), (other_store, expected))
            ]
            for name in ("payload", "scale_bytes"):
                first, second = (getattr(record, name)[: len(prompt)] for record in records)
                assert torch.equal(first, second), (sample.sample_id, site, name)


def test_rows_of_padding_change_nothing(packed_engine, weights, exact_products):
    padded = tiny_engine(
        weights,
        power_of_two_scales=True,
        hint_sites=("fc1", "fc2", "k", "v"),
        diagnostic_share=1.0,
        packed_experts="torch",
        limits={"cuda_graphs": DecodeGraphs((8,), captured=False)},
    )
    prompts = random_prompts(5)
    assert_same_rollout(roll_out(padded, prompts), roll_out(packed_engine, prompts))


def test_a_failed_push_leaves_the_packed_codes_that_serve(packed_engine, weights, other_weights):
    before = {name: buffer.clone() for name, buffer in packed_engine.model.named_buffers()}
    broken = dict(other_weights)
    name = next(name for name in broken if "local_experts.3.linear_fc2" in name)
    broken[name] = broken[name].clone()
    broken[name][0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        packed_engine.push_weights(broken, policy_version=9)
    after = dict(packed_engine.model.named_buffers())
    assert all(torch.equal(after[name], buffer) for name, buffer in before.items())
    packed_engine.push_weights(other_weights, policy_version=10)
    codes = "routed_experts.fc1_codes"
    changed = dict(packed_engine.model.named_buffers())
    assert any(not torch.equal(changed[n], b) for n, b in before.items() if n.endswith(codes))
    packed_engine.push_weights(weights, policy_version=11)
    restored = dict(packed_engine.model.named_buffers())
    assert all(torch.equal(restored[name], buffer) for name, buffer in before.items())


@pytest.mark.parametrize("config", [{}, {"moe_router_pre_softmax": True}])
def test_experts_are_chosen_as_megatrons_router_does_but_without_its_maps(weights, config):
    engine = tiny_engine(weights, config=config, packed_experts="torch")
    moe: Any = engine.layers[LAYER].moe
    x = torch.randn(40, 1, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    x = x.to(moe.router.weight.device)
    moe.router.router_replay.set_router_replay_action(RouterReplayAction.RECORD)
    with torch.no_grad():
        probabilities, _ = moe.route(x)
        expected = moe.router.router_replay.get_recorded_indices().clone()
        moe.router.router_replay.clear_indices()
        ours, chosen = moe._chosen(x, None)
    recorded = moe.router.router_replay.get_recorded_indices()
    moe.router.router_replay.clear_router_replay_action()
    assert moe._only_chooses
    assert torch.equal(chosen, expected)
    assert torch.equal(recorded, expected)
    assert torch.equal(ours, probabilities.gather(1, chosen))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        # On a GPU it is the tiny model that is too narrow.
        (
            {"packed_experts": "cuda"},
            "packed_experts=cuda cannot run: (it needs a GPU|hidden size)",
        ),
        ({"packed_experts": "torch", "method": "bf16"}, "quantises none"),
        ({"packed_experts": "torch", "number_format": "mxfp4"}, "it computes in nvfp4, not mxfp4"),
        ({"packed_experts": "torch", "method": "quads"}, "adds a second product"),
        ({"packed_experts": "torch", "pattern": "*-*-"}, "the model has no routed experts"),
    ],
)
def test_a_choice_that_cannot_run_says_why(settings, message):
    with pytest.raises(ValueError, match=message):
        tiny_engine(None, **settings)


def test_auto_leaves_megatrons_experts_where_the_kernel_cannot_run():
    moe: Any = tiny_engine(None, packed_experts="auto").layers[LAYER].moe
    assert moe.routed_experts is None


@pytest.mark.gpu
def test_the_kernel_serves_and_records_like_the_reference_captured_too():
    config = {"hidden_size": 512, "moe_ffn_hidden_size": 512}
    wide = tiny_weights(seed=4, config=config)
    prompts = random_prompts(6)
    rollouts = [
        roll_out(
            tiny_engine(
                wide,
                config=config,
                hint_sites=("fc1", "fc2"),
                diagnostic_share=1.0,
                packed_experts=kernels,
                limits={"cuda_graphs": graphs},
            ),
            prompts,
        )
        for kernels, graphs in (("torch", False), ("cuda", False), ("cuda", True))
    ]
    (expected, expected_store), *others = rollouts
    for samples, store in others:
        for sample, like, prompt in zip(samples, expected, prompts, strict=True):
            for site, share in ((Site.FC1, 1.0), (Site.FC2, 0.999)):
                ours, theirs = (
                    record_of(of, one, 0, site, RecordKind.CODES).payload[: len(prompt)]
                    for of, one in ((store, sample), (expected_store, like))
                )
                # Sums have another order, so that a value of fc2's input may round to another one.
                assert (ours == theirs).float().mean() >= share, (sample.sample_id, site)
