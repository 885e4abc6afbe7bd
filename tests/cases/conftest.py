"""One rank of Megatron for the cases that need a model."""

from __future__ import annotations

import pytest

from megatron_trace.testing.single_process import single_process


@pytest.fixture
def one_rank():
    """Megatron's parallel state of one process."""
    with single_process(seed=0):
        yield
