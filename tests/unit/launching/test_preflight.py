"""What is refused before a job asks for GPUs."""

import dataclasses
from pathlib import Path

import pytest

from megatron_trace.launching.model_flags import read_flags
from megatron_trace.launching.preflight import (
    GIB,
    Job,
    hint_bytes_per_token,
    reasons_against,
    reasons_against_node,
)
from megatron_trace.models.fla_backward import FlaSetup
from megatron_trace.models.presets import preset
from megatron_trace.planning.sizes import HintChoice, hint_bytes, routing_bytes

ROOT = Path(__file__).parents[3]
PRESET = ROOT / "launch" / "models" / "qwen3.5-35b-a3b.args"
FLAGS = [
    f"@{PRESET}",
    "--seq-length=8192",
    "--expert-model-parallel-size=8",
    "--expert-tensor-parallel-size=1",
    "--tensor-model-parallel-size=2",
    "--micro-batch-size=1",
    "--global-batch-size=256",
    "--some-flag-of-megatron=7",
]
JOB = Job(
    training_nodes=4,
    rollout_nodes=2,
    slurm_nodes=6,
    visible_devices="0,1,2,3,4,5,6,7",
    samples_per_step=256,
    free_disk_bytes=14_000 * GIB,
    host_memory_bytes=2_000 * GIB,
    time_limit_s=14_400,
    step_s=120,
)


def reasons(*more, **changes):
    return reasons_against(dataclasses.replace(JOB, **changes), read_flags([*FLAGS, *more]))


def test_a_fitting_job_is_not_refused():
    assert reasons() == []


@pytest.mark.parametrize(
    ("reason", "more", "changes"),
    [
        ("24 (3 nodes of 8) are no multiple", ["--pipeline-model-parallel-size=2"], {}),
        ("Slurm gave 5 nodes, but the run is for 6", [], {"slurm_nodes": 5}),
        ("0,1,2,3,4,5,6,9 is not contiguous", [], {"visible_devices": "0,1,2,3,4,5,6,9"}),
        ("shows 4 GPUs, but GPUS_PER_NODE=8", [], {"visible_devices": "0,1,2,3"}),
        ("shows parts of GPUs (MIG)", [], {"visible_devices": ",".join(["MIG-1"] * 8)}),
        ("START=/nowhere does not exist", [], {"needed": {"START": Path("/nowhere")}}),
        ("what is exported takes up to 2e+04 GiB", [], {"export_bytes": 20_000 * GIB}),
        ("leaves a node of 8", ["--tensor-model-parallel-size=16"], {}),
        ("--num-query-groups 2 cannot be divided over 4", ["--tensor-model-parallel-size=4"], {}),
        ("--num-experts 256 cannot be divided over 3", ["--expert-model-parallel-size=3"], {}),
        ("no whole number of nvfp4's blocks of 16", ["--moe-ffn-hidden-size=520"], {}),
        (
            "no whole number of mxfp4's blocks of 32",
            ["--trace-number-format=mxfp4", "--expert-tensor-parallel-size=32"],
            {},
        ),
        ("has 1 stages", ["--pipeline-model-parallel-size=2"], {}),
        ("--seq-length 8190 must be", ["--context-parallel-size=2", "--seq-length=8190"], {}),
        ("--global-batch-size 250 is no multiple of 16", ["--global-batch-size=250"], {}),
        ("differs from the 128 samples", [], {"samples_per_step": 128}),
        ("and the run's folder has 5 free", [], {"free_disk_bytes": 5 * GIB}),
        ("more than half of the host's", ["--trace-hint-memory-mb=200000"], {}),
        ("no attempt would get on", [], {"time_limit_s": 400}),
        ("the step that is under way would be lost", [], {"step_s": 900}),
        ("hint_sites must be distinct sites", ["--trace-hint-sites", "fc1", "kv"], {}),
        ("method must be one of", ["--trace-method=tracee"], {}),
        ("residue", ["--trace-number-format=mxfp4", "--trace-hint-scales=residue"], {}),
        (
            "/run/../run is the run's own",
            ["--trace-metrics-dir=/run/../run"],
            {"run": Path("/run")},
        ),
        (f"{PRESET} is no folder", [f"--trace-metrics-dir={PRESET}"], {}),
    ],
)
def test_each_reason_is_a_sentence(reason, more, changes):
    if "3 nodes" in reason:
        changes = {"training_nodes": 3, "slurm_nodes": 5}
        more = ["--pipeline-model-parallel-size=5"]
    assert any(reason in text for text in reasons(*more, **changes)), reasons(*more, **changes)


HOPPER_WITHOUT_TILELANG = FlaSetup((9, 0), "3.6.0", "tilelang is not installed")


@pytest.mark.parametrize(
    ("fla", "reason"),
    [
        (None, "flash-linear-attention, which is not installed"),
        (HOPPER_WITHOUT_TILELANG, "because tilelang is not installed; pip install"),
    ],
)
def test_a_node_whose_gpus_cannot_train_gated_delta_nets_is_refused(fla, reason):
    (told,) = reasons_against_node(read_flags(FLAGS), fla)
    assert reason in told


@pytest.mark.parametrize(
    ("fla", "more"),
    [
        (FlaSetup((9, 0), "3.6.0", ""), []),
        (HOPPER_WITHOUT_TILELANG, ["--trace-delta-rule=torch"]),
        (HOPPER_WITHOUT_TILELANG, ["--deterministic-mode"]),
        (HOPPER_WITHOUT_TILELANG, ["--hybrid-layer-pattern=*E*E"]),
    ],
    ids=["tilelang", "torch", "deterministic", "attention only"],
)
def test_a_node_that_trains_otherwise_is_not_refused(fla, more):
    assert reasons_against_node(read_flags([*FLAGS, *more]), fla) == []


def test_a_policy_may_answer_on_parts_of_gpus():
    flags = read_flags([f"@{PRESET}"])  # No batch: nothing is trained.
    job = Job(training_nodes=1, visible_devices=",".join(f"MIG-{n}" for n in range(8)))
    assert reasons_against(job, flags) == []


@pytest.mark.parametrize("layers", ["all", "latter_half"])
@pytest.mark.parametrize("sites", [("fc1", "k", "v"), ("fc2",)])
def test_hints_on_disk_are_those_of_the_planner(layers, sites):
    model = preset("Qwen3.5-35B-A3B")
    flags = read_flags(
        [f"@{PRESET}", f"--trace-hint-layers={layers}", "--trace-hint-sites", *sites]
    )
    choice = HintChoice(sites=sites, layers=layers)
    assert hint_bytes_per_token(flags) == hint_bytes(model, choice) + routing_bytes(model)


def test_a_missing_file_of_flags_is_named():
    with pytest.raises(ValueError, match=r"none\.args"):
        read_flags(["@none.args"])
