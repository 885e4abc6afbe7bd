"""Checks and times the gated delta rule's backward pass: flash-linear-attention's against torch's.

    python tools/bench_delta_rule.py [--out bench_delta_rule.json] [--heads 32] [--head-dim 128]
    python tools/bench_delta_rule.py --cpu --heads 2 --head-dim 16 --tokens 128      torch's alone

Correctness first: output and gradients of each choice of `--trace-delta-rule` from BF16 inputs
against torch's from the same values in FP32, for several lengths, padded and packed; the error is
the root mean square of the difference over that of the value. Then milliseconds and memory of a
forward and backward pass of `--tokens`, in one sequence, in eight, and packed.
"""

# ruff: noqa: E402  The stand-in for the CUDA runtime must be installed before Megatron is imported.
from __future__ import annotations

from megatron_trace.testing import cpu_runtime

cpu_runtime.install()

import argparse
import json
import platform
import time
import traceback
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from megatron_trace.config import DeltaRule
from megatron_trace.models.delta_rule import delta_rule_kernels, mix
from megatron_trace.testing.delta_rule_gradients import (
    TOLERANCE,
    errors,
    output_and_gradients,
    random_inputs,
)
from megatron_trace.testing.device_timing import median_us

# Sequences, tokens of each, and bounds where they are packed.
CASES: tuple[tuple[int, int, tuple[int, ...] | None], ...] = (
    (1, 64, None),
    (2, 65, None),
    (1, 1000, None),
    (2, 2048, None),
    (1, 3000, (0, 1000, 1003, 2048, 3000)),
)


def check(choice: DeltaRule, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compares a choice in every case, and prints it."""
    rows = []
    for num_sequences, num_tokens, bounds in CASES:
        inputs = made(num_sequences, num_tokens, options)
        ends = None if bounds is None else torch.tensor(bounds, device=options.device)
        exact = [x.float() for x in inputs]
        expected = output_and_gradients(mix, exact, ends)
        started = time.perf_counter()
        got = output_and_gradients(delta_rule_kernels(choice).mix, inputs, ends)
        row = {
            "choice": choice,
            "sequences": num_sequences,
            "tokens": num_tokens,
            "bounds": bounds,
            "first_s": time.perf_counter() - started,
            "errors": errors(expected, got),
        }
        rows.append(row)
        told = "  ".join(f"{name} {error:.1e}" for name, error in row["errors"].items())
        packed = "" if bounds is None else f" packed {bounds}"
        print(f"{choice:6} {num_sequences} x {num_tokens}{packed}: {told}", flush=True)
    return rows


def timed(choice: DeltaRule, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Times a choice, and prints it."""
    rows = []
    part = options.tokens // 8
    ends = torch.arange(0, options.tokens + 1, part, device=options.device)
    for name, num_sequences, bounds in (("one", 1, None), ("eight", 8, None), ("packed", 1, ends)):
        inputs = made(num_sequences, options.tokens // num_sequences, options)
        run = partial(output_and_gradients, delta_rule_kernels(choice).mix, inputs, bounds)
        row = {"choice": choice, "sequences": name} | measured(run, options)
        rows.append(row)
        print(
            f"{choice:6} {options.tokens} tokens, {name:6}: {row['ms']:.2f} ms, "
            f"{row['peak_bytes'] / 2**30:.2f} GiB",
            flush=True,
        )
    return rows


def measured(run: Callable[[], object], options: argparse.Namespace) -> dict[str, float]:
    """Gives milliseconds of a call, and the most bytes beyond those before it."""
    if options.cpu:
        started = time.perf_counter()
        run()
        return {"ms": (time.perf_counter() - started) * 1e3, "peak_bytes": 0}
    run()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    milliseconds = median_us(run, repeats=options.repeats) / 1e3
    return {"ms": milliseconds, "peak_bytes": torch.cuda.max_memory_allocated() - before}


def made(num_sequences: int, num_tokens: int, options: argparse.Namespace) -> list[torch.Tensor]:
    """Gives random BF16 inputs."""
    return random_inputs(
        num_sequences,
        num_tokens,
        num_heads=options.heads,
        head_dim=options.head_dim,
        dtype=torch.bfloat16,
        device=options.device,
    )


PARTS = {"checks": check, "times": timed}


def main() -> None:
    """Runs what the options ask for; a choice that fails is reported, and the others go on."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cpu", action="store_true", help="torch's rule alone, to try this tool")
    parser.add_argument("--heads", type=int, default=32, help="value heads; default 32, Qwen3.5's")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--choices", nargs="+", choices=("torch", "fla"), default=["torch", "fla"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    if options.cpu:
        options.choices = ["torch"]
    options.device = torch.device("cpu" if options.cpu else "cuda")
    told: dict[str, Any] = {"torch": version("torch"), "triton": version("triton")}
    told["device"] = platform.processor() if options.cpu else torch.cuda.get_device_name()
    results: dict[str, Any] = {"machine": told, "checks": [], "times": [], "failed": []}
    for choice in options.choices:
        for part in options.parts:
            try:
                results[part] += PARTS[part](choice, options)
            except Exception:  # noqa: BLE001  The other choice is still worth its time.
                results["failed"].append(f"{choice}: {part}")
                traceback.print_exc()
    wrong = [
        f"{row['choice']} {row['sequences']} x {row['tokens']}: {name} {error:.1e}"
        for row in results["checks"]
        for name, error in row["errors"].items()
        if not error < TOLERANCE
    ]
    if options.out:
        options.out.write_text(json.dumps(results | {"wrong": wrong}, indent=1))
    if wrong or results["failed"]:
        raise SystemExit(f"wrong: {wrong}; failed: {results['failed']}")


if __name__ == "__main__":
    main()
