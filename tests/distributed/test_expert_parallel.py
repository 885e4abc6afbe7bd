"""Expert parallelism over two ranks gives what one rank gives: loss, gradients, codes, digest.

Each expert-parallel rank is a data-parallel rank too. So the ranks get different samples, unequal
in number and length, and Megatron's DDP averages their gradients; one rank forwards the same two
micro-batches one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest
import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)

from megatron_trace.config import DEFAULT_HINT_SITES, HINT_SITES
from megatron_trace.hints.store import HintStore, RecordKind
from megatron_trace.hints.types import Site
from megatron_trace.metrics import CodeMismatch
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.ranks import run_ranks
from megatron_trace.testing.recorded_samples import seen_values
from megatron_trace.testing.rollouts import record_of
from megatron_trace.testing.single_process import single_process
from megatron_trace.testing.tiny_trainer import recorded_rollout, tiny_trainer
from megatron_trace.training.micro_batch import make_micro_batch
from megatron_trace.training.model import token_logprobs
from megatron_trace.training.weights import expert_weight_digest

NUM_EXPERTS = 16
# FP32 products of other row counts and sums in another order; measured 3.7e-7 relative at most.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Scenario:
    """What two ranks train on.

    Attributes:
        lengths: (prompt, response) of the samples of each rank.
        num_experts: Experts that get tokens.
        trace: Fields of `TraceConfig`.
        config: Fields of `TransformerConfig`.
        without_fc2: Rank whose samples have no hints of fc2.
    """

    lengths: tuple[tuple[tuple[int, int], ...], ...]
    num_experts: int = NUM_EXPERTS
    trace: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    without_fc2: int | None = None


UNEQUAL = (((5, 3), (3, 0), (7, 4)), ((2, 6), (4, 4)))
EQUAL = (((5, 3), (3, 3)), ((2, 6), (4, 2)))
FC2_HINTS = {"hint_sites": HINT_SITES}
PACKED = FC2_HINTS | {"save_packed_activations": True}
SCENARIOS = {
    "all experts": Scenario(UNEQUAL),
    # Samples of equal length on a rank, so that no padding goes to the second half either.
    "second half empty": Scenario((((5, 4), (5, 4)), ((4, 2),)), NUM_EXPERTS // 2),
    "fc2 hints": Scenario(UNEQUAL, trace=FC2_HINTS),
    "fc2 hints, packed activations": Scenario(UNEQUAL, trace=PACKED),
    # This dispatcher wants as many tokens on every rank.
    "fc2 hints, all-gather": Scenario(
        EQUAL, trace=PACKED, config={"moe_token_dispatcher_type": "allgather"}
    ),
    # The other rank's rows must arrive all the same, and be read as what they are.
    "fc2 hints of one rank": Scenario(
        UNEQUAL, trace=FC2_HINTS | {"missing_hints": "rtn"}, without_fc2=0
    ),
    "fc2 residues of one rank": Scenario(
        UNEQUAL,
        trace=FC2_HINTS | {"missing_hints": "rtn", "hint_bits": 2, "hint_scales": "residue"},
        without_fc2=1,
    ),
}


def train(rank: int, world_size: int, scenarios: dict[str, Any]) -> dict[str, Any]:
    """Runs forward and backward of every scenario on one rank."""
    return {name: _train_one(rank, world_size, **given) for name, given in scenarios.items()}


def train_on_rank(rank: int, scenarios: dict[str, Any]) -> dict[str, Any]:
    """Entry of a rank of two."""
    return train(rank, 2, scenarios)


def _train_one(rank, world_size, *, weights, settings, store, samples_of_rank, trace, config):
    model, sites = tiny_trainer(
        "trace",
        settings=settings,
        config={**config, "expert_model_parallel_size": world_size},
        **trace,
    )
    sites.diagnostics = True
    local = NUM_EXPERTS // world_size
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[_global_name(name, rank * local)])
    ddp = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(use_distributed_optimizer=False), model
    )
    ddp.zero_grad_buffer()
    samples = samples_of_rank if world_size == 1 else samples_of_rank[rank : rank + 1]
    tokens = sum(len(s.response_tokens) for part in samples_of_rank for s in part)
    loss_sum = 0.0
    with seen_values(sites) as seen:
        for part in samples:
            micro_batch = make_micro_batch(part, store, sites)
            with sites.micro_batch(micro_batch):
                logprobs = token_logprobs(ddp, sites, micro_batch)
                loss = -logprobs[micro_batch.loss_mask].sum()
                # DDP averages over the data-parallel ranks.
                (loss * world_size / tokens).backward()
            loss_sum += loss.item()
    finalize_model_grads([ddp])
    sites.assert_ran()
    return {
        "loss_sum": loss_sum,
        "grads": {
            _global_name(name, rank * local): p.main_grad.clone()
            for name, p in model.named_parameters()
        },
        "codes": {place: values.outputs for place, values in seen.items()},
        "digest": expert_weight_digest(model, sites),
        "mismatch": sites.report().code_mismatch,
        "sites": {site: asdict(counts) for site, counts in sites.report().sites.items()},
    }


def _global_name(name: str, first_expert: int) -> str:
    parts = name.split(".")
    if "local_experts" in parts:
        index = parts.index("local_experts") + 1
        parts[index] = str(int(parts[index]) + first_expert)
    return ".".join(parts)


@pytest.fixture(scope="module")
def runs():
    """What one rank gave, and what each of two gave, by scenario."""
    with single_process(seed=0):
        scenarios = {name: _given(scenario) for name, scenario in SCENARIOS.items()}
        alone = train(0, 1, scenarios)
    parallel = {"expert_model_parallel_size": 2}
    of_rank = run_ranks(
        __file__, "train_on_rank", world_size=2, parallel=parallel, scenarios=scenarios
    )
    return {name: (alone[name], [results[name] for results in of_rank]) for name in SCENARIOS}


def _given(scenario: Scenario) -> dict[str, Any]:
    lengths = [length for part in scenario.lengths for length in part]
    rolled = recorded_rollout(
        lengths,
        num_experts=scenario.num_experts,
        sites=scenario.trace.get("hint_sites", DEFAULT_HINT_SITES),
        num_bits=scenario.trace.get("hint_bits", 1),
        scale_form=scenario.trace.get("hint_scales", "raw"),
        codes=True,
    )
    model, _ = tiny_trainer("bf16")
    first = len(scenario.lengths[0])
    samples_of_rank = [rolled.samples[:first], rolled.samples[first:]]
    store = rolled.store
    if scenario.without_fc2 is not None:
        store = _without_fc2(store, samples_of_rank, scenario.without_fc2)
    return {
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
        "settings": rolled.settings,
        "store": store,
        "samples_of_rank": samples_of_rank,
        "trace": scenario.trace,
        "config": scenario.config,
    }


def _without_fc2(store: HintStore, samples_of_rank: Any, without: int) -> HintStore:
    """Gives the hints but those of fc2 of one rank's samples."""
    left = HintStore()
    for rank, samples in enumerate(samples_of_rank):
        for sample in samples:
            for layer, site in store.places(sample.sample_id):
                if rank != without or site is not Site.FC2:
                    left.put(record_of(store, sample, layer, site))
            for layer, site in store.places(sample.sample_id, RecordKind.CODES):
                codes = record_of(store, sample, layer, site, RecordKind.CODES)
                left.put(codes, RecordKind.CODES)
    return left


