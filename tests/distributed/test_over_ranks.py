"""One failing rank is one clear error on all ranks, and counts are summed over them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_trace.hints.types import Site
from megatron_trace.metrics import CodeMismatch
from megatron_trace.testing.ranks import run_ranks
from megatron_trace.testing.single_process import single_process
from megatron_trace.testing.tiny_trainer import recorded_rollout, tiny_trainer
from megatron_trace.training.micro_batch import make_micro_batch
from megatron_trace.training.over_ranks import (
    agreed,
    largest,
    quantile,
    summed,
    summed_differences,
    summed_report,
)
from megatron_trace.training.report import ActivationDifference, SiteReport, TraceReport

pytestmark = pytest.mark.distributed
# Of two ranks; one number is denormal, one is twice there.
NUMBERS = torch.tensor([0.5, 0.0, 3.0, 1e-40]), torch.tensor([0.25, 3.0, 1e30])
ACTIVATION = ActivationDifference(trained=1, nearest=2, rollout=4)
SHARES = (0.0, 0.4, 0.5, 0.75, 0.99, 1.0)


def settle(rank):
    """Two of three ranks agree thrice, and sum their counts; the first has no part in it."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return None

    def fail_on(*failing):
        if rank in failing:
            raise (LookupError, OSError)[rank - 1](f"no hint of sample-{rank}")
        return f"batch of rank {rank}"

    told = [agreed(fail_on, group)]
    for failing in ((2,), (1, 2)):
        try:
            agreed(lambda failing=failing: fail_on(*failing), group)
        except (LookupError, RuntimeError, OSError) as error:
            told.append(f"{type(error).__name__}: {error}")
    # After a failure the group is still in step.
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    second = rank == 2
    report = TraceReport(
        sites=(
            {Site.K: SiteReport(calls=1, guided=3)} if second else {Site.FC1: SiteReport(calls=2)}
        ),
        weight_uses=5,
        weights_quantised=3,
        routing_compared=10,
        routing_different=int(second),
        code_mismatch={Site.V: CodeMismatch(values=7, sign_flip=1)} if second else {},
    )
    numbers = summed([1.5 * rank, 1.0], group), largest([-float(rank), rank], group)
    places = {(rank, Site.K): ActivationDifference(rank, 1, 2), (9, Site.V): ACTIVATION}
    differences = summed_differences(TraceReport(activation_difference=places), group)
    shares = [quantile(NUMBERS[rank - 1], share, group) for share in SHARES]
    return told, total.item(), summed_report(report, group), (*numbers, shares), differences


def make_micro_batches(rank, settings, store, samples):
    """Each of two replicas makes the micro-batches of its samples; a hint of rank 1's is gone."""
    _, sites = tiny_trainer("trace", settings=settings)
    half = len(samples) // 2
    parts = [[sample] for sample in samples[rank * half :][:half]]
    try:
        agreed(lambda: [make_micro_batch(part, store, sites) for part in parts], dist.group.WORLD)
    except (LookupError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was missing"


def test_a_missing_hint_of_one_replica_is_one_error_on_all_ranks():
    with single_process(seed=0):
        rolled = recorded_rollout(((5, 3), (3, 2), (7, 4), (2, 6)))
    rolled.store.drop_sample("sample-3")
    first, second = run_ranks(
        Path(__file__),
        "make_micro_batches",
        world_size=2,
        parallel={"expert_model_parallel_size": 2},
        settings=rolled.settings,
        store=rolled.store,
        samples=rolled.samples,
    )
    assert second.startswith("LookupError: no hint record")
    assert first.startswith("RuntimeError: rank 1 could not build its part, so no rank goes on: ")
    assert first.endswith(second)
    assert "sample sample-3, layer 0, site fc1" in first


@pytest.fixture(scope="module")
def results():
    """What each of two ranks gave, which are the last two of three."""
    return run_ranks(Path(__file__), "settle", world_size=3)[1:]


def test_a_failure_of_one_rank_is_told_to_all(results):
    (first, alive, *_), (second, *_) = results
    assert first[0] == "batch of rank 1"
    assert second[0] == "batch of rank 2"
    # Named by its rank among all, not in the group.
    assert first[1] == (
        "RuntimeError: rank 2 could not build its part, so no rank goes on: OSError: no hint of "
        "sample-2"
    )
    assert second[1] == "OSError: no hint of sample-2"
    assert alive == 2.0


def test_every_failing_rank_keeps_its_own_error(results):
    assert [told[2] for told, *_ in results] == [
        "LookupError: no hint of sample-1",
        "OSError: no hint of sample-2",
    ]


def test_sums_and_the_largest_number_are_of_all_ranks(results):
    assert [of[3][:2] for of in results] == [([4.5, 2.0], [-1.0, 2.0])] * 2


def test_a_quantile_over_ranks_equals_torchs_of_all_values(results):
    shares = torch.tensor(SHARES, dtype=torch.float64)
    expected = torch.quantile(torch.cat(NUMBERS).double(), shares).tolist()
    for *_, (_, _, found), _ in results:
        assert found == pytest.approx(expected, rel=1e-12)


def test_counts_are_summed_over_ranks_of_unlike_layers(results):
    expected = TraceReport(
        sites={Site.FC1: SiteReport(calls=2), Site.K: SiteReport(calls=1, guided=3)},
        weight_uses=10,
        weights_quantised=6,
        routing_compared=20,
        routing_different=1,
        code_mismatch={Site.V: CodeMismatch(values=7, sign_flip=1)},
    )
    assert [report for _, _, report, *_ in results] == [expected, expected]


def test_differences_of_a_place_are_summed_over_the_ranks_that_have_it(results):
    expected = {
        (1, Site.K): ActivationDifference(1, 1, 2),
        (2, Site.K): ActivationDifference(2, 1, 2),
        (9, Site.V): ActivationDifference(2, 4, 8),
    }
    assert [differences for *_, differences in results] == [expected, expected]
