"""An RL run whose trainer has Transformer Engine's experts is the run with local experts.

Under the stand-in for Transformer Engine's CUDA products, see `te_on_cpu`.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip(
    "transformer_engine.pytorch", reason="Transformer Engine is not installed", exc_type=ImportError
)

from megatron_trace.config import HINT_SITES, TraceConfig
from megatron_trace.rl import checkpoint
from megatron_trace.rl.step import rl_step
from megatron_trace.testing.te_on_cpu import te_on_cpu

NUMBERS = ("reward", "loss", "grad_norm", "gap", "hint_bytes_per_token")


@pytest.fixture(scope="module", autouse=True)
def _te(one_rank):
    with te_on_cpu():
        yield


def _trace(experts: str) -> TraceConfig:
    return TraceConfig(hint_layers="all", hint_sites=HINT_SITES, experts=experts)


def _numbers(metrics: dict) -> dict:
    return {name: metrics[name] for name in NUMBERS}


@pytest.fixture
def local_steps(started):
    run = started(trace=_trace("local"), trainer_dtype="bf16")
    return [_numbers(rl_step(run)) for _ in range(2)]


@pytest.mark.parametrize("experts", ["te", "te_recipe"])
def test_two_steps_give_the_numbers_of_local_experts(started, local_steps, experts):
    run = started(trace=_trace(experts), trainer_dtype="bf16")
    metrics = [rl_step(run) for _ in range(2)]
    assert [_numbers(step) for step in metrics] == local_steps
    assert all(step["quantisers"]["sites"]["fc2"]["coverage"] > 0.9 for step in metrics)


def test_a_run_goes_on_from_a_checkpoint_of_the_other_kind(started, build, local_steps, tmp_path):
    first = started(trace=_trace("te"), trainer_dtype="bf16")
    rl_step(first)
    saved = checkpoint.save(first, tmp_path, identity={})
    for experts in ("te", "local"):
        torch.manual_seed(1)
        run = build(trace=_trace(experts), trainer_dtype="bf16")
        checkpoint.resume(run, saved, identity={})
        assert _numbers(rl_step(run)) == local_steps[1]
