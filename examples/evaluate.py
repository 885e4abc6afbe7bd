"""Answers prompts greedily from a checkpoint, with the FP4 engine of rollouts, and scores them.

    torchrun examples/evaluate.py MEGATRON'S MODEL FLAGS --load CHECKPOINT \\
        --rollout-tasks held_out.jsonl --evaluate-output FOLDER [--evaluate-settings RUN]
    ... --evaluate-num-shares 8 --evaluate-share 3       one process of eight, each a share
    ... --trace-method qat --evaluate-export FOLDER --evaluate-published HF_FOLDER
        serves a checkpoint in ModelOpt's layout that was exported from CHECKPOINT (launch/ptq.sh)

Who writes the last share's file also writes `evaluation.json`, over all of them.
"""

# ruff: noqa: E402  The stand-in for the CUDA runtime must be installed before Megatron is imported.
from __future__ import annotations

from megatron_trace.testing import cpu_pretrain, cpu_runtime

cpu_runtime.install()
cpu_pretrain.install()

import json
import math
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import torch
from megatron.training import training
from megatron.training.arguments import parse_and_validate_args
from record_rollouts import (
    DEFAULTS,
    add_sampling_arguments,
    build_engine,
    checkpoint_weights,
    latest_checkpoint,
    load_prompts,
)

from megatron_trace import compat
from megatron_trace.arguments import trace_config_from_args
from megatron_trace.conversion.modelopt_folder import read_modelopt_folder
from megatron_trace.hints.durable import create_file, write_file
from megatron_trace.hints.settings_file import load_settings
from megatron_trace.hints.types import QuantizerSettings, Site
from megatron_trace.rl.run import calibration_batches
from megatron_trace.rl.tasks import items_digest
from megatron_trace.rollout import RolloutEngine, SamplingSettings


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Adds our flags to Megatron's parser."""
    compat.let_help_be_printed(parser)
    group = add_sampling_arguments(parser)
    group.add_argument("--evaluate-output", type=Path, required=True, help="folder to write to")
    group.add_argument(
        "--evaluate-settings", type=Path, help="folder with settings.json; without, it calibrates"
    )
    group.add_argument("--evaluate-export", type=Path, help="what serves, in ModelOpt's layout")
    group.add_argument(
        "--evaluate-published", type=Path, help="checkpoint in BF16 that it was exported from"
    )
    group.add_argument("--evaluate-share", type=int, default=0, help="of the prompts, default 0")
    group.add_argument("--evaluate-num-shares", type=int, default=1, help="default 1")
    return parser


def main() -> None:
    """Evaluates as the flags say."""
    args = parse_and_validate_args(add_arguments, args_defaults=DEFAULTS)
    share, num_shares = args.evaluate_share, args.evaluate_num_shares
    if args.load is None or not 0 <= share < num_shares:
        raise SystemExit("give --load CHECKPOINT, and --evaluate-share below --evaluate-num-shares")
    if (args.evaluate_export is None) != (args.evaluate_published is None):
        raise SystemExit("--evaluate-export needs --evaluate-published, whose names it has")
    compat.data_set_helpers_not_compiled()
    training.initialize_megatron()
    args.evaluate_output.mkdir(parents=True, exist_ok=True)
    result = evaluated(args)
    write_file(
        args.evaluate_output / f"share-{share}of{num_shares}.json", json.dumps(result).encode()
    )
    print(f"share {share} of {num_shares}: {told(result)}", flush=True)
    paths = [args.evaluate_output / f"share-{n}of{num_shares}.json" for n in range(num_shares)]
    if all(path.is_file() for path in paths):
        shares = [json.loads(path.read_text()) for path in paths]
        summary = combined(shares)
        create_file(args.evaluate_output / "evaluation.json", json.dumps(summary).encode())
        print(f"{args.evaluate_output}: {told(summary)}", flush=True)


def told(result: dict[str, Any]) -> dict[str, Any]:
    """Gives what is printed of a result; which prompts were solved is a list as long as these."""
    return {name: value for name, value in result.items() if name != "solved"}


