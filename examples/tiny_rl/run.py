"""TRACE on a tiny MoE, on a CPU: the same RL run with BF16, FP4 and rollout-guided FP4 arithmetic.

    make demo                                        all of it, with the defaults
    make demo DEMO_FLAGS="--seeds 0 1"               repeated, gap ratios of every seed
    make demo DEMO_FLAGS="--resume"                  continue what was interrupted
    make demo DEMO_FLAGS="--async-lag 3"             roll out ahead, docs/asynchronous.md
    python examples/tiny_rl/run.py --help            all settings
    ... --tasks prompts.jsonl --trace-reward my_rewards:score    your own task, docs/my_data.md

Everything is real (Megatron-Core's modules, optimizer and inference engine, ModelOpt's NVFP4,
reasoning-gym's tasks) except the CUDA runtime. The run is far too small to say anything about
rewards; it shows how far the log-probs of rollout and training are apart.
"""

# ruff: noqa: E402  The stand-in for the CUDA runtime must be installed before Megatron is imported.
from __future__ import annotations

import logging
import time
import warnings

STARTED_S = time.perf_counter()

from megatron_trace.testing import cpu_runtime

cpu_runtime.install()
if __name__ == "__main__":  # Megatron and torch announce deprecations of their own parts.
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)

import argparse
import contextlib
import dataclasses
import faulthandler
import fcntl
import gc
import hashlib
import itertools
import json
import shutil
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from megatron_trace.arguments import (
    add_cuda_graphs_argument,
    add_health_arguments,
    add_loss_arguments,
    add_task_arguments,
    add_trace_arguments,
    health_config_from_args,
    loss_config_from_args,
    task_config_from_args,
    trace_config_from_args,
)
from megatron_trace.config import TraceConfig
from megatron_trace.models.hybrid import HybridModules, build_hybrid_model
from megatron_trace.rl import checkpoint
from megatron_trace.rl.asynchronous import AsyncRollouts, AsyncSettings
from megatron_trace.rl.export import make_items
from megatron_trace.rl.health import must_stop
from megatron_trace.rl.metrics_log import METRICS_FILE, MetricsLog, read_metrics
from megatron_trace.rl.optimizer import OptimizerSettings
from megatron_trace.rl.report import format_ratios, format_table, save_figure
from megatron_trace.rl.run import (
    RlRun,
    RunSettings,
    build_run,
    calibration_batches,
    evaluate,
    start,
)
from megatron_trace.rl.run_record import RunRecord
from megatron_trace.rl.step import rl_step
from megatron_trace.rl.summary import RunSummary, summarise
from megatron_trace.rl.task import open_task
from megatron_trace.rl.tasks import TaskItem, save_tasks, split_tasks
from megatron_trace.rl.tokenizer import Tokenizer
from megatron_trace.rl.warm_start import WarmStartSettings, answer_accuracy, warm_start
from megatron_trace.testing.single_process import single_process, tiny_moe_config

