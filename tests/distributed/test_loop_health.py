"""Alarms of Megatron's loop on two ranks: both raise the same, and both skip a step of either."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_trace.config import TraceConfig
from megatron_trace.hints.types import Site
from megatron_trace.rl.loop_health import LoopHealth
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
    return found, told, health.skips([]), health.stop_reason, health.skips([])


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
    _, _, skips, reason, skips_next = ranks
    assert (skips, skips_next) == (True, False)
    assert reason == "non_finite is 1 (threshold 0)"
