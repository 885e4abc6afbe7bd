"""TraceConfig as flags of Megatron's parser."""

import argparse
import dataclasses
import json
import subprocess
import sys

import pytest

from megatron_trace.arguments import add_trace_arguments, attribute_docs, trace_config_from_args
from megatron_trace.config import TraceConfig

EVERY_FLAG = """
    --trace-method qat
    --trace-quantised-parts experts
    --trace-hint-bits 4
    --trace-hint-scales residue
    --trace-hint-layers 1,3
    --trace-hint-sites fc1 fc2 v
    --trace-missing-hints rtn
    --no-trace-guard
    --trace-guard-max-far-blocks 0.5
    --trace-guard-max-scale-steps 3
    --trace-guard-min-parity-agreement 0.7
    --trace-diagnostic-share 0.25
    --trace-power-of-two-scales
    --trace-save-packed-activations
    --trace-experts te
    --trace-implementation torch
"""
EVERY_FIELD_CHANGED = TraceConfig(
    method="qat",
    quantised_parts="experts",
    hint_bits=4,
    hint_scales="residue",
    hint_layers="1,3",
    hint_sites=("fc1", "fc2", "v"),
    missing_hints="rtn",
    guard=False,
    guard_max_far_blocks=0.5,
    guard_max_scale_steps=3,
    guard_min_parity_agreement=0.7,
    diagnostic_share=0.25,
    power_of_two_scales=True,
    save_packed_activations=True,
    experts="te",
    implementation="torch",
)

WITH_MEGATRON = """
import dataclasses, json, sys
from megatron_trace.testing import cpu_runtime
cpu_runtime.install()
from megatron.training.arguments import parse_args
from megatron_trace.arguments import add_trace_arguments, trace_config_from_args
args = parse_args(extra_args_provider=add_trace_arguments)
print(json.dumps([args.num_layers, dataclasses.asdict(trace_config_from_args(args))]))
"""


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
    # Both contradict other flags, so that they are parsed by themselves.
    assert unchanged == ["number_format", "check_finite"], "EVERY_FLAG must change each field"
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


def test_every_field_is_documented() -> None:
    assert list(attribute_docs(TraceConfig)) == [
        field.name for field in dataclasses.fields(TraceConfig)
    ]


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
    run = subprocess.run(
        [sys.executable, "-c", WITH_MEGATRON, "--num-layers", "8", *EVERY_FLAG.split()],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    num_layers, fields = json.loads(run.stdout.splitlines()[-1])
    assert num_layers == 8
    assert (
        TraceConfig(**fields | {"hint_sites": tuple(fields["hint_sites"])}) == EVERY_FIELD_CHANGED
    )
