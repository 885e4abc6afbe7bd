"""TraceConfig as flags of Megatron's parser."""

import argparse
import dataclasses
import sys

import pytest

from megatron_trace.arguments import (
    add_health_arguments,
    add_loss_arguments,
    add_recorded_arguments,
    add_trace_arguments,
    attribute_docs,
    health_config_from_args,
    loss_config_from_args,
    recorded_config_from_args,
    require_agreement,
    trace_config_from_args,
)
from megatron_trace.config import RecordedConfig, TraceConfig
from megatron_trace.rl_config import HealthConfig, LossConfig
from megatron_trace.testing.ranks import run_ranks

EVERY_FLAG = """
    --trace-method qat
    --trace-quantised-parts experts
    --trace-hint-bits 4
    --trace-hint-scales residue
    --trace-hint-layers 1,3
    --trace-hint-sites fc1 fc2 v
    --trace-missing-hints rtn
    --trace-guard-max-far-blocks 0.5
    --trace-guard-max-scale-steps 3
    --trace-guard-min-parity-agreement 0.7
    --trace-guard-max-rejected-rows 0.25
    --trace-diagnostic-share 0.25
    --trace-power-of-two-scales
    --trace-save-packed-activations
    --trace-experts te
    --trace-implementation torch
    --trace-delta-rule torch
    --trace-kv-attention torch
    --trace-packed-experts auto
"""
EVERY_FIELD_CHANGED = TraceConfig(
    method="qat",
    quantised_parts="experts",
    hint_bits=4,
    hint_scales="residue",
    hint_layers="1,3",
    hint_sites=("fc1", "fc2", "v"),
    missing_hints="rtn",
    guard_max_far_blocks=0.5,
    guard_max_scale_steps=3,
    guard_min_parity_agreement=0.7,
    guard_max_rejected_rows=0.25,
    diagnostic_share=0.25,
    power_of_two_scales=True,
    save_packed_activations=True,
    experts="te",
    implementation="torch",
    delta_rule="torch",
    kv_attention="torch",
    packed_experts="auto",
)


def parsed_by_megatron(rank, flags):
    """Gives what Megatron's parser takes from flags, and the TraceConfig that they mean."""
    from megatron.training.arguments import parse_args

    sys.argv = ["program", *flags]
    args = parse_args(extra_args_provider=add_trace_arguments)
    return args.num_layers, trace_config_from_args(args)


def parsed(*flags: str) -> TraceConfig:
    parser = add_trace_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return trace_config_from_args(parser.parse_args(flags))


def test_no_flags_give_the_default_config() -> None:
    assert parsed() == TraceConfig()


def test_every_field_has_a_flag() -> None:
    config = parsed(*EVERY_FLAG.split())
    assert config == EVERY_FIELD_CHANGED
    unchanged = [
        field.name
        for field in dataclasses.fields(TraceConfig)
        if getattr(config, field.name) == getattr(TraceConfig(), field.name)
    ]
    # They contradict other flags, so that they are parsed by themselves.
    assert unchanged == ["number_format", "guard", "check_finite"], "EVERY_FLAG must change each"
    assert not parsed("--no-trace-guard").guard
    assert not parsed("--no-trace-check-finite").check_finite
    assert parsed("--trace-number-format", "mxfp4").number_format == "mxfp4"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--trace-method bf16", "save_packed_activations has no effect with method=bf16"),
        ("--no-trace-check-finite", "contradicts check_finite=False"),
    ],
)
def test_packed_activations_that_contradict_another_setting_are_refused(flags, message) -> None:
    with pytest.raises(ValueError, match=message):
        parsed("--trace-save-packed-activations", *flags.split())


def test_shorter_names_mean_the_same() -> None:
    flags = (
        "--trace-mode qat --trace-format mxfp4 --trace-sites k v --trace-layers 1 "
        "--trace-on-missing rtn"
    )
    config = parsed(*flags.split())
    assert config == TraceConfig(
        method="qat",
        number_format="mxfp4",
        hint_sites=("k", "v"),
        hint_layers="1",
        missing_hints="rtn",
    )


@pytest.mark.parametrize("settings", [TraceConfig, LossConfig, HealthConfig, RecordedConfig])
def test_every_field_is_documented(settings) -> None:
    assert list(attribute_docs(settings)) == [field.name for field in dataclasses.fields(settings)]


def test_alarms_and_objective_have_flags() -> None:
    parser = add_health_arguments(add_loss_arguments(argparse.ArgumentParser()))
    flags = "--trace-alarms kl=0.1:stop lag=2:bf16 --trace-objective tbpo --trace-max-lag 3"
    args = parser.parse_args(flags.split())
    assert health_config_from_args(args) == HealthConfig(alarms=("kl=0.1:stop", "lag=2:bf16"))
    assert loss_config_from_args(args) == LossConfig(objective="tbpo", max_lag=3)
    assert health_config_from_args(parser.parse_args([])) == HealthConfig()


