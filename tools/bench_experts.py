"""Checks and times the FP4 experts kernel on one GPU.

usage: bench_experts.py [--out bench_experts.json] [--variants NAME=1,... ...]

Correctness first, stage by stage, each from what the kernel itself gave before it:
* codes and block scales of fc1's input, and of fc2's: equal to the specification's, bit for bit;
* fc2's input and the output: against `experts_reference` on the same operands. Sums have another
  order than torch's, so that a value may round to another BF16 number: the largest difference over
  the largest magnitude of the row is reported, and must be at most TOLERANCE.
Then time under graph replay, 256 experts of which 8 are chosen, hidden size 2048, width 512: a
graph goes over layers with weights of their own, so that none is in the L2 cache. Bytes are codes
and block scales of the experts that a token chose, each once; the share is of a device copy, bytes
read and written, in the same run. All builds, which are made side by side, get the same inputs and
routing. BF16: torch's grouped products of the same shapes, alone.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from megatron_trace.rollout.kernels import experts as kernel
from megatron_trace.rollout.kernels.experts_reference import PackedExperts, RoutedOutput
from megatron_trace.rollout.kernels.library import library
from megatron_trace.testing.device_timing import copy_bandwidth, median_us
from megatron_trace.testing.packed_experts import (
    TOLERANCE,
    compared,
    random_experts,
    random_routing,
)

EXPERTS, TOP_K, HIDDEN, WIDTH = 256, 8, 2048, 512
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
VARIANT_TOKENS = (32, 64, 128, 256)
LAYERS, BF16_LAYERS = 12, 4
# Builds that leave something out: nothing but weights is loaded, and not decoded; no tokens are.
CEILINGS = ("EXPERT_CEILING=1", "EXPERT_CEILING=2")
# Experts, top-k, hidden size, width, tokens.
CASES = (
    (16, 4, 512, 512, 1),
    (16, 4, 1024, 512, 7),
    (8, 2, 512, 1024, 300),
    (256, 8, 2048, 512, 1),
    (256, 8, 2048, 512, 8),
    (256, 8, 2048, 512, 256),
)


def graph_us(calls: list[Callable[[], Any]]) -> float:
    """Gives the time of a call in us when a graph of several is replayed."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return median_us(graph.replay) / len(calls)


def checks() -> dict[str, Any]:
    """Gives what `compared` gives in every case."""
    results = {}
    for num_experts, top_k, hidden, width, tokens in CASES:
        weights = random_experts(num_experts, hidden, width, device="cuda", seed=tokens)
        for skewed in (False, True):
            x = torch.randn(tokens, hidden, device="cuda").bfloat16()
            if tokens > 5:
                x[1], x[2, :40], x[3, 5] = 0.0, -0.0, float("inf")
                x[4, 100] = float("nan")
                x[5] *= 1e-6
            routing = random_routing(tokens, num_experts, top_k, device="cuda", skewed=skewed)
            name = f"E{num_experts} k{top_k} H{hidden} F{width} T{tokens} skewed {skewed}"
            results[name] = compared(x, *routing, weights)
            print(name, results[name], flush=True)
    return results


def is_right(results: dict[str, Any]) -> bool:
    """Whether all records are equal and all values near enough."""
    return all(
        value == 0 if name.endswith("differ") else value <= TOLERANCE
        for case in results.values()
        for name, value in case.items()
    )


def calls_of(
    layers: list[PackedExperts], tokens: int, flags: tuple[str, ...] = ()
) -> tuple[list[Callable[[], RoutedOutput]], float]:
    """Gives a call for each layer, and the mean bytes of weights that it needs."""
    torch.manual_seed(tokens)
    calls, num_bytes = [], 0
    for weights in layers:
        x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        experts, probabilities = random_routing(tokens, EXPERTS, TOP_K, device="cuda")
        num_bytes += len(experts.unique()) * weights.expert_bytes
        arguments = (x, experts, probabilities, weights)
        calls.append(partial(kernel.routed_experts, *arguments, flags=flags))
    return calls, num_bytes / len(layers)


