"""Plans: memory against what was measured, roofline against bytes, refusals that help."""

import dataclasses
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_trace.models.presets import NAME_2_4T, PRESETS, UNKNOWN_FIELDS, preset
from megatron_trace.planning.hardware import HARDWARE, Efficiency
from megatron_trace.planning.launches import LAUNCHES, micro_batch_launch_s
from megatron_trace.planning.layouts import layouts, waiting_bytes
from megatron_trace.planning.plan import DoesNotFit, make_plan
from megatron_trace.planning.report import report, summary
from megatron_trace.planning.request import Request
from megatron_trace.planning.rollout import capacity, decode_step_s
from megatron_trace.planning.sizes import HintChoice
from megatron_trace.planning.training_memory import (
    Layout,
    expert_activation_bytes,
    moe_rest_activation_bytes,
    training_memory,
)
from megatron_trace.planning.training_time import activations_s, products_s, training_time

TOOL = Path(__file__).parents[3] / "tools" / "plan.py"
MODEL = PRESETS["Qwen3.5-35B-A3B"]
GDN_2_4T = dict(zip(UNKNOWN_FIELDS[NAME_2_4T], (16, 64, 128, 128), strict=True))
# The four models of the paper.
OF_THE_PAPER = (
    MODEL,
    PRESETS["Qwen3.5-122B-A10B"],
    PRESETS["Qwen3.8-Flash-Next"],
    preset(NAME_2_4T, **GDN_2_4T),
)
WHOLE = Efficiency(compute=1, memory=1, network=1, disk=1, usable_memory=1, usable_host=1)


def request(**changes):
    fields = {"architecture": MODEL, "hardware": HARDWARE["H200"], "num_gpus": 64}
    return Request(**fields | changes)


# docs/measurements.md, a layer as wide as the 35B model's, 32 experts, none shared, fused SwiGLU.
@pytest.mark.parametrize(("packed", "measured"), [(False, 57_376), (True, 27_936)])
def test_activations_of_experts_are_those_that_were_measured(packed, measured):
    assert expert_activation_bytes(MODEL, "nvfp4", packed=packed) == measured


def test_activations_of_the_router_are_those_that_were_measured():
    of_32 = dataclasses.replace(MODEL, num_experts=32)
    shared = 2 * (3 * MODEL.shared_expert_hidden_size + MODEL.hidden_size)
    assert moe_rest_activation_bytes(of_32) - shared == 4_576


def test_weights_gradients_and_optimizer_of_one_rank_take_18_bytes_a_parameter():
    layout = Layout(1, 1, 1, 1, 1, "none")
    memory = training_memory(request(num_gpus=1), layout, HintChoice(), 1)
    states = memory.weights + memory.gradients + memory.optimizer
    assert states == pytest.approx(18 * 34.66e9, rel=1e-3)


# The study's 106M model: attention without output gate, no shared expert.
STUDY = dataclasses.replace(
    MODEL,
    name="moe_100m",
    num_layers=8,
    attention_interval=1,
    hidden_size=512,
    num_query_heads=8,
    num_kv_heads=2,
    head_dim=64,
    num_experts=16,
    router_topk=4,
    expert_hidden_size=512,
    shared_expert_hidden_size=0,
    vocab_size=128,
)


@pytest.mark.parametrize(
    ("rows", "length", "local_experts", "step_s", "optimizer_s"),
    [
        (96, 512, 16, 0.192, 0.019),
        (192, 512, 16, 0.234, 0.027),
        (8, 8192, 16, 0.243, 0.029),
        # Since the experts are one grouped product; its optimizer was not measured alone.
        (96, 512, 0, 0.141, 0.019),
    ],
)
def test_the_steps_that_were_measured_are_planned_within_a_tenth(
    rows, length, local_experts, step_s, optimizer_s
):
    """docs/measurements.md, "Training the study's MoE"; one constant for all, `launch_us`."""
    gpu, tokens = HARDWARE["H200"], rows * length
    passes = {"forwards": 1, "backwards": 1}
    launches = LAUNCHES["local"].of_layer(num_experts=local_experts, **passes)
    planned = (
        products_s(STUDY, gpu, Efficiency(), tokens=tokens, length=length, **passes)
        + activations_s(STUDY, gpu, Efficiency(), tokens=tokens, **passes)
        + STUDY.num_layers * launches * gpu.launch_us * 1e-6
    )
    assert planned == pytest.approx(step_s - optimizer_s, rel=0.1)


@pytest.mark.parametrize(("experts", "measured_s"), [("local", 0.115), ("te", 0.112)])
def test_a_layer_of_256_experts_is_planned_within_a_fifth(experts, measured_s):
    """The same, "The cost of a step": attention and MoE, 8192 tokens in samples of 2048.

    Of local experts it is a prediction: their operations were counted in another model.
    """
    layer = dataclasses.replace(MODEL, num_layers=1, attention_interval=1, vocab_size=128)
    asked = request(architecture=layer, num_gpus=1, experts=experts)
    passes = {"forwards": 1, "backwards": 1}
    gpu = {"tokens": 8192, **passes}
    planned = products_s(layer, asked.hardware, asked.efficiency, length=2048, **gpu)
    planned += activations_s(layer, asked.hardware, asked.efficiency, **gpu)
    planned += micro_batch_launch_s(asked, Layout(1, 1, 1, 1, 1, "none"), **passes)
    assert planned == pytest.approx(measured_s, rel=0.2)