PATTERN = "*E*E*E*E"
CALIBRATION_SAMPLES = 256
DIAGNOSTIC_SHARE = 0.125
# Three or four numbers of one digit: "6-4+8=" is answered by "10" and the end token.
TASK = {"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 1}
TASK_SIZE = 60_000
# What each run changes in the settings that the --trace-* flags give; `flags` changes nothing.
RUNS: dict[str, dict[str, str]] = {
    "bf16": {"method": "bf16"},
    "qat": {"method": "qat", "hint_layers": "all"},
    "trace": {"method": "trace", "hint_layers": "all"},
    "trace-half": {"method": "trace", "hint_layers": "latter_half"},
    "flags": {},
}
DEFAULT_RUNS = ["bf16", "qat", "trace", "trace-half"]


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Gives the options; contradictory ones end the program with a message."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=DEFAULT_RUNS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=25, help="RL steps of a run (default 25)")
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a step (default 32)")
    parser.add_argument("--samples", type=int, default=8, help="samples of a prompt (default 8)")
    parser.add_argument("--learning-rate", type=float, default=1e-5, help="default 1e-5")
    parser.add_argument("--trainer-dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--trainer-attention", choices=["megatron", "sdpa"], default="megatron")
    parser.add_argument("--context", type=int, default=64, help="tokens (default 64)")
    parser.add_argument(
        "--max-response-tokens", type=int, default=8, help="sampled ones, of all turns (default 8)"
    )
    parser.add_argument(
        "--warm-start-steps",
        type=int,
        default=300,
        help="on the answers of the prompts; 0 begins with random weights (default 300)",
    )
    parser.add_argument("--held-out", type=int, default=400, help="problems (default 400)")
    parser.add_argument("--tasks", type=Path, help="prompts (default: made here)")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("out/tiny_rl"),
        help="default out/tiny_rl; what an earlier start left there is replaced unless --resume",
    )
    parser.add_argument("--save-every", type=int, default=10, help="steps; 0 saves nothing")
    parser.add_argument(
        "--tensorboard", action="store_true", help="also write tensorboard/ beside metrics.jsonl"
    )
    parser.add_argument("--resume", action="store_true", help="continue from --output")
    parser.add_argument(
        "--hint-files", action="store_true", help="hints in files under --output, not in memory"
    )
    add_cuda_graphs_argument(parser)
    parser.add_argument(
        "--async-lag",
        type=int,
        help="roll out ahead of the training: most versions that a sample may be older than the "
        "policy it trains (default: in turn); docs/asynchronous.md",
    )
    parser.add_argument(
        "--async-on-push",
        choices=["keep", "recompute"],
        help="what a push does with what running samples have computed (default keep)",
    )
    parser.add_argument(
        "--async-engine-steps", type=int, help="steps of the engine during an update (default 4)"
    )
    add_task_arguments(add_health_arguments(add_loss_arguments(add_trace_arguments(parser))))
    parser.set_defaults(trace_diagnostic_share=DIAGNOSTIC_SHARE)
    options = parser.parse_args(arguments)
    if "flags" not in options.runs:
        for name in ("method", "hint_layers"):
            if getattr(options, f"trace_{name}") != getattr(TraceConfig, name):
                flag = f"--trace-{name.replace('_', '-')}"
                parser.error(
                    f"{flag} has no effect on --runs {' '.join(options.runs)}, which set "
                    "it; use --runs flags"
                )
    for name in ("runs", "seeds"):
        if len(set(getattr(options, name))) < len(getattr(options, name)):
            parser.error(f"--{name} names one twice: {' '.join(map(str, getattr(options, name)))}")
    for name in ("steps", "prompts", "samples", "held_out", "context", "max_response_tokens"):
        if (number := getattr(options, name)) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1; got {number}")
    if options.warm_start_steps < 0:
        parser.error(f"--warm-start-steps must be at least 0; got {options.warm_start_steps}")
    if options.tasks and not options.tasks.exists():
        parser.error(
            f"--tasks {options.tasks} does not exist; docs/my_data.md says what it may be, and "
            "tools/export_tasks.py writes one"
        )
    try:
        if task_config_from_args(options).reward is not None and options.tasks is None:
            parser.error("--trace-reward needs prompts of your own; give --tasks")
        async_settings(options)
        for name in options.runs:
            run_settings(options, name, seed=0).trace.recorded_layers(PATTERN.count("E"))
    except ValueError as error:
        parser.error(str(error))
    return options


def run_settings(options: argparse.Namespace, name: str, seed: int) -> RunSettings:
    """Gives the settings of one run."""
    changes = {f"trace_{field}": value for field, value in _changes(options, name).items()}
    return RunSettings(
        trace=trace_config_from_args(argparse.Namespace(**vars(options) | changes)),
        loss=loss_config_from_args(options),
        health=health_config_from_args(options),
        optimizer=OptimizerSettings(learning_rate=options.learning_rate),
        trainer_dtype=options.trainer_dtype,
        trainer_attention=options.trainer_attention,
        prompts_per_step=options.prompts,
        samples_per_prompt=options.samples,
        micro_batch_samples=128,
        max_response_tokens=options.max_response_tokens,
        context=options.context,
        cuda_graphs=options.rollout_cuda_graphs,
        seed=seed,
    )