def time_kernel(
    layers: list[PackedExperts],
    copy: float,
    all_tokens: tuple[int, ...],
    flags: tuple[str, ...] = (),
) -> list[dict[str, float]]:
    """Gives a row for each number of tokens."""
    rows = []
    for tokens in all_tokens:
        calls, num_bytes = calls_of(layers, tokens, flags)
        us = graph_us(calls)
        row = {
            "tokens": tokens,
            "us": us,
            "MB": num_bytes / 1e6,
            "TBps": num_bytes / us / 1e6,
            "of_copy": num_bytes / us / 1e6 / copy,
        }
        print(*flags, {key: round(value, 4) for key, value in row.items()}, flush=True)
        rows.append(row)
    return rows


def time_bf16(all_tokens: tuple[int, ...]) -> list[dict[str, float]]:
    """Gives the time of the two grouped products and SwiGLU in BF16, tokens sorted beforehand."""
    shape = (BF16_LAYERS, EXPERTS)
    fc1 = torch.empty((*shape, 2 * WIDTH, HIDDEN), dtype=torch.bfloat16, device="cuda").normal_()
    fc2 = torch.empty((*shape, HIDDEN, WIDTH), dtype=torch.bfloat16, device="cuda").normal_()
    rows = []
    for tokens in all_tokens:
        experts, _ = random_routing(tokens, EXPERTS, TOP_K, device="cuda")
        ends = torch.bincount(experts.flatten(), minlength=EXPERTS).cumsum(0).int()
        x = torch.randn(tokens * TOP_K, HIDDEN, device="cuda").bfloat16()

        def call(layer: int, x: torch.Tensor = x, ends: torch.Tensor = ends) -> torch.Tensor:
            gate, up = F.grouped_mm(x, fc1[layer].transpose(1, 2), offs=ends).chunk(2, -1)
            return F.grouped_mm(F.silu(gate) * up, fc2[layer].transpose(1, 2), offs=ends)

        us = graph_us([lambda i=i: call(i) for i in range(BF16_LAYERS)])
        used = int((ends.diff(prepend=ends.new_zeros(1)) > 0).sum())
        row = {"tokens": tokens, "us": us, "MB": used * 3 * HIDDEN * WIDTH * 2 / 1e6}
        row["TBps"] = row["MB"] / us
        print("bf16", {key: round(value, 4) for key, value in row.items()}, flush=True)
        rows.append(row)
    return rows


def profile(layers: list[PackedExperts], tokens: int) -> dict[str, float]:
    """Gives the time of each kernel in us; they overlap."""
    calls, _ = calls_of(layers, tokens)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for call in calls:
            call()
        torch.cuda.synchronize()
    names = ("prepare", "multiply", "combine")
    return {
        name: event.device_time_total / len(calls)
        for event in profiler.key_averages()
        for name in names
        if f"{name}_kernel" in event.key
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench_experts.json"))
    parser.add_argument(
        "--variants",
        nargs="*",
        default=CEILINGS,
        help="other builds to be timed, each a list of macros NAME=1,...",
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device is visible")
    variants = {
        variant: tuple(f"-D{macro}" for macro in variant.split(","))
        for variant in arguments.variants
    }
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda flags: library(kernel.SOURCE, *flags), [(), *variants.values()]))
    torch.manual_seed(0)
    result: dict[str, Any] = {
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "shape": {"experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "width": WIDTH},
    }

    failed: list[str] = []

    def keep(name: str, measure: Callable[[], Any]) -> None:
        # Measurements do not depend on one another: one that fails is shown, and the others run.
        try:
            result[name] = measure()
        except Exception:  # noqa: BLE001
            result[name] = traceback.format_exc()
            failed.append(name)
        arguments.out.write_text(json.dumps(result, indent=1))
        print(name, result[name], flush=True)

    keep("checks", checks)
    keep("right", lambda: is_right(result["checks"]))
    keep("copy_TBps", copy_bandwidth)
    layers = [random_experts(EXPERTS, HIDDEN, WIDTH, device="cuda", seed=i) for i in range(LAYERS)]
    copy = result["copy_TBps"]
    keep("fp4", lambda: time_kernel(layers, copy, TOKENS))
    for variant, flags in variants.items():
        keep(variant, lambda flags=flags: time_kernel(layers, copy, VARIANT_TOKENS, flags))
    for tokens in (8, 32, 256):
        keep(f"profile_{tokens}_us", lambda tokens=tokens: profile(layers, tokens))
    keep("bf16", lambda: time_bf16((1, 8, 32, 64, 256)))
    if result["right"] is not True:
        raise SystemExit("the kernel's results are not right: see checks")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