def test_experts_of_a_rank_launch():
    seconds = [
        training_time(request(experts=experts), Layout(1, 1, 1, ep, 64, "none")).launch_s
        for experts, ep in (("te", 8), ("local", 8), ("te", 1), ("local", 1))
    ]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[-1] / 5


def test_sharding_divides_what_is_sharded():
    one, many = (
        training_memory(request(), Layout(tp, 1, 1, ep, 8 // tp, "none"), HintChoice(), 1)
        for tp, ep in ((1, 1), (2, 8))
    )
    assert many.weights == pytest.approx(2 * (2.449e9 / 2 + 32.21e9 / 8), rel=2e-2)
    assert one.optimizer == pytest.approx(many.optimizer, rel=2e-2), "over all ranks either way"


def test_sequences_that_fit_beside_the_weights():
    """139 GB hold about 23 BF16 or 133 FP4 sequences of 136K tokens."""
    of_139_gb = dataclasses.replace(HARDWARE["H200"], memory_gib=139e9 / 2**30)
    asked = request(
        hardware=of_139_gb, prompt_tokens=8 << 10, response_tokens=128 << 10, efficiency=WHOLE
    )
    assert [capacity(asked, number_format, 1) for number_format in (None, "nvfp4")] == [23, 133]


def test_decoding_at_equal_batch_gains_what_its_bytes_save():
    """About 3, between the weights' and the cache's 3.56 and the states' 1."""
    nothing_else = dataclasses.replace(HARDWARE["H200"], decode_layer_us=0)
    lengths = {"prompt_tokens": 8 << 10, "response_tokens": 128 << 10}
    asked = request(hardware=nothing_else, efficiency=WHOLE, **lengths)
    (slow, bound), (fast, _) = (decode_step_s(asked, name, 1, 23) for name in (None, "nvfp4"))
    assert bound == "memory"
    assert slow / fast == pytest.approx(3.0, abs=0.2)


@pytest.mark.parametrize(
    ("number_format", "batch", "measured_s"),
    [(None, 25, 0.0325), ("nvfp4", 25, 0.0151), ("nvfp4", 138, 0.0366)],
)
def test_steps_of_decoding_that_were_measured_are_planned_within_a_twentieth(
    number_format, batch, measured_s
):
    """docs/measurements.md: all layers on one GPU, the mean over a response; one constant."""
    asked = request(prompt_tokens=8 << 10, response_tokens=128 << 10)
    planned, bound = decode_step_s(asked, number_format, 1, batch)
    assert planned == pytest.approx(measured_s, rel=0.05)
    assert bound == "memory"


@pytest.mark.parametrize("architecture", OF_THE_PAPER, ids=lambda a: a.name)
@pytest.mark.parametrize("num_gpus", [8, 64, 512, 4096])
def test_a_plan_fits_or_says_what_would(architecture, num_gpus):
    asked = request(architecture=architecture, num_gpus=num_gpus, response_tokens=31 << 10)
    try:
        plan = make_plan(asked)
    except DoesNotFit as error:
        assert num_gpus < 512
        needed = int(re.search(r"would do:.* (\d+) H200", str(error)).group(1))
        make_plan(dataclasses.replace(asked, num_gpus=needed))
        with pytest.raises(DoesNotFit):
            make_plan(dataclasses.replace(asked, num_gpus=needed // 2))
        return
    assert plan.training.memory.total <= asked.usable_bytes
    assert plan.step_s >= plan.parts[plan.bottleneck]
    assert plan.rollout.weight_bytes + plan.rollout.cache_bytes <= (
        plan.rollout.engine_gpus * asked.usable_bytes
    )
    assert summary(plan).startswith(f"{num_gpus:5d} H200: TP ")
    assert f"Training: {plan.training.layout}" in report(plan)


def test_the_chosen_layout_is_the_fastest_that_fits():
    asked, hints = request(num_gpus=16), HintChoice()
    plan = make_plan(dataclasses.replace(asked, hints=hints))
    for layout in layouts(asked):
        num_micro = -(-asked.num_samples // layout.dp)
        memory = training_memory(asked, layout, hints, num_micro)
        waiting = asked.hardware.gpus_per_node * memory.states
        if memory.total <= asked.usable_bytes and waiting <= asked.usable_host_bytes:
            assert training_time(asked, layout).seconds >= plan.training.time.seconds


def test_every_layout_uses_all_gpus_and_divides_what_it_shards():
    for layout in layouts(request()):
        assert layout.tp * layout.pp * layout.cp * layout.dp == 64
        assert MODEL.gdn_key_heads % (layout.tp * layout.cp) == 0
        assert layout.stage_ranks % layout.ep == 0


def test_slower_storage_leaves_fewer_hints():
    few_gib, lengths = {"host_gib": 1100}, {"response_tokens": 31 << 10, "num_gpus": 8}
    chosen = []
    for rate in (100, 10, 3):
        hardware = dataclasses.replace(HARDWARE["H200"], disk_gb_s=rate, disk_tib=99, **few_gib)
        chosen.append(make_plan(request(hardware=hardware, **lengths)).hints)
    assert all(hints.place == "disk" for hints in chosen)
    sizes = [hints.step_bytes for hints in chosen]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]
    none = dataclasses.replace(HARDWARE["H200"], disk_gb_s=0.1, **few_gib)
    with pytest.raises(DoesNotFit, match=r"more than 25% of a step .*; record fewer layers"):
        make_plan(request(hardware=none, **lengths))


def test_asked_hints_that_do_not_fit_are_refused():
    small = dataclasses.replace(HARDWARE["H200"], disk_tib=0.1, host_gib=1100)
    with pytest.raises(DoesNotFit, match=r"fc1 --trace-hint-layers all .* TiB of them, the disks"):
        make_plan(request(hardware=small, num_gpus=8, hints=HintChoice(("fc1",))))


def test_gpus_of_their_own_let_rollout_and_training_run_at_once():
    plan = make_plan(request(rollout_gpus=32))
    longer = max(plan.rollout.seconds, plan.training.time.seconds)
    assert plan.step_s == pytest.approx(longer + plan.push_s)
    assert plan.offload_s == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_gpus": 0}, "num_gpus must be at least 1"),
        ({"rollout_gpus": 64}, "rollout_gpus=64 must leave some"),
        ({"number_format": "int4"}, "number_format must be one of"),
        ({"max_hint_share": 0.0}, "max_hint_share must be in"),
    ],
)
def test_requests_that_no_run_has_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        request(**changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HintChoice(("fc1", "fc3")), "some of fc1, fc2, k, v, each once; got fc1 fc3"),
        (lambda: HintChoice(("fc1", "fc1")), "each once; got fc1 fc1"),
        (lambda: HintChoice(()), "each once; got none"),
        (lambda: Efficiency(compute=0), "compute is a share of a peak"),
        (lambda: Efficiency(memory=1.5), "memory is a share of a peak"),
        (lambda: dataclasses.replace(HARDWARE["H200"], gpus_per_node=0), "gpus_per_node must be"),
        (lambda: dataclasses.replace(HARDWARE["H200"], disk_gb_s=-1), "disk_gb_s must be above 0"),
    ],
)
def test_machines_shares_and_hints_that_there_are_not_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--hint-layers latter_half --hint-bits 4", "--hint-layers --hint-bits has no effect"),
        ("--set memory_gib=much", "memory_gib must be a number; got 'much'"),
        ("--set gpus_per_node=4.5", "gpus_per_node must be a whole number; got '4.5'"),
        ("--set memory=4", "'memory' is none of memory_gib"),
    ],
)
def test_flags_that_contradict_each_other_or_are_no_numbers_are_refused(
    flags, message, monkeypatch
):
    monkeypatch.syspath_prepend(str(TOOL.parent))
    plan = importlib.import_module("plan")
    monkeypatch.setattr(sys, "argv", [str(TOOL), MODEL.name, *flags.split()])
    with pytest.raises(ValueError, match=re.escape(message)):
        plan.asked(plan.parsed_flags())


