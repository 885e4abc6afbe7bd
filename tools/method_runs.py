"""RL runs of all methods side by side: makes the missing ones, then the tables of all.

    python tools/method_runs.py --setting cpu --processes 2
    python tools/method_runs.py --setting cpu-long --processes 2
    python tools/method_runs.py --setting h200 --processes 6 --tasks out/moe_100m.jsonl.gz
    python tools/method_runs.py --setting cpu --methods bf16 qat trace --perturb 0.1 --processes 2
    python tools/method_runs.py --setting cpu-106m --fixed-policy --tasks out/moe_100m.jsonl.gz
    python tools/method_runs.py --setting cpu --report-only      of the runs that are there
    python tools/method_runs.py --setting h200 --page-only       of what docs/results has of them

Every run is a process of its own and a folder as tools/report.py reads them. Killed, the same
command goes on where it was; a run that fails does not end the others. `--out` gets
<setting>.md and <setting>.jsonl.gz of all runs in `--work`. It ends with status 1 if a run failed.
What is compared, and how, was fixed before the runs: docs/results.md.
"""

# ruff: noqa: E402  The stand-in for the CUDA runtime must be installed before Megatron is imported.
from __future__ import annotations

import time
import warnings

STARTED_S = time.perf_counter()

from megatron_trace.testing import cpu_runtime

cpu_runtime.install()

import logging

if __name__ == "__main__":  # Megatron and torch announce deprecations of their own parts.
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)

import argparse
import dataclasses
import gc
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_trace.models.hybrid import HybridModules, build_hybrid_model
from megatron_trace.rl.asynchronous import AsyncSettings
from megatron_trace.rl.run import RunSettings, calibration_batches
from megatron_trace.rl.run_record import RUN_FILE
from megatron_trace.rl.tasks import CharTokenizer, TaskItem, load_tasks, save_tasks, split_tasks
from megatron_trace.rl.warm_start import WarmStartSettings, answer_accuracy, warm_start
from megatron_trace.study import moe_100m
from megatron_trace.study.chain_training import Recipe
from megatron_trace.study.comparison import load_logs, logs_of_folders, save_logs
from megatron_trace.study.comparison_page import write_page
from megatron_trace.study.locks import locked
from megatron_trace.study.method_runs import VARIANTS, Problem, RunPlan, base_settings, do_run
from megatron_trace.study.task_mix import (
    CHAIN_SUMS,
    LONG_CHAIN_SUMS,
    TaskOfMix,
    items_of_mix,
    with_running_sums,
)
from megatron_trace.testing.single_process import single_process, tiny_moe_config

PATTERN = "*E*E*E*E"
CALIBRATION_SAMPLES = 256
NUM_ITEMS_106M = 20_000
FIXED_POLICY_STEPS = 4


@dataclasses.dataclass(frozen=True)
class DemoStart:
    """What the demo's MoE is warm-started on, and reinforced on after that.

    Attributes:
        task: Problems.
        warm_start: Supervised steps; its seed is the run's.
        running_sums: Whether answers are written with the sums on the way.
    """

    task: TaskOfMix
    warm_start: WarmStartSettings
    running_sums: bool = False


@dataclasses.dataclass(frozen=True)
class Setting:
    """A model and machine.

    Attributes:
        base: What the runs have in common.
        methods: Methods that are compared, unless chosen.
        seeds: Seeds, unless chosen.
        steps: RL steps of a run.
        num_held_out: Held-out problems.
        save_every: Steps between two checkpoints; those of the 106M MoE have 1.5 GB.
        start: Start of the demo's MoE, or how the 106M MoE is trained.
        ahead: How far rollouts run ahead; None rolls out and trains in turn.
    """

    base: RunSettings
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    steps: int
    num_held_out: int
    save_every: int
    start: DemoStart | Recipe
    ahead: AsyncSettings | None = None


