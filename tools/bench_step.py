"""Measures what a step of each method costs on one block of a published model, on a GPU.

    python tools/bench_step.py --out step.json --kinds local te --tokens 8192 32768

A block is a token mixer and a MoE of the full width of `--preset`; embedding and output layer are
small, so that what is measured is what 40 such blocks repeat. The samples are of `--length` tokens,
with hints that a model of method qat recorded, written to files and read by the trainer's own
prefetcher: file -> page-locked memory -> side stream -> device (`--readers` says by what).

All trainers have one and the same weights, gradients and optimizer. They take turns in shuffled
order, so that what the machine does to one it does to all (`bench_step_train.py`). Times are
medians of micro-batches, of CUDA events (of the wall clock on a CPU); "host" is how long the host
took to hand the work over, so where both are alike the GPU waited for the host, "wait" how much of
that was waiting for hints to be read, and "weights" how much longer the first micro-batch after an
optimizer step takes. "over qat" (with the same experts and reader) is the median of the ratios of
the rounds, with its 95 % interval by bootstrap over the rounds, and whether the interval says that
it is within 3 %.

A case is METHOD:EXPERTS[:SITES[:LAYERS]][@T], SITES joined by +, such as
`trace:te:all:latter_half` or `trace:te:fc1+k`; with @T it is measured at that many tokens only.

Legend: T tokens of a micro-batch.
"""

# ruff: noqa: E402  The stand-in for the CUDA runtime must be installed before Megatron is imported.
from __future__ import annotations

from megatron_trace.testing import cpu_runtime

cpu_runtime.install()

import argparse
import contextlib
import dataclasses
import faulthandler
import gc
import json
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_step_block import ALL_SITES, DEFAULT_SITES, Block, Case, Timer
from bench_step_profile import print_compilations
from bench_step_rollout import measure_rollout
from bench_step_train import measure_training, passed_s
from stall_watch import watched

from megatron_trace.hints.files import HintFiles
from megatron_trace.models.architecture import Architecture
from megatron_trace.models.presets import preset
from megatron_trace.testing.single_process import single_process
from megatron_trace.training.hint_reader import HintReader
from megatron_trace.training.micro_batch import stage_micro_batch


def measure_loading(block: Block, num_tokens: int) -> dict[str, Any]:
    """Reads one micro-batch's hints of every site from files, and copies them, by itself."""
    case = Case("trace", "local")
    _, sites = block.build(case)
    sites.settings = block.settings
    on_gpu, samples = (
        sites.device.type == "cuda",
        block.samples[: num_tokens // block.options.length],
    )
    seconds, copies, num_bytes = [], [], 0
    for _ in range(4):
        files, started = HintFiles(block.folder), time.perf_counter()
        staged = stage_micro_batch(samples, files, sites, pin_memory=on_gpu)
        seconds.append(time.perf_counter() - started)
        timer = Timer(sites.device)
        with timer:
            staged.on_device(non_blocking=True)
        copies.append(timer.milliseconds)
        num_bytes = staged.on_host.hint_bytes
    return {
        "tokens": num_tokens,
        "first_read_s": seconds[0],
        "read_s": statistics.median(seconds[1:]),
        "copy_ms": statistics.median(copies[1:]),
        "bytes": num_bytes,
    }


@contextlib.contextmanager
def _reported(options: argparse.Namespace, what: str) -> Iterator[None]:
    """Goes on after an error, which is printed and noted; the program then ends with 1."""
    try:
        yield
    except Exception:  # noqa: BLE001  The other cases are to be measured.
        print(f"{what} failed:\n{traceback.format_exc()}", flush=True)
        options.failed.append(what)


def cases_of(options: argparse.Namespace, num_tokens: int) -> list[Case]:
    """Gives the cases that the options ask for."""
    if options.cases:
        asked = (case.partition("@") for case in options.cases)
        return [Case(*case.split(":")) for case, _, at in asked if at in ("", str(num_tokens))]
    cases = []
    for kind in options.kinds:
        cases += [Case("bf16", kind), Case("qat", kind)]
        cases += [Case("trace", kind, sites) for sites in ("fc1", DEFAULT_SITES, ALL_SITES)]
        if options.pattern.count("E") > 1:
            cases.append(Case("trace", kind, ALL_SITES, "latter_half"))
    return cases


def main() -> None:
    """Measures as the options say."""
    options = _options()
    options.started = time.perf_counter()
    print(f"started after {_age_s():.1f} s, imports mostly", flush=True)
    if options.hang_s:
        faulthandler.dump_traceback_later(options.hang_s, exit=True)
    options.samples = max(options.samples or 2 * max(options.tokens) // options.length, 1)
    report: dict[str, Any] = {"options": {k: str(v) for k, v in vars(options).items()}}
    options.failed, report["blocks"] = [], {}
    with (
        single_process(seed=0),
        tempfile.TemporaryDirectory() as folder,
        _watched(options, Path(folder)) as made,
    ):
        for number, pattern in enumerate(options.patterns):
            of_block = report["blocks"].setdefault(pattern, {})
            for part in _measured(options, pattern, Path(folder) / str(number), made):
                of_block |= part
                _write(options, report)
                gc.collect()
                torch.cuda.empty_cache()
    if options.failed:
        raise SystemExit(f"failed: {', '.join(options.failed)}")


def _age_s() -> float:
    """Gives the seconds since this process began."""
    began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return uptime - began / os.sysconf("SC_CLK_TCK")


def _measured(
    options: argparse.Namespace, pattern: str, folder: Path, made: Callable[[], None]
) -> Iterator[dict[str, Any]]:
    """Gives what is measured so far of a block."""
    options.pattern = pattern
    sizes = preset(options.preset)
    sizes = sizes.reduced() if options.small else sizes
    architecture = dataclasses.replace(
        sizes,
        num_layers=pattern.count("E"),
        attention_interval=1,
        vocab_size=min(sizes.vocab_size, 2048),
    )
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(
        f"{architecture.name}, pattern {pattern}, {device}, torch {torch.__version__}", flush=True
    )
    folder.mkdir()
    if "train" in options.parts:
        with _reported(options, f"training of {pattern}"):
            yield from _train_part(options, architecture, folder / "hints", made)
    if "rollout" in options.parts and "*" not in pattern:
        print(f"no rollout of {pattern}: Megatron's engine needs attention to schedule by")
    elif "rollout" in options.parts:
        with _reported(options, f"rollout of {pattern}"):
            yield {"rollout": measure_rollout(options, architecture, folder)}


@contextlib.contextmanager
def _watched(options: argparse.Namespace, folder: Path) -> Iterator[Callable[[], None]]:
    """Gives what says that a micro-batch was done, to a watcher of this process if one is asked."""
    if not options.watch_s:
        yield lambda: None
        return
    print_compilations()
    with watched(folder, after_s=options.watch_s, native=options.native_stacks) as progress:
        yield progress.made
    print(f"longest time without a turn of a thread of Python: {progress.longest_gap_s:.2f} s")
    if torch.cuda.is_available() and torch.version.cuda is not None:
        counts = torch.cuda.memory_stats()
        names = ("num_alloc_retries", "num_device_alloc", "num_device_free", "num_sync_all_streams")
        print("device memory:", {name: counts.get(name) for name in names})
        print("page-locked memory:", torch.cuda.host_memory_stats())


def _write(options: argparse.Namespace, report: dict[str, Any]) -> None:
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1))


