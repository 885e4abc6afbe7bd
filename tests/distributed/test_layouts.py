"""A table of layouts: in each, a guided training step gives what one rank gives.

Of every layout: loss, gradients, weights after a step, what every quantiser gave (bit for bit),
digest of the quantised weights, coverage, and the bytes of hints that were read. A few run always,
the others with `pytest -m layouts`; `docs/layouts.md` has the last full run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from megatron_trace.config import HINT_SITES
from megatron_trace.hints import HintFilesWriter
from megatron_trace.hints.sharding import packed_length
from megatron_trace.hints.types import Site
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.layouts import Task, train_layouts, train_step
from megatron_trace.testing.ranks import run_ranks
from megatron_trace.testing.rollouts import records_of
from megatron_trace.testing.single_process import single_process
from megatron_trace.testing.tiny_trainer import recorded_rollout, tiny_trainer
from megatron_trace.training.layout import RankLayout
from megatron_trace.training.row_order import row_order

# FP32 products of other sizes and sums in another order; the largest are in docs/layouts.md.
LOSS_TOLERANCE = 1e-6
GRAD_TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 1e-6
NUM_POSITIONS = 16
# Of one layout; one of 4 ranks takes 3 s on two free cores.
TIMEOUT_S = 120.0
TP, PP, CP, EP, ETP = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
LENGTHS = ((5, 3), (3, 2), (7, 4), (2, 13))
# As long as S, so that no padding goes to the experts that are to stay without tokens.
FULL_LENGTHS = ((9, 8), (5, 12), (16, 1), (1, 16))
# 5, 7 and 3 rows: two tensor-parallel ranks pad the pack to 16 (cases.md, 29).
CASE_29 = ((3, 3), (5, 3), (2, 2))
# Multiples of 4 rows: context parallelism of two ranks splits each sample without padding.
IN_FOURS = ((5, 4), (3, 6), (4, 1), (7, 14))


@dataclass(frozen=True)
class Layout:
    """A row of the table.

    Attributes:
        world_size: Ranks.
        parallel: Sizes of the groups.
        config: Fields of `TransformerConfig`.
        trace: Fields of `TraceConfig`.
        num_experts: Experts that get tokens.
        distributed_optimizer: Whether optimizer states are split.
        is_short: Whether it is part of the normal run.
        pattern: Hybrid layer pattern; `|` ends a pipeline stage.
        packed: (prompt, response) tokens of samples that are packed; None has others side by side.
    """

    world_size: int
    parallel: Mapping[str, int]
    config: Mapping[str, Any] = field(default_factory=dict)
    trace: Mapping[str, Any] = field(default_factory=dict)
    num_experts: int = 16
    distributed_optimizer: bool = False
    is_short: bool = False
    pattern: str = "*E|*E"
    packed: tuple[tuple[int, int], ...] | None = None

    @property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        """(prompt, response) tokens of the samples."""
        if self.packed is not None:
            return self.packed
        return LENGTHS if self.num_experts == 16 else FULL_LENGTHS

    @property
    def num_replicas(self) -> int:
        """Data-parallel replicas."""
        sizes = [self.parallel.get(name, 1) for name in (TP, PP, CP)]
        return self.world_size // math.prod(sizes)


ALL_GATHER = {"moe_token_dispatcher_type": "allgather"}
PACKED = {"save_packed_activations": True}
DELTA_NET = "GE|*E"
LAYOUTS = {
    "TP2": Layout(2, {TP: 2}, is_short=True),
    # So strict that parts of a row would be judged differently.
    "TP2 ETP2, many rows rejected": Layout(
        2, {TP: 2, ETP: 2}, trace={"guard_min_parity_agreement": 0.97}, is_short=True
    ),
    "TP2 EP2": Layout(2, {TP: 2, EP: 2}, is_short=True),
    "CP2": Layout(2, {CP: 2}, is_short=True),
    "ETP2": Layout(2, {ETP: 2}, is_short=True),
    # Likewise, where rows are rejected on another rank than their token's.
    "CP2 EP2 all-gather, half of the experts empty": Layout(
        2,
        {CP: 2, EP: 2},
        config=ALL_GATHER,
        trace={"guard_min_parity_agreement": 0.97},
        num_experts=8,
        is_short=True,
    ),
    "TP2 Gated DeltaNet": Layout(2, {TP: 2}, pattern=DELTA_NET, is_short=True),
    "CP2 Gated DeltaNet": Layout(2, {CP: 2}, pattern=DELTA_NET),
    "EP2 Gated DeltaNet": Layout(2, {EP: 2}, pattern=DELTA_NET),
    "PP2 Gated DeltaNet": Layout(2, {PP: 2}, pattern=DELTA_NET),
    "TP2 CP2 EP2 Gated DeltaNet": Layout(4, {TP: 2, CP: 2, EP: 2}, pattern=DELTA_NET),
    "PP2 TP2 Gated DeltaNet, a layer cut in two": Layout(4, {PP: 2, TP: 2}, pattern="*EG|E"),
    "TP2 packed samples": Layout(2, {TP: 2}, packed=CASE_29, is_short=True),
    "CP2 EP2 packed samples": Layout(2, {CP: 2, EP: 2}, packed=IN_FOURS, is_short=True),
    "EP2": Layout(2, {EP: 2}),
    "EP2, half of the experts empty": Layout(2, {EP: 2}, num_experts=8),
    "EP2 all-gather, half of the experts empty": Layout(
        2, {EP: 2}, config=ALL_GATHER, num_experts=8
    ),
    "CP2 EP2": Layout(2, {CP: 2, EP: 2}),
    "TP2 ETP2": Layout(2, {TP: 2, ETP: 2}),
    "TP2 EP2 packed activations": Layout(2, {TP: 2, EP: 2}, trace=PACKED),
    "TP2 ETP2 packed activations": Layout(2, {TP: 2, ETP: 2}, trace=PACKED),
    "ETP2 all-gather": Layout(2, {ETP: 2}, config=ALL_GATHER),
    "TP2 residues of 2 bits": Layout(2, {TP: 2}, trace={"hint_bits": 2, "hint_scales": "residue"}),
    "TP2 ETP2 W4A8": Layout(2, {TP: 2, ETP: 2}, trace={"number_format": "mxfp4_w4a8"}),
    "TP2 EP2 MXFP4 packed activations": Layout(
        2, {TP: 2, EP: 2}, trace={"number_format": "mxfp4", **PACKED}
    ),
    "TP2 ETP2 full recomputation": Layout(
        2,
        {TP: 2, ETP: 2},
        config={
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    ),
    "TP4, fewer KV heads": Layout(4, {TP: 4}),
    "EP4": Layout(4, {EP: 4}),
    "CP4": Layout(4, {CP: 4}),
    "TP2 CP2 EP2": Layout(4, {TP: 2, CP: 2, EP: 2}),
    "TP2 EP2 ETP2": Layout(4, {TP: 2, EP: 2, ETP: 2}),
    "TP2 CP2 EP2 ETP2 all-gather": Layout(4, {TP: 2, CP: 2, EP: 2, ETP: 2}, config=ALL_GATHER),
    "EP2 packed samples": Layout(2, {EP: 2}, packed=IN_FOURS),
    "TP2 ETP2 packed samples": Layout(2, {TP: 2, ETP: 2}, packed=CASE_29),
    "TP2 CP2 EP2 packed samples": Layout(4, {TP: 2, CP: 2, EP: 2}, packed=IN_FOURS),
    "PP2 TP2 packed samples": Layout(4, {PP: 2, TP: 2}, packed=CASE_29),
    "PP2 TP2": Layout(4, {PP: 2, TP: 2}),
    "PP2 TP2 ETP2, a layer cut in two": Layout(4, {PP: 2, TP: 2, ETP: 2}, pattern="*E*|E"),
    "PP2 CP2 EP2": Layout(4, {PP: 2, CP: 2, EP: 2}),
    "DP2 EP2 TP2": Layout(4, {TP: 2, EP: 2}),
    "DP2 EP2 distributed optimizer": Layout(2, {EP: 2}, distributed_optimizer=True),
    "DP4 EP2 distributed optimizer": Layout(4, {EP: 2}, distributed_optimizer=True),
    "DP2 TP2 EP4 distributed optimizer": Layout(4, {TP: 2, EP: 4}, distributed_optimizer=True),
}


def steps_on_rank(rank, tasks, folder):
    """Entry of a rank."""
    return dict(train_layouts(rank, tasks, folder))


def _task(layout: Layout, folder) -> Task:
    trace = {"hint_sites": HINT_SITES, **layout.trace}
    whole_pattern = layout.pattern.replace("|", "")
    rolled = recorded_rollout(
        layout.lengths,
        pattern=whole_pattern,
        num_experts=layout.num_experts,
        sites=HINT_SITES,
        num_bits=trace.get("hint_bits", 1),
        scale_form=trace.get("hint_scales", "raw"),
        number_format=trace.get("number_format", "nvfp4"),
    )
    with HintFilesWriter(folder) as writer:
        for sample in rolled.samples:
            for (kind, _, _), hint in records_of(rolled.store, sample).items():
                writer.put(hint, kind)
            writer.commit([sample])
    model, _ = tiny_trainer("bf16", pattern=whole_pattern)
    # The first replicas take one more where it is uneven.
    parts = torch.arange(len(rolled.samples)).tensor_split(layout.num_replicas)
    of_replicas = [[rolled.samples[n] for n in part.tolist()] for part in parts]
    num_positions = NUM_POSITIONS
    if layout.packed:
        sizes = {"tp_size": layout.parallel.get(TP, 1), "cp_size": layout.parallel.get(CP, 1)}
        num_positions = max(
            packed_length([sample.num_rows for sample in samples], **sizes)
            for samples in of_replicas
        )
    return Task(
        weights={name: p.detach().clone() for name, p in model.named_parameters()},
        settings=rolled.settings,
        hint_folder=folder,
        replicas=of_replicas,
        num_positions=num_positions,
        packed=layout.packed is not None,
        trace=trace,
        config=layout.config,
        distributed_optimizer=layout.distributed_optimizer,
        # Megatron's default is the size of the tensor-parallel group.
        parallel={ETP: 1, **layout.parallel},
        pattern=layout.pattern if PP in layout.parallel else whole_pattern,
    )


def _param(name: str) -> Any:
    return pytest.param(name, marks=[] if LAYOUTS[name].is_short else [pytest.mark.layouts])


pytestmark = [
    pytest.mark.distributed,
    pytest.mark.parametrize("name", [_param(name) for name in LAYOUTS]),
]


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """Of the selected layouts: the task, what one rank gave, and what each of the ranks gave.

    Layouts of as many ranks share their processes, whose start takes longer than a step.
    """
    here = [item for item in request.session.items if item.path == request.path]
    chosen = dict.fromkeys(item.callspec.params["name"] for item in here)
    alone = {}
    with single_process(seed=0):
        tasks = {name: _task(LAYOUTS[name], tmp_path_factory.mktemp("hints")) for name in chosen}
        for name, task in tasks.items():
            alone[name] = train_step(task, alone=True)
    of_ranks = {}
    for size in sorted({LAYOUTS[name].world_size for name in chosen}):
        together = {name: tasks[name] for name in chosen if LAYOUTS[name].world_size == size}
        folder = tmp_path_factory.mktemp("stores")
        results = run_ranks(
            __file__,
            "steps_on_rank",
            world_size=size,
            timeout_s=TIMEOUT_S * len(together),
            tasks=together,
            folder=folder,
        )
        of_ranks |= {name: [outcomes[name] for outcomes in results] for name in together}
    return {name: (LAYOUTS[name], tasks[name], alone[name], of_ranks[name]) for name in chosen}


@pytest.fixture
def run(outcomes, name):
    """What the tests compare of one layout."""
    return outcomes[name]


def _error(got: torch.Tensor, expected: torch.Tensor, whole: torch.Tensor) -> float:
    return ((got - expected).abs().max() / whole.abs().max().clamp(min=1e-6)).item()


def test_every_rank_has_the_loss_of_its_whole_replica(run, record_property):
    _, _, alone, ranks = run
    errors = []
    for rank in ranks:
        errors += [abs(loss / alone.loss[rank.replica] - 1) for loss in rank.loss]
    assert len(errors) == len(ranks) // run[0].parallel.get(PP, 1), "the last stages have the loss"
    record_property("loss", max(errors))
    assert max(errors) <= LOSS_TOLERANCE


def test_every_gradient_is_that_of_one_rank(run, record_property):
    layout, _, alone, ranks = run
    worst, seen = (0.0, ""), set()
    for rank in ranks:
        for name, grad in rank.grads.items():
            whole = alone.grads[name]
            worst = max(worst, (_error(grad, rank.slices[name].of(whole), whole), name))
            seen.add(name)
    record_property("grads", worst)
    assert worst[0] <= GRAD_TOLERANCE, worst
    assert seen == (set() if layout.distributed_optimizer else set(alone.grads))


def test_the_weights_after_a_step_are_those_of_one_rank(run, record_property):
    _, task, alone, ranks = run
    worst, seen = (0.0, ""), set()
    for rank in ranks:
        for name, weight in rank.weights.items():
            whole = alone.weights[name]
            worst = max(worst, (_error(weight, rank.slices[name].of(whole), whole), name))
            seen.add(name)
    record_property("weights", worst)
    assert worst[0] <= WEIGHT_TOLERANCE, worst
    assert seen == set(alone.weights)
    moved = [not torch.equal(alone.weights[name], task.weights[name]) for name in seen]
    assert sum(moved) > len(moved) / 2


@pytest.mark.parametrize("site", [Site.FC1, Site.K, Site.V])
def test_every_row_and_column_is_quantised_as_on_one_rank(run, site):
    _, task, alone, ranks = run
    for layer in (0, 1):
        for number, rank in enumerate(ranks):
            if (layer, site) not in rank.shape.places:
                continue
            whole = alone.values[layer, site][rank.replica]
            columns = rank.shape.columns(site) or range(whole.shape[-1])
            expected = whole[_rows_on_one_rank(task, rank, site)]
            expected = expected[:, columns.start : columns.stop].contiguous()
            # Recomputation quantises twice, with the same bits.
            for got in rank.values[layer, site]:
                assert_same_bytes(got, expected, f"layer {layer}, rank {number}")


def _rows_on_one_rank(task, rank, site):
    """Gives which of one rank's rows stand at the rows of this rank."""
    lengths = tuple(sample.num_rows for sample in task.replicas[rank.replica])
    one, own = (
        row_order(lengths, layout, num_positions=task.num_positions, packed=task.packed)
        for layout in (RankLayout(), rank.layout)
    )
    if own.rows()[2].all() or rank.layout.cp_size == 1:
        known = {token: row for row, token in enumerate(_tokens(one))}
        return [known[token] for token in (_tokens(own)[row] for row in own.own(site).tolist())]
    assert not task.packed, "padding of packs stands elsewhere under context parallelism"
    return own.own(site).tolist()


