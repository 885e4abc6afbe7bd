"""Pipeline stages give what one rank gives: loss, gradients, codes; each reads its own hints only.

Megatron's schedules run: every stage forwards several micro-batches, of shuffled samples, before
the first of them goes backward.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_trace.config import DEFAULT_HINT_SITES, HINT_SITES
from megatron_trace.hints import HintFiles, HintFilesWriter
from megatron_trace.hints.sharding import packed_length
from megatron_trace.hints.types import Site
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.layouts import slice_of
from megatron_trace.testing.ranks import run_ranks
from megatron_trace.testing.recorded_samples import seen_values
from megatron_trace.testing.single_process import single_process
from megatron_trace.testing.tiny_trainer import recorded_rollout, tiny_trainer, tiny_trainer_chunks
from megatron_trace.training.micro_batch import make_micro_batch
from megatron_trace.training.over_ranks import agreed
from megatron_trace.training.pipeline import trainer_forward_step
from megatron_trace.training.weights import expert_weight_digest

NUM_EXPERTS = 16
# Where ranks share a stage, FP32 sums are in another order; measured 1.0e-6 relative at most.
# Stages alone change no bit.
TOLERANCE = 1e-5
# (prompt, response) of the samples, two in a micro-batch; sequences of a micro-batch are padded.
LENGTHS = ((5, 4), (3, 0), (2, 7), (4, 3), (7, 2), (6, 3), (1, 8), (2, 2))
# Not in the order of the samples; the longest of each has 9 tokens.
MICRO_BATCHES = ((4, 1), (2, 7), (6, 3), (0, 5))
UNEQUAL = ((4, 1), (3, 7), (1, 7), (0, 5))
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


@dataclass(frozen=True)
class Scenario:
    """What is trained, by stages and on one rank.

    Attributes:
        pattern: Hybrid layer pattern.
        micro_batches: Samples of each micro-batch.
        trace: Fields of `TraceConfig`.
        config: Fields of `TransformerConfig`.
        packed: Whether the samples of a micro-batch are packed.
    """

    pattern: str
    micro_batches: tuple[tuple[int, int], ...] = MICRO_BATCHES
    trace: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    packed: bool = False

    @property
    def hint_sites(self) -> tuple[str, ...]:
        """Sites whose hints are used."""
        return self.trace.get("hint_sites", DEFAULT_HINT_SITES)


@dataclass(frozen=True)
class Layout:
    """How ranks share the model.

    Attributes:
        parallel: Sizes for `initialize_model_parallel`.
        scenarios: What is trained.
    """

    parallel: Mapping[str, int]
    scenarios: Mapping[str, Scenario]

    def size(self, kind: str) -> int:
        """Gives the size of a group, such as that of `context` parallelism."""
        name = "expert_model" if kind == "expert" else kind
        return self.parallel.get(f"{name}_parallel_size", 1)

    @property
    def world_size(self) -> int:
        """Ranks of one pipeline times those that share its stages."""
        kinds = ("pipeline_model", "tensor_model", "context", "expert")
        return math.prod(self.size(kind) for kind in kinds)

    @property
    def splits_stages(self) -> bool:
        """Whether several ranks share a stage."""
        return self.world_size > self.size("pipeline_model")


FC2 = {"hint_sites": HINT_SITES}
PACKED = FC2 | {"save_packed_activations": True}
LAYOUTS = {
    "PP2": Layout(
        {"pipeline_model_parallel_size": 2},
        {
            "case 35: two layers and one": Scenario("*E*E|*E", config=FULL),
            "a layer cut in two": Scenario("*E*|E*E", trace=PACKED, config=MOE),
            "dense and MoE layers, latter half": Scenario(
                "*-*|E*E", trace=FC2 | {"hint_layers": "latter_half"}
            ),
            "case 28: other lengths in each": Scenario(
                "*E|*E", UNEQUAL, config=FULL | {"variable_seq_lengths": True}
            ),
        },
    ),
    "PP2 x VPP2": Layout(
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        {
            "uneven": Scenario("GE|*E*|E|*E", trace=PACKED, config=FULL),
            "an attention alone": Scenario("*E|*E*|E*|E", config=MOE),
            "other lengths in each": Scenario(
                "*E|*E|*E|*E", UNEQUAL, config={"variable_seq_lengths": True}
            ),
            "packed samples": Scenario(
                "*E|*E*|E|*E",
                UNEQUAL,
                trace=PACKED,
                config=FULL | {"variable_seq_lengths": True},
                packed=True,
            ),
        },
    ),
    "PP4": Layout(
        {"pipeline_model_parallel_size": 4},
        {
            "case 35: five layers": Scenario("*E*E|*E|*E|*E", trace=PACKED, config=FULL),
            "layers cut in two": Scenario("*|E*|E*E*|E", config=MOE),
        },
    ),
    "PP2 x TP2": Layout(
        {
            "pipeline_model_parallel_size": 2,
            "tensor_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
        {"a layer cut in two": Scenario("*E*|E*E", trace=PACKED, config=FULL)},
    ),
    "PP2 x VPP2 x TP2": Layout(
        {
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "tensor_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
        {
            "case 29: packed samples": Scenario(
                "*E|*E*|E|*E",
                UNEQUAL,
                trace=FC2,
                config=FULL | {"variable_seq_lengths": True},
                packed=True,
            )
        },
    ),
    "PP2 x CP2": Layout(
        {"pipeline_model_parallel_size": 2, "context_parallel_size": 2},
        {"a layer cut in two": Scenario("*E*|E*E", trace=PACKED, config=FULL)},
    ),
    "PP2 x EP2": Layout(
        {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2},
        {
            "uneven": Scenario("*E*E|*E", trace=PACKED, config=FULL),
            "a layer cut in two": Scenario("*E*|E*E", config=MOE),
        },
    ),
}
IN_EVERY_RUN = ("PP2", "PP2 x VPP2")
CASES = [
    pytest.param(layout, name, marks=() if layout in IN_EVERY_RUN else pytest.mark.layouts)
    for layout, given in LAYOUTS.items()
    for name in given.scenarios
]
pytestmark = pytest.mark.distributed


def train_on_rank(rank: int, layout: str, given: dict[str, Any]) -> dict[str, Any]:
    """Entry of a rank: runs every scenario of its layout."""
    parallel = LAYOUTS[layout].parallel
    return {name: _train(parallel, **arguments) for name, arguments in given.items()}


def _train(parallel, *, scenario, weights, settings, folder, samples, pattern):
    config = {**scenario.config, **parallel, "deallocate_pipeline_outputs": True}
    config["sequence_parallel"] = parallel.get("tensor_model_parallel_size", 1) > 1
    if "virtual_pipeline_model_parallel_size" in parallel:
        config |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    chunks = tiny_trainer_chunks(
        "trace", settings=settings, config=config, pattern=pattern, **scenario.trace
    )
    dp_rank, dp_size = (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )
    wrapped, names, slices = [], [], {}
    for model, sites in chunks:
        names.append(_global_names(model))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                whole = names[-1][name]
                slices[whole] = slice_of(whole, parameter, sites.shape.layout)
                parameter.copy_(slices[whole].of(weights[whole]))
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=False)
        wrapped.append(DistributedDataParallel(model.config, ddp, model))
        wrapped[-1].train()
    files = HintFiles(folder)
    # Data-parallel ranks (here those of expert parallelism) take micro-batches by turns.
    own = scenario.micro_batches[dp_rank::dp_size]
    made = agreed(
        lambda: [
            [
                make_micro_batch(
                    [samples[i] for i in part],
                    files,
                    sites,
                    num_positions=_num_positions(part) if scenario.packed else None,
                    packed=scenario.packed,
                )
                for part in own
            ]
            for _, sites in chunks
        ],
        torch.distributed.group.WORLD,
    )
    reported = []

    def loss(logprobs, micro_batch):
        value = -logprobs[micro_batch.loss_mask].sum()
        return value, {"samples": micro_batch.sample_ids, "loss": value.item()}

    seq_length, micro_batch_size = max(micro_batch.forward_shape for micro_batch in made[0])
    with seen_values(*(sites for _, sites in chunks)) as seen:
        reported = get_forward_backward_func()(
            forward_step_func=trainer_forward_step(loss),
            data_iterator=[iter(micro_batches) for micro_batches in made],
            model=wrapped,
            num_microbatches=len(own),
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            forward_only=False,
        )
    finalize_model_grads(wrapped)
    codes = defaultdict(list)
    for place, values in seen.items():
        for sample_ids, outputs in zip(values.sample_ids, values.outputs, strict=True):
            codes[place, sample_ids].append(outputs)
    for _, sites in chunks:
        sites.assert_ran()
        assert sites.micro_batch_in_force is None
    return {
        "losses": {report["samples"]: report["loss"] for report in reported},
        "grads": {
            of_chunk[name]: parameter.main_grad.clone()
            for (model, _), of_chunk in zip(chunks, names, strict=True)
            for name, parameter in model.named_parameters()
        },
        "slices": slices,
        "codes": dict(codes),
        "shape": chunks[0][1].shape,
        "guided": sum(
            (
                Counter({site: counts.guided for site, counts in sites.report().sites.items()})
                for _, sites in chunks
            ),
            Counter(),
        ),
        "digest": expert_weight_digest(*chunks[0], *chunks[1:]),
        "tensor_bytes": files.bytes_read.tensor_bytes,
        "places": [place for _, sites in chunks for place in sites.recorded_places],
    }


def _num_positions(part: tuple[int, int]) -> int:
    """Gives a length of the pack that two sequence-parallel ranks can split."""
    return packed_length([sum(LENGTHS[i]) - 1 for i in part], tp_size=2, cp_size=1)


def _global_names(model) -> dict[str, str]:
    """Gives for each parameter of a chunk its name in the whole model on one rank."""
    first_expert = 0
    for layer in model.decoder.layers:
        if hasattr(layer.mlp, "local_expert_indices"):
            first_expert = layer.mlp.local_expert_indices[0]
    names = {}
    for name, _ in model.named_parameters():
        parts = name.split(".")
        if "layers" in parts:
            index = parts.index("layers") + 1
            parts[index] = str(model.decoder.layers[int(parts[index])].layer_number - 1)
        if "local_experts" in parts:
            index = parts.index("local_experts") + 1
            parts[index] = str(int(parts[index]) + first_expert)
        names[name] = ".".join(parts)
    return names


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What one rank gave, and what each of several gave, by layout; made when first asked for."""
    known: dict[str, Any] = {}

    def run(layout: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        assert layout not in known or known[layout], f"{layout} failed before"
        if layout not in known:
            known[layout] = None
            scenarios = LAYOUTS[layout].scenarios
            with single_process(seed=0):
                given = {
                    name: _given(scenario, tmp_path_factory.mktemp("hints"))
                    for name, scenario in scenarios.items()
                }
                alone = {
                    name: _train({}, **arguments, pattern=scenarios[name].pattern.replace("|", ""))
                    for name, arguments in given.items()
                }
            for name, arguments in given.items():
                arguments["pattern"] = scenarios[name].pattern
            of_rank = run_ranks(
                __file__,
                "train_on_rank",
                world_size=LAYOUTS[layout].world_size,
                parallel=LAYOUTS[layout].parallel,
                layout=layout,
                given=given,
            )
            known[layout] = alone, of_rank
        return known[layout]

    return run


def _given(scenario: Scenario, folder) -> dict[str, Any]:
    pattern = scenario.pattern.replace("|", "")
    rolled = recorded_rollout(LENGTHS, pattern=pattern, sites=HINT_SITES)
    with HintFilesWriter(folder) as files:
        rolled.put_records(files)
        files.commit(rolled.samples)
    model, _ = tiny_trainer("bf16", pattern=pattern)
    return {
        "scenario": scenario,
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
        "settings": rolled.settings,
        "folder": str(folder),
        "samples": rolled.samples,
    }


@pytest.fixture
def result(runs, layout, name):
    """The scenario, what one rank gave, and what each of several gave."""
    alone, of_rank = runs(layout)
    return LAYOUTS[layout].scenarios[name], alone[name], [results[name] for results in of_rank]


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_the_loss_of_every_micro_batch_is_that_of_one_rank(result, layout):
    _, alone, of_rank = result
    losses = {}
    for results in of_rank:
        losses |= results["losses"]
    tolerance = TOLERANCE if LAYOUTS[layout].splits_stages else 0.0
    assert losses == pytest.approx(alone["losses"], rel=tolerance, abs=0.0)


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_every_gradient_is_that_of_one_rank(result, layout):
    _, alone, of_rank = result
    tolerance = TOLERANCE if LAYOUTS[layout].splits_stages else 0.0
    seen = set()
    for results in of_rank:
        for parameter, grad in results["grads"].items():
            expected = results["slices"][parameter].of(alone["grads"][parameter])
            scale = max(expected.abs().max().item(), 1e-6)
            error = (grad - expected).abs().max().item() / scale
            assert error <= tolerance, f"{parameter}: relative error {error:.1e}"
            seen.add(parameter)
    assert seen == set(alone["grads"])


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_the_codes_of_every_micro_batch_are_those_of_one_rank(result):
    """Also those that recomputation makes again."""
    scenario, alone, of_rank = result
    expected = {key: calls for key, calls in alone["codes"].items() if key[0][1] is not Site.FC2}
    seen = set()
    for results in of_rank:
        for (place, sample_ids), calls in results["codes"].items():
            if place[1] is Site.FC2:
                continue
            own = _own_part(
                expected[place, sample_ids][0], results["shape"], place[1], packed=scenario.packed
            )
            for got in calls:
                assert_same_bytes(got, own, f"{place} {sample_ids}")
            assert len(calls) == len(expected[place, sample_ids])
            seen.add((place, sample_ids))
    assert seen == set(expected)


def _own_part(whole, shape, site, *, packed):
    """Gives the rows and columns of a rank that shares its stage with others."""
    columns = shape.columns(site) or range(whole.shape[-1])
    if packed:
        rows = [whole[r.start : r.stop] for r in shape.layout.positions(site, len(whole))]
        return torch.cat(rows)[:, columns.start : columns.stop].contiguous()
    whole = whole.unflatten(0, (-1, 2))
    rows = [whole[r.start : r.stop] for r in shape.layout.positions(site, len(whole))]
    return torch.cat(rows).flatten(0, 1)[:, columns.start : columns.stop].contiguous()


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_fc2_codes_of_every_micro_batch_are_those_of_one_rank(result, layout):
    """Where ranks share a stage, an expert's rows come from all of them, or are dealt out."""
    _, alone, of_rank = result
    if LAYOUTS[layout].splits_stages:
        rows = [_sorted_fc2_rows([alone]), _sorted_fc2_rows(of_rank)]
        assert rows[0].keys() == rows[1].keys()
        for place, expected in rows[0].items():
            assert_same_bytes(rows[1][place], expected, f"{place}")
        return
    seen = set()
    for results in of_rank:
        for key, calls in results["codes"].items():
            if key[0][1] is Site.FC2:
                for expert, got in enumerate(calls):
                    assert_same_bytes(got, alone["codes"][key][expert], f"{key}, call {expert}")
                seen.add(key)
    assert seen == {key for key in alone["codes"] if key[0][1] is Site.FC2}


def _sorted_fc2_rows(results):
    rows = defaultdict(list)
    for result in results:
        for ((layer, site), _), calls in result["codes"].items():
            if site is Site.FC2:
                rows[layer].extend(calls)
    return {layer: torch.tensor(sorted(torch.cat(parts).tolist())) for layer, parts in rows.items()}


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_the_weight_digest_is_that_of_one_rank(result):
    _, alone, of_rank = result
    assert {results["digest"] for results in of_rank} == {alone["digest"]}


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_every_row_that_one_rank_guides_is_guided_once(result, layout):
    """Those of K and V on every tensor-parallel rank, for its own heads."""
    _, alone, of_rank = result
    guided = sum((results["guided"] for results in of_rank), Counter())
    for site in (Site.K, Site.V):
        guided[site] //= LAYOUTS[layout].size("tensor_model")
    assert guided == alone["guided"]
    assert all(guided.values())


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_each_stage_reads_the_hint_bytes_of_its_own_layers_only(result, layout):
    """Each byte is read by one rank; which of those that share a stage, `test_layouts` says."""
    scenario, alone, of_rank = result
    total = sum(results["tensor_bytes"] for results in of_rank)
    assert total == alone["tensor_bytes"] > 0
    if LAYOUTS[layout].size("tensor_model") * LAYOUTS[layout].size("context") > 1:
        return
    for results in [alone, *of_rank]:
        places = results["places"]
        assert len(places) == len(set(places))
        assert results is alone or len(places) < len(alone["places"])
        ep_size = 1 if results is alone else LAYOUTS[layout].size("expert")
        rows_of_rank = [
            sum(sum(LENGTHS[i]) - 1 for part in scenario.micro_batches[r::ep_size] for i in part)
            for r in range(ep_size)
        ]
        # 1 bit a value and 1 byte for 16: of hidden 128, 2 KV heads x 32, top-4 of 64 at fc2.
        row_bytes = {Site.FC1: 24, Site.K: 12, Site.V: 12, Site.FC2: 48}
        of_a_row = sum(row_bytes[site] for _, site in places)
        assert results["tensor_bytes"] in [rows * of_a_row for rows in rows_of_rank]