def _train_part(
    options: argparse.Namespace,
    architecture: Architecture,
    folder: Path,
    made: Callable[[], None],
) -> Iterator[dict[str, Any]]:
    """Gives what is measured so far, after each number of tokens."""
    # Started before the block is built, as a training's is before its first pass.
    process = HintReader(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    process.start()
    with contextlib.closing(process):
        yield from _measured_training(options, Block(options, architecture, folder), process, made)


def _measured_training(
    options: argparse.Namespace, block: Block, process: HintReader, made: Callable[[], None]
) -> Iterator[dict[str, Any]]:
    per_token = block.hint_bytes / block.num_tokens
    print(
        f"recorded {block.num_tokens} tokens; hints of all sites {per_token:.0f} bytes a token, "
        f"written in {block.store_seconds:.3f} s ({block.hint_bytes / 1e6:.1f} MB); "
        f"{passed_s(options):.1f} s so far",
        flush=True,
    )
    rows, loading = [], []
    for num_tokens in options.tokens:
        loading.append(measure_loading(block, num_tokens))
        print("loading", loading[-1], flush=True)
        cases, reported = cases_of(options, num_tokens), partial(_reported, options)
        rows += measure_training(block, cases, num_tokens, process, reported, made)
        yield {
            "training": rows,
            "store": {
                "seconds": block.store_seconds,
                "bytes": block.hint_bytes,
                "tokens": block.num_tokens,
            },
            "loading": loading,
        }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", default="Qwen3.5-35B-A3B")
    parser.add_argument(
        "--patterns", nargs="+", default=["*E"], help="hybrid layer pattern of each block"
    )
    parser.add_argument("--small", action="store_true", help="the structure, but small widths")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192], help="of a micro-batch")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sample")
    parser.add_argument("--samples", type=int, help="samples; two of the largest micro-batches")
    parser.add_argument("--kinds", nargs="+", default=["local"], help="of the routed experts")
    parser.add_argument("--cases", nargs="+", help="see above; instead of those of all kinds")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--rounds-per-step", type=int, default=6, help="between optimizer steps")
    parser.add_argument("--warm-up", type=int, default=2, help="micro-batches before the rounds")
    parser.add_argument(
        "--budget-s",
        type=float,
        nargs="+",
        default=[600.0],
        help="ends the rounds of a block and a number of tokens, so long after the first began",
    )
    parser.add_argument("--micro-batches", type=int, default=1, help="of a case in a round")
    parser.add_argument(
        "--profile", type=int, default=0, help="rows of a case's profile, at the first --tokens"
    )
    parser.add_argument("--profile-cases", nargs="+", default=["qat:local", "trace:local"])
    parser.add_argument(
        "--readers",
        nargs="+",
        choices=("process", "thread", "at-once"),
        default=["process"],
        help="what reads the hints ahead; at-once makes micro-batches before they are timed",
    )
    parser.add_argument("--hang-s", type=float, help="ends with all stacks after so long")
    parser.add_argument(
        "--watch-s",
        type=float,
        help="says where the process stands after so long without a micro-batch (stall_watch.py), "
        "and each compilation of Triton",
    )
    parser.add_argument("--native-stacks", action="store_true", help="of a stall, by cuda-gdb")
    parser.add_argument("--parts", nargs="+", default=["train", "rollout"])
    parser.add_argument("--prompts", type=int, default=32, help="of the rollout, of 64 tokens")
    parser.add_argument("--new-tokens", type=int, default=32, help="sampled for each prompt")
    parser.add_argument("--graphs", action="store_true", help="captures the engine's decode steps")
    parser.add_argument(
        "--packed-experts", choices=("off", "torch", "cuda"), default="off", help="of the engine"
    )
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