def test_help_is_the_text_of_the_docstring() -> None:
    text = " ".join(add_trace_arguments(argparse.ArgumentParser()).format_help().split())
    assert "--trace-guard-max-scale-steps" in text
    assert "Steps beyond which a block counts as far" in text
    assert "(rounding to nearest, counted and reported)" in text, "a text of several lines"


def test_value_that_the_config_refuses_is_refused() -> None:
    with pytest.raises(ValueError, match="hint_bits must be 1, 2 or 4; got 3"):
        parsed("--trace-hint-bits", "3")
    with pytest.raises(ValueError, match="hint_scales must be raw or residue; got 'delta'"):
        TraceConfig(hint_scales="delta")  # pyright: ignore[reportArgumentType]


def test_unknown_choice_names_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--trace-method", "fp8")
    message = capsys.readouterr().err
    assert "--trace-method" in message
    assert "bf16" in message


def test_megatrons_own_parser_takes_the_flags() -> None:
    """In a process of its own, as the parser reads its arguments from `sys.argv`."""
    flags = ["--num-layers", "8", *EVERY_FLAG.split()]
    (found,) = run_ranks(__file__, "parsed_by_megatron", world_size=1, flags=flags)
    assert found == (8, EVERY_FIELD_CHANGED)


MEGATRON_FLAGS = {
    "use_megatron_fsdp": False,
    "use_torch_fsdp2": False,
    "calculate_per_token_loss": True,
    "fp4": None,
    "fp4_quantizer_factory": None,
    "fp8": None,
    "cuda_graph_impl": "none",
    "num_experts": 8,
    "moe_enable_routing_replay": True,
    "perform_rl_step": False,
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "alltoall",
}
FACTORY = "megatron_trace.training.te_recipe.guided_fake_quantizer_factory"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_experts": None, "moe_enable_routing_replay": False},
        {"fp4": "e2m1", "fp4_quantizer_factory": FACTORY},
    ],
)
def test_flags_that_agree_are_accepted(changes) -> None:
    args = argparse.Namespace(**MEGATRON_FLAGS | changes)
    require_agreement(args, TraceConfig(), RecordedConfig())


def test_a_run_without_replay_needs_to_say_so() -> None:
    args = argparse.Namespace(**MEGATRON_FLAGS | {"moe_enable_routing_replay": False})
    with pytest.raises(ValueError, match="trace contradicts no --moe-enable-routing-replay"):
        require_agreement(args, TraceConfig(), RecordedConfig())
    require_agreement(args, TraceConfig(), RecordedConfig(replay_routing=False))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_megatron_fsdp": True}, "--use-megatron-fsdp"),
        ({"use_torch_fsdp2": True}, "--use-torch-fsdp2"),
        ({"calculate_per_token_loss": False}, "no --calculate-per-token-loss"),
        ({"fp4": "e2m1"}, "--fp4-format without a --fp4-quantizer-factory"),
        ({"fp4": "e2m1", "fp4_quantizer_factory": "other.factory"}, "--fp4-format"),
        ({"fp8": "e4m3"}, "--fp8-format"),
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl local"),
        ({"perform_rl_step": True}, "--perform-rl-step"),
    ],
)
def test_flags_of_megatron_that_contradict_ours_are_named_with_ours(changes, named) -> None:
    args = argparse.Namespace(**MEGATRON_FLAGS | changes)
    with pytest.raises(ValueError, match=f"--trace-method qat contradicts {named}"):
        require_agreement(args, TraceConfig(method="qat"), RecordedConfig())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pipeline_model_parallel_size": 2}, "--pipeline-model-parallel-size"),
        ({"moe_token_dispatcher_type": "allgather"}, "--moe-token-dispatcher-type allgather"),
    ],
)
def test_packs_are_refused_where_ranks_must_know_their_length(changes, named) -> None:
    args = argparse.Namespace(**MEGATRON_FLAGS | changes)
    packed = RecordedConfig(attention="sdpa", pack_samples=True)
    with pytest.raises(ValueError, match=f"contradicts {named}.*--trace-pack-samples"):
        require_agreement(args, TraceConfig(), packed)
    require_agreement(args, TraceConfig(), RecordedConfig(attention="sdpa"))
    require_agreement(argparse.Namespace(**MEGATRON_FLAGS), TraceConfig(), packed)


def test_packs_contradict_megatrons_attention() -> None:
    with pytest.raises(ValueError, match="pack_samples contradicts attention=megatron"):
        RecordedConfig(pack_samples=True)


def test_recorded_rollouts_have_flags_and_a_help_group_of_their_own() -> None:
    parser = add_recorded_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--trace-hint-dir", "rollouts", "--trace-importance-cap", "2"])
    assert recorded_config_from_args(args) == RecordedConfig("rollouts")
    assert loss_config_from_args(args) == LossConfig(importance_cap=2.0)
    text = parser.format_help()
    assert "trace, recorded rollouts:" in text
    assert "--trace-valid-hint-dir" in text
    with pytest.raises(ValueError, match="temperature must be > 0"):
        recorded_config_from_args(parser.parse_args(["--trace-temperature", "0"]))
