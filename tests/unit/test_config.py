"""TraceConfig: which layers are recorded, and what is refused."""

from __future__ import annotations

import pytest

from megatron_trace.config import TraceConfig


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
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        TraceConfig(**{name: value})


def test_diagnostics_of_a_rollout_without_quantisers_are_refused():
    with pytest.raises(ValueError, match="has no effect with method=bf16"):
        TraceConfig(method="bf16", diagnostic_share=0.5)
