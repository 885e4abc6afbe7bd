"""Measures where the seconds of an RL step of short samples go: rollout, record, train, push.

    python tools/bench_rl_step.py --methods bf16 qat trace --profile bench_rl_step.txt    on one GPU
    python tools/bench_rl_step.py --cpu --hidden 64 --layers 8 --steps 3                  on a CPU

The runs of `method_runs.py --setting h200` (106M MoE, 32 prompts x 8 samples), but with weights of
a short supervised start, so that nothing must be there before. Printed of each method: seconds of
every step by phase, those of an evaluation of 600 problems and of a checkpoint, and a digest of
all other numbers of the run and its last weights: what makes a step faster must not change it.
"""

# ruff: noqa: E402  The stand-in for the CUDA runtime must be installed before Megatron is imported.
from __future__ import annotations

import time

STARTED_S = time.perf_counter()

from megatron_trace.testing import cpu_runtime

cpu_runtime.install()

import argparse
import cProfile
import dataclasses
import gc
import hashlib
import io
import json
import pstats
import statistics
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from method_runs import CALIBRATION_SAMPLES, H200_TASKS, SETTINGS, fits

from megatron_trace.models.hybrid import HybridModules, build_hybrid_model
from megatron_trace.rl import checkpoint
from megatron_trace.rl.run import RlRun, build_run, calibration_batches, solved, start
from megatron_trace.rl.step import rl_step
from megatron_trace.rl.tasks import CharTokenizer, TaskItem, split_tasks
from megatron_trace.rl.warm_start import WarmStartSettings, warm_start
from megatron_trace.rollout.weights import plain_digest
from megatron_trace.study import moe_100m
from megatron_trace.study.chain_training import Recipe, model_config
from megatron_trace.study.method_runs import VARIANTS, Problem, RunPlan
from megatron_trace.study.task_mix import items_of_mix
from megatron_trace.testing.single_process import single_process

PHASES = ("rollout", "record", "train", "push")


def problem_of(options: argparse.Namespace) -> Problem:
    """Gives model, weights and problems like those of the runs."""
    mix = [part for part in moe_100m.MIX if part.task in H200_TASKS]
    items: list[TaskItem] = items_of_mix(
        [dataclasses.replace(part, size=options.items) for part in mix], drop_characters=" []'\","
    )
    items = [item for item in items if fits(item, SETTINGS["h200"].base)]
    tokenizer = CharTokenizer.of_tasks(items)
    train_items, held_out = split_tasks(items, num_held_out=SETTINGS["h200"].num_held_out, seed=0)
    size = {"hidden_size": options.hidden, "expert_size": options.hidden}
    recipe = dataclasses.replace(moe_100m.RECIPE, num_layers=options.layers, **size)
    weights = _warm_started(recipe, train_items, tokenizer, options)
    return Problem(
        model_config(recipe),
        recipe.pattern,
        train_items,
        held_out,
        tokenizer,
        weights,
        calibration_batches(train_items, tokenizer, num_samples=CALIBRATION_SAMPLES),
    )


def _warm_started(
    recipe: Recipe,
    items: Sequence[TaskItem],
    tokenizer: CharTokenizer,
    options: argparse.Namespace,
) -> dict[str, torch.Tensor]:
    if options.weights is not None and options.weights.exists():
        return torch.load(options.weights)
    config = model_config(recipe)
    fp32 = {"bf16": False, **dict.fromkeys(("params_dtype", "pipeline_dtype"), torch.float32)}
    model = build_hybrid_model(
        dataclasses.replace(config, autocast_dtype=torch.float32, **fp32),
        pattern=recipe.pattern,
        vocab_size=tokenizer.vocab_size,
        max_sequence_length=SETTINGS["h200"].base.context,
        modules=HybridModules(),
    )
    settings = WarmStartSettings(options.warm_start, batch_size=128, learning_rate=1e-3)
    warm_start(model, items, tokenizer, settings, progress=False)
    weights = {name: value.detach().cpu().clone() for name, value in model.named_parameters()}
    if options.weights is not None:
        torch.save(weights, options.weights)
    return weights


