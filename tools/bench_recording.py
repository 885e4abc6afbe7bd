"""Measures what recording and CUDA graphs do to the time of a decode step, on and off by turns.

    python tools/bench_recording.py --layers 12 --json bench_recording.json          on one GPU
    python tools/bench_recording.py --cpu --reduced --batches 4 --context 64         tries the tool

Layers of a published model with random weights (FP4 experts and KV cache, hints of the latter half
at one bit), the engine's own steps: scheduling, forward, recording, sampling, bookkeeping. Requests
are moved to a length with random keys, values and states (`testing/long_decode.py`). A round times
so many steps without and with recording, or the other way round, amid one rollout, and the next one
is a page further on, so that rows go where none was before. Rounds are many and short, as a step's
time on the host varies by more than recording costs. Printed is the median over the rounds of the
ratio of both, its interval of 95 % by bootstrap over the rounds, and whether the interval is within
2 %. `one by one` are Megatron's experts, which wait for the device; `kernels` are the padded steps
that are captured, launched kernel by kernel; `graphs` replays them. `--profile` tells by kernel
what recording adds on the device, and where the host is.
"""

# ruff: noqa: E402  The stand-in for the CUDA runtime must be installed before Megatron is imported.
from __future__ import annotations

from megatron_trace.testing import cpu_runtime

cpu_runtime.install()

import argparse
import dataclasses
import faulthandler
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from bench_step_pairs import paired_ratio
from bench_step_profile import Collections

from megatron_trace.config import TraceConfig
from megatron_trace.models.local_config import architecture_config
from megatron_trace.models.presets import PRESETS, preset
from megatron_trace.rollout.decode_graphs import DecodeGraphs
from megatron_trace.rollout.packed_experts import implementation_of
from megatron_trace.rollout.policy import ServedPolicy
from megatron_trace.rollout.serving import EngineLimits, Server
from megatron_trace.testing.long_decode import LongDecode, fill_experts, random_settings
from megatron_trace.testing.single_process import single_process
from megatron_trace.testing.step_profile import host_profile, profiled

PAGE_TOKENS = 64
WARM_UP = 3
PROFILED_STEPS = 40
SPARE_PAGES = 4
# On over off, of the time of a step.
MOST = 1.02
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
        max_sequence_length=options.context + (options.rounds + SPARE_PAGES) * PAGE_TOKENS,
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


def measured(policy: ServedPolicy, options: argparse.Namespace, batch: int, name: str) -> Any:
    """Gives the row of a batch and a way of computing its forward."""
    server = server_of(policy, batch, FORWARDS[name])
    times: dict[bool, list[float]] = {False: [], True: []}
    with LongDecode(server, batch, keep=False).running() as decode:

        def block_ms(page: int, *, keep: bool) -> float:
            decode.record(keep)
            context = options.context + page * PAGE_TOKENS
            return decode.mean_ms(context, warm_up=WARM_UP, steps=options.steps)

        for keep in times:  # Compiles, and captures.
            say(f"batch {batch}, {name}, recording {keep}: first {block_ms(0, keep=keep):.2f} ms")
        with Collections() as collections:
            started = time.perf_counter()
            for number in range(1, options.rounds + 1):
                if time.perf_counter() - started > options.budget_s and number > 1:
                    break
                # What comes first changes, so that a drift adds to neither.
                for keep in times if number % 2 == 0 else reversed(times):
                    times[keep].append(block_ms(number, keep=keep))
        chosen = decode.distinct_experts()
        if options.profile == name:
            tell_profiles(decode)
    off, on = (statistics.median(of_blocks) for of_blocks in times.values())
    overhead = paired_ratio(times[True], times[False])
    say(f"batch {batch}, {name}: {overhead} {overhead.verdict(MOST)} {MOST - 1:.0%}; {collections}")
    return {
        "batch": batch,
        "forward": name,
        "off_ms": off,
        "on_ms": on,
        "off_tokens_per_s": 1000 * batch / off,
        "on_tokens_per_s": 1000 * batch / on,
        "overhead": overhead.as_dict(MOST),
        "blocks_ms": {"off": times[False], "on": times[True]},
        "experts_read": chosen,
        "replayed": server.forward.num_replayed,
        "ring_waits": policy.sites.recorder.num_waits,
    }


def tell_profiles(decode: LongDecode) -> None:
    """Prints what recording adds on the device by kernel, and where the host spends its time."""
    if torch.cuda.is_available():
        found: list[dict[tuple[str, str], tuple[int, float]]] = []
        for keep in (False, True):
            decode.record(keep)
            profiled(decode.step)  # The first use of a profiler takes its own time.
            parts = profiled(decode.step)
            for part, time in parts.items():
                busy = f"busy {time.busy_us:.0f} of {time.span_us:.0f} us"
                say(f"recording {keep}, {part}: {time.num_kernels} kernels, {busy}")
            found.append(
                {
                    (part, kernel): sums
                    for part, time in parts.items()
                    for kernel, sums in time.kernels.items()
                }
            )
        off, on = found
        nothing = 0, 0.0
        added = {key: on.get(key, nothing)[1] - off.get(key, nothing)[1] for key in off | on}
        for key in sorted(added, key=lambda key: -abs(added[key]))[:16]:
            print(f"  {added[key]:+8.1f} us to {off.get(key, nothing)[1]:8.1f}  {': '.join(key)}")
    for keep in (False, True):
        decode.record(keep)
        say(f"recording {keep}, {host_profile(decode.step, calls=PROFILED_STEPS)}")


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
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 64, 138])
    parser.add_argument("--context", type=int, default=8192, help="tokens of each request")
    parser.add_argument("--steps", type=int, default=10, help="that are timed at once, default 10")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument(
        "--budget-s", type=float, default=60.0, help="of a batch, then no round begins; default 60"
    )
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
            f"{row['overhead']['median'] - 1:+.2%} [{row['overhead']['low'] - 1:+.2%}, "
            f"{row['overhead']['high'] - 1:+.2%}]  {row['overhead']['verdict']} {MOST - 1:.0%}"
        )


if __name__ == "__main__":
    main()
