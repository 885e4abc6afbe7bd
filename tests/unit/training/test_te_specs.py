"""The TE experts of TRACE: what they refuse, how they plug into Megatron's specs."""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip(
    "transformer_engine.pytorch", reason="Transformer Engine is not installed", exc_type=ImportError
)

from megatron.core.fp8_utils import _resolve_callable_from_python_import_path
from megatron.core.transformer.moe.experts import TEGroupedMLP

from megatron_trace.testing.single_process import TINY_MOE_FLAGS, tiny_moe_config
from megatron_trace.training.te_choice import FACTORIES, FAKE_FACTORY
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
    [
        {"moe_latent_size": 64},
        {"moe_expert_capacity_factor": 1.0},
        {"moe_token_dispatcher_type": "flex"},
    ],
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


MODEL_FLAGS = f"""
    {TINY_MOE_FLAGS} --calculate-per-token-loss --train-iters 1 --lr 1e-4
    --transformer-impl transformer_engine --tokenizer-type NullTokenizer
"""
RECIPE_FLAGS = f"--fp4-format e2m1 --fp4-recipe custom --fp4-quantizer-factory {FAKE_FACTORY}"
WITH_MEGATRON = """
from megatron_trace.testing import cpu_runtime
cpu_runtime.install()
from megatron.training.arguments import parse_and_validate_args
from megatron_trace.arguments import (
    add_recorded_arguments, recorded_config_from_args, require_agreement, trace_config_from_args
)
from megatron_trace.testing.single_process import single_process
from megatron_trace.testing.te_on_cpu import te_on_cpu
from megatron_trace.training.megatron_model import trace_model_config_from_args
with single_process(seed=0), te_on_cpu():
    args = parse_and_validate_args(add_recorded_arguments)
    trace = trace_config_from_args(args)
    require_agreement(args, trace, recorded_config_from_args(args))
    config = trace_model_config_from_args(args, trace, "sdpa", None)
    builder = config.get_builder_cls()(config)
    model = builder.build_model(None, pre_process=True, post_process=True)
    moe = model.decoder.layers[1].mlp
    print("BUILT", type(moe).__name__, type(moe.experts).__name__, moe.config.fp4)
"""


@pytest.mark.parametrize(
    ("flags", "built"),
    [
        (RECIPE_FLAGS, "TraceTEMoELayer TraceTEGroupedMLP e2m1"),
        ("--trace-experts te_recipe", "TraceTEMoELayer TraceTEGroupedMLP e2m1"),
        ("--trace-experts te", "GuidedMoELayer TraceTEGroupedMLP None"),
        ("", "GuidedMoELayer GuidedExperts None"),
    ],
)
def test_megatrons_parser_and_config_choose_the_experts(flags, built) -> None:
    words = [*MODEL_FLAGS.split(), "--trace-hint-dir", "hints", *flags.split()]
    # Megatron sets them for the attention of a test before, and refuses others.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NVTE_")}
    done = subprocess.run(
        [sys.executable, "-c", WITH_MEGATRON, *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"BUILT {built}" in done.stdout, done.stdout[-1000:] + done.stderr[-3000:]
