"""TRACE inside Megatron's own training loop: trains on recorded rollouts, with Megatron's flags.

    torchrun --nproc-per-node 8 examples/pretrain_trace.py MEGATRON'S FLAGS \\
        --trace-method trace --trace-hint-dir ROLLOUTS [--trace-valid-hint-dir OTHER ROLLOUTS]
    python examples/pretrain_trace.py --help        lists both; ours are in the groups "trace"

Logging, evaluation, optimizer, schedules of the pipeline and checkpoints are Megatron's. The loss
is an objective of `rl.losses` (--trace-objective, and others of the group "trace, objective") over
the recorded samples; rollouts come from `examples/record_rollouts.py` or from an engine that writes
such a folder (`rl.rollout_folder`). It may also be the folder of a run (`rl.exchange`), in which
workers roll out meanwhile: `examples/rollout_worker.py`, launch/. With --trace-metrics-dir FOLDER
every step leaves a line of metrics there, for tools/report.py.
"""

# ruff: noqa: E402  The stand-in for the CUDA runtime must be installed before Megatron is imported.
from __future__ import annotations

from megatron_trace.testing import cpu_pretrain, cpu_runtime

cpu_runtime.install()
cpu_pretrain.install()

import contextlib
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.utils import unwrap_model
from megatron.training import pretrain, print_rank_0
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.checkpointing import get_checkpoint_tracker_filename

from megatron_trace import compat
from megatron_trace.arguments import (
    add_recorded_arguments,
    health_config_from_args,
    loss_config_from_args,
    recorded_config_from_args,
    require_agreement,
    trace_config_from_args,
)
from megatron_trace.config import RecordedConfig, TraceConfig
from megatron_trace.rl.exchange import PausedError
from megatron_trace.rl.exchange_folder import ExchangeFolder
from megatron_trace.rl.loop_health import LoopHealth
from megatron_trace.rl.loop_log import LoopLog
from megatron_trace.rl.recorded import RecordedTraining
from megatron_trace.rl_config import LossConfig
from megatron_trace.training.megatron_model import trace_model_config_from_args, trace_sites
from megatron_trace.training.sites import TraceSites
from megatron_trace.training.weights import expert_weight_digest


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Adds our flags to Megatron's parser."""
    compat.let_help_be_printed(parser)
    return add_recorded_arguments(parser)


def main() -> None:
    """Trains as the flags say."""
    args = parse_and_validate_args(
        add_arguments,
        args_defaults={"tokenizer_type": "NullTokenizer", "eval_interval": 1000},
    )
    trace, recorded = trace_config_from_args(args), recorded_config_from_args(args)
    require_agreement(args, trace, recorded)
    if done_before(args):
        if not args.rank:
            print(f"all {args.train_iters} iterations were done before: {args.load}")
        return
    loss, alarms = loss_config_from_args(args), health_config_from_args(args)
    settings = {"trace": trace, "loss": loss, "health": alarms, "recorded": recorded}
    log = LoopLog(recorded.metrics_dir, args, settings)
    if args.bf16:
        # A step with NaN or Inf is skipped and counted, which Megatron's optimizer does with a
        # constant scale of the loss; its own check would end the run.
        args.loss_scale, args.check_for_nan_in_loss_and_grad = args.loss_scale or 1.0, False
    health = LoopHealth(
        alarms, trace, saves=bool(args.save), skips=args.bf16, logs=bool(recorded.metrics_dir)
    )
    try:
        with log.running():
            train(args, trace, recorded, loss, health, log)
    except SystemExit as way_out:
        if args.rank and isinstance(way_out.code, str):  # One rank tells.
            raise SystemExit(1) from None
        raise


def done_before(args: Namespace) -> bool:
    """Says whether the checkpoint to go on from is the last one, at which Megatron has no data."""
    if not args.load or args.finetune or args.ckpt_step or args.train_iters is None:
        return False
    tracker = Path(get_checkpoint_tracker_filename(args.load))
    text = tracker.read_text().strip() if tracker.is_file() else ""
    return text.isdigit() and int(text) >= args.train_iters