BASE_106M = base_settings(
    learning_rate=1e-5,
    prompts_per_step=32,
    samples_per_prompt=8,
    micro_batch_samples=256,
    max_requests=256,
    max_response_tokens=16,
    context=128,
)
SETTINGS = {
    "cpu": Setting(
        base_settings(
            learning_rate=3e-5,
            prompts_per_step=16,
            samples_per_prompt=8,
            micro_batch_samples=128,
            max_requests=128,
            max_response_tokens=8,
            context=64,
        ),
        methods=tuple(VARIANTS),
        seeds=(0, 1, 2),
        steps=120,
        num_held_out=400,
        save_every=20,
        start=DemoStart(
            CHAIN_SUMS, WarmStartSettings(steps=300, batch_size=128, learning_rate=4e-3)
        ),
    ),
    "cpu-long": Setting(
        base_settings(
            learning_rate=3e-5,
            prompts_per_step=16,
            samples_per_prompt=8,
            micro_batch_samples=128,
            max_requests=512,  # Those of four steps, so that none waits for room.
            max_response_tokens=72,
            context=96,
            answer_format="last_line",
        ),
        methods=("bf16", "qat", "trace"),
        seeds=(0, 1, 2),
        steps=120,
        num_held_out=400,
        save_every=20,
        start=DemoStart(
            LONG_CHAIN_SUMS,
            WarmStartSettings(steps=400, batch_size=64, learning_rate=4e-3),
            running_sums=True,
        ),
        # As many engine steps an update as a response has tokens: one version makes all of it, and
        # the samples of four steps together.
        ahead=AsyncSettings(max_version_lag=3, engine_steps_per_update=72, drain_every=4),
    ),
    "h200": Setting(
        BASE_106M,
        methods=("bf16", "qat", "trace"),
        seeds=(0, 1),
        steps=150,
        num_held_out=600,
        save_every=50,
        start=moe_100m.RECIPE,
    ),
    "cpu-106m": Setting(
        BASE_106M,
        methods=("bf16", "qat", "trace"),
        seeds=(0, 1, 2),
        steps=150,
        num_held_out=600,
        save_every=50,
        start=moe_100m.CPU_RECIPE,
    ),
}


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Gives the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setting", choices=SETTINGS, default="cpu")
    parser.add_argument("--methods", nargs="+", choices=VARIANTS, help="default: the setting's")
    parser.add_argument("--seeds", nargs="+", type=int, help="default: the setting's")
    parser.add_argument("--steps", type=int, help="RL steps of a run (default: the setting's)")
    parser.add_argument(
        "--perturb",
        nargs="+",
        type=float,
        default=[0.0],
        help="diagnostic: relative noise in the trainer's forward pass; several are several sets",
    )
    parser.add_argument(
        "--fixed-policy",
        action="store_true",
        help=f"all methods at the start's weights: learning rate 0, {FIXED_POLICY_STEPS} steps",
    )
    parser.add_argument("--processes", type=int, default=1, help="runs at a time")
    parser.add_argument(
        "--tasks", type=Path, help="problems of the 106M MoE, see tools/moe_100m.py"
    )
    parser.add_argument("--work", type=Path, help="kept between starts (out/method_runs/SETTING)")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument(
        "--rehearse", action="store_true", help="with a hardly trained model (106M MoE only)"
    )
    parser.add_argument("--report-only", action="store_true", help="make no run")
    parser.add_argument(
        "--page-only",
        action="store_true",
        help="make no run, and the page from the numbers that --out has of them",
    )
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    setting = SETTINGS[options.setting]
    methods, steps, suffix = setting.methods, setting.steps, ""
    if options.fixed_policy:
        methods, steps, suffix = tuple(VARIANTS), FIXED_POLICY_STEPS, "-fixed-policy"
    options.methods = options.methods or list(methods)
    options.seeds = options.seeds if options.seeds is not None else list(setting.seeds)
    options.steps = options.steps or steps
    options.name = options.setting + suffix + ("-rehearsal" if options.rehearse else "")
    options.work = options.work or Path("out/method_runs") / options.name
    chosen = f"--setting {options.setting}"
    if isinstance(setting.start, DemoStart):
        if options.tasks:
            parser.error(f"--tasks has no effect on {chosen}: it makes its own")
        if options.rehearse:
            parser.error(f"--rehearse is for settings of the 106M MoE, not for {chosen}")
    elif not (options.tasks or options.report_only or options.page_only):
        parser.error(f"{chosen} needs --tasks; `tools/moe_100m.py tasks FILE` writes them")
    if options.processes < 1 or options.steps < 1 or min(options.perturb) < 0:
        parser.error("--processes and --steps must be >= 1, --perturb >= 0")
    return options