def async_settings(options: argparse.Namespace) -> AsyncSettings | None:
    """Gives how far rollouts run ahead of the training; None if the two take turns.

    Raises:
        ValueError: A value is out of range, or has no effect.
    """
    given = {
        "on_push": options.async_on_push,
        "engine_steps_per_update": options.async_engine_steps,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if options.async_lag is None:
        if given:
            raise ValueError(
                "--async-on-push and --async-engine-steps have no effect without --async-lag"
            )
        return None
    return AsyncSettings(max_version_lag=options.async_lag, drain_every=options.save_every, **given)


def _changes(options: argparse.Namespace, name: str) -> dict[str, Any]:
    changes: dict[str, Any] = dict(RUNS[name])
    methods = {run: RUNS[run].get("method", options.trace_method) for run in options.runs}
    # A flag that has an effect on no run is refused; otherwise it is of the runs that it suits.
    others = set(methods.values()) - {"bf16", "quads"}
    is_default = options.trace_diagnostic_share == DIAGNOSTIC_SHARE
    if methods[name] in ("bf16", "quads") and (others or is_default):
        changes["diagnostic_share"] = 0.0  # Their trainers give activations no codes.
    if methods[name] == "bf16" and set(methods.values()) != {"bf16"}:
        changes |= {n: getattr(TraceConfig, n) for n in ("number_format", "quantised_parts")}
    return changes


def prepare_tasks(options: argparse.Namespace) -> Path:
    """Gives the prompt file, made with reasoning-gym if none was named."""
    if options.tasks:
        return options.tasks
    path = options.output / "tasks.jsonl"
    items = make_items(
        "chain_sum",
        size=TASK_SIZE,
        seed=0,
        parameters=TASK,
        prompt_template="{metadata[expression]}=",
        drop_characters=" ",
    )
    save_tasks(path, items)
    print(f"{path}: {len(items)} problems such as {items[0].prompt} {items[0].answer}", flush=True)
    return path


def warm_started_weights(
    options: argparse.Namespace,
    items: list[TaskItem],
    held_out: list[TaskItem],
    tokenizer: Tokenizer,
) -> dict[str, torch.Tensor]:
    """Gives the FP32 weights that every run starts from."""
    torch.manual_seed(0)
    model = build_hybrid_model(
        tiny_moe_config(PATTERN),
        pattern=PATTERN,
        vocab_size=tokenizer.vocab_size,
        max_sequence_length=options.context,
        modules=HybridModules(),
    )
    size = sum(parameter.numel() for parameter in model.parameters())
    if options.warm_start_steps:
        settings = WarmStartSettings(
            steps=options.warm_start_steps, batch_size=128, learning_rate=4e-3
        )
        warm_start(model, items, tokenizer, settings)
        accuracy = answer_accuracy(model, held_out, tokenizer)
        print(
            f"warm start: {size:,} parameters, held-out accuracy {accuracy:.3f} in FP32", flush=True
        )
    else:
        print(f"random weights: {size:,} parameters", flush=True)
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def identity_of(settings: RunSettings, options: argparse.Namespace, tasks: Path) -> dict[str, Any]:
    """Gives what must be equal for a run to be resumed; the number of steps may grow."""
    return dataclasses.asdict(settings) | {
        "pattern": PATTERN,
        "warm_start_steps": options.warm_start_steps,
        "held_out": options.held_out,
        **_identity_of_schedule(options),
        "tasks_sha256": tasks_digest(tasks),
        "task": dataclasses.asdict(task_config_from_args(options)),
    }


def _identity_of_schedule(options: argparse.Namespace) -> dict[str, Any]:
    settings = async_settings(options)
    return {} if settings is None else {"asynchronous": dataclasses.asdict(settings)}


def tasks_digest(path: Path) -> str:
    """Gives the SHA-256 of a prompt file, or of the files of a folder in the order of names."""
    files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def saved_steps(folder: Path, options: argparse.Namespace, record: RunRecord) -> Path | None:
    """Gives the checkpoint to continue a run from; without --resume, removes what is there.

    Raises:
        SystemExit: There is none, but steps of another run, which --resume does not mean.
    """
    checkpoints = folder / "checkpoints"
    if not options.resume:
        shutil.rmtree(checkpoints, ignore_errors=True)
    for unfinished in checkpoints.glob("step-*.tmp-*"):  # Of a save that was interrupted.
        shutil.rmtree(unfinished)
    if any(checkpoints.glob("step-??????")):
        return checkpoint.latest(checkpoints)
    # Nothing is saved of a run that the interruption kept from its first checkpoint.
    has_steps = options.resume and read_metrics(folder / METRICS_FILE)
    if has_steps and (different := record.difference_there()):
        raise SystemExit(
            f"error: {folder} has no checkpoint to resume, and steps of another run: {different}; "
            "without --resume they are replaced, and another --output leaves them"
        )
    return None


def do_run(
    run: RlRun,
    name: str,
    folder: Path,
    held_out: list[TaskItem],
    options: argparse.Namespace,
    identity: dict[str, Any],
    record: RunRecord,
) -> tuple[float, float]:
    """Does the remaining steps of a run, and notes the held-out accuracies in its record.

    Returns:
        Held-out accuracy before the first step and after the last.
    """
    log = MetricsLog(
        folder / METRICS_FILE,
        first_step=run.progress.step,
        tensorboard=options.tensorboard,
    )
    before_file = folder / "held_out_before.json"
    if run.progress.step == 0:
        before_file.write_text(json.dumps(evaluate(run, held_out)))
    record.held_out["before"] = json.loads(before_file.read_text())
    title = f"{name}, seed {run.settings.seed}"
    ahead = async_settings(options)
    with _told_in_one_line():
        rollouts = None if ahead is None else AsyncRollouts(run, ahead, num_steps=options.steps)
    bar = tqdm(range(run.progress.step, options.steps), desc=title, unit="step", disable=None)
    for _ in bar:
        metrics = rl_step(run) if rollouts is None else rollouts.step(run)
        log.append(metrics)
        gap = metrics["gap"]["mean"] or 0.0  # None where no sample was trained on.
        bar.set_postfix(reward=f"{metrics['reward']:.2f}", gap=f"{gap:.1e}", refresh=False)
        done = run.progress.step
        # A run whose updates were all skipped is as it was at the start.
        saves = options.save_every and run.progress.num_updates
        if saves and (done % options.save_every == 0 or done == options.steps):
            saved = checkpoint.save(run, folder / "checkpoints", identity=identity)
            checkpoint.drop_others(saved)
        if reason := must_stop(metrics):
            log.close()
            if rollouts is not None:
                rollouts.abandon()
            told = "no update was done"
            if run.progress.num_updates:
                saved = checkpoint.save(run, folder / "checkpoints", identity=identity)
                told = f"{saved} holds the run, and --resume continues it"
            raise SystemExit(
                f"\n{title}: stopped after step {metrics['step']}, as {reason}; {told}"
            )
    log.close()
    record.held_out["after"] = evaluate(run, held_out)
    accuracies = record.held_out["before"], record.held_out["after"]
    print(f"{title}: {options.steps} steps, held-out accuracy {accuracies[1]:.3f}", flush=True)
    return accuracies


def report(options: argparse.Namespace, summaries: list[RunSummary]) -> None:
    """Prints tables and gap ratios; writes table, figure and summaries."""
    texts = []
    for seed in options.seeds:
        runs = [summary for summary in summaries if summary.seed == seed]
        texts.append(f"seed {seed}, trainer {options.trainer_dtype}\n{format_table(runs)}")
        records = {
            run.name: read_metrics(options.output / f"seed-{seed}" / run.name / METRICS_FILE)
            for run in runs
        }
        save_figure(options.output / f"seed-{seed}" / "report.png", runs, records)
    guided = [name for name in options.runs if name not in ("bf16", "qat")]
    texts.append(format_ratios(summaries, baseline="qat", guided=guided))
    texts.append(
        "No claim about rewards: a run this small shows whether rollout and training agree, not\n"
        "whether a policy gets better."
    )
    text = "\n\n".join(part for part in texts if part)
    (options.output / "report.txt").write_text(text + "\n")
    (options.output / "summary.json").write_text(
        json.dumps([dataclasses.asdict(summary) for summary in summaries], indent=1)
    )
    print(
        f"\n{text}\n\n{options.output}: report.txt, summary.json, seed-*/report.png, "
        "seed-*/*/metrics.jsonl"
    )


@contextlib.contextmanager
def _told_in_one_line() -> Iterator[None]:
    """Ends the program with the message alone, where a file or setting of the user is at fault."""
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        raise SystemExit(f"error: {error}") from error


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Ends the program if another one writes into the folder, and keeps others out meanwhile."""
    with contextlib.ExitStack() as stack:
        with _told_in_one_line():
            folder.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((folder / "lock").open("a"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(
                f"error: another run writes into {folder}; wait for its end or give another "
                "--output"
            ) from None
        yield


def do_all_runs(options: argparse.Namespace) -> list[RunSummary]:
    """Does every run of every seed, all from the same warm-started weights."""
    with _told_in_one_line():
        tasks = prepare_tasks(options)
        items, task = open_task(tasks, task_config_from_args(options))
        train_items, held_out = split_tasks(items, num_held_out=options.held_out, seed=0)

    @cache
    def weights() -> dict[str, torch.Tensor]:
        return warm_started_weights(options, train_items, held_out, task.tokenizer)

    summaries = []
    with contextlib.closing(task):
        for seed, name in itertools.product(options.seeds, options.runs):
            folder = options.output / f"seed-{seed}" / name
            with _told_in_one_line():
                folder.mkdir(parents=True, exist_ok=True)
            settings = run_settings(options, name, seed)
            identity = identity_of(settings, options, tasks)
            run = build_run(
                settings,
                tiny_moe_config(PATTERN),
                pattern=PATTERN,
                items=train_items,
                tokenizer=task.tokenizer,
                task=task,
                hint_folder=folder / "hints" if options.hint_files else None,
            )
            record = RunRecord(folder, name=name, seed=seed, settings=identity, steps=options.steps)
            with contextlib.closing(run):
                if saved := saved_steps(folder, options, record):
                    with _told_in_one_line():
                        checkpoint.resume(run, saved, identity=identity, num_steps=options.steps)
                else:
                    calibration = calibration_batches(
                        train_items, task.tokenizer, num_samples=CALIBRATION_SAMPLES
                    )
                    run.drop_hints()  # Of a run that did not come to its first checkpoint.
                    start(run, weights(), calibration)
                with record.running():
                    accuracies = do_run(run, name, folder, held_out, options, identity, record)
            records = read_metrics(folder / METRICS_FILE)
            summaries.append(summarise(name, seed, records, accuracies))
    return summaries


def main() -> None:
    """Does all runs and reports."""
    options = parse_options()
    faulthandler.unregister(signal.SIGINT)  # Megatron's engine would print a stack first.
    # Matrices of this size gain nothing from a second thread and lose much when a core is busy.
    torch.set_num_threads(1)
    try:
        with alone_in(options.output), single_process(seed=0):
            summaries = do_all_runs(options)
    except KeyboardInterrupt:
        print("\ninterrupted; the same command with --resume continues", flush=True)
        raise SystemExit(130) from None
    report(options, summaries)
    print(f"{time.perf_counter() - STARTED_S:.0f} s in all")


def tell_warnings_of_steps() -> None:
    """Prints warnings of the RL steps, alarms and skipped updates, and errors of all."""

    def is_told(record: logging.LogRecord) -> bool:
        is_own = record.name.startswith("megatron_trace.rl.")
        return record.levelno >= (logging.WARNING if is_own else logging.ERROR)

    handler = logging.StreamHandler()
    handler.addFilter(is_told)
    logging.basicConfig(handlers=[handler], force=True)
    logging.disable(logging.NOTSET)


if __name__ == "__main__":
    gc.freeze()  # A million objects of imports live to the end: no collection need see them.
    tell_warnings_of_steps()
    main()
