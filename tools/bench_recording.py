"""Measures what recording and CUDA graphs do to the time of a decode step, on and off by turns.

    python tools/bench_recording.py --layers 12 --json bench_recording.json          on one GPU
    python tools/bench_recording.py --cpu --reduced --batches 4 --context 64         tries the tool

Layers of a published model with random weights (FP4 experts and KV cache, hints of the latter half
at one bit), the engine's own steps: scheduling, forward, recording, sampling, bookkeeping. Requests
are moved to a length with random keys, values and states (`testing/long_decode.py`). Each round
times so many steps without and with recording, or the other way round, in one process and on one
server; printed is the median over the rounds. `one by one` are Megatron's experts, which wait for
the device; `kernels` are the padded steps that are captured, launched kernel by kernel; `graphs`
replays them. `--profile` tells by kernel what recording adds on the device, and where the host is.
"""

# ruff: noqa: E402  The stand-in for the CUDA runtime must be installed before Megatron is imported.
from __future__ import annotations

from megatron_trace.testing import cpu_runtime

cpu_runtime.install()

import argparse
import contextlib
import cProfile
import dataclasses
import faulthandler
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
from megatron_trace.models.local_config import architecture_config
from megatron_trace.models.presets import PRESETS, preset
from megatron_trace.rollout import SamplingSettings
from megatron_trace.rollout.decode_graphs import DecodeGraphs
from megatron_trace.rollout.packed_experts import implementation_of
from megatron_trace.rollout.policy import ServedPolicy
from megatron_trace.rollout.serving import EngineLimits, Server
from megatron_trace.testing.long_decode import (
    begin_decoding,
    fill_cache,
    fill_experts,
    fill_states,
    move_to,
    random_settings,
)
from megatron_trace.testing.single_process import single_process

PAGE_TOKENS = 64
WARM_UP = 4
FORWARDS = {"one by one": None, "kernels": False, "graphs": True}
STARTED = time.perf_counter()


def say(text: str) -> None:
    """Prints what is done, and when."""
    print(f"{time.perf_counter() - STARTED:.1f} s: {text}", flush=True)


def policy_of(options: argparse.Namespace) -> ServedPolicy:
    """Builds the layers with random weights; their values change no time."""
    architecture = preset(options.preset)
    if options.reduced:
        architecture = architecture.reduced()
    changes = {"num_layers": options.layers, "num_experts": options.experts}
    changes["attention_interval"] = 1 if options.attention_only else None
    chosen = {name: value for name, value in changes.items() if value}
    architecture = dataclasses.replace(architecture, **chosen)
    config = architecture_config(architecture, use_cpu_initialization=False)
    trace = TraceConfig(
        hint_layers=options.hint_layers,
        kv_attention=options.kv_attention,
        packed_experts=options.packed_experts,
        check_finite=not options.no_check_finite,
    )
    device = torch.device("cpu" if options.cpu else "cuda")
    is_packed = implementation_of(config, trace, device) is not None
    policy = ServedPolicy(
        config,
        pattern=architecture.pattern(),
        vocab_size=architecture.vocab_size,
        max_sequence_length=options.context + 2 * PAGE_TOKENS,
        trace=trace,
        keep_packed_weights=False,
        keep_bf16_experts=not is_packed,
        model_id=architecture.name,
        rotary_percent=architecture.rope_share,
        rotary_base=architecture.rope_base,
    )
    policy.use_settings(random_settings(policy))
    if is_packed:
        fill_experts(policy.layers)
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

    def step_ms(
        self, *, keep: bool, during: contextlib.AbstractContextManager[Any] | None = None
    ) -> float:
        """Gives the time of a step, with or without recording; `during` is entered meanwhile."""
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
            with during or contextlib.nullcontext():
                started = time.perf_counter()
                for _ in range(self.steps):
                    run.step()
                torch.cuda.synchronize()
                elapsed_ms = 1000 * (time.perf_counter() - started)
            server.reset()
        return elapsed_ms / self.steps


