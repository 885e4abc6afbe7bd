"""Rolls out from a Megatron checkpoint and writes samples, hints and rewards to a folder.

    torchrun examples/record_rollouts.py MEGATRON'S MODEL FLAGS --load CHECKPOINT \\
        --rollout-tasks prompts.jsonl --rollout-output ROLLOUTS --trace-method trace
    ... --save CHECKPOINT --rollout-warm-start 300    first trains a model on the answers, 300 steps

One process; `examples/pretrain_trace.py` trains on the folder in any layout. Prompts are as
`tools/export_tasks.py` writes them, scored by reasoning-gym; or one's own, with --trace-reward, and
--trace-tokenizer and --trace-environment if wanted (docs/my_data.md).
"""

# ruff: noqa: E402  The stand-in for the CUDA runtime must be installed before Megatron is imported.
from __future__ import annotations

from megatron_trace.testing import cpu_pretrain, cpu_runtime

cpu_runtime.install()
cpu_pretrain.install()

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.training import print_rank_0, training
from megatron.training.arguments import parse_and_validate_args
from megatron.training.checkpointing import get_checkpoint_name, read_metadata, save_checkpoint
from megatron.training.checkpointing import get_checkpoint_tracker_filename as tracker_file

from megatron_trace import compat
from megatron_trace.arguments import (
    add_cuda_graphs_argument,
    add_task_arguments,
    add_trace_arguments,
    task_config_from_args,
    trace_config_from_args,
)
from megatron_trace.config import TraceConfig
from megatron_trace.conversion.distributed_checkpoint import CheckpointTensors
from megatron_trace.hints.files_writer import HintFilesWriter
from megatron_trace.hints.settings_file import SETTINGS_FILE, load_settings
from megatron_trace.models.hybrid import HybridModules, build_hybrid_model
from megatron_trace.rl.rollout_folder import Reward, commit_rollouts, rewarded_groups
from megatron_trace.rl.run import calibration_batches
from megatron_trace.rl.task import Task, open_task
from megatron_trace.rl.tasks import TaskItem
from megatron_trace.rl.tokenizer import Tokenizer
from megatron_trace.rl.warm_start import WarmStartSettings, warm_start
from megatron_trace.rollout import RolloutEngine, SamplingSettings
from megatron_trace.training.megatron_model import trace_model_config_from_args
from megatron_trace.training.te_choice import without_recipe

# Flags of Megatron's training that mean nothing here, but must be there.
DEFAULTS = {
    "tokenizer_type": "NullTokenizer",
    "save_interval": 1,
    "train_iters": 1,
    "lr": 0.0,
    "micro_batch_size": 1,
}


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Adds our flags to Megatron's parser."""
    compat.let_help_be_printed(parser)
    group = add_sampling_arguments(parser)
    group.add_argument("--rollout-output", type=Path, required=True, help="folder to write to")
    group.add_argument(
        "--rollout-warm-start", type=int, help="steps on the answers, from random weights"
    )
    group.add_argument(
        "--rollout-warm-start-lr", type=float, default=3e-3, help="peak rate, default 3e-3"
    )
    group.add_argument("--rollout-first-prompt", type=int, default=0, help="default 0")
    group.add_argument("--rollout-prompts", type=int, default=32, help="default 32")
    group.add_argument("--rollout-samples", type=int, default=8, help="of a prompt, default 8")
    return parser


def add_sampling_arguments(parser: ArgumentParser) -> Any:
    """Adds the flags that every rollout has, and gives their group."""
    group = add_task_arguments(add_trace_arguments(parser)).add_argument_group("rollout")
    group.add_argument("--rollout-tasks", type=Path, required=True, help="prompts, docs/my_data.md")
    group.add_argument("--rollout-max-response-tokens", type=int, default=8, help="default 8")
    group.add_argument("--rollout-calibration-samples", type=int, default=64, help="default 64")
    group.add_argument(
        "--rollout-top-logprobs",
        type=int,
        default=0,
        help="most likely tokens kept at each position, for --trace-objective score_centering",
    )
    group.add_argument("--rollout-requests", type=int, default=64, help="at a time, default 64")
    add_cuda_graphs_argument(group)
    return group