def measure(method: str, problem: Problem, options: argparse.Namespace) -> dict[str, Any]:
    """Does the steps of a run, and gives the seconds of each."""
    plan = RunPlan(method, 0, options.steps, SETTINGS["h200"].base)
    built = time.perf_counter()
    run = build_run(
        plan.settings,
        problem.config,
        pattern=problem.pattern,
        items=problem.items,
        tokenizer=problem.tokenizer,
    )
    start(run, problem.weights, problem.calibration)
    seconds: dict[str, Any] = {"build": _since(built)}
    numbers = hashlib.sha256()
    steps: list[dict[str, float]] = []
    for step in range(options.steps):
        metrics, took = _step(run)
        _add(numbers, metrics)
        steps.append(took)
        told = ", ".join(f"{name} {value:.3f}" for name, value in took.items())
        _tell(f"{method:6} step {step}: {told} s, {metrics['response_tokens']:.2f} tokens")
    numbers.update(plain_digest(run.named_weights()).encode())
    seconds |= {name: statistics.median(step[name] for step in steps[1:]) for name in steps[0]}
    if options.profile is not None:
        with options.profile.open("a") as out:
            for part in profiles_of(run, options.rows):
                print(f"# {method}\n{part}", file=out, flush=True)
        _tell(f"{method}: profiles are written")
    began = time.perf_counter()
    right = solved(run, problem.held_out)
    seconds["evaluation"] = _since(began)
    numbers.update(bytes(right))
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        checkpoint.save(run, Path(folder), identity={})
        seconds["checkpoint"] = _since(began)
    told = ", ".join(f"{name} {value:.3f}" for name, value in seconds.items())
    digest = numbers.hexdigest()[:16]
    _tell(f"{method:6} median: {told} s; digest {digest}")
    return {"seconds": seconds, "steps": steps, "digest": digest}


def profiles_of(run: RlRun, rows: int) -> Iterator[str]:
    """Gives where the host spends a step's time, and what the device computes in another one."""
    profiler = cProfile.Profile()
    profiler.runcall(_step, run)
    text = io.StringIO()
    stats = pstats.Stats(profiler, stream=text)
    for order in ("tottime", "cumtime"):
        stats.sort_stats(order).print_stats(rows)
    yield text.getvalue()
    if not torch.cuda.is_available():
        return
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        _step(run)
    averages = profile.key_averages()
    for order in ("self_cpu_time_total", "self_cuda_time_total"):
        yield averages.table(sort_by=order, row_limit=rows, max_name_column_width=70)


def _step(run: RlRun) -> tuple[dict[str, Any], dict[str, float]]:
    torch.cuda.synchronize()
    began = time.perf_counter()
    metrics = rl_step(run)
    torch.cuda.synchronize()
    took = {name: metrics["seconds"][name] for name in PHASES}
    return metrics, took | {"step": _since(began)}


def _add(numbers: Any, metrics: dict[str, Any]) -> None:
    plain = {name: value for name, value in metrics.items() if name != "seconds"}
    numbers.update(json.dumps(plain, sort_keys=True).encode())


def _tell(text: str) -> None:
    print(f"{time.perf_counter() - STARTED_S:.1f} s: {text}", flush=True)


def _since(began: float) -> float:
    torch.cuda.synchronize()
    return time.perf_counter() - began


def parse_options() -> argparse.Namespace:
    """Gives the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", choices=VARIANTS, default=["bf16", "qat", "trace"])
    parser.add_argument("--steps", type=int, default=6, help="the first one does not count")
    parser.add_argument("--hidden", type=int, default=moe_100m.RECIPE.hidden_size)
    parser.add_argument("--layers", type=int, default=moe_100m.RECIPE.num_layers)
    parser.add_argument("--items", type=int, default=1000, help="problems of each task")
    parser.add_argument("--warm-start", type=int, default=60, help="supervised steps")
    parser.add_argument("--weights", type=Path, help="file that keeps the weights of the start")
    parser.add_argument("--cpu", action="store_true", help="expect no GPU")
    parser.add_argument("--profile", type=Path, help="file for profiles of two more steps")
    parser.add_argument("--rows", type=int, default=40, help="rows of a profile")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps must be >= 2, as the first one does not count")
    if not options.cpu and not torch.cuda.is_available():
        parser.error("no CUDA device is visible; --cpu measures on the host")
    return options


def main() -> None:
    """Measures every method."""
    options = parse_options()
    torch.set_num_threads(1)
    if options.profile is not None:
        options.profile.unlink(missing_ok=True)
    _tell("imported")
    with single_process(seed=0):
        began = time.perf_counter()
        problem = problem_of(options)
        _tell(f"problem: {_since(began):.1f} s")
        found = {method: measure(method, problem, options) for method in options.methods}
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    gc.freeze()  # A million objects of imports live to the end: no collection need see them.
    main()
