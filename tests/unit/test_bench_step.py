"""How `tools/bench_step.py` compares cases, and says where a process stands that stands still."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_trace.testing.programs import load_program

TOOLS = Path(__file__).parents[2] / "tools"
STANDS_STILL = """
import os, sys, tempfile
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from stall_watch import watched

def stand_still():
    os.read(0, 1)

with tempfile.TemporaryDirectory() as folder:
    with watched(Path(folder), after_s=0.3, native=False) as progress:
        progress.made()
        stand_still()
        progress.made()
        os.read(0, 1)
"""


@pytest.fixture(scope="module")
def pairs():
    return load_program(TOOLS / "bench_step_pairs.py")


def test_a_ratio_of_rounds_is_not_moved_by_what_slows_both_cases(pairs):
    plain = [100.0, 130.0, 101.0, 190.0, 99.0]
    ratio = pairs.paired_ratio([1.02 * time for time in plain], plain)
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((1.02, 1.02, 1.02))
    assert ratio.num_pairs == 5


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([1.0, 1.01, 1.02] * 8, "within"),
        ([1.05, 1.06, 1.07] * 8, "beyond"),
        ([0.9, 1.02, 1.2], "not resolved"),
    ],
)
def test_the_verdict_is_that_of_the_whole_interval(pairs, ratios, verdict):
    assert pairs.paired_ratio(ratios, [1.0] * len(ratios)).verdict(1.03) == verdict


def test_cases_that_are_compared_take_their_turns_one_after_another(pairs):
    cases = [(experts, method) for method in ("qat", "trace") for experts in ("te", "local")]
    orders = {
        tuple(pairs.shuffled_groups(cases, lambda case: case[0], random.Random(seed)))
        for seed in range(64)
    }
    assert all(a[0] == b[0] and c[0] == d[0] for a, b, c, d in orders)
    assert all(sorted(order) == sorted(cases) for order in orders)
    assert len(orders) == 8


def test_rounds_that_are_not_pairs_are_refused(pairs):
    with pytest.raises(ValueError, match="got 2 and 1"):
        pairs.paired_ratio([1.0, 2.0], [1.0])


def test_a_process_that_stands_still_is_described_with_its_threads_and_stacks():
    command = [sys.executable, "-c", STANDS_STILL, str(TOOLS)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0
    ) as process:
        assert process.stdin is not None
        # It stands until all of this was said, however long the watcher takes to start.
        for said in (b"no progress beyond 1", b"beats in .4 s", b"in stand_still"):
            assert any(said in line for line in process.stdout), said
        process.stdin.write(b"1")
        assert any(b"goes on" in line for line in process.stdout)
        process.stdin.write(b"2")
        process.stdout.read()
    assert process.returncode == 0
