"""Reading ahead on several ranks and pipeline stages changes no bit, and fails on all together.

`RecordedTraining` and Megatron's schedules run as in Megatron's own loop: every chunk of the model
has a reading thread of its own, or those of a rank share one process.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
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

from megatron_trace.config import HINT_SITES, RecordedConfig, TraceConfig
from megatron_trace.hints import HintFilesWriter
from megatron_trace.hints.types import Site
from megatron_trace.rl.recorded import RecordedTraining
from megatron_trace.rl.rollout_folder import Reward, commit_rollouts
from megatron_trace.testing.layouts import parts_of_whole
from megatron_trace.testing.ranks import run_ranks
from megatron_trace.testing.rollouts import record_of
from megatron_trace.testing.single_process import single_process
from megatron_trace.testing.tiny_trainer import recorded_rollout, tiny_trainer, tiny_trainer_chunks

pytestmark = pytest.mark.distributed

PP, VPP = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
TP, EP, ETP = (
    "tensor_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
LENGTHS = ((5, 4), (3, 1), (2, 7), (4, 3), (7, 2), (6, 3), (1, 8), (2, 2))
NUM_POSITIONS = 12
NUM_MICRO_BATCHES = 4
NUM_PASSES = 2
TRACE = {"hint_layers": "all", "hint_sites": HINT_SITES}


@dataclass(frozen=True)
class Layout:
    """How ranks share the model.

    Attributes:
        parallel: Sizes for `initialize_model_parallel`.
        pattern: Hybrid layer pattern.
    """

    parallel: Mapping[str, int]
    pattern: str = "*E*E"

    @property
    def world_size(self) -> int:
        """Ranks of one pipeline times those that share its stages."""
        sizes = {name: size for name, size in self.parallel.items() if name != VPP}
        return math.prod(sizes.values())


LAYOUTS = {
    "PP2 VPP2": Layout({PP: 2, VPP: 2}, "*E|*E*|E|*E"),
    "EP2": Layout({EP: 2}),
    "PP2": Layout({PP: 2}, "*E*|E"),
    "TP2": Layout({TP: 2, ETP: 1}),
    "PP2 TP2": Layout({PP: 2, TP: 2, ETP: 1}, "*E*|E"),
    "PP2 EP2": Layout({PP: 2, EP: 2}, "*E*E|*E"),
}
IN_EVERY_RUN = ("PP2 VPP2",)


class Batches:
    """Indices of a data-parallel rank's samples, two at a time, without end; counts what it gave.

    Args:
        rank: The data-parallel rank.
        size: Data-parallel ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.samples = range(len(LENGTHS))[rank::size]
        self.num_given = 0

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        places = [2 * self.num_given, 2 * self.num_given + 1]
        self.num_given += 1
        samples = [self.samples[place % len(self.samples)] for place in places]
        return {"part": torch.tensor([0, 0]), "sample": torch.tensor(samples)}


def train_on_rank(rank: int, layout: str, **given: Any) -> dict[str, Any]:
    """Entry of a rank: the same passes without and with reading ahead."""
    return {
        name: _train(LAYOUTS[layout], recorded, **given)
        for name, recorded in {
            "at once": {},
            "ahead": {"prefetch": True},
            "process": {"prefetch": True, "hint_memory_mb": 1, "hint_reader": "process"},
        }.items()
    }


def _train(layout: Layout, recorded: Mapping[str, Any], *, folder, settings, weights):
    config = {**layout.parallel, "calculate_per_token_loss": True}
    config["sequence_parallel"] = layout.parallel.get(TP, 1) > 1
    if VPP in layout.parallel:
        config |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    chunks = tiny_trainer_chunks(
        "trace", settings=settings, config=config, pattern=layout.pattern, **TRACE
    )
    wrapped = []
    for model, sites in chunks:
        object.__setattr__(model, "trace_sites", sites)
        names, slices = parts_of_whole(model, sites)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(slices[names[name]].of(weights[names[name]]))
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=False)
        wrapped.append(DistributedDataParallel(model.config, ddp, model))
    training = RecordedTraining(
        TraceConfig(**TRACE),
        RecordedConfig(hint_dir=folder, **recorded),
        num_positions=NUM_POSITIONS if PP in layout.parallel else None,
        num_micro_batches=lambda trains: NUM_MICRO_BATCHES,
    )
    replica = (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )
    batches = [Batches(*replica) for _ in chunks]
    given, reports = [], []
    try:
        for _ in range(NUM_PASSES):
            reports += get_forward_backward_func()(
                forward_step_func=training.forward_step,
                data_iterator=batches,
                model=wrapped,
                num_microbatches=NUM_MICRO_BATCHES,
                seq_length=NUM_POSITIONS,
                micro_batch_size=2,
                forward_only=False,
            )
            given.append([each.num_given for each in batches])
        training.assert_ran()
        summary = training.summary()
    finally:
        training.close()
    finalize_model_grads(wrapped)
    return {
        "reports": [{name: value.tolist() for name, value in each.items()} for each in reports],
        "grads": [p.main_grad.clone() for model, _ in chunks for p in model.parameters()],
        "given": given,
        "summary": summary,
        "threads": sum(thread.name == "trace-prefetch" for thread in threading.enumerate()),
    }


