"""One rank of Megatron for every module of parity tests."""

from __future__ import annotations

import pytest

from megatron_trace.testing.single_process import single_process


@pytest.fixture(scope="module", autouse=True)
def _one_rank():
    with single_process(seed=0):
        yield
