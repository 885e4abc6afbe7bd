"""One rank of Megatron, tiny trainer models and recorded rollouts."""

from __future__ import annotations

import pytest

from megatron_trace.testing.tiny_trainer import recorded_rollout, tiny_trainer


@pytest.fixture(scope="module", autouse=True)
def _one_rank(one_rank):
    """Every module builds models."""


@pytest.fixture
def build():
    """Gives `tiny_trainer`."""
    return tiny_trainer


@pytest.fixture
def rollout():
    """Gives `recorded_rollout`."""
    return recorded_rollout