def fail_on_rank(rank: int, **given: Any) -> str:
    """Entry of a rank: a hint of rank 1's second micro-batch is missing."""
    try:
        _train(LAYOUTS["EP2"], {"prefetch": True}, **given)
    except (LookupError, RuntimeError) as error:
        left = [thread for thread in threading.enumerate() if thread.name == "trace-prefetch"]
        assert not left, "the reading thread outlives the error"
        return f"{type(error).__name__}: {error}"
    return "nothing was missing"


def _write(folder, pattern, *, without=None):
    """Writes a folder of rewarded samples; one place of one sample may have no hint."""
    whole = pattern.replace("|", "")
    with single_process(seed=0):
        rolled = recorded_rollout(LENGTHS, pattern=whole, sites=HINT_SITES)
        model, _ = tiny_trainer("bf16", pattern=whole)
    with HintFilesWriter(folder) as files:
        for sample in rolled.samples:
            for place in rolled.store.places(sample.sample_id):
                if (sample.sample_id, *place) != without:
                    files.put(record_of(rolled.store, sample, *place))
        rewards = [
            Reward(sample.sample_id, "g", len(LENGTHS), float(n % 3))
            for n, sample in enumerate(rolled.samples)
        ]
        commit_rollouts(files, rolled.samples, rewards, rolled.settings)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {"folder": str(folder), "settings": rolled.settings, "weights": weights}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What each rank of a layout gave; made when first asked for."""
    known = {}

    def run(name):
        if name not in known:
            layout = LAYOUTS[name]
            known[name] = run_ranks(
                __file__,
                "train_on_rank",
                world_size=layout.world_size,
                parallel=layout.parallel,
                layout=name,
                **_write(tmp_path_factory.mktemp("rollouts"), layout.pattern),
            )
        return known[name]

    return run


@pytest.mark.parametrize("how", ["ahead", "process"])
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in IN_EVERY_RUN else pytest.mark.layouts) for n in LAYOUTS],
)
def test_reading_ahead_changes_no_bit_on_any_rank(runs, name, how):
    results = runs(name)
    for rank, result in enumerate(results):
        plain, ahead = result["at once"], result[how]
        assert ahead["reports"] == plain["reports"], f"rank {rank}"
        assert ahead["summary"] == plain["summary"]
        assert any(grad.any() for grad in plain["grads"])
        for a, b in zip(ahead["grads"], plain["grads"], strict=True):
            assert torch.equal(a, b), f"rank {rank}"
        # Every chunk takes the indices of a pass, and none of the next one.
        chunks = LAYOUTS[name].parallel.get(VPP, 1)
        expected = [[NUM_MICRO_BATCHES * (n + 1)] * chunks for n in range(NUM_PASSES)]
        assert ahead["given"] == plain["given"] == expected
        assert ahead["threads"] == 0
    losses = [report for result in results for report in result["at once"]["reports"]]
    assert any(report["policy loss"][0] for report in losses)
    assert "100.0% of the rows guided" in results[0]["at once"]["summary"]


def test_a_hint_that_one_rank_misses_while_it_reads_ahead_is_one_error_on_all(tmp_path):
    given = _write(tmp_path, "*E*E", without=("sample-5", 1, Site.V))
    first, second = run_ranks(
        __file__, "fail_on_rank", world_size=2, parallel=LAYOUTS["EP2"].parallel, **given
    )
    assert second.startswith("LookupError: ")
    assert "sample-5" in second
    assert first.startswith("RuntimeError: rank 1 could not build its part, so no rank goes on: ")
    assert first.endswith(second)
