"""Measures what recording and CUDA graphs do to the time of a decode step, on and off by turns.

    python tools/bench_recording.py --layers 12 --json bench_recording.json          on one GPU
    python tools/bench_recording.py --cpu --reduced --batches 4 --context 64         tries the tool

Layers of a published model with random weights (FP4 experts and KV cache, hints of the latter half
at one bit), the engine's own steps: scheduling, forward, recording, sampling, bookkeeping. Requests
are moved to a length with random keys, values and states (`testing/long_decode.py`). Each round
times so many steps without and with recording, in one process and on one server; printed is the
median over the rounds. `one by one` are Megatron's experts, which wait for the device; `kernels`
are the padded steps that are captured, launched kernel by kernel; `graphs` replays them.
"""

# ruff: noqa: E402  The stand-in for the CUDA runtime must be installed before Megatron is imported.
from __future__ import annotations

from megatron_trace.testing import cpu_runtime

cpu_runtime.install()

import argparse
import cProfile
import dataclasses
import gc
import io
import json
import pstats
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from megatron_trace.config import TraceConfig
from megatron_trace.formats import E4M3_MAX
from megatron_trace.hints import QuantizerSettings, Site
from megatron_trace.models.local_config import architecture_config
from megatron_trace.models.presets import PRESETS, preset
from megatron_trace.rollout import SamplingSettings
from megatron_trace.rollout.decode_graphs import DecodeGraphs
from megatron_trace.rollout.packed_experts import PackedRoutedExperts
from megatron_trace.rollout.policy import ServedPolicy
from megatron_trace.rollout.serving import EngineLimits, Server
from megatron_trace.testing.long_decode import (
    KV_GLOBAL_SCALE,
    begin_decoding,
    fill_cache,
    fill_states,
    move_to,
)
from megatron_trace.testing.single_process import single_process

PAGE_TOKENS = 64
WARM_UP = 4
E4M3_ONE = 0x38
FORWARDS = {"one by one": None, "kernels": False, "graphs": True}


def policy_of(options: argparse.Namespace) -> ServedPolicy:
    """Builds the layers with random weights; their values change no time."""
    architecture = preset(options.preset)
    if options.reduced:
        architecture = architecture.reduced()
    changes = {"num_layers": options.layers, "num_experts": options.experts}
    changes["attention_interval"] = 1 if options.attention_only else None
    chosen = {name: value for name, value in changes.items() if value}
    architecture = dataclasses.replace(architecture, **chosen)
    policy = ServedPolicy(
        architecture_config(architecture, use_cpu_initialization=False),
        pattern=architecture.pattern(),
        vocab_size=architecture.vocab_size,
        max_sequence_length=options.context + 2 * PAGE_TOKENS,
        trace=TraceConfig(
            hint_layers=options.hint_layers,
            kv_attention=options.kv_attention,
            packed_experts=options.packed_experts,
            check_finite=not options.no_check_finite,
        ),
        keep_packed_weights=False,
        model_id=architecture.name,
        rotary_percent=architecture.rope_share,
        rotary_base=architecture.rope_base,
    )
    scales: dict[tuple[int, Site], float] = {}
    for layer in policy.layers:
        if layer.moe is not None:
            scales[layer.index, Site.FC1] = scales[layer.index, Site.FC2] = 8 / (6 * E4M3_MAX)
        if layer.attention is not None:
            scales[layer.index, Site.K] = scales[layer.index, Site.V] = KV_GLOBAL_SCALE
    for layer in policy.layers:
        packed = getattr(layer.moe, "routed_experts", None)
        if isinstance(packed, PackedRoutedExperts):
            for name, buffer in packed.named_buffers():
                fill = {"codes": None, "scales": E4M3_ONE, "global_scales": 1e-2}
                value = fill[name.split("_", 1)[1]]
                buffer.random_(0, 256) if value is None else buffer.fill_(value)
    policy.use_settings(QuantizerSettings(scales, model_id=policy.model_id))
    return policy


def server_of(policy: ServedPolicy, batch: int, captured: bool | None) -> Server:
    """Gives a server of so many requests; captured as `DecodeGraphs`, None for no such steps."""
    return Server(
        policy.model,
        policy.sites,
        packed=True,
        eod_token=policy.model.vocab_size,
        limits=EngineLimits(
            policy.max_sequence_length,
            max_requests=batch,
            block_size_tokens=PAGE_TOKENS,
            max_step_tokens=max(1024, batch),
            cuda_graphs=False if captured is None else DecodeGraphs((batch,), captured),
        ),
    )