def plans_of(options: argparse.Namespace) -> list[RunPlan]:
    """Gives the runs: all seeds of a method before the next, so that pairs are there early."""
    setting = SETTINGS[options.setting]
    start = setting.start
    pattern = PATTERN if isinstance(start, DemoStart) else recipe_of(options, start).pattern
    # By the names that the demo has for them, so that tools/ptq.py reads the runs too.
    problem = {"model": options.setting, "pattern": pattern, "held_out": setting.num_held_out}
    base = setting.base
    if options.fixed_policy:
        base = dataclasses.replace(
            base, optimizer=dataclasses.replace(base.optimizer, learning_rate=0.0)
        )
    return [
        RunPlan(
            method,
            seed,
            options.steps,
            base,
            perturb=perturb,
            save_every=setting.save_every,
            problem=problem,
            ahead=setting.ahead,
        )
        for perturb in options.perturb
        for method in options.methods
        for seed in options.seeds
    ]


def is_done(plan: RunPlan, work: Path) -> bool:
    """Says whether a run has finished with all of its steps, or was stopped by an alarm.

    Raises:
        ValueError: It was made with other settings.
    """
    path = plan.folder(work) / RUN_FILE
    if not path.exists():
        return False
    if different := plan.record(work).difference_there():
        raise ValueError(f"{path} is of another run: {different}; choose another --work")
    record = json.loads(path.read_text())
    if record["status"] == "stopped":
        return True
    return record["status"] == "finished" and record["steps"] >= plan.steps


def make_runs(options: argparse.Namespace, plans: Sequence[RunPlan]) -> list[str]:
    """Makes the missing runs, each in a process of its own.

    Returns:
        Names and seeds of the runs that failed.
    """
    waiting = [plan for plan in plans if not is_done(plan, options.work)]
    total, failed = len(waiting), []
    running: dict[subprocess.Popen[bytes], RunPlan] = {}
    try:
        while waiting or running:
            while waiting and len(running) < options.processes:
                plan = waiting.pop(0)
                running[_start(options, plan)] = plan
            time.sleep(0.2)
            for process in [process for process in running if process.poll() is not None]:
                plan = running.pop(process)
                title = f"{plan.name}, seed {plan.seed}"
                told = "finished"
                if process.returncode:
                    failed.append(title)
                    log = plan.folder(options.work) / "log.txt"
                    told = f"failed with status {process.returncode}, see {log}"
                done = total - len(waiting) - len(running)
                elapsed = time.perf_counter() - STARTED_S
                print(f"[{done}/{total}, {elapsed:.0f} s] {title}: {told}", flush=True)
    finally:
        for process in running:
            process.terminate()
            process.wait()
    return failed


def _start(options: argparse.Namespace, plan: RunPlan) -> subprocess.Popen[bytes]:
    folder = plan.folder(options.work)
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, "--in-process", "--setting", options.setting]
    command += ["--methods", plan.variant, "--seeds", str(plan.seed), "--steps", str(plan.steps)]
    command += ["--perturb", repr(plan.perturb), "--work", str(options.work)]
    command += ["--tasks", str(options.tasks)] if options.tasks else []
    command += ["--rehearse"] if options.rehearse else []
    command += ["--fixed-policy"] if options.fixed_policy else []
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def run_one(options: argparse.Namespace, plan: RunPlan) -> None:
    """Makes one run in this process."""
    torch.set_num_threads(1)  # Matrices of this size gain nothing from a second one.
    with (
        locked(plan.folder(options.work) / "lock", wait=False) as is_alone,
        single_process(seed=0),
    ):
        if not is_alone:
            raise SystemExit(f"another process makes the run in {plan.folder(options.work)}")
        do_run(plan, problem_of(options, plan.seed), options.work)


def problem_of(options: argparse.Namespace, seed: int) -> Problem:
    """Gives model, weights and problems; trains the weights if no run did so before."""
    setting = SETTINGS[options.setting]
    if isinstance(setting.start, DemoStart):
        return _demo_problem(setting, setting.start, options.work, seed)
    return _problem_106m(options, recipe_of(options, setting.start))


