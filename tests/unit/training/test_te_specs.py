"""The TE experts of TRACE: what they refuse, how they plug into Megatron's specs."""

# pyright: reportMissingImports=false

from __future__ import annotations

import pytest
import torch

pytest.importorskip(
    "transformer_engine.pytorch", reason="Transformer Engine is not installed", exc_type=ImportError
)

from megatron.core.fp8_utils import _resolve_callable_from_python_import_path
from megatron.core.transformer.moe.experts import TEGroupedMLP

from megatron_trace.testing.single_process import tiny_moe_config
from megatron_trace.training.te_choice import FACTORIES
from megatron_trace.training.te_specs import (
    TraceTEColumnParallelGroupedLinear,
    TraceTEGroupedMLP,
    TraceTEMoELayer,
    TraceTERowParallelGroupedLinear,
    TraceTESpecProvider,
    trace_te_moe_spec,
)

FP4 = {"fp4": "e2m1", "fp4_recipe": "custom", "fp4_quantizer_factory": FACTORIES[0]}


def test_megatron_finds_the_factories_by_their_flag() -> None:
    for path in FACTORIES:
        assert _resolve_callable_from_python_import_path(path).__name__ == path.rsplit(".", 1)[1]


def test_the_provider_gives_megatrons_te_experts_with_our_linears() -> None:
    builder = TraceTESpecProvider().grouped_mlp_modules(True)
    assert builder.func is TraceTEGroupedMLP
    assert issubclass(builder.func, TEGroupedMLP)
    assert builder.keywords["submodules"].linear_fc1 is TraceTEColumnParallelGroupedLinear
    assert builder.keywords["submodules"].linear_fc2 is TraceTERowParallelGroupedLinear
    assert trace_te_moe_spec(num_experts=4).func is TraceTEMoELayer


def test_experts_without_the_grouped_product_are_refused() -> None:
    with pytest.raises(ValueError, match="moe_grouped_gemm"):
        TraceTESpecProvider().grouped_mlp_modules(False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"fp4_recipe": "nvfp4"},
        {"fp4_quantizer_factory": "somewhere.else.factory"},
        {"moe_apply_probs_on_input": True},
        {"first_last_layers_bf16": True},
        {"fp4": None, "fp8": "e4m3"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_settings_that_bypass_the_quantisers_are_refused(wrong) -> None:
    config = tiny_moe_config("E", **(FP4 | wrong))
    with pytest.raises(ValueError, match=list(wrong)[-1]):
        TraceTEGroupedMLP(4, config, None)


@pytest.mark.parametrize(
    "wrong",
    [{"moe_latent_size": 64}, {"moe_expert_capacity_factor": 1.0}],
    ids=lambda fields: next(iter(fields)),
)
def test_dispatch_that_hints_cannot_follow_is_refused(wrong) -> None:
    fields = FP4 | wrong
    if "moe_expert_capacity_factor" in wrong:
        fields["moe_pad_expert_input_to_capacity"] = True
    with pytest.raises(ValueError, match="hints could not follow"):
        TraceTEMoELayer(tiny_moe_config("E", **fields))


def test_linears_save_no_state_of_the_recipe() -> None:
    linear = object.__new__(TraceTEColumnParallelGroupedLinear)
    state = linear.get_extra_state()
    assert state.numel() == 0
    assert state.dtype == torch.uint8
