"""Residual compensation of the rollout's experts (QUADS), by hand and in the engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_trace.config import TraceConfig
from megatron_trace.formats import FORMAT_SETS
from megatron_trace.hints import Site
from megatron_trace.models.hybrid import expert_linears, named_expert_linears
from megatron_trace.rollout.compensation import (
    ResidualCompensation,
    largest_channels,
    num_compensated,
)
from megatron_trace.rollout.quantize import site_quantisers
from megatron_trace.testing.tiny_rollout import random_prompts, roll_out, tiny_engine


@pytest.fixture(scope="module")
def quads_engine(weights):
    return tiny_engine(weights, "quads")


@pytest.fixture(scope="module")
def qat_engine(weights):
    return tiny_engine(weights, "qat")


def test_the_channels_with_the_largest_residual_are_chosen_in_ascending_order():
    # Sums of |R|: 3, 0, 2, 2, 5.
    residual = torch.tensor([[1.0, 0.0, -2.0, 1.0, 0.0], [-2.0, 0.0, 0.0, 1.0, 5.0]])
    assert largest_channels(residual, 2).tolist() == [0, 4]
    # Of the two channels of equal size the first.
    assert largest_channels(residual, 3).tolist() == [0, 2, 4]


def test_half_of_the_channels_in_whole_blocks_is_quantised_twice():
    assert num_compensated(128, 0.5, 16) == 64
    assert num_compensated(48, 0.5, 16) == 16
    assert num_compensated(16, 0.5, 16) == 0


def place_of(x, tokens, num_rows, scale=1.0):
    """A compensation of NVFP4 whose first quantiser gives x rounded to integers."""
    sites = SimpleNamespace(
        trace=TraceConfig(method="quads"),
        recorder=SimpleNamespace(num_rows=num_rows),
        format_of=lambda site: FORMAT_SETS["nvfp4"].activations,
        scale=lambda layer, site: torch.tensor(scale),
    )
    return ResidualCompensation(
        sites, (0, Site.FC1), lambda x: x.round().bfloat16(), lambda: torch.tensor(tokens)
    )


def output_of(compensation, x, weight):
    linear = torch.nn.Linear(*weight.t().shape, bias=False, dtype=torch.bfloat16)
    linear.weight.data.copy_(weight)
    product = compensation.quantise(x.bfloat16()) @ linear.weight.t()
    return compensation.add(linear, (x,), (product, None))[0]


def test_output_equals_hand_computed_values():
    """Residuals .25 in the even channels and 0 elsewhere; 16 of 32 channels are half of them."""
    x = torch.arange(32.0).view(1, 32) % 4
    x[:, ::2] += 0.25
    weight = torch.zeros(2, 32)
    weight[0, 2], weight[1, 3] = 2.0, 2.0
    # Channel 2 holds 2.25: 2 * 2 + .25 * 2. Channel 3 holds 3, without residual: 3 * 2.
    # The block of residuals is all .25: block scale .25 / 6 = E4M3 .04296875 (11 * 2**-8), and
    # .25 / .04296875 = 5.8 rounds to 6: .2578125. As BF16 4.515625 becomes 4.5.
    expected = torch.tensor([[4.0 + 0.515625, 6.0]]).bfloat16()
    assert torch.equal(output_of(place_of(x, [0], 1), x, weight), expected)


def test_the_choice_depends_on_the_rows_in_the_same_batch():
    """Alone, a row's own residuals are compensated; beside another, those of the other."""
    x = torch.zeros(2, 32)
    x[0, :16], x[1, 16:] = 0.125, 0.375
    weight = torch.ones(1, 32)
    alone = output_of(place_of(x[:1], [0], 1), x[:1], weight)
    together = output_of(place_of(x, [0, 1], 2), x, weight)
    assert alone.item() == pytest.approx(2.0, rel=0.05)
    assert together[0].item() == 0.0


def test_padding_has_no_say_in_the_choice():
    x = torch.zeros(2, 32)
    x[0, :16], x[1, 16:] = 0.125, 0.375
    output = output_of(place_of(x, [0, 5], 1), x, torch.ones(1, 32))
    assert output[0].item() == pytest.approx(2.0, rel=0.05)


def test_every_expert_linear_of_the_engine_is_compensated(quads_engine):
    compensated = [
        (layer.index, expert, matrix)
        for layer in quads_engine.layers
        for expert, matrix, linear in named_expert_linears(layer)
        if linear._forward_hooks
    ]
    assert len(compensated) == 2 * 16 * 2, "two layers of 16 experts with two linears"
    samples, store = roll_out(quads_engine, random_prompts(12))
    assert {sample.settings_digest for sample in samples} == {quads_engine.settings.digest()}
    assert len(store) == 0, "no hints are recorded"


def test_the_input_of_fc1_is_quantised_by_each_expert(quads_engine, qat_engine):
    of_quads = site_quantisers(quads_engine.layers[0])
    of_qat = site_quantisers(qat_engine.layers[0])
    assert (len(of_quads[Site.FC1]), len(of_qat[Site.FC1])) == (16, 1)
    # All tokens reach some expert, so that the amax, and with it the scale, is the same.
    assert quads_engine.settings.global_scales == qat_engine.settings.global_scales
    assert quads_engine.settings.digest() != qat_engine.settings.digest()


def test_compensated_experts_are_nearer_to_bf16_activations(quads_engine, qat_engine):
    """Measured: mean relative error of fc2's product .059, without compensation .092."""
    errors = []
    for engine in (quads_engine, qat_engine):
        seen, handles = [], []

        def note(module, args, output, seen=seen):
            exact = args[0] @ module.weight.t()
            seen.append((output[0].float() - exact.float()).norm() / exact.float().norm())

        for layer in engine.layers:
            layer.moe.computes_together = False  # Otherwise no linear is called.
            for _, matrix, linear in expert_linears(layer.moe):
                if matrix == "fc2":
                    handles.append(linear.register_forward_hook(note))
        roll_out(engine, random_prompts(6))
        for handle in handles:
            handle.remove()
        errors.append(torch.stack([value for value in seen if value.isfinite()]).mean().item())
    assert errors[0] < 0.75 * errors[1], errors


def test_a_model_without_a_whole_block_of_half_its_channels_is_refused(weights):
    with pytest.raises(ValueError, match="moe_ffn_hidden_size=16, of which that is none"):
        tiny_engine(None, "quads", config={"moe_ffn_hidden_size": 16})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hint_bits": 2}, "hint_bits=2 has no effect with method=quads, which reads no hints"),
        ({"hint_layers": "0"}, "hint_layers=0 has no effect"),
        ({"hint_sites": ("k",)}, "hint_sites="),
        ({"missing_hints": "rtn"}, "missing_hints=rtn has no effect"),
        ({"diagnostic_share": 0.5}, "diagnostic_share=0.5 has no effect"),
        ({"save_packed_activations": True}, "save_packed_activations=True has no effect"),
        ({"quantised_parts": "kv"}, "quantised_parts=kv contradicts method=quads"),
        ({"experts": "te"}, "experts=te contradicts method=quads"),
    ],
)
def test_settings_without_effect_on_quads_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        TraceConfig(method="quads", **changes)
