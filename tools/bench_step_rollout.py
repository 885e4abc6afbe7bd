"""The rollout's part of `bench_step.py`: seconds of rollout and of recording, per method."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from bench_step_block import all_sites

from megatron_trace.config import TraceConfig
from megatron_trace.hints.files_writer import HintFilesWriter
from megatron_trace.models.architecture import Architecture
from megatron_trace.models.hybrid import HybridModules, build_hybrid_model
from megatron_trace.models.local_config import architecture_config
from megatron_trace.rollout import RolloutEngine, SamplingSettings

PROMPT_TOKENS = 64


def measure_rollout(
    options: argparse.Namespace, architecture: Architecture, folder: Path
) -> list[dict[str, Any]]:
    """Rolls out with each method; gives seconds of rollout, of recording in it, and of storing.

    Args:
        options: Of `bench_step.py`.
        architecture: Sizes of the block.
        folder: Gets the hint files.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = architecture_config(
        architecture,
        num_layers=len(options.pattern),
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        use_cpu_initialization=device == "cpu",
    )
    length = PROMPT_TOKENS + options.new_tokens
    sizes: dict[str, Any] = {
        "pattern": options.pattern,
        "vocab_size": architecture.vocab_size,
        "max_sequence_length": length,
        "rotary_base": architecture.rope_base,
        "rotary_percent": architecture.rope_share,
    }
    torch.manual_seed(0)
    model = build_hybrid_model(config, **sizes, modules=HybridModules())
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    # The engine's end token is none that is sampled: every sample has the same length.
    end = architecture.vocab_size - 1
    prompts = torch.randint(end, (options.prompts, PROMPT_TOKENS)).tolist()
    rows = []
    for method in ("bf16", "qat", "trace"):
        fields: dict[str, Any] = {}
        if method == "trace":
            fields["hint_sites"] = all_sites(options.pattern)
        if method != "bf16":
            fields["packed_experts"] = options.packed_experts
        engine = RolloutEngine(
            config,
            **sizes,
            trace=TraceConfig(method=method, **fields),
            eod_token=end,
            max_requests=options.prompts,
            cuda_graphs=options.graphs,
        )
        if method != "bf16":
            engine.load_weights(weights)
            engine.calibrate([torch.tensor(prompts, device=device)])
        engine.push_weights(weights, policy_version=0)
        for attempt in range(3):
            before = dict(engine.seconds)
            names = [f"{method}-{attempt}-{index}" for index in range(options.prompts)]
            with HintFilesWriter(folder / f"rollout-{method}-{attempt}") as files:
                samples = engine.generate(
                    prompts,
                    names,
                    store=files,
                    sampling=SamplingSettings(max_new_tokens=options.new_tokens),
                    seed=attempt,
                )
                storing = time.perf_counter()
                files.commit(samples)
                stored = time.perf_counter() - storing
                num_bytes = files.num_bytes
            tokens = sum(len(sample.response_tokens) for sample in samples)
            seconds = {name: engine.seconds[name] - before[name] for name in ("rollout", "record")}
            row = {"method": method, "sampled": tokens, "store": stored, "bytes": num_bytes}
            print("rollout", attempt, row | seconds, flush=True)
            # The first one compiles and captures.
            if attempt:
                rows.append(row | seconds)
        del engine
    return rows