def main() -> None:
    """Rolls out as the flags say."""
    args = parse_and_validate_args(add_arguments, args_defaults=DEFAULTS)
    warm = args.rollout_warm_start is not None
    if warm == (args.load is not None) or (warm and args.save is None):
        raise SystemExit("give either --load CHECKPOINT, or --rollout-warm-start N and --save")
    trace = trace_config_from_args(args)
    items, task = load_prompts(args)
    if not 1 <= args.rollout_prompts <= len(items) or args.rollout_samples < 2:
        raise SystemExit(
            f"--rollout-prompts must be 1 to {len(items)}, the prompts of {args.rollout_tasks}, "
            f"and --rollout-samples at least 2, as an advantage is relative to the others; got "
            f"{args.rollout_prompts} and {args.rollout_samples}"
        )
    compat.data_set_helpers_not_compiled()
    training.initialize_megatron()
    weights, policy_version = first_weights(args, items, task.tokenizer)
    engine = build_engine(args, trace, task)
    engine.load_weights(weights)
    if (args.rollout_output / SETTINGS_FILE).is_file() and trace.method != "bf16":
        # Later policy versions keep the scales of the folder's first one.
        engine.use_settings(load_settings(args.rollout_output))
    elif trace.method != "bf16":
        engine.calibrate(
            calibration_batches(items, task.tokenizer, num_samples=args.rollout_calibration_samples)
        )
    engine.push_weights(weights, policy_version)
    record(args, engine, items, task, policy_version)
    task.close()


def load_prompts(args: Namespace) -> tuple[list[TaskItem], Task]:
    """Gives the prompts, and their task with its tokenizer."""
    items, task = open_task(args.rollout_tasks, task_config_from_args(args))
    if task.tokenizer.vocab_size > args.padded_vocab_size:
        raise SystemExit(
            f"{args.rollout_tasks} needs {task.tokenizer.vocab_size} tokens, but the model has "
            f"{args.padded_vocab_size}; set --vocab-size"
        )
    return items, task


def build_engine(args: Namespace, trace: TraceConfig, task: Task) -> RolloutEngine:
    """Gives an engine without weights."""
    config = trace_model_config_from_args(args, trace, "megatron", None)
    return RolloutEngine(
        config.transformer,
        pattern=args.hybrid_layer_pattern,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        trace=trace,
        eod_token=task.tokenizer.end_token,
        max_requests=args.rollout_requests,
        cuda_graphs=args.rollout_cuda_graphs,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
    )


def record(
    args: Namespace,
    engine: RolloutEngine,
    items: Sequence[TaskItem],
    task: Task,
    policy_version: int,
) -> None:
    """Rolls out and commits samples, hints and rewards."""
    first = args.rollout_first_prompt
    rows = [row % len(items) for row in range(first, first + args.rollout_prompts)]
    group = f"version-{policy_version}"
    with HintFilesWriter(args.rollout_output) as files:
        known = {name.rpartition("/")[0] for name in files.sample_ids()}
        again = [row for row in rows if f"{group}/item-{row}" in known]
        if again:
            raise SystemExit(
                f"{args.rollout_output} has samples of {len(again)} of these {len(rows)} prompts "
                f"and of policy version {policy_version} already; give another --rollout-output, "
                "or other prompts by --rollout-first-prompt"
            )
        rewards = roll_out(
            args,
            engine,
            files,
            items,
            task,
            rows=rows,
            samples_per_prompt=args.rollout_samples,
            group=group,
        )
    if not rewards:
        raise SystemExit("no sample has a reward; see the reasons above")
    print_rank_0(
        f"{args.rollout_output}: {len(rewards)} samples of policy version {policy_version}, "
        f"mean reward {sum(r.reward for r in rewards) / len(rewards):.3f}"
    )