def evaluated(args: Namespace) -> dict[str, Any]:
    """Gives the result of this process's share of the prompts."""
    trace = trace_config_from_args(args)
    items, task = load_prompts(args)
    own = items[args.evaluate_share :: args.evaluate_num_shares]
    folder, iteration = latest_checkpoint(args.load)
    weights = checkpoint_weights(args, folder)
    engine = build_engine(args, trace, task)
    if args.evaluate_export is not None:
        digest = serve_export(args, engine, weights, iteration)
    else:
        if trace.method != "bf16":
            engine.load_weights(weights)
            if args.evaluate_settings is not None:
                engine.use_settings(load_settings(args.evaluate_settings))
            else:
                number = args.rollout_calibration_samples
                engine.calibrate(calibration_batches(items, task.tokenizer, num_samples=number))
        digest = engine.push_weights(weights, iteration)
    names = [f"evaluation-{n}" for n in range(len(own))]
    task.begin(dict(zip(names, own, strict=True)))
    samples = engine.generate(
        [task.tokenizer.encode(item.prompt) for item in own],
        names,
        store=None,
        sampling=SamplingSettings(max_new_tokens=args.rollout_max_response_tokens, greedy=True),
        seed=args.seed,
        next_turn=task.next_turn,
    )
    scores = task.scores(samples, own)
    task.close()
    failed = sum(scores.failures.values())
    if any(math.isnan(reward) for reward in scores.rewards):
        raise SystemExit(
            f"{failed} of {len(own)} prompts got no reward (see above), and a share of the others "
            "would mislead; give --trace-failed-reward"
        )
    return {
        "checkpoint": folder,
        "iteration": iteration,
        "method": trace.method,
        "prompts_digest": items_digest(items),
        "prompts": len(own),
        "right": sum(reward >= 1.0 for reward in scores.rewards),
        "score_sum": sum(scores.rewards),
        "failed": failed,
        "weights_digest": digest,
        "solved": [reward >= 1.0 for reward in scores.rewards],
    }


def serve_export(
    args: Namespace, engine: RolloutEngine, weights: dict[str, torch.Tensor], iteration: int
) -> str:
    """Makes an engine serve an exported checkpoint, and gives the digest of its experts.

    Args:
        args: Parsed flags.
        engine: The engine.
        weights: Parameters of the checkpoint that it was exported from, by name.
        iteration: Its iteration.

    Raises:
        ValueError: What is not quantised differs from the checkpoint's.
    """
    export = read_modelopt_folder(args.evaluate_export, args.evaluate_published)
    for name, value in export.parameters.items():
        if name not in weights or not torch.equal(value.bfloat16(), weights[name].bfloat16().cpu()):
            raise ValueError(f"{args.evaluate_export} has another {name} than {args.load}")
    scales = {(layer, Site(site)): scale for (layer, site), scale in export.input_scales.items()}
    engine.load_weights(weights)
    engine.use_settings(QuantizerSettings(scales))
    # Codes and scales are the file's; nothing is quantised here.
    return engine.push_weights(
        weights,
        iteration,
        rule=lambda place, weight: export.experts[place].to(weight.device),
    )


def combined(shares: list[dict[str, Any]]) -> dict[str, Any]:
    """Gives the result over all shares.

    Raises:
        ValueError: They are of different checkpoints, methods, prompts or quantised weights.
    """
    same = ("checkpoint", "iteration", "method", "prompts_digest", "weights_digest")
    kinds = {tuple(share[name] for name in same) for share in shares}
    if len(kinds) > 1:
        raise ValueError(f"shares of different evaluations: {sorted(kinds)}; use another folder")
    sums = {name: sum(share[name] for share in shares) for name in ("prompts", "right", "failed")}
    mean = sum(share["score_sum"] for share in shares) / sums["prompts"]
    solved = [False] * sums["prompts"]
    for number, share in enumerate(shares):
        solved[number :: len(shares)] = share["solved"]
    return {
        **{name: shares[0][name] for name in same},
        **sums,
        "accuracy": sums["right"] / sums["prompts"],
        "mean_score": mean,
        "solved": solved,
    }


if __name__ == "__main__":
    main()
