"""Alarms of Megatron's loop on two ranks: both raise the same, and both skip a step of either."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_trace.config import TraceConfig
from megatron_trace.hints.types import Site
from megatron_trace.rl.loop_health import LoopHealth
from megatron_trace.rl.loop_record import SampleOrigin
from megatron_trace.rl.losses import LossSums
from megatron_trace.rl_config import HealthConfig
from megatron_trace.testing.ranks import run_ranks
from megatron_trace.training.report import SiteReport, TraceReport
from megatron_trace.training.rounding import NonFiniteError

pytestmark = pytest.mark.distributed
ALARMS = ("gap_mean=0:warn", "gap_max=0:warn", "gap_p99=0:warn", "coverage=1:stop")
GAPS = torch.tensor([0.5, -1.0, 0.25]), torch.tensor([-2.0])
COUNTS = SiteReport(calls=1, guided=9, rejected=1), SiteReport(calls=1, guided=3, missing=7)


def steps(rank):
    """Does a step with different tokens, one with the same, and one in which rank 1 has a NaN."""
    config = HealthConfig(alarms=ALARMS, max_skipped_steps=0)
    health = LoopHealth(config, TraceConfig(), saves=True)
    alone = [dist.new_group([each]) for each in range(2)]
    report = TraceReport(sites={(Site.K, Site.FC1)[rank]: COUNTS[rank]})
    found = []
    for gaps, tensor_parallel in ((GAPS[rank], alone[rank]), (GAPS[0], dist.group.WORLD)):
        groups = SimpleNamespace(tp=tensor_parallel)
        health.add(gaps, LossSums(num_tokens=len(gaps)), groups)
        alarms = health.check(1, report)
        found.append({alarm["alarm"]: alarm["value"] for alarm in alarms})
    told = health.stop_reason
    if rank == 1:
        health.note_non_finite(NonFiniteError("a NaN of rank 1"))
    skipped = health.skips([]), health.stop_reason, health.skips([])
    return found, told, *skipped, logged(rank, alone[rank])


def logged(rank, alone):
    """Logs a step of a sample on each rank, and one of a sample that both have a part of."""
    health = LoopHealth(HealthConfig(alarms=("none",)), TraceConfig(), saves=True, logs=True)
    records = []
    for context_parallel in (alone, dist.group.WORLD):
        groups = SimpleNamespace(tp=alone, cp=context_parallel)
        with health.waiting():
            health.add(GAPS[rank], LossSums(num_tokens=len(GAPS[rank])), groups)
        mask = torch.ones(1, 3 + rank, dtype=torch.bool)
        origin = SampleOrigin(rewards=(float(rank),), lags=(rank,), spreads=(True,))
        health.add_samples(origin, mask, torch.tensor([rank == 0]), groups)
        health.check(1, TraceReport())
        records.append(health.take_record())
        assert records[-1].pop("seconds")["train"] > 0
    return records


@pytest.fixture(scope="module")
def ranks():
    first, second = run_ranks(Path(__file__), "steps", world_size=2)
    assert first == second
    return first


def test_both_ranks_raise_the_alarms_of_all_tokens(ranks):
    (apart, together), reason, *_ = ranks
    assert apart.pop("gap_p99") == pytest.approx(1.97)
    assert apart == {"gap_mean": 0.9375, "gap_max": 2.0, "coverage": 0.6}
    # Tensor-parallel ranks have the same tokens, which count once.
    assert together.pop("gap_p99") == pytest.approx(0.99)
    assert together == {"gap_mean": 1.75 / 3, "gap_max": 1.0, "coverage": 0.6}
    assert reason == "coverage is 0.6 (threshold 1)"


def test_a_nan_of_one_rank_skips_the_step_on_both_and_no_other_step(ranks):
    _, _, skips, reason, skips_next, _ = ranks
    assert (skips, skips_next) == (True, False)
    assert reason == "non_finite is 1 (threshold 0)"


def test_both_ranks_log_the_step_of_all_samples_each_counted_once(ranks):
    apart, together = ranks[-1]
    of_samples = ("samples", "reward", "response_tokens", "response_tokens_max", "dropped_samples")
    assert [apart[name] for name in of_samples] == [2, 0.5, 3.5, 4, 1]
    assert [together[name] for name in of_samples] == [1, 0.0, 3.0, 3, 1]
    assert [record["health"]["lag_max"] for record in (apart, together)] == [1, 0]
    # Tokens are those of both ranks in either case.
    for record in (apart, together):
        assert (record["gap"]["num_tokens"], record["gap"]["mean"]) == (4, 0.9375)
        assert record["gap"]["max"] == 2.0
        assert record["gap"]["ratio_min"] == pytest.approx(math.exp(-2.0))
        assert record["gap"]["ratio_max"] == pytest.approx(math.exp(0.5))
