"""Measures what a step of each method costs on one block of a published model, on a GPU.

    python tools/bench_step.py --out step.json --kinds local te --tokens 8192 32768

A block is a token mixer and a MoE of the full width of `--preset`; embedding and output layer are
small, so that what is measured is what 40 such blocks repeat. The samples are of `--length` tokens,
with hints that a model of method qat recorded, written to files and read by the trainer's own
prefetcher: file -> page-locked memory -> side stream -> device.

All trainers have one and the same weights, gradients and optimizer. They take turns, so that what
the machine does to one it does to all: in each round every case trains on some micro-batches, of
which the first also quantises the weights that the optimizer changed, and then the optimizer steps.
Times are medians over rounds, of CUDA events (of the wall clock on a CPU); "host" is how long the
host took to hand the work over, so where both are alike the GPU waited for the host.

A case is METHOD:EXPERTS[:SITES[:LAYERS]][@T], SITES joined by +, such as
`trace:te:fc1+fc2+k+v:latter_half`; with @T it is measured at that many tokens only.

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
import itertools
import json
import statistics
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_step_block import ALL_SITES, DEFAULT_SITES, Block, Case, Timer, Trainer
from bench_step_profile import profiled
from bench_step_rollout import measure_rollout

from megatron_trace.hints.files import HintFiles
from megatron_trace.hints.types import RolloutSample
from megatron_trace.models.architecture import Architecture
from megatron_trace.models.presets import preset
from megatron_trace.testing.single_process import single_process
from megatron_trace.training.micro_batch import (
    MicroBatch,
    make_micro_batch,
    stage_micro_batch,
)
from megatron_trace.training.model import token_logprobs
from megatron_trace.training.prefetch import MicroBatchPrefetcher


def measure_training(block: Block, cases: Sequence[Case], num_tokens: int) -> list[dict[str, Any]]:
    """Trains all cases by turns; gives a row of the table for each that could run."""
    options, per_batch = block.options, num_tokens // block.options.length
    device = next(iter(block.parameters.values())).device
    starts = range(0, len(block.samples) - per_batch + 1, per_batch)
    batches = [block.samples[first : first + per_batch] for first in starts]
    rows: list[dict[str, Any]] = []
    optimizer: list[float] = []
    budget_s = options.budget_s[min(options.tokens.index(num_tokens), len(options.budget_s) - 1)]
    trainers = []
    for case in cases:
        with _reported(options, case.name):
            trainers.append(Trainer(case, *block.trainer(case), HintFiles(block.folder)))
    print(f"built, {_passed(options):.1f} s so far", flush=True)
    for round_number in range(options.rounds + 1):
        # One round that counts is the least.
        if round_number > 1 and _passed(options) > budget_s:
            break
        first = round_number % len(trainers)
        for trainer in trainers[first:] + trainers[:first]:
            started, done = time.perf_counter(), False
            with _reported(options, trainer.case.name):
                train(trainer, batches, options, device, count=round_number > 0)
                done = True
            if not done:
                trainers = [other for other in trainers if other is not trainer]
            elif round_number == 0:
                seconds = time.perf_counter() - started
                print(f"{trainer.case.name}: first round {seconds:.2f} s", flush=True)
        optimizer.append(block.optimizer_step())
        if round_number:
            rows = [row_of(of, num_tokens, statistics.median(optimizer)) for of in trainers]
        if round_number == 1:
            print_training(rows)
        print(f"round {round_number} done, {_passed(options):.1f} s so far", flush=True)
    print_training(rows)
    for trainer in trainers:
        is_last = num_tokens == options.tokens[-1]
        if is_last and options.profile and trainer.case.text in options.profile_cases:
            with (
                _reported(options, f"profile of {trainer.case.name}"),
                _reading(trainer, batches, ahead=options.ahead) as stream,
            ):
                step(trainer, next(stream))
                micro_batch = next(stream)
                profiled(trainer.case.name, partial(step, trainer, micro_batch), options.profile)
    return rows


def _passed(options: argparse.Namespace) -> float:
    return time.perf_counter() - options.started


@contextlib.contextmanager
def _reading(
    trainer: Trainer, batches: Sequence[Sequence[RolloutSample]], *, ahead: bool
) -> Iterator[Iterator[MicroBatch]]:
    """Gives a case's micro-batches without end: read ahead, or made now and used again."""
    if ahead:
        with MicroBatchPrefetcher(
            itertools.cycle(batches), trainer.files, trainer.sites, max_host_bytes=None
        ) as stream:
            yield stream
        return
    made = [make_micro_batch(samples, trainer.files, trainer.sites) for samples in batches]
    yield itertools.cycle(made)