def _tokens(order):
    """Gives what stands at each row of all ranks: (sample, position), or a number for padding."""
    samples, positions, real = (part.tolist() for part in order.rows())
    places = enumerate(zip(samples, positions, real, strict=True))
    return [(b, p) if known else row for row, (b, p, known) in places]


def test_every_slot_is_quantised_as_on_one_rank(run):
    """Recomputation quantises twice, on one rank too."""
    _, _, alone, ranks = run
    for layer in (0, 1):
        place = (layer, Site.FC2)
        for expert in range(16):
            whole = torch.cat(alone.values[place][expert::16])
            for etp_rank in range(ranks[0].layout.etp_size):
                got = [
                    rows
                    for rank in ranks
                    if rank.layout.etp_rank == etp_rank
                    for rows in _rows_of(rank, place, expert)
                ]
                columns = next(
                    rank.shape.slot_columns or range(whole.shape[1])
                    for rank in ranks
                    if rank.layout.etp_rank == etp_rank
                )
                expected = _sorted(whole[:, columns.start : columns.stop])
                assert_same_bytes(_sorted(torch.cat(got)), expected, f"{place}, expert {expert}")


def _rows_of(rank, place, expert):
    local = sorted({e for layer, e, _ in rank.shape.expert_matrices if layer == place[0]})
    return rank.values[place][local.index(expert) :: len(local)] if expert in local else []


