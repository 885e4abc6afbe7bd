"""The rank spawner: results by rank, and no hang when a rank fails or waits for ever."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_trace.testing.ranks import run_ranks

pytestmark = pytest.mark.distributed


def sum_over_ranks(rank, values):
    """Adds what each rank is given."""
    total = torch.tensor(values[rank])
    dist.all_reduce(total)
    return {"rank": rank, "total": total}


def say_and_wait(rank, folder):
    """Says something at once, and ends when that was heard."""
    sys.stderr.write(f"layout {rank} is done\n")
    while not (Path(folder) / f"heard {rank}").exists():
        time.sleep(0.01)
    sys.stderr.write("all are done\n")


def fail_on_rank_1(rank):
    """Rank 1 fails before the collective in which rank 0 waits."""
    if rank == 1:
        raise ValueError("rank 1 has no hint for sample-7")
    dist.all_reduce(torch.zeros(1))


def wait_for_ever(rank):
    """Never returns."""
    time.sleep(3600)


def test_each_rank_gives_its_result():
    results = run_ranks(__file__, "sum_over_ranks", world_size=2, values=[3, 4])
    assert [result["rank"] for result in results] == [0, 1]
    assert [int(result["total"]) for result in results] == [7, 7]


def test_one_failing_rank_ends_all_and_its_message_is_shown():
    with pytest.raises(RuntimeError, match="rank 1 has no hint for sample-7"):
        run_ranks(__file__, "fail_on_rank_1", world_size=2)


def test_ranks_that_never_finish_are_ended():
    with pytest.raises(RuntimeError, match=r"not finished after 1 s, exit codes \[-9, -9\]"):
        run_ranks(__file__, "wait_for_ever", world_size=2, timeout_s=1)


def test_what_ranks_print_is_passed_on_before_they_end(tmp_path):
    seen = []

    def heard(line):
        seen.append(line.partition("rank ")[2])
        for rank in range(2):
            if line.endswith(f"layout {rank} is done"):
                (tmp_path / f"heard {rank}").touch()

    run_ranks(__file__, "say_and_wait", world_size=2, echo=heard, folder=str(tmp_path))
    for rank in range(2):
        assert seen.count(f"{rank}] layout {rank} is done") == 1
        assert f"{rank}] all are done" in seen