def train(
    trainer: Trainer,
    batches: Sequence[Sequence[RolloutSample]],
    options: argparse.Namespace,
    device: torch.device,
    *,
    count: bool,
) -> None:
    """Trains on some micro-batches, and notes their times if they count."""
    on_gpu = device.type == "cuda"
    with _reading(trainer, batches, ahead=options.ahead) as stream:
        for index in range(options.micro_batches):
            timer, before = Timer(device), 0
            if on_gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            with timer:
                step(trainer, next(stream))
            milliseconds = timer.milliseconds
            if on_gpu:
                peak = torch.cuda.max_memory_allocated() - before
                trainer.peak_bytes = max(trainer.peak_bytes, peak)
            if not count:
                continue
            if index == 0:
                trainer.first.append(milliseconds)
            else:
                trainer.later.append(milliseconds)
                trainer.host.append(timer.host_milliseconds)


def step(trainer: Trainer, micro_batch: MicroBatch) -> None:
    """Does the forward and backward pass of a micro-batch."""
    for parameter in trainer.model.parameters():
        parameter.grad_added_to_main_grad = False
    with trainer.sites.micro_batch(micro_batch):
        logprobs = token_logprobs(trainer.model, trainer.sites, micro_batch)
        (-logprobs[micro_batch.loss_mask].mean()).backward()


def row_of(trainer: Trainer, num_tokens: int, optimizer_ms: float) -> dict[str, Any]:
    """Gives the medians of a case."""
    later, first = statistics.median(trainer.later), statistics.median(trainer.first)
    coverage = {}
    if trainer.sites.quantises:
        report = trainer.sites.report()
        coverage = {str(site): round(counts.coverage, 4) for site, counts in report.sites.items()}
    return {
        "case": dataclasses.asdict(trainer.case) | {"name": trainer.case.name},
        "tokens": num_tokens,
        "micro_batch_ms": later,
        "micro_batch_ms_least": min(trainer.later),
        "micro_batch_ms_most": max(trainer.later),
        "host_ms": statistics.median(trainer.host),
        "weights_ms": first - later,
        "optimizer_ms": optimizer_ms,
        "peak_bytes": trainer.peak_bytes,
        "coverage": coverage,
    }


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