def _sorted(rows: torch.Tensor) -> torch.Tensor:
    """Ranks get an expert's rows in another order; equal sets of rows sort alike."""
    if not len(rows):
        return rows
    values, counts = rows.unique(dim=0, return_counts=True)
    return values.repeat_interleave(counts, dim=0)


def test_the_weight_digest_is_that_of_one_rank(run):
    _, _, alone, ranks = run
    assert {rank.digests[0] for rank in ranks} == {alone.digests[0]}
    assert len({rank.digests[1] for rank in ranks}) == 1
    assert ranks[0].digests[1] != alone.digests[0]


def test_counts_add_up_to_those_of_one_rank(run):
    """A row of K and V is counted by each rank that has some of its heads, one of fc2 by each
    that has some of its columns."""
    _, _, alone, ranks = run
    layout = ranks[0].layout
    times = {Site.FC1: 1, Site.FC2: layout.etp_size, Site.K: layout.tp_size, Site.V: layout.tp_size}
    for site, expected in alone.report.sites.items():
        for name in ("guided", "rejected", "missing", "not_recorded", "padding"):
            for rank in ranks:
                total = getattr(rank.report.sites[site], name)
                assert total == times[site] * getattr(expected, name), (site, name)


def test_both_guided_and_rejected_rows_were_compared(run):
    layout, _, alone, _ = run
    if "guard_min_parity_agreement" not in layout.trace:
        pytest.skip("the default guard rejects next to nothing")
    for site, counts in alone.report.sites.items():
        assert counts.guided > 10, site
        assert counts.rejected > 10, site


def test_every_byte_of_hints_is_read_by_exactly_one_rank(run):
    layout, _, alone, ranks = run
    num_kv_heads = alone.shape.num_kv_heads
    if layout.parallel.get(TP, 1) > num_kv_heads or "hint_scales" in layout.trace:
        pytest.skip("KV heads on several ranks, and residues in groups of 8 blocks, are read twice")
    assert sum(rank.hint_bytes for rank in ranks) == alone.hint_bytes > 0


def test_ranks_without_tokens_get_no_gradient(run):
    layout, _, _, ranks = run
    if layout.num_experts == 16:
        pytest.skip("all experts get tokens")
    idle = [rank for rank in ranks if min(e for _, e, _ in rank.shape.expert_matrices) >= 8]
    assert idle
    for rank in idle:
        assert not any(g.any() for name, g in rank.grads.items() if "local_experts" in name)
        assert rank.guided[Site.FC2] == 0
