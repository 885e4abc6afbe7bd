"""A tiny rollout engine, weights and prompts for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_trace.config import Method, TraceConfig
from megatron_trace.hints import HintStore
from megatron_trace.models.hybrid import HybridModules, build_hybrid_model
from megatron_trace.rollout import RolloutEngine, SamplingSettings
from megatron_trace.rollout.prompts import Prompt
from megatron_trace.testing.rollouts import Rollout
from megatron_trace.testing.single_process import tiny_moe_config

VOCAB_SIZE = 16
MAX_SEQUENCE_LENGTH = 64
# Not a token that the prompts contain.
EOD_TOKEN = 15


def tiny_weights(
    seed: int, *, pattern: str = "*E*E", config: Mapping[str, Any] | None = None
) -> dict[str, torch.Tensor]:
    """Gives FP32 parameters as a trainer has them, on the CPU: no norm weight is 1."""
    torch.manual_seed(seed)
    model = build_hybrid_model(
        tiny_moe_config(pattern, init_method_std=0.06, **config or {}),
        pattern=pattern,
        vocab_size=VOCAB_SIZE,
        max_sequence_length=MAX_SEQUENCE_LENGTH,
        # Nothing is computed, and fla's rule is refused where its gradients are wrong.
        modules=HybridModules(delta_rule="torch" if "G" in pattern else "auto"),
    )
    generator = torch.Generator().manual_seed(seed)
    return {
        name: parameter.detach().cpu() + 0.01 * torch.randn(parameter.shape, generator=generator)
        for name, parameter in model.named_parameters()
    }


def calibration_tokens() -> list[torch.Tensor]:
    """Gives two batches of 32 sequences of 12 tokens."""
    generator = torch.Generator().manual_seed(3)
    return list(torch.randint(0, EOD_TOKEN, (2, 32, 12), generator=generator))


def tiny_engine(
    weights: Mapping[str, torch.Tensor] | None,
    method: Method = "trace",
    *,
    pattern: str = "*E*E",
    eod_token: int = EOD_TOKEN,
    config: Mapping[str, Any] | None = None,
    rotary_base: int = 10_000,
    rotary_percent: float = 1.0,
    max_requests: int = 64,
    limits: Mapping[str, Any] | None = None,
    **trace: Any,
) -> RolloutEngine:
    """Builds an engine with pages of 16 tokens.

    Args:
        weights: Calibrates and pushes these as version 0; None leaves the engine without weights.
        method: Method of TRACE.
        pattern: Hybrid layer pattern.
        eod_token: Token that ends a response.
        config: Fields of `TransformerConfig` to set otherwise.
        rotary_base: Base period of RoPE.
        rotary_percent: Share of the head dim that RoPE rotates.
        max_requests: Requests that run at a time.
        limits: More of the engine's limits, such as `cache_tokens`.
        **trace: Fields of `TraceConfig`.
    """
    engine = RolloutEngine(
        tiny_moe_config(pattern, **config or {}),
        pattern=pattern,
        vocab_size=VOCAB_SIZE,
        max_sequence_length=MAX_SEQUENCE_LENGTH,
        rotary_base=rotary_base,
        rotary_percent=rotary_percent,
        trace=TraceConfig(method=method, **trace),
        eod_token=eod_token,
        max_requests=max_requests,
        block_size_tokens=16,
        **limits or {},
    )
    if weights is not None:
        if method != "bf16":
            engine.load_weights(weights)
            engine.calibrate(calibration_tokens())
        engine.push_weights(weights, policy_version=0)
    return engine


def random_prompts(
    count: int, *, shortest: int = 1, longest: int = 9, seed: int = 5
) -> list[list[int]]:
    """Gives prompts of random length and tokens, none of which ends a response."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, EOD_TOKEN, (n,), generator=generator).tolist() for n in lengths]


def roll_out(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    *,
    store: HintStore | None = None,
    sample_ids: Sequence[str] | None = None,
    seed: int = 0,
    **sampling: Any,
) -> Rollout:
    """Generates up to 6 tokens per prompt and gives the samples with their store.

    Args:
        engine: The engine.
        prompts: Token ids.
        store: Gets the records; a new one if None.
        sample_ids: Names of the samples; s0, s1, ... if None.
        seed: Seed of the sampling.
        **sampling: Fields of `SamplingSettings`.
    """
    store = HintStore() if store is None else store
    samples_per_prompt = sampling.get("samples_per_prompt", 1)
    ids = sample_ids or [f"s{index}" for index in range(len(prompts) * samples_per_prompt)]
    fields: dict[str, Any] = {"max_new_tokens": 6, **sampling}
    settings = SamplingSettings(**fields)
    return engine.generate(prompts, ids, store=store, sampling=settings, seed=seed), store
