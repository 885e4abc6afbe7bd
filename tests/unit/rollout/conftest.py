"""Engines of the tiny MoE that the tests of a module share."""

from __future__ import annotations

import pytest

from megatron_trace.testing import cpu_runtime
from megatron_trace.testing.exact_products import ExactProducts
from megatron_trace.testing.tiny_rollout import tiny_engine, tiny_weights


@pytest.fixture(scope="module", autouse=True)
def _one_rank(one_rank):
    """Every module builds models."""


@pytest.fixture(scope="module")
def weights():
    return tiny_weights(seed=1)


@pytest.fixture(scope="module")
def other_weights():
    return tiny_weights(seed=2)


@pytest.fixture(scope="module")
def trace_engine(weights):
    """Records all layers, and full codes of every sample."""
    return tiny_engine(weights, hint_layers="all", diagnostic_share=1.0)


@pytest.fixture(scope="module")
def bf16_engine(weights):
    return tiny_engine(weights, "bf16")


@pytest.fixture(scope="module")
def exact_products(_one_rank):
    """Lets rollouts with other batches be compared bit by bit, as far as torch computes them."""
    if not cpu_runtime.is_installed():
        pytest.skip("kernels of a GPU do not go through torch")
    with ExactProducts():
        yield