def train(
    args: Namespace,
    trace: TraceConfig,
    recorded: RecordedConfig,
    loss: LossConfig,
    health: LoopHealth,
    log: LoopLog,
) -> None:
    """Trains until the last iteration, or until Megatron ends it.

    Raises:
        SystemExit: An alarm stopped the run.
    """
    # Stages, and the all-gather dispatcher, must know how long the micro-batches of others are.
    fixed_length = args.pipeline_model_parallel_size > 1 or (
        args.moe_token_dispatcher_type == "allgather" and args.expert_model_parallel_size > 1
    )

    def num_micro_batches(trains: bool) -> int:
        if trains:
            return get_num_microbatches()
        return args.eval_global_batch_size // (
            args.eval_micro_batch_size * args.data_parallel_size * args.gtp_weight_remat_size
        )

    training = RecordedTraining(
        trace,
        recorded,
        loss,
        num_positions=args.seq_length if fixed_length else None,
        num_micro_batches=num_micro_batches,
        health=health,
    )
    for folder in training.folders:
        if isinstance(folder, ExchangeFolder):
            folder.require_fitting(
                global_batch_size=args.global_batch_size,
                train_iters=args.train_iters,
                save=args.save,
                load=args.load,
                save_interval=args.save_interval,
            )
    model_config = trace_model_config_from_args(args, trace, recorded.attention, training.settings)
    iteration = None
    stages: list[tuple[Any, TraceSites]] = []

    def datasets(num_samples: Sequence[int], vp_stage: int | None = None) -> Any:
        found = training.datasets(num_samples)
        log.begin()  # All is built and loaded: the first step is next.
        return found

    # Every rank needs the indices, not only the first of a tensor-parallel group.
    vars(datasets)["is_distributed"] = True

    def forward_step(data_iterator: Iterator[Any], model: torch.nn.Module) -> Any:
        nonlocal iteration
        current = (args.curr_iteration, model.training)
        if iteration not in (None, current):
            training.assert_ran()
        iteration = current
        return training.forward_step(data_iterator, model)

    def finalize_grads(chunks: list[Any], *tokens: Any, **groups: Any) -> None:
        finalize_model_grads(chunks, *tokens, **groups)
        stages[:] = [(unwrap_model(chunk), trace_sites(chunk)) for chunk in chunks]
        if trace.quantises_experts and args.num_experts:
            version = args.curr_iteration
            digest = training.require_weights(
                version, lambda: expert_weight_digest(*stages[0], *stages[1:])
            )
            if digest is not None:
                print_rank_0(f"version {version} has the digest of its rollouts, {digest}")
        if training.end_step(args.curr_iteration + 1, chunks):
            # Megatron looks at it after each step: it saves, and leaves.
            args.exit_interval = 1

    model_config.transformer.finalize_model_grads_func = finalize_grads
    compat.data_set_helpers_not_compiled()
    saving = contextlib.nullcontext if args.async_save else compat.checkpoint_writes_in_process
    with (
        contextlib.closing(training),
        compat.distributed_optimizer_resumes_with_torch_adam(),
        saving(),
        compat.checkpoint_flags_told(log.goes_on_from),
        compat.training_steps_told(lambda of: log.step(of, health.take_record())),
    ):
        try:
            pretrain(
                pretrain_cfg_container_from_args(args, model_config),
                datasets,
                ModelType.encoder_or_decoder,
                forward_step,
            )
        except SystemExit as way_out:  # Megatron's, where it does not go on.
            if health.stop_reason:
                raise SystemExit(_stopped(args, health.stop_reason)) from None
            if way_out.code or not stages:
                raise
            if args.curr_iteration + 1 < args.train_iters:
                log.leave_off("asked to: --exit-interval, --exit-duration-in-mins or a signal")
        except PausedError as error:
            log.leave_off(str(error))
            raise
    training.assert_ran()
    print_rank_0(f"TRACE ran: method {trace.method}, {len(training.folders[0])} samples")
    print_rank_0(training.summary())
    if trace.quantises_experts and args.num_experts:
        digest = expert_weight_digest(*stages[0], *stages[1:])
        print_rank_0(f"  version {args.curr_iteration + 1} has digest {digest}")


def _stopped(args: Namespace, reason: str) -> str:
    """Gives what is told of an alarm; a status that is not 0 tells a job that it is not done."""
    kept = f"the checkpoint is in {args.save}" if args.save else "no --save, no checkpoint"
    return f"stopped after iteration {args.curr_iteration + 1}, as {reason}; {kept}"


if __name__ == "__main__":
    main()
