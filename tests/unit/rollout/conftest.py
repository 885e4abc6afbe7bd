"""Engines of the tiny MoE that the tests of a module share."""

from __future__ import annotations

import pytest
import torch

from megatron_trace.config import TraceConfig
from megatron_trace.hints import HintStore
from megatron_trace.models.hybrid import HybridModules, build_hybrid_model
from megatron_trace.rollout import RolloutEngine, SamplingSettings
from megatron_trace.testing.single_process import single_process, tiny_moe_config

PATTERN = "*E*E"
VOCAB_SIZE = 16
MAX_SEQUENCE_LENGTH = 64
# Not a token that the prompts contain.
EOD = 15


@pytest.fixture(scope="module", autouse=True)
def _one_rank():
    with single_process(seed=0):
        yield


def trained_weights(seed: int) -> dict[str, torch.Tensor]:
    """Gives FP32 parameters as a trainer has them, larger than Megatron's initial ones."""
    torch.manual_seed(seed)
    model = build_hybrid_model(
        tiny_moe_config(PATTERN, init_method_std=0.06),
        pattern=PATTERN,
        vocab_size=VOCAB_SIZE,
        max_sequence_length=MAX_SEQUENCE_LENGTH,
        modules=HybridModules(),
    )
    generator = torch.Generator().manual_seed(seed)
    return {
        name: parameter.detach() + 0.01 * torch.randn(parameter.shape, generator=generator)
        for name, parameter in model.named_parameters()
    }


@pytest.fixture(scope="module")
def weights():
    return trained_weights(seed=1)


@pytest.fixture(scope="module")
def other_weights():
    return trained_weights(seed=2)


@pytest.fixture(scope="session")
def calibration_tokens() -> list[torch.Tensor]:
    """Gives two batches of 32 sequences of 12 tokens."""
    generator = torch.Generator().manual_seed(3)
    return list(torch.randint(0, EOD, (2, 32, 12), generator=generator))


@pytest.fixture(scope="module")
def build_engine(weights, calibration_tokens):
    """Gives a function that builds an engine, ready to generate unless ready=False."""

    def build(method: str = "trace", *, ready: bool = True, eod_token: int = EOD, **trace):
        engine = RolloutEngine(
            tiny_moe_config(PATTERN),
            pattern=PATTERN,
            vocab_size=VOCAB_SIZE,
            max_sequence_length=MAX_SEQUENCE_LENGTH,
            trace=TraceConfig(method=method, **trace),
            eod_token=eod_token,
            block_size_tokens=16,
        )
        if ready:
            if method != "bf16":
                engine.load_weights(weights)
                engine.calibrate(calibration_tokens)
            engine.push_weights(weights, policy_version=0)
        return engine

    return build


@pytest.fixture(scope="module")
def trace_engine(build_engine):
    """Records all layers, and full codes of every sample."""
    return build_engine(hint_layers="all", diagnostic_share=1.0)


@pytest.fixture(scope="module")
def bf16_engine(build_engine):
    return build_engine("bf16")


@pytest.fixture(scope="session")
def random_prompts():
    """Gives a function that makes prompts of 1 to `longest` tokens."""

    def make(count: int, *, longest: int = 9, seed: int = 5) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
        return [torch.randint(0, EOD, (n,), generator=generator).tolist() for n in lengths]

    return make


@pytest.fixture(scope="session")
def roll_out():
    """Gives a function that generates samples s0, s1, ... and gives them with their store."""

    def run(engine, prompts, *, store=None, seed=0, sample_ids=None, **sampling):
        store = HintStore() if store is None else store
        ids = sample_ids or [f"s{index}" for index in range(len(prompts))]
        settings = SamplingSettings(**({"max_new_tokens": 6} | sampling))
        return engine.generate(prompts, ids, store=store, sampling=settings, seed=seed), store

    return run
