"""Quantises a policy of the demo after its training, and asks held-out problems of what serves.

    python tools/ptq.py --run out/tiny_rl/seed-0/bf16
    python tools/ptq.py --run out/tiny_rl/seed-0/bf16 --recipe vanilla h_scale --held-out 100

The run's latest checkpoint is loaded. Its BF16 weights are served in BF16, then by an engine in
deployment precision (W4A4 experts, KV4 cache) under each recipe, which differ in the scales of the
experts' weights alone; scales of activations and cache, and the Hessians of h_scale, are those of
the same calibration tokens. Decoding is greedy, so that every recipe answers the same problems.

`lost` and `gained` are problems that the policy solves in BF16 only, and under the recipe only; p
is the probability of so uneven a split by chance (exact sign test). The errors are sums over all
experts, as shares of vanilla's: of the weights, and of their outputs on the calibration tokens.
"""

# ruff: noqa: E402  The stand-in for the CUDA runtime must be installed before Megatron is imported.
from __future__ import annotations

import logging
import warnings

from megatron_trace.testing import cpu_runtime

cpu_runtime.install()
if __name__ == "__main__":  # Megatron and torch announce deprecations of their own parts.
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)

import argparse
import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_trace.config import TraceConfig
from megatron_trace.formats.packed_matrix import PackedMatrix
from megatron_trace.models.hybrid import named_expert_linears
from megatron_trace.ptq.comparison import HEADS, REFERENCE, Comparison, aligned
from megatron_trace.ptq.hessian import LocalHessian, calibrate_with_hessians
from megatron_trace.ptq.recipes import RECIPES
from megatron_trace.ptq.weights import block_errors
from megatron_trace.rl import checkpoint
from megatron_trace.rl.run import RlRun, build_run, calibration_batches, solved
from megatron_trace.rl.task import open_task
from megatron_trace.rl.tasks import TaskItem, split_tasks
from megatron_trace.rl_config import TaskConfig
from megatron_trace.rollout.engine import RolloutEngine
from megatron_trace.rollout.weights import MatrixPlace
from megatron_trace.testing.single_process import single_process, tiny_moe_config


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one recipe showed.

    Attributes:
        answers: Its answers, against those in BF16.
        weight_error: Squared error of the experts' weights.
        output_error: The same, weighted by the Hessians.
        seconds: Of choosing scales and pushing.
    """

    answers: Comparison
    weight_error: float = 0.0
    output_error: float = 0.0
    seconds: float = 0.0

    def record(self) -> dict[str, Any]:
        """Gives it flat, for JSON."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return dataclasses.asdict(own.pop("answers")) | own