def print_training(rows: Sequence[dict[str, Any]]) -> None:
    """Prints the table, with the cost of guidance over method qat with the same experts."""
    print(
        f"{'case':44} {'tokens':>6} {'ms':>8} {'least':>8} {'over qat':>8} {'host':>8} "
        f"{'weights':>8} {'GiB':>6}  coverage"
    )
    plain = {
        (row["tokens"], row["case"]["experts"]): row["micro_batch_ms"]
        for row in rows
        if row["case"]["method"] == "qat"
    }
    for row in rows:
        base = plain.get((row["tokens"], row["case"]["experts"]))
        over = f"{row['micro_batch_ms'] / base - 1:+.1%}" if base else ""
        print(
            f"{row['case']['name']:44} {row['tokens']:6} {row['micro_batch_ms']:8.2f} "
            f"{row['micro_batch_ms_least']:8.2f} {over:>8} {row['host_ms']:8.2f} "
            f"{row['weights_ms']:8.2f} {row['peak_bytes'] / 2**30:6.2f}  {row['coverage']}",
            flush=True,
        )


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
    if options.hang_s:
        faulthandler.dump_traceback_later(options.hang_s, exit=True)
    sizes = preset(options.preset)
    sizes = sizes.reduced() if options.small else sizes
    architecture = dataclasses.replace(
        sizes,
        num_layers=options.pattern.count("E"),
        attention_interval=1,
        vocab_size=min(sizes.vocab_size, 2048),
    )
    options.samples = max(options.samples or 2 * max(options.tokens) // options.length, 1)
    report: dict[str, Any] = {"options": {k: str(v) for k, v in vars(options).items()}}
    options.failed = []
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{architecture.name}, pattern {options.pattern}, {device}, torch {torch.__version__}")
    with single_process(seed=0), tempfile.TemporaryDirectory() as folder:
        if "train" in options.parts:
            for part in _train_part(options, architecture, Path(folder) / "hints"):
                _write(options, report | part)
                report |= part
            gc.collect()
            torch.cuda.empty_cache()
        if "rollout" in options.parts:
            with _reported(options, "rollout"):
                report["rollout"] = measure_rollout(options, architecture, Path(folder))
    _write(options, report)
    if options.failed:
        raise SystemExit(f"failed: {', '.join(options.failed)}")


def _write(options: argparse.Namespace, report: dict[str, Any]) -> None:
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1))


def _train_part(
    options: argparse.Namespace, architecture: Architecture, folder: Path
) -> Iterator[dict[str, Any]]:
    """Gives what is measured so far, after each number of tokens."""
    block = Block(options, architecture, folder)
    per_token = block.hint_bytes / block.num_tokens
    print(
        f"recorded {block.num_tokens} tokens; hints of all sites {per_token:.0f} bytes a token, "
        f"written in {block.store_seconds:.3f} s ({block.hint_bytes / 1e6:.1f} MB); "
        f"{_passed(options):.1f} s so far",
        flush=True,
    )
    rows, loading = [], []
    for num_tokens in options.tokens:
        loading.append(measure_loading(block, num_tokens))
        print("loading", loading[-1], flush=True)
        rows += measure_training(block, cases_of(options, num_tokens), num_tokens)
        yield {
            "training": rows,
            "store": {
                "seconds": block.store_seconds,
                "bytes": block.hint_bytes,
                "tokens": block.num_tokens,
            },
            "loading": loading,
        }
        gc.collect()
        torch.cuda.empty_cache()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", default="Qwen3.5-35B-A3B")
    parser.add_argument("--pattern", default="*E", help="hybrid layer pattern of the block")
    parser.add_argument("--small", action="store_true", help="the structure, but small widths")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192], help="of a micro-batch")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sample")
    parser.add_argument("--samples", type=int, help="samples; two of the largest micro-batches")
    parser.add_argument("--kinds", nargs="+", default=["local"], help="of the routed experts")
    parser.add_argument("--cases", nargs="+", help="see above; instead of those of all kinds")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--budget-s", type=float, nargs="+", default=[600.0], help="ends rounds early, by tokens"
    )
    parser.add_argument("--micro-batches", type=int, default=4, help="of a case in a round")
    parser.add_argument("--profile", type=int, default=0, help="rows of a case's profile")
    parser.add_argument("--profile-cases", nargs="+", default=["qat:local", "trace:local"])
    parser.add_argument(
        "--at-once",
        action="store_false",
        dest="ahead",
        help="makes micro-batches before they are timed, without the thread that reads ahead",
    )
    parser.add_argument("--hang-s", type=float, help="ends with all stacks after so long")
    parser.add_argument("--parts", nargs="+", default=["train", "rollout"])
    parser.add_argument("--prompts", type=int, default=32, help="of the rollout, of 64 tokens")
    parser.add_argument("--new-tokens", type=int, default=32, help="sampled for each prompt")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
