"""ModelOpt's quantisers in the engine, by number format and by what is quantised."""

from __future__ import annotations

import pytest
import torch

from megatron_trace.models.hybrid import named_expert_linears
from megatron_trace.rollout.quantize import site_quantisers
from megatron_trace.testing.tiny_rollout import roll_out, tiny_engine

E2M1, E4M3 = (2, 1), (4, 3)
# Blocks, and the exponent and mantissa bits of their scales.
NV, MX = (16, (4, 3)), (32, (8, 0))


def _says(quantiser):
    """Gives what a ModelOpt quantiser says of its numbers."""
    sizes = quantiser.block_sizes
    return quantiser.num_bits, (sizes[-1], sizes["scale_bits"])


@pytest.mark.parametrize(
    ("number_format", "weights", "inputs", "kv"),
    [
        ("nvfp4", (E2M1, NV), (E2M1, NV), (E2M1, NV)),
        ("nvfp4_4over6", (E2M1, NV), (E2M1, NV), (E2M1, NV)),
        ("mxfp4", (E2M1, MX), (E2M1, MX), (E2M1, MX)),
        ("mxfp4_w4a8", (E2M1, MX), (E4M3, MX), (E2M1, MX)),
    ],
)
def test_modelopts_quantisers_are_of_the_format(number_format, weights, inputs, kv):
    engine = tiny_engine(None, number_format=number_format)
    for layer in engine.layers:
        assert {_says(linear.weight_quantizer) for *_, linear in named_expert_linears(layer)} == {
            weights
        }
        found = site_quantisers(layer)
        for site, expected in (("fc1", inputs), ("fc2", inputs), ("k", kv), ("v", kv)):
            assert {_says(quantiser) for quantiser in found[site].values()} == {expected}


@pytest.mark.parametrize(
    ("parts", "sites"),
    [("experts_and_kv", ["fc1", "fc2", "k", "v"]), ("experts", ["fc1", "fc2"]), ("kv", ["k", "v"])],
)
def test_only_what_is_quantised_has_quantisers_that_run(weights, parts, sites):
    engine = tiny_engine(weights, "qat", quantised_parts=parts)
    for layer in engine.layers:
        assert list(site_quantisers(layer)) == sites
    roll_out(engine, [[1, 2, 3], [4]])
    assert sorted(engine.sites.calls) == [(layer, site) for layer in (0, 1) for site in sites]


def test_weights_stay_plain_where_experts_are_not_quantised(weights):
    engine = tiny_engine(weights, quantised_parts="kv")
    for name, parameter in engine.model.named_parameters():
        assert torch.equal(parameter.cpu(), weights[name].cpu().bfloat16()), name


@pytest.mark.parametrize(("parts", "site"), [("experts", "k"), ("kv", "fc1")])
def test_values_that_are_not_quantised_are_still_checked(weights, parts, site):
    engine = tiny_engine(weights, "qat", quantised_parts=parts)
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    if site == "fc1":
        name = "decoder.layers.1.pre_mlp_layernorm.weight"
    broken = weights | {name: torch.full_like(weights[name], torch.nan)}
    engine.push_weights(broken, policy_version=1)
    with pytest.raises(RuntimeError, match=rf"NaN or Inf activation .* layer 0, site {site}"):
        roll_out(engine, [[1, 2]])