def test_a_host_of_which_the_run_has_some_gpus_holds_the_states_of_these():
    host = {"num_gpus": 2, "hardware": dataclasses.replace(HARDWARE["B300"], host_gib=2048)}
    memory = training_memory(
        request(**host), Layout(1, 2, 1, 1, 1, "full"), HintChoice(), num_micro_batches=4096
    )
    assert waiting_bytes(request(**host), memory) == 2 * memory.states
    assert waiting_bytes(request(**host | {"num_gpus": 64}), memory) == 8 * memory.states


def test_gpus_that_roll_out_alone_stay_in_a_smaller_run():
    """3 of 64 would be none of 8, and the run one by turns."""
    assert request(rollout_gpus=3).with_gpus(8).rollout_gpus == 1
    assert request(rollout_gpus=48).with_gpus(8).rollout_gpus == 6
    assert request().with_gpus(8).rollout_gpus == 0


def test_the_tool_prints_a_plan_of_ones_own_machines():
    run = [sys.executable, str(TOOL), MODEL.name, "--gpus", "64", "--set", "memory_gib=100"]
    printed = subprocess.run(run, capture_output=True, text=True, check=True, timeout=300).stdout
    for line in (
        "Training: TP",
        "of 90 usable GiB",
        "FP4 / BF16:",
        "Hints: --trace-hint-sites",
        "A step takes",
    ):
        assert line in printed