def _demo_problem(setting: Setting, start: DemoStart, work: Path, seed: int) -> Problem:
    path = work / "tasks.jsonl"
    with locked(work / "tasks.lock"):
        if not path.exists():
            items = items_of_mix([start.task])
            save_tasks(path, map(with_running_sums, items) if start.running_sums else items)
    items = load_tasks(path)
    tokenizer = CharTokenizer.of_tasks(items)
    train_items, held_out = split_tasks(items, num_held_out=setting.num_held_out, seed=0)
    started = work / f"seed-{seed}.pt"
    with locked(work / f"seed-{seed}.lock"):
        if not started.exists():
            settings = dataclasses.replace(start.warm_start, seed=seed)
            weights = _warm_started(
                train_items, held_out, tokenizer, settings, context=setting.base.context
            )
            temporary = started.with_suffix(".tmp")
            torch.save(weights, temporary)
            temporary.rename(started)
    return Problem(
        tiny_moe_config(PATTERN),
        PATTERN,
        train_items,
        held_out,
        tokenizer,
        torch.load(started),
        calibration_batches(train_items, tokenizer, num_samples=CALIBRATION_SAMPLES),
    )


def _warm_started(
    items: Sequence[TaskItem],
    held_out: Sequence[TaskItem],
    tokenizer: CharTokenizer,
    settings: WarmStartSettings,
    *,
    context: int,
) -> dict[str, torch.Tensor]:
    torch.manual_seed(settings.seed)
    model = build_hybrid_model(
        tiny_moe_config(PATTERN),
        pattern=PATTERN,
        vocab_size=tokenizer.vocab_size,
        max_sequence_length=context,
        modules=HybridModules(),
    )
    warm_start(model, items, tokenizer, settings)
    print(
        f"warm start: held-out accuracy {answer_accuracy(model, held_out, tokenizer):.3f} in FP32"
    )
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def _problem_106m(options: argparse.Namespace, recipe: Recipe) -> Problem:
    setting = SETTINGS[options.setting]
    items = load_tasks(options.tasks)
    tokenizer = CharTokenizer.of_tasks(items)
    train_items, held_out = (
        [item for item in part if fits(item, setting.base)] for part in moe_100m.split(items)
    )
    # Last: all but one process wait here for that one to train it, which may take all cores.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = moe_100m.load(options.work, tasks=options.tasks, recipe=recipe)
    torch.set_num_threads(num_threads)
    return Problem(
        model.config,
        model.pattern,
        train_items[:NUM_ITEMS_106M],
        held_out[: setting.num_held_out],
        tokenizer,
        model.weights,
        calibration_batches(train_items, tokenizer, num_samples=CALIBRATION_SAMPLES),
    )


def recipe_of(options: argparse.Namespace, recipe: Recipe) -> Recipe:
    """Gives how the 106M MoE is trained: by the setting's recipe, or for a rehearsal."""
    return moe_100m.REHEARSAL if options.rehearse else recipe


def fits(item: TaskItem, settings: RunSettings) -> bool:
    """Whether a problem is one that the 106M MoE is reinforced on, with room for its answer."""
    room = settings.max_response_tokens
    return (
        item.task in moe_100m.SHORT_TASKS
        and len(item.answer or "") < room
        and len(item.prompt) + room <= settings.context
    )


def write_results(options: argparse.Namespace) -> Path:
    """Writes the numbers and the page of all runs there are, or the page of the numbers."""
    numbers = options.out / f"{options.name}.jsonl.gz"
    if options.page_only:
        if not numbers.is_file():
            raise SystemExit(f"error: there is no {numbers}; without --page-only, runs write it")
        logs = load_logs(numbers)
    else:
        logs = logs_of_folders(options.work)
        if not logs:
            raise SystemExit(f"error: {options.work} holds no run")
        save_logs(numbers, logs)
    page = options.out / f"{options.name}.md"
    command = f"python tools/method_runs.py --setting {options.setting}"
    command += " --fixed-policy" if options.fixed_policy else ""
    write_page(page, f"Methods side by side, {options.name}", logs, command=command)
    return page


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the missing runs and the tables."""
    options = parse_options(arguments)
    plans = plans_of(options)
    if options.in_process:
        for plan in plans:
            run_one(options, plan)
        return 0
    try:
        report_only = options.report_only or options.page_only
        failed = [] if report_only else make_runs(options, plans)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    except KeyboardInterrupt:
        print("\ninterrupted; the same command continues", flush=True)
        raise SystemExit(130) from None
    page = write_results(options)
    print(f"{page}; {time.perf_counter() - STARTED_S:.0f} s in all")
    for title in failed:
        print(f"failed: {title}")
    return 1 if failed else 0


if __name__ == "__main__":
    gc.freeze()  # A million objects of imports live to the end: no collection need see them.
    raise SystemExit(main())
