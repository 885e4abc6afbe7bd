"""TraceConfig: which layers are recorded, and what is refused."""

from __future__ import annotations

from typing import get_args

import pytest

from megatron_trace.config import NumberFormatName, TraceConfig
from megatron_trace.formats import FORMAT_SETS


@pytest.mark.parametrize(
    ("hint_layers", "recorded"),
    [
        ("all", (0, 1, 2, 3, 4)),
        ("latter_half", (2, 3, 4)),
        ("3,0", (0, 3)),
        (" 1 ", (1,)),
    ],
)
def test_recorded_layers(hint_layers, recorded):
    assert TraceConfig(hint_layers=hint_layers).recorded_layers(5) == recorded


@pytest.mark.parametrize("hint_layers", ["", "half", "1,,2", "-1", "²", "1.5"])
def test_what_is_not_a_list_of_layers_is_refused(hint_layers):
    with pytest.raises(ValueError, match="hint_layers must be latter_half, all, or indices"):
        TraceConfig(hint_layers=hint_layers)


def test_a_layer_named_twice_is_refused():
    with pytest.raises(ValueError, match="twice"):
        TraceConfig(hint_layers="2,2")


def test_a_layer_that_the_model_does_not_have_is_refused():
    with pytest.raises(ValueError, match=r"names decoder layer 5, but the model has 5"):
        TraceConfig(hint_layers="1,5").recorded_layers(5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("method", "fp4"),
        ("number_format", "fp4"),
        ("quantised_parts", "router"),
        ("hint_bits", 3),
        ("hint_sites", ()),
        ("hint_sites", ("k", "k")),
        ("hint_sites", ("router",)),
        ("missing_hints", "ignore"),
        ("guard_max_far_blocks", 1.5),
        ("guard_min_parity_agreement", -0.1),
        ("guard_max_scale_steps", -1),
        ("diagnostic_share", 2.0),
        ("implementation", "cuda"),
        ("delta_rule", "triton"),
        ("kv_attention", "fla"),
        ("packed_experts", "triton"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        TraceConfig(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"), [("guard_min_parity_agreement", 0.3), ("guard_max_rejected_rows", 1.0)]
)
def test_what_the_guard_may_do_is_refused_where_it_is_off(name, value):
    with pytest.raises(ValueError, match=f"{name}={value} has no effect without guard"):
        TraceConfig(guard=False, **{name: value})


def test_diagnostics_of_a_rollout_without_quantisers_are_refused():
    with pytest.raises(ValueError, match="has no effect with method=bf16"):
        TraceConfig(method="bf16", diagnostic_share=0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "bf16", "number_format": "mxfp4"}, "number_format=mxfp4 has no effect"),
        ({"method": "bf16", "quantised_parts": "kv"}, "quantised_parts=kv has no effect"),
        ({"number_format": "mxfp4", "power_of_two_scales": True}, "which has no global scales"),
        ({"number_format": "mxfp4", "hint_scales": "residue"}, "whose block scales no residue"),
        ({"number_format": "nvfp4_4over6", "hint_scales": "residue"}, "set hint_scales=raw"),
        ({"quantised_parts": "experts", "hint_sites": ("fc1", "k")}, "hint_sites names k, but"),
        ({"quantised_parts": "kv", "hint_sites": ("fc2",)}, "quantises k, v only"),
        ({"quantised_parts": "kv", "save_packed_activations": True}, "has no effect with quant"),
    ],
)
def test_what_contradicts_the_number_format_or_the_parts_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TraceConfig(**settings)


@pytest.mark.parametrize(
    ("parts", "guided"),
    [("experts_and_kv", ("fc1", "k", "v")), ("experts", ("fc1",)), ("kv", ("k", "v"))],
)
def test_the_default_sites_are_those_that_are_quantised(parts, guided):
    config = TraceConfig(quantised_parts=parts)
    assert config.sites_in(("fc1", "fc2", "k", "v")) == guided


def test_every_set_of_formats_can_be_chosen():
    assert get_args(NumberFormatName) == tuple(FORMAT_SETS)


def test_power_of_two_scales_go_with_four_over_six():
    assert TraceConfig(number_format="nvfp4_4over6", power_of_two_scales=True).power_of_two_scales
