"""One rank of Megatron for every module of parity tests."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _one_rank(one_rank):
    """Every module builds models."""