class Batch:
    """Decodes on one server.

    Args:
        server: The server.
        batch: Requests.
        context: Tokens of each request.
        steps: Steps that are timed at once; they stay within a page.
    """

    def __init__(self, server: Server, batch: int, context: int, steps: int) -> None:
        if WARM_UP + steps >= PAGE_TOKENS:
            raise ValueError(f"{WARM_UP} + {steps} steps do not stay within a page")
        self.server, self.batch, self.context, self.steps = server, batch, context, steps

    def step_ms(self, *, keep: bool, profile: cProfile.Profile | None = None) -> float:
        """Gives the time of a step, with or without recording."""
        server, count = self.server, self.batch
        sampling = SamplingSettings(max_new_tokens=server.context.max_sequence_length)
        with server.computing():
            run = server.begin(sampling=sampling, keep=keep)
            prompts = [[index % server.model.vocab_size] for index in range(count)]
            server.add(prompts, [f"s{index}" for index in range(count)], list(range(count)))
            begin_decoding(server)
            move_to(server.context, 2)
            fill_cache(server.context)
            run.step()
            # Slots are set to zero in the first step.
            fill_states(server.context)
            move_to(server.context, max(2, self.context // PAGE_TOKENS * PAGE_TOKENS + 1))
            for _ in range(WARM_UP):
                run.step()
            torch.cuda.synchronize()
            if profile is not None:
                profile.enable()
            started = time.perf_counter()
            for _ in range(self.steps):
                run.step()
            torch.cuda.synchronize()
            elapsed_ms = 1000 * (time.perf_counter() - started)
            if profile is not None:
                profile.disable()
            server.reset()
        return elapsed_ms / self.steps


def measured(policy: ServedPolicy, options: argparse.Namespace, batch: int, name: str) -> Any:
    """Gives the row of a batch and a way of computing its forward."""
    server = server_of(policy, batch, FORWARDS[name])
    decode = Batch(server, batch, options.context, options.steps)
    for keep in (False, True):  # Compiles, and captures.
        decode.step_ms(keep=keep)
    rounds = [[decode.step_ms(keep=keep) for keep in (False, True)] for _ in range(options.rounds)]
    off, on = (statistics.median(column) for column in zip(*rounds, strict=True))
    recorder = policy.sites.recorder
    row = {
        "batch": batch,
        "forward": name,
        "off_ms": off,
        "on_ms": on,
        "off_tokens_per_s": 1000 * batch / off,
        "on_tokens_per_s": 1000 * batch / on,
        "overhead": statistics.median(on / off - 1 for off, on in rounds),
        "rounds": rounds,
        "replayed": server.forward.num_replayed,
        "ring_waits": recorder.num_waits,
    }
    if options.profile == name:
        profile = cProfile.Profile()
        decode.step_ms(keep=True, profile=profile)
        text = io.StringIO()
        pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(22)
        print(f"host, batch {batch}, {decode.steps} steps:\n{text.getvalue()}", flush=True)
    return row


def main(arguments: list[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="Qwen3.5-35B-A3B", help=", ".join(PRESETS))
    parser.add_argument("--reduced", action="store_true", help="small widths, for a CPU")
    parser.add_argument("--layers", type=int, help="decoder layers that are built; default all")
    parser.add_argument("--experts", type=int, help="of a layer; fewer are built sooner")
    parser.add_argument(
        "--attention-only", action="store_true", help="no Gated DeltaNet, which fla tunes at length"
    )
    parser.add_argument("--hint-layers", default="latter_half")
    parser.add_argument("--kv-attention", default="auto")
    parser.add_argument("--packed-experts", default="auto", help="off: grouped products in BF16")
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 64, 256])
    parser.add_argument("--context", type=int, default=8192, help="tokens of each request")
    parser.add_argument("--steps", type=int, default=50, help="that are timed at once, default 50")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--forwards", nargs="+", choices=FORWARDS, default=["kernels", "graphs"])
    parser.add_argument("--no-check-finite", action="store_true")
    parser.add_argument("--profile", choices=FORWARDS, help="print where the host's time goes")
    parser.add_argument("--cpu", action="store_true", help="try the tool without a GPU")
    parser.add_argument("--json", type=Path, help="file that gets the numbers")
    options = parser.parse_args(arguments)
    if not options.cpu and not torch.cuda.is_available():
        parser.error("no CUDA device is visible; --cpu tries the tool")
    if options.cpu:
        FORWARDS["graphs"] = False
    rows = []
    with single_process(seed=0):
        started = time.perf_counter()
        policy = policy_of(options)
        print(f"built in {time.perf_counter() - started:.1f} s", flush=True)
        for name in options.forwards:
            for batch in options.batches:
                rows.append(measured(policy, options, batch, name))
                print(f"{time.perf_counter() - started:.1f} s:", json.dumps(rows[-1]), flush=True)
                if options.json:
                    facts = {"machine": torch.cuda.get_device_name(), "torch": torch.__version__}
                    facts |= {name: str(value) for name, value in vars(options).items()}
                    options.json.write_text(json.dumps({"facts": facts, "rows": rows}, indent=1))
                gc.collect()
    for row in rows:
        print(
            f"batch {row['batch']:4d}  {row['forward']:10s}  off {row['off_ms']:7.3f} ms  on "
            f"{row['on_ms']:7.3f} ms  {row['on_tokens_per_s']:8.0f} tokens/s  recording "
            f"{100 * row['overhead']:+.2f} %"
        )


if __name__ == "__main__":
    main()
