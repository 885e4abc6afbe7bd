"""Runs the fixed-policy study of one model and writes the report of all studies so far.

    python tools/study.py --model tiny_moe --setting cpu --work out/study --out docs/study

Killed, it goes on with the missing cells. `--out` gets the raw rows, <model>-<setting>.jsonl.gz,
and a page with a figure for each study; the report is written beside it, <out>.md. It ends with
status 1 if a control that must fail did not.
"""

# ruff: noqa: E402  The stand-in for the CUDA runtime must be installed before Megatron is imported.
from __future__ import annotations

import time
import warnings

STARTED_S = time.perf_counter()

from megatron_trace.testing import cpu_runtime

cpu_runtime.install()

import argparse
import contextlib
import dataclasses
import datetime
import importlib
import logging
import math
import multiprocessing
import platform
import subprocess
import traceback
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch

from megatron_trace.study.cells import StudySettings
from megatron_trace.study.controls import check_controls
from megatron_trace.study.report import write_report
from megatron_trace.study.results import load_study, save_study
from megatron_trace.study.run import Study
from megatron_trace.testing.single_process import single_process

MODELS = ("tiny_moe", "moe_100m", "smollm2", "smollm2_moe")
# By model and setting: samples of a rollout set and longest response.
SETTINGS = {
    ("tiny_moe", "cpu"): StudySettings("cpu", num_samples=128, max_new_tokens=16),
    ("tiny_moe", "h200"): StudySettings("h200", num_samples=256, max_new_tokens=16),
    ("moe_100m", "cpu"): StudySettings("cpu", num_samples=16, max_new_tokens=16, short=True),
    ("moe_100m", "h200"): StudySettings("h200", num_samples=256, max_new_tokens=32),
    ("smollm2", "cpu"): StudySettings("cpu", num_samples=12, max_new_tokens=24, short=True),
    ("smollm2", "h200"): StudySettings("h200", num_samples=128, max_new_tokens=64),
    ("smollm2_moe", "cpu"): StudySettings("cpu", num_samples=12, max_new_tokens=24, short=True),
    ("smollm2_moe", "h200"): StudySettings("h200", num_samples=128, max_new_tokens=64),
}
# Time that helping processes get for the cells they have begun when time is up.
GRACE_S = 20.0
PACKAGES = ("torch", "triton", "megatron-core", "nvidia-modelopt", "reasoning-gym", "numpy")


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Gives the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, help="without it, only the report is written")
    parser.add_argument("--setting", choices=("cpu", "h200"), default="cpu")
    parser.add_argument("--work", type=Path, default=Path("out/study"), help="kept between starts")
    parser.add_argument("--tasks", type=Path, help="problems of moe_100m, see tools/moe_100m.py")
    parser.add_argument("--out", type=Path, default=Path("docs/study"))
    parser.add_argument(
        "--only", nargs="+", default=[], help="questions or cells, such as sites gradient/qat"
    )
    parser.add_argument(
        "--processes", type=int, default=1, help="that share the cells, and all GPUs"
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="with a hardly trained model (moe_100m only)"
    )
    parser.add_argument("--no-report", action="store_true", help="write the raw rows only")
    parser.add_argument(
        "--max-seconds", type=float, default=math.inf, help="after which no cell is begun"
    )
    parser.add_argument("--commit", help="commit to name in the report (default: ask git)")
    options = parser.parse_args(arguments)
    if options.rehearse and options.model != "moe_100m":
        parser.error("--rehearse is for --model moe_100m")
    return options


def header_of(options: argparse.Namespace) -> dict[str, Any]:
    """Gives machine, versions and commit."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": _machine(),
        "commit": options.commit or _commit(),
        "versions": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "command": f"python tools/study.py --model {options.model} --setting {options.setting}",
    }


def _machine() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, one thread"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    folder = Path(__file__).parent
    called = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    result = subprocess.run(called, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


def main(arguments: list[str] | None = None) -> int:
    """Runs one study and writes the report of all."""
    warnings.filterwarnings("ignore")  # Megatron and torch announce deprecations of their parts.
    logging.disable(logging.WARNING)
    options = parse_options(arguments)
    failed = run_study(options) if options.model else 0
    if options.no_report:
        return 1 if failed else 0
    results = [load_study(path) for path in sorted(options.out.glob("*.jsonl.gz"))]
    if not results:
        raise SystemExit(f"error: {options.out} holds no study; name a --model to run one")
    report = write_report(results, options.out)
    for result in results:
        name = f"{result.header['model']}-{result.header['setting']}"
        for control in check_controls(result):
            failed += control.holds is False
            print(f"{name}: {control}")
    print(f"{report}; {time.perf_counter() - STARTED_S:.0f} s in all")
    return 1 if failed else 0


def run_study(options: argparse.Namespace) -> int:
    """Trains or reads the model, computes the missing cells, writes the raw rows.

    Returns:
        Number of processes in which a cell failed.
    """
    context = multiprocessing.get_context("spawn")
    trained = context.Event()
    helpers = [
        context.Process(target=_help, args=(options, number, trained), daemon=True)
        for number in range(1, options.processes)
    ]
    for helper in helpers:
        helper.start()
    failed = 0
    with _study(options) as study:
        trained.set()
        until = time.perf_counter() + options.max_seconds
        try:
            study.compute(options.only, max_seconds=options.max_seconds)
        except ExceptionGroup as errors:
            traceback.print_exception(errors)
            failed += 1
        for helper in helpers:
            left = until + GRACE_S - time.perf_counter()
            helper.join(None if math.isinf(left) else max(left, 0.0))
            helper.terminate()
            failed += bool(helper.exitcode)
        result = study.result()
    save_study(options.out / f"{study.model.name}-{options.setting}.jsonl.gz", result)
    return failed


@contextlib.contextmanager
def _study(options: argparse.Namespace, number: int = 0) -> Iterator[Study]:
    """Gives the study of a process; the processes take the GPUs in turn."""
    if not torch.cuda.is_available() or options.processes > 1:
        torch.set_num_threads(1)
    module = importlib.import_module(f"megatron_trace.study.{options.model}")
    given = {"tasks": options.tasks} if options.tasks else {}
    if options.rehearse:
        given["recipe"] = module.REHEARSAL
    settings = SETTINGS[options.model, options.setting]
    if options.rehearse:
        settings = dataclasses.replace(settings, num_samples=8, max_new_tokens=4)
    with single_process(seed=0):
        if torch.cuda.is_available():
            torch.cuda.set_device(number % torch.cuda.device_count())
        yield Study(
            module.load(options.work, **given),
            settings,
            options.work,
            header=header_of(options),
            say=lambda line: print(f"{time.perf_counter() - STARTED_S:6.0f} s  {line}", flush=True),
        )


def _help(options: argparse.Namespace, number: int, trained: Event) -> None:
    """Computes cells beside the process that trained the model."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    trained.wait()
    with _study(options, number) as study:
        study.compute(options.only, max_seconds=options.max_seconds)


if __name__ == "__main__":
    raise SystemExit(main())