def roll_out(
    args: Namespace,
    engine: RolloutEngine,
    files: HintFilesWriter,
    items: Sequence[TaskItem],
    task: Task,
    *,
    rows: Sequence[int],
    samples_per_prompt: int,
    group: str,
) -> list[Reward]:
    """Rolls out and commits samples, hints and rewards.

    Args:
        args: Parsed flags.
        engine: An engine that weights were pushed to.
        files: Where samples and hints go.
        items: The prompts.
        task: Their task.
        rows: Which of them.
        samples_per_prompt: Samples of each.
        group: First part of the names of groups and samples; a sample's random numbers are those
            of --seed and its name.

    Returns:
        The reward of each sample that was committed: of those without a reward none is, nor one
        that is then alone in its group.
    """
    places = [(row, n) for row in rows for n in range(samples_per_prompt)]
    names = [f"{group}/item-{row}/sample-{n}" for row, n in places]
    task.begin({name: items[row] for name, (row, _) in zip(names, places, strict=True)})
    samples = engine.generate(
        [task.tokenizer.encode(items[row].prompt) for row, _ in places],
        names,
        store=files,
        sampling=SamplingSettings(
            max_new_tokens=args.rollout_max_response_tokens,
            top_logprobs=args.rollout_top_logprobs,
        ),
        seed=args.seed,
        next_turn=task.next_turn,
    )
    scores = task.scores(samples, [items[row] for row, _ in places])
    groups = [f"{group}/item-{row}" for row, _ in places]
    kept, rewards = rewarded_groups(samples, groups, scores.rewards)
    for name in {sample.sample_id for sample in samples} - {one.sample_id for one in kept}:
        files.drop_sample(name)
    commit_rollouts(files, kept, rewards, engine.settings)
    return rewards


def first_weights(
    args: Namespace, items: Sequence[TaskItem], tokenizer: Tokenizer
) -> tuple[dict[str, torch.Tensor], int]:
    """Gives the parameters to roll out from by name, and their iteration as policy version."""
    if args.rollout_warm_start is None:
        folder, iteration = latest_checkpoint(args.load)
        return checkpoint_weights(args, folder), iteration
    model = build_model(args, fp32=True)
    settings = WarmStartSettings(
        steps=args.rollout_warm_start, learning_rate=args.rollout_warm_start_lr
    )
    losses = warm_start(model, items, tokenizer, settings)
    if losses:
        print_rank_0(f"warm start: loss {losses[0]:.3f} to {losses[-1]:.3f}")
    model.to(args.params_dtype)
    with compat.checkpoint_writes_in_process():
        save_checkpoint(0, [model], None, None, 0)
    return _parameters(model), 0


def latest_checkpoint(load: str) -> tuple[str, int]:
    """Gives the folder of the latest checkpoint below `load`, and its iteration.

    `load` may be the folder of an iteration itself, so that all of several processes take the same
    one while a run goes on.

    Raises:
        FileNotFoundError: There is none.
    """
    tracker = tracker_file(load)
    itself = re.fullmatch(r"iter_(\d+)|release", Path(load).name)
    if itself is not None and Path(load).is_dir():
        return load, int(itself[1] or 0)
    if not Path(tracker).is_file():
        raise FileNotFoundError(
            f"--load {load} has no checkpoint: there is no {tracker}; give the folder that --save "
            "wrote, or make one by record_rollouts.py --rollout-warm-start N --save FOLDER"
        )
    iteration, release = read_metadata(tracker)
    folder = get_checkpoint_name(load, iteration, release, return_base_dir=True)
    if not Path(folder).is_dir():
        raise FileNotFoundError(
            f"{tracker} names the checkpoint {folder}, which is not there; restore it, or write "
            "the iteration of another one into that file"
        )
    return folder, int(iteration)


def checkpoint_weights(args: Namespace, folder: str | Path) -> dict[str, torch.Tensor]:
    """Gives the parameters of one checkpoint by name.

    Raises:
        ValueError: There is none, or one of Megatron's own Gated DeltaNet layers.
    """
    CheckpointTensors(Path(folder)).refuse_foreign()
    model = build_model(args)
    state: Any = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(folder))
    model.load_state_dict(state["model"])
    return _parameters(model)


def build_model(args: Namespace, *, fp32: bool = False) -> HybridModel:
    """Gives a model of the flags' sizes, in their dtype or in FP32."""
    config = trace_model_config_from_args(args, trace_config_from_args(args), "megatron", None)
    transformer = without_recipe(config.transformer)
    # Only the warm start computes with it: short sequences in FP32, for which fla would be tuned.
    delta_rule = "torch" if "G" in args.hybrid_layer_pattern else "auto"
    if fp32:
        transformer.params_dtype, transformer.bf16 = torch.float32, False
    return build_hybrid_model(
        transformer,
        pattern=args.hybrid_layer_pattern,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        modules=HybridModules(delta_rule=delta_rule),
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
    )


def _parameters(model: HybridModel) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in model.named_parameters()}


if __name__ == "__main__":
    main()
