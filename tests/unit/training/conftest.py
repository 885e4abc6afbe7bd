"""Trainer models of one process, and samples whose hints another model recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel

from megatron_trace.config import TraceConfig
from megatron_trace.hints.store import HintStore
from megatron_trace.hints.types import RolloutSample
from megatron_trace.testing.recorded_samples import calibrate, random_samples, record
from megatron_trace.testing.single_process import single_process, tiny_moe_config
from megatron_trace.training.model import build_trainer_model
from megatron_trace.training.sites import TraceSites

VOCAB = 16
LENGTHS = ((5, 3), (3, 0), (7, 4), (2, 6))


@pytest.fixture(scope="module", autouse=True)
def _one_rank():
    with single_process(seed=0):
        yield


Build = Callable[..., tuple[HybridModel, TraceSites]]


@pytest.fixture
def build() -> Build:
    """Gives a function that builds a trainer model; weights depend on the seed only."""

    def build_model(
        method: str = "trace",
        *,
        pattern: str = "*E*E",
        dtype: torch.dtype = torch.float32,
        config: dict[str, Any] | None = None,
        seed: int = 0,
        **trace: Any,
    ) -> tuple[HybridModel, TraceSites]:
        torch.manual_seed(seed)
        return build_trainer_model(
            tiny_moe_config(pattern, **config or {}),
            pattern=pattern,
            vocab_size=VOCAB,
            max_sequence_length=32,
            trace=TraceConfig(method=method, **{"hint_layers": "all", **trace}),
            dtype=dtype,
        )

    return build_model


@dataclass
class Rollout:
    """A store with the hints of some samples.

    Attributes:
        store: The hints.
        samples: The samples.
        settings: Settings of the quantisers that were recorded.
    """

    store: HintStore
    samples: list[RolloutSample]
    settings: Any


@pytest.fixture
def rollout(build: Build) -> Callable[..., Rollout]:
    """Gives a function that records samples from a model of the other dtype (BF16)."""

    def roll_out(
        lengths=LENGTHS, *, pattern: str = "*E*E", seed: int = 0, **recorded: Any
    ) -> Rollout:
        model, sites = build("qat", pattern=pattern, dtype=torch.bfloat16)
        samples = random_samples(lengths, sites.shape, vocab_size=VOCAB, seed=seed)
        calibrate(model, sites, samples)
        store = HintStore()
        samples = record(model, sites, samples, store, **recorded)
        return Rollout(store, samples, sites.settings)

    return roll_out