def main() -> None:
    """Prints a table, and writes it as `ptq.json` into the run's folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, required=True, help="folder of a run of the demo")
    parser.add_argument("--recipe", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument(
        "--tasks", type=Path, help="prompt file (default: tasks.jsonl, two folders above)"
    )
    parser.add_argument("--held-out", type=int, help="problems (default: those of the run)")
    parser.add_argument("--calibration", type=int, default=256, help="samples (default 256)")
    parser.add_argument(
        "--quantised-parts",
        choices=["experts_and_kv", "experts"],
        default="experts_and_kv",
        help="experts leaves the cache in BF16, to tell recipes apart that it hides",
    )
    parser.add_argument("--output", type=Path, help="default: ptq.json in the run's folder")
    args = parser.parse_args()
    if args.calibration < 1:
        parser.error(f"--calibration must be at least 1; got {args.calibration}")
    output = args.output or args.run / "ptq.json"
    torch.set_num_threads(1)
    try:
        if args.output:  # Better known before than after all answers.
            output.parent.mkdir(parents=True, exist_ok=True)
        with single_process(seed=0):
            results = compare(
                args.run,
                args.recipe,
                args.tasks,
                args.held_out,
                num_calibration=args.calibration,
                quantised_parts=args.quantised_parts,
            )
        print(table(results))
        output.write_text(json.dumps([r.record() for r in results], indent=1) + "\n")
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    print(f"{output} holds the same")


def compare(
    folder: Path,
    recipes: Sequence[str],
    tasks: Path | None = None,
    num_held_out: int | None = None,
    *,
    num_calibration: int = 256,
    quantised_parts: str = "experts_and_kv",
) -> list[Result]:
    """Gives what the policy of a run shows in BF16 and under recipes.

    Args:
        folder: Folder of the run.
        recipes: Names of the recipes.
        tasks: Its prompt file; None for the one beside the seeds' folders.
        num_held_out: Problems that are asked, no more than the run held out; None for all of them.
        num_calibration: Training items that calibrate.
        quantised_parts: As of `TraceConfig`, with experts.

    Raises:
        ValueError: The run has no checkpoint, the prompt file is not the run's, or more problems
            are to be asked than it held out.
    """
    saved = checkpoint.latest(folder / "checkpoints")
    settings, identity = checkpoint.saved_run(saved)
    path = tasks or folder.parent.parent / "tasks.jsonl"
    _require_same_tasks(path, identity)
    items, task = open_task(
        path, TaskConfig(**identity.get("task", {})), answer_format=settings.answer_format
    )
    train_items, held_out = split_tasks(items, num_held_out=identity["held_out"], seed=0)
    held_out = _held_out(held_out, num_held_out)
    run = build_run(
        settings,
        tiny_moe_config(identity["pattern"]),
        pattern=identity["pattern"],
        items=train_items,
        tokenizer=task.tokenizer,
        task=task,
    )
    trace = TraceConfig(
        method="qat",
        quantised_parts=quantised_parts,  # pyright: ignore[reportArgumentType]
    )
    with contextlib.closing(task):
        return _compare(run, saved, identity, held_out, recipes, num_calibration, trace)


def _compare(
    run: RlRun,
    saved: Path,
    identity: Mapping[str, Any],
    held_out: list[TaskItem],
    recipes: Sequence[str],
    num_calibration: int,
    trace: TraceConfig,
) -> list[Result]:
    checkpoint.resume(run, saved, identity=identity)
    weights = run.named_weights()
    print(
        f"{saved}: method {run.settings.trace.method}, {len(held_out)} held-out problems",
        flush=True,
    )
    run.engine = _engine(run, identity["pattern"], TraceConfig(method="bf16"))
    run.engine.push_weights(weights, policy_version=0)
    in_bf16 = solved(run, held_out)
    results = [Result(answers=Comparison.of(REFERENCE, in_bf16, in_bf16))]
    engine = run.engine = _engine(run, identity["pattern"], trace, keep=True)
    engine.load_weights(weights)
    calibration = calibration_batches(run.items, run.tokenizer, num_samples=num_calibration)
    hessians = calibrate_with_hessians(engine, calibration)
    for name in recipes:
        started = time.perf_counter()
        engine.push_weights(weights, policy_version=0, rule=RECIPES[name].rule(hessians))
        seconds = time.perf_counter() - started
        answers = solved(run, held_out)
        weight_error, output_error = _errors(engine, weights, hessians)
        results.append(
            Result(
                answers=Comparison.of(name, answers, in_bf16),
                weight_error=weight_error,
                output_error=output_error,
                seconds=seconds,
            )
        )
    return results


def table(results: Sequence[Result]) -> str:
    """Gives the results as text; errors as shares of vanilla's, or as they are without it."""
    vanilla = next((r for r in results if r.answers.recipe == "vanilla"), None)
    rows = [[*HEADS, "weights", "outputs", "s"]]
    for r in results:
        errors = [r.weight_error, r.output_error]
        if vanilla is not None:
            errors = [r.weight_error / vanilla.weight_error, r.output_error / vanilla.output_error]
        own = [*(f"{e:.4g}" for e in errors), f"{r.seconds:.1f}"]
        rows.append([*r.answers.cells(), *(own if r.answers.recipe != REFERENCE else ["", "", ""])])
    return aligned(rows)


def _require_same_tasks(path: Path, identity: Mapping[str, Any]) -> None:
    """Checks that a prompt file, or a folder of them, is the one that the demo noted.

    Runs of `tools/method_runs.py` note none: they make theirs, always the same.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist; name the run's prompts with --tasks")
    files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
    found = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    if found != identity.get("tasks_sha256", found):
        raise ValueError(f"{path} is not the prompt file of the run; name it with --tasks")


def _held_out(items: list[TaskItem], num_asked: int | None) -> list[TaskItem]:
    if num_asked is not None and not 0 < num_asked <= len(items):
        raise ValueError(
            f"--held-out must be 1 to {len(items)}, the problems that the run did not train on; "
            f"got {num_asked}"
        )
    return items[:num_asked]


def _engine(run: RlRun, pattern: str, trace: TraceConfig, *, keep: bool = False) -> RolloutEngine:
    settings = run.settings
    return RolloutEngine(
        tiny_moe_config(pattern),
        pattern=pattern,
        vocab_size=run.tokenizer.vocab_size,
        max_sequence_length=settings.context,
        trace=trace,
        eod_token=run.tokenizer.end_token,
        max_requests=settings.max_requests,
        keep_packed_weights=keep,
    )


def _errors(
    engine: RolloutEngine,
    weights: Mapping[str, torch.Tensor],
    hessians: Mapping[MatrixPlace, LocalHessian],
) -> tuple[float, float]:
    """Gives the squared error of the experts' weights that serve, plain and by the Hessians."""
    packed: Mapping[MatrixPlace, PackedMatrix] = engine.quantised_model()[1]
    names = {id(p): name for name, p in engine.model.named_parameters()}
    plain, weighted = 0.0, 0.0
    for layer in engine.layers:
        for expert, matrix, linear in named_expert_linears(layer):
            place = layer.index, expert, matrix
            device = packed[place].packed_codes.device
            weight = weights[names[id(linear.weight)]].to(device, torch.bfloat16)
            mean = hessians[place].mean()
            plain += float(block_errors(weight, packed[place]).sum())
            if mean is not None:
                weighted += hessians[place].num_rows * float(
                    block_errors(weight, packed[place], mean).sum()
                )
    return plain, weighted


if __name__ == "__main__":
    main()
