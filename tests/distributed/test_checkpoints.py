"""Checkpoints saved in one layout and loaded in another: the guided forward keeps its bits.

Megatron's dist_checkpointing holds the weights, `settings.json` beside them the quantiser settings.
Every layout forwards the same samples with the same hints on all of its ranks, after all of its
parameters were NaN; what one rank gives that never saw a checkpoint is what all must give.
`docs/layouts.md` has the last full run. Cases 21 and 22 are among these conversions.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_trace import compat
from megatron_trace.config import HINT_SITES
from megatron_trace.hints.settings_file import load_settings, save_settings
from megatron_trace.hints.store import HintStore
from megatron_trace.hints.types import QuantizerSettings, RolloutSample, Site
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.layouts import Slice, parts_of_whole
from megatron_trace.testing.ranks import run_ranks
from megatron_trace.testing.recorded_samples import seen_values
from megatron_trace.testing.single_process import init_rank, single_process
from megatron_trace.testing.tiny_trainer import recorded_rollout, tiny_trainer
from megatron_trace.training.micro_batch import make_micro_batch
from megatron_trace.training.over_ranks import agreed
from megatron_trace.training.pipeline import trainer_forward_step
from megatron_trace.training.shape import ModelShape, Place
from megatron_trace.training.weights import expert_weight_digest

# Of FP32 log-probs, relative to the largest: that of losses in the table of layouts.
TOLERANCE = 1e-6
NUM_EXPERTS = 16
NUM_POSITIONS = 16
# A Gated DeltaNet too, each part of whose input projection a checkpoint splits alone.
PATTERN = "GE*E|*E"
LENGTHS = ((5, 3), (3, 2), (7, 4), (2, 13))
TIMEOUT_S = 400.0
TP, PP, EP, ETP = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
LAYOUTS: dict[str, dict[str, int]] = {
    "one rank": {},
    "EP2": {EP: 2},
    "TP2": {TP: 2},
    "TP2 ETP2": {TP: 2, ETP: 2},
    "PP2": {PP: 2},
    "EP4": {EP: 4},
    "TP2 EP2 ETP2": {TP: 2, EP: 2, ETP: 2},
    "PP2 TP2": {PP: 2, TP: 2},
}
SAVED = ("EP2", "TP2", "TP2 ETP2", "PP2")
# (saved by two ranks, loaded, ranks that load).
CONVERSIONS = [
    ("EP2", "one rank", 1),
    ("TP2", "one rank", 1),
    ("TP2 ETP2", "one rank", 1),
    ("PP2", "one rank", 1),
    ("PP2", "EP2", 2),
    ("EP2", "TP2 ETP2", 2),
    ("TP2", "PP2", 2),
    ("EP2", "EP4", 4),
    ("TP2 ETP2", "TP2 EP2 ETP2", 4),
    ("EP2", "PP2 TP2", 4),
]


@dataclass(frozen=True)
class Given:
    """What every layout forwards.

    Attributes:
        samples: Rollout samples.
        store: Their hints.
        weights: Parameters of the whole model.
        settings: Quantiser settings of the rollout.
    """

    samples: Sequence[RolloutSample]
    store: HintStore
    weights: Mapping[str, torch.Tensor]
    settings: QuantizerSettings


@dataclass(frozen=True)
class Outcome:
    """What a forward pass gave on one rank.

    Attributes:
        shape: Sizes of its model.
        logprobs: FP32 [B, S]; None before the last pipeline stage.
        values: What each quantiser gave, call by call.
        digest: Digest of the quantised expert weights.
        settings: Quantiser settings that it used.
        guided: Rows that it guided.
        weights: Its parameters, by name in the whole model.
        slices: Which part of a parameter these are.
    """

    shape: ModelShape
    logprobs: torch.Tensor | None
    values: dict[Place, list[torch.Tensor]]
    digest: str
    settings: QuantizerSettings
    guided: int
    weights: dict[str, torch.Tensor]
    slices: dict[str, Slice]


def run_on_rank(
    rank: int, layouts: Sequence[tuple[str, str | None]], given: dict[str, Any], folder: Path
) -> list[dict[str, Any]]:
    """Entry of a rank: forwards in one layout after another.

    Args:
        rank: This rank.
        layouts: The layout and the one whose checkpoint it loads; if None, it takes the weights
            and settings that are given, and saves a checkpoint.
        given: Fields of `Given`.
        folder: Where checkpoints and file stores are.

    Returns:
        Fields of an `Outcome` for each layout: a rank's module has no name to be found by.
    """
    outcomes = []
    world_size = dist.get_world_size()
    for number, (layout, loaded) in enumerate(layouts):
        if number:
            parallel_state.destroy_model_parallel()
        dist.barrier()
        dist.destroy_process_group()
        # Megatron's default is the size of the tensor-parallel group.
        parallel = {ETP: 1, **LAYOUTS[layout]}
        store = folder / f"store-{world_size}-{number}"
        init_rank(store, rank=rank, world_size=world_size, seed=0, **parallel)
        try:
            if loaded is None:
                outcome = forward(layout, Given(**given), save=folder / layout)
            else:
                outcome = forward(layout, Given(**given), load=folder / loaded)
            outcomes.append(vars(outcome))
        except BaseException as error:
            error.add_note(f"in layout {layout}, from {loaded}")
            raise
    parallel_state.destroy_model_parallel()
    return outcomes


def forward(
    layout: str, given: Given, *, load: Path | None = None, save: Path | None = None
) -> Outcome:
    """Forwards the samples on this rank; the parameters are NaN until they are loaded or copied."""
    parallel = {ETP: 1, **LAYOUTS[layout]}
    model, sites = tiny_trainer(
        "trace",
        pattern=PATTERN if PP in parallel else PATTERN.replace("|", ""),
        config={**parallel, "sequence_parallel": parallel.get(TP, 1) > 1},
        hint_sites=HINT_SITES,
    )
    names, slices = parts_of_whole(model, sites)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            part = slices[names[name]].of(given.weights[names[name]])
            parameter.copy_(part if load is None else torch.full_like(part, torch.nan))
    if load is None:
        sites.settings = given.settings
    else:
        state: Any = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(load))
        model.load_state_dict(state["model"])
        sites.settings = load_settings(load)
    if save is not None:
        _save(model, sites.settings, save)
    world = dist.group.WORLD
    assert world is not None, "the layout is initialised"
    micro_batch = agreed(
        lambda: make_micro_batch(given.samples, given.store, sites, num_positions=NUM_POSITIONS),
        world,
    )
    with torch.no_grad(), seen_values(sites) as seen:
        reported = get_forward_backward_func()(
            forward_step_func=trainer_forward_step(
                lambda logprobs, _: (logprobs.sum(), {"logprobs": logprobs})
            ),
            data_iterator=iter([micro_batch]),
            model=[model],
            num_microbatches=1,
            seq_length=NUM_POSITIONS,
            micro_batch_size=len(given.samples),
            forward_only=True,
        )
    return Outcome(
        shape=sites.shape,
        logprobs=reported[0]["logprobs"] if reported else None,
        values={place: values.outputs for place, values in seen.items()},
        digest=expert_weight_digest(model, sites),
        settings=sites.settings,
        guided=sum(counts.guided for counts in sites.report().sites.values()),
        weights={names[name]: p.detach().clone() for name, p in model.named_parameters()},
        slices=slices,
    )


def _save(model: Any, settings: QuantizerSettings, folder: Path) -> None:
    """Writes the weights, and the settings beside them."""
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    with compat.checkpoint_writes_in_process():
        dist_checkpointing.save({"model": model.sharded_state_dict()}, str(folder))
    if dist.get_rank() == 0:
        save_settings(settings, folder)
    dist.barrier()


def _param(conversion: tuple[str, str, int]) -> Any:
    saved, loaded, ranks = conversion
    marks = [pytest.mark.layouts] if ranks == 4 else []
    return pytest.param(conversion, marks=marks, id=f"{saved} to {loaded}")


pytestmark = [
    pytest.mark.distributed,
    pytest.mark.parametrize("conversion", [_param(c) for c in CONVERSIONS]),
]


@pytest.fixture(scope="module")
def given():
    """Weights, samples, hints and settings, none of which a checkpoint held."""
    with single_process(seed=0):
        whole = PATTERN.replace("|", "")
        rolled = recorded_rollout(LENGTHS, pattern=whole, sites=HINT_SITES)
        model, _ = tiny_trainer("bf16", pattern=whole)
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return Given(rolled.samples, rolled.store, weights, rolled.settings)


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory, given):
    """What one rank gave, and what each rank gave of every selected conversion."""
    here = [item for item in request.session.items if item.path == request.path]
    chosen = list(dict.fromkeys(item.callspec.params["conversion"] for item in here))
    folder = tmp_path_factory.mktemp("checkpoints")
    found = {}
    for ranks in (2, 4):
        loading = [c for c in chosen if c[2] == ranks]
        layouts = [(saved, None) for saved in SAVED] if ranks == 2 else []
        layouts += [(loaded, saved) for saved, loaded, _ in loading]
        if not layouts:
            continue
        of_ranks = run_ranks(
            __file__,
            "run_on_rank",
            world_size=ranks,
            timeout_s=TIMEOUT_S,
            layouts=layouts,
            given=vars(given),
            folder=folder,
        )
        of_layouts = [
            [Outcome(**fields) for fields in each] for each in zip(*of_ranks, strict=True)
        ]
        found |= dict(zip(loading, of_layouts[len(layouts) - len(loading) :], strict=True))
    with single_process(seed=0):
        alone = forward("one rank", given)
        for saved, loaded, ranks in chosen:
            if ranks == 1:
                found[saved, loaded, 1] = (forward(loaded, given, load=folder / saved),)
    return alone, found


@pytest.fixture
def run(outcomes, conversion):
    """What one rank gave without a checkpoint, and what the ranks of a conversion gave."""
    alone, found = outcomes
    return alone, found[conversion]


def test_case_21_every_parameter_is_loaded_bit_for_bit(run, given):
    _, ranks = run
    seen = set()
    for rank in ranks:
        for name, weight in rank.weights.items():
            expected = rank.slices[name].of(given.weights[name])
            assert_same_bytes(weight, expected.contiguous(), name)
            seen.add(name)
    assert seen == set(given.weights)


def test_case_22_global_scales_and_codes_of_the_weights_are_those_of_one_rank(run, given):
    alone, ranks = run
    for rank in ranks:
        assert rank.settings == given.settings
        assert rank.settings.digest() == given.settings.digest()
    assert {rank.digest for rank in ranks} == {alone.digest}


@pytest.mark.parametrize("site", [Site.FC1, Site.K, Site.V])
def test_every_row_and_column_is_quantised_as_on_one_rank(run, site):
    alone, ranks = run
    places = set()
    for number, rank in enumerate(ranks):
        for layer in range(3):
            if (layer, site) not in rank.shape.places:
                continue
            places.add(layer)
            (whole,) = alone.values[layer, site]
            whole = whole.unflatten(0, (NUM_POSITIONS, -1))
            parts = rank.shape.layout.positions(site, NUM_POSITIONS)
            columns = rank.shape.columns(site) or range(whole.shape[-1])
            expected = torch.cat([whole[p.start : p.stop] for p in parts]).flatten(0, 1)
            (got,) = rank.values[layer, site]
            expected = expected[:, columns.start : columns.stop].contiguous()
            assert_same_bytes(got, expected, f"layer {layer}, rank {number}")
    assert places == ({0, 1, 2} if site is Site.FC1 else {1, 2})


def test_every_slot_is_quantised_as_on_one_rank(run):
    """Ranks may share the rows of an expert, or all forward the same ones: sets are compared."""
    alone, ranks = run
    got = defaultdict(list)
    for rank in ranks:
        columns = rank.shape.slot_columns or range(rank.shape.expert_values)
        for layer in {layer for layer, _, _ in rank.shape.expert_matrices}:
            experts = sorted({e for at, e, _ in rank.shape.expert_matrices if at == layer})
            for expert, rows in zip(experts, rank.values[layer, Site.FC2], strict=True):
                got[layer, expert, columns].append(rows)
    assert {key[:2] for key in got} == {(i, e) for i in range(3) for e in range(NUM_EXPERTS)}
    for (layer, expert, columns), rows in got.items():
        whole = alone.values[layer, Site.FC2][expert]
        expected = whole[:, columns.start : columns.stop].unique(dim=0)
        where = f"layer {layer}, expert {expert}, columns {columns}"
        assert_same_bytes(torch.cat(rows).unique(dim=0), expected, where)


def test_log_probs_are_those_of_one_rank(run, record_property):
    alone, ranks = run
    assert alone.logprobs is not None
    largest = alone.logprobs.abs().max()
    errors = [
        ((rank.logprobs - alone.logprobs).abs().max() / largest).item()
        for rank in ranks
        if rank.logprobs is not None
    ]
    record_property("logprobs", max(errors))
    assert max(errors) <= TOLERANCE
    assert not math.isnan(max(errors))
    assert all(rank.guided > 0 for rank in ranks)
