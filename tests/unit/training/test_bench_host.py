"""What `tools/bench_host.py` measures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_trace.config import HINT_SITES
from megatron_trace.formats import ops
from megatron_trace.testing.programs import load_program

TOOLS = Path(__file__).parents[3] / "tools"


@pytest.mark.parametrize("method", ["qat", "trace"])
def test_every_site_is_timed_and_values_are_rounded_again_afterwards(rollout, method):
    bench = load_program(TOOLS / "bench_host.py")
    found = bench.measure(method, rollout(sites=HINT_SITES), repetitions=1)
    assert set(found) == {"micro-batch", *HINT_SITES}
    assert all(0 < microseconds < 1e5 for microseconds in found.values())
    values = torch.full((1, 16), 0.3)
    with bench.without_kernels():
        assert torch.equal(ops.rtn(values, 1.0), values)
    assert not torch.equal(ops.rtn(values, 1.0), values)