def measured(policy: ServedPolicy, options: argparse.Namespace, batch: int, name: str) -> Any:
    """Gives the row of a batch and a way of computing its forward."""
    server = server_of(policy, batch, FORWARDS[name])
    decode = Batch(server, batch, options.context, options.steps)
    for keep in (False, True):  # Compiles, and captures.
        say(f"batch {batch}, {name}, recording {keep}: first {decode.step_ms(keep=keep):.2f} ms")
    rounds = []
    for number in range(options.rounds):
        # What comes first in a round changes, so that a drift adds to neither.
        order = (False, True) if number % 2 == 0 else (True, False)
        times = {keep: decode.step_ms(keep=keep) for keep in order}
        rounds.append([times[False], times[True]])
        say(f"batch {batch}, {name}: off {times[False]:.3f} ms, on {times[True]:.3f} ms")
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
        tell_profiles(decode)
    return row


def tell_profiles(decode: Batch) -> None:
    """Prints what recording adds on the device by kernel, and where the host spends its time."""
    kinds = torch.profiler.ProfilerActivity
    kind = kinds.CUDA if torch.cuda.is_available() else kinds.CPU
    clock = "self_device_time_total" if kind == kinds.CUDA else "self_cpu_time_total"
    times = []
    for keep in (False, True):
        profiler = torch.profiler.profile(activities=[kind])
        decode.step_ms(keep=keep, during=profiler)
        times.append({event.key: getattr(event, clock) for event in profiler.key_averages()})
    off, on = times
    added = {key: (on.get(key, 0.0) - off.get(key, 0.0)) / decode.steps for key in off | on}
    total = sum(off.values()) / decode.steps
    say(f"device, us a step: {total:.0f} without recording, which adds {sum(added.values()):.1f}")
    for key in sorted(added, key=lambda key: -abs(added[key]))[:16]:
        print(f"  {added[key]:+8.1f} to {off.get(key, 0.0) / decode.steps:8.1f}  {key[:90]}")
    for keep in (False, True):
        profile = cProfile.Profile()
        decode.step_ms(keep=keep, during=profile)
        text = io.StringIO()
        pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(25)
        say(f"host, {decode.steps} steps, recording {keep}:\n{text.getvalue()}")


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
    parser.add_argument(
        "--forwards", nargs="+", choices=FORWARDS, help="default graphs, with --cpu kernels"
    )
    parser.add_argument("--no-check-finite", action="store_true")
    parser.add_argument("--profile", choices=FORWARDS, help="of which forward, see above")
    parser.add_argument(
        "--stacks-s", type=float, default=60.0, help="print all stacks so often, default 60"
    )
    parser.add_argument("--cpu", action="store_true", help="try the tool without a GPU")
    parser.add_argument("--json", type=Path, help="file that gets the numbers")
    options = parser.parse_args(arguments)
    if not options.cpu and not torch.cuda.is_available():
        parser.error("no CUDA device is visible; --cpu tries the tool")
    options.forwards = options.forwards or ["kernels" if options.cpu else "graphs"]
    if options.cpu and "graphs" in options.forwards:
        parser.error("--forwards graphs requires a GPU, which --cpu goes without")
    faulthandler.dump_traceback_later(options.stacks_s, repeat=True)
    rows = []
    with single_process(seed=0):
        policy = policy_of(options)
        torch.cuda.synchronize()
        say("built")
        for name in options.forwards:
            for batch in options.batches:
                rows.append(measured(policy, options, batch, name))
                say(json.dumps(rows[-1]))
                if options.json:
                    facts = {"machine": torch.cuda.get_device_name(), "torch": torch.__version__}
                    facts |= {name: str(value) for name, value in vars(options).items()}
                    options.json.write_text(json.dumps({"facts": facts, "rows": rows}, indent=1))
                gc.collect()
    faulthandler.cancel_dump_traceback_later()
    for row in rows:
        print(
            f"batch {row['batch']:4d}  {row['forward']:10s}  off {row['off_ms']:7.3f} ms  on "
            f"{row['on_ms']:7.3f} ms  {row['on_tokens_per_s']:8.0f} tokens/s  recording "
            f"{100 * row['overhead']:+.2f} %"
        )


if __name__ == "__main__":
    main()