pytestmark = [pytest.mark.distributed, pytest.mark.parametrize("name", list(SCENARIOS))]


def test_the_loss_is_that_of_one_rank(runs, name):
    alone, of_rank = runs[name]
    total = sum(result["loss_sum"] for result in of_rank)
    assert total == pytest.approx(alone["loss_sum"], rel=TOLERANCE)


def test_every_gradient_is_that_of_one_rank(runs, name):
    alone, of_rank = runs[name]
    seen = set()
    for result in of_rank:
        for parameter, grad in result["grads"].items():
            expected = alone["grads"][parameter]
            scale = max(expected.abs().max().item(), 1e-6)
            error = (grad - expected).abs().max().item() / scale
            assert error <= TOLERANCE, f"{parameter}: relative error {error:.1e}"
            seen.add(parameter)
    assert seen == set(alone["grads"])


@pytest.mark.parametrize("site", [Site.FC1, Site.K, Site.V])
def test_guided_codes_are_those_of_one_rank(runs, name, site):
    alone, of_rank = runs[name]
    for layer in (0, 1):
        for rank, result in enumerate(of_rank):
            (got,) = result["codes"][layer, site]
            assert_same_bytes(got, alone["codes"][layer, site][rank], f"layer {layer}, rank {rank}")


def test_fc2_codes_are_those_of_one_rank(runs, name):
    """An expert's rows come from both ranks, those of rank 0 first."""
    alone, of_rank = runs[name]
    for layer in (0, 1):
        calls = alone["codes"][layer, Site.FC2]
        for expert in range(NUM_EXPERTS):
            expected = torch.cat([calls[expert], calls[NUM_EXPERTS + expert]])
            rank, local = divmod(expert, NUM_EXPERTS // 2)
            got = of_rank[rank]["codes"][layer, Site.FC2][local]
            assert_same_bytes(got, expected, f"layer {layer}, expert {expert}")


def test_every_row_is_guided_on_its_own_rank(runs, name):
    _, of_rank = runs[name]
    for part, result in zip(SCENARIOS[name].lengths, of_rank, strict=True):
        rows = sum(prompt + response - 1 for prompt, response in part)
        for site in (Site.FC1, Site.K, Site.V):
            counts = result["sites"][site]
            assert counts["guided"] + counts["rejected"] == 2 * rows
            assert counts["missing"] == 0


def test_every_slot_of_both_ranks_is_guided(runs, name):
    scenario, (alone, of_rank) = SCENARIOS[name], runs[name]
    kinds = ("guided", "rejected", "missing", "padding", "not_recorded")
    counts = {kind: sum(result["sites"][Site.FC2][kind] for result in of_rank) for kind in kinds}
    assert counts == {kind: alone["sites"][Site.FC2][kind] for kind in kinds}
    rows = [sum(prompt + response - 1 for prompt, response in part) for part in scenario.lengths]
    if "hint_sites" in scenario.trace:
        missing = 0 if scenario.without_fc2 is None else rows[scenario.without_fc2]
        present = 2 * 4 * (sum(rows) - missing)
        assert counts["guided"] + counts["rejected"] == present
        assert counts["guided"] > 0.9 * present
        assert (counts["missing"], counts["not_recorded"]) == (2 * 4 * missing, 0)
        assert all(result["sites"][Site.FC2]["guided"] > 0 for result in of_rank)
    else:
        assert counts["guided"] == 0


def test_full_codes_reach_every_slot_too(runs, name):
    alone, of_rank = runs[name]
    assert (Site.FC2 in alone["mismatch"]) == ("hint_sites" in SCENARIOS[name].trace)
    for site, expected in alone["mismatch"].items():
        counts = sum((result["mismatch"][site] for result in of_rank), CodeMismatch())
        assert (counts.values, counts.guided_values) == (expected.values, expected.guided_values)
        assert counts.rtn_different == expected.rtn_different > 0
        assert counts.unexplained == 0


def test_the_weight_digest_does_not_depend_on_the_layout(runs, name):
    alone, of_rank = runs[name]
    assert {result["digest"] for result in of_rank} == {alone["digest"]}


def test_case_13_experts_without_tokens_are_quantised_and_get_no_gradient(runs, name):
    _, of_rank = runs[name]
    grads = [g for n, g in of_rank[1]["grads"].items() if "local_experts" in n]
    assert len(grads) == 2 * NUM_EXPERTS
    counts = of_rank[1]["sites"][Site.FC2]
    rows = counts["guided"] + counts["not_recorded"]
    if name == "second half empty":
        assert rows == 0
        assert not any(grad.any() for grad in grads)
    else:
        assert rows > 0
