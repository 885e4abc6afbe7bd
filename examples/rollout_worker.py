"""Rolls out for a run (`rl.exchange`): batch after batch, from its newest published weights.

    torchrun examples/rollout_worker.py MEGATRON'S MODEL FLAGS --load START \\
        --rollout-tasks prompts.jsonl --rollout-run RUN --rollout-worker NAME

One process, one engine; any number of workers share a run, and each may end and begin anew at any
moment. `examples/pretrain_trace.py --trace-hint-dir RUN` trains meanwhile, or by turns: a worker
with --rollout-until-idle ends when there is nothing that it may begin. Exit status 0: the run needs
no more rollouts, or there is nothing to begin; 75: the run is paused.
"""

# ruff: noqa: E402  The stand-in for the CUDA runtime must be installed before Megatron is imported.
from __future__ import annotations

from megatron_trace.testing import cpu_pretrain, cpu_runtime

cpu_runtime.install()
cpu_pretrain.install()

import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

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
    roll_out,
)

from megatron_trace import compat
from megatron_trace.arguments import trace_config_from_args
from megatron_trace.hints.files_writer import HintFilesWriter
from megatron_trace.hints.settings_file import load_settings
from megatron_trace.rl.exchange import Claim, Exchange, PausedError
from megatron_trace.rl.run import calibration_batches
from megatron_trace.rollout import RolloutEngine

EXIT_PAUSED = 75


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Adds our flags to Megatron's parser."""
    compat.let_help_be_printed(parser)
    group = add_sampling_arguments(parser)
    group.add_argument("--rollout-run", type=Path, required=True, help="folder of the run")
    group.add_argument("--rollout-worker", required=True, help="name, of one worker only")
    group.add_argument("--rollout-until-idle", action="store_true", help="end rather than wait")
    group.add_argument("--rollout-keep", action="store_true", help="hints of all versions")
    group.add_argument("--rollout-poll-s", type=float, default=1.0, help="default 1")
    return parser


class Worker:
    """An engine that follows the versions of a run.

    Args:
        args: Parsed flags.
        exchange: The run.
    """

    def __init__(self, args: Namespace, exchange: Exchange) -> None:
        self.args = args
        self.exchange = exchange
        self.trace = trace_config_from_args(args)
        self.items, self.task = load_prompts(args)
        self.folder = exchange.worker_folder(args.rollout_worker)
        self.engine: RolloutEngine | None = None
        self.version: int | None = None
        self.weights_digest = ""

    def roll_out(self, claim: Claim) -> None:
        """Rolls one batch out and makes it complete."""
        run = self.exchange.settings
        started = time.monotonic()
        with self.exchange.signs_of_life(claim):
            engine = self.engine_of(claim.policy_version)
            first = claim.batch * run.prompts_per_batch
            with HintFilesWriter(self.folder) as files:
                rewards = roll_out(
                    self.args,
                    engine,
                    files,
                    self.items,
                    self.task,
                    rows=[n % len(self.items) for n in range(first, first + run.prompts_per_batch)],
                    samples_per_prompt=run.samples_per_prompt,
                    group=f"batch-{claim.batch}",
                )
                if not self.args.rollout_keep:
                    self.drop_old(claim, files)
        digest = self.weights_digest if self.trace.quantises_experts else None
        first_one = self.exchange.commit(claim, self.folder, rewards, digest)
        mean = sum(reward.reward for reward in rewards) / len(rewards)
        print(
            f"worker {self.args.rollout_worker}: batch {claim.batch} of version "
            f"{claim.policy_version}, mean reward {mean:.3f}, {time.monotonic() - started:.1f} s"
            f"{'' if first_one else '; another worker was first'}",
            flush=True,
        )

    def drop_old(self, claim: Claim, files: HintFilesWriter) -> None:
        """Removes this worker's hints that no step needs any more."""
        before = self.exchange.oldest_needed_version(claim)
        files.expire(before=before)
        self.exchange.drop_earlier_lives(self.args.rollout_worker, self.folder, before=before)

    def engine_of(self, version: int) -> RolloutEngine:
        """Gives the engine with the weights of a version.

        Raises:
            FileNotFoundError: A later version replaced it.
        """
        if self.engine is not None and self.version == version:
            return self.engine
        weights = self.weights_of(version)
        if self.engine is None:
            self.engine = build_engine(self.args, self.trace, self.task)
            self.engine.load_weights(weights)
            if self.trace.method != "bf16":
                self.use_settings_of_run(self.engine)
        self.weights_digest = digest = self.engine.push_weights(weights, version)
        print(
            f"worker {self.args.rollout_worker}: version {version} has digest {digest}", flush=True
        )
        self.version = version
        return self.engine

    def weights_of(self, version: int) -> dict[str, torch.Tensor]:
        """Gives the weights of a version; version 0 is the checkpoint to start from."""
        folder = self.exchange.checkpoint_folder(version)
        if version == 0:
            folder = Path(latest_checkpoint(self.args.load)[0])
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is gone")
        return checkpoint_weights(self.args, folder)

    def use_settings_of_run(self, engine: RolloutEngine) -> None:
        """Gives the engine the run's quantiser settings, which the first worker calibrates."""
        try:
            settings = load_settings(self.exchange.folder)
        except FileNotFoundError:
            engine.calibrate(
                calibration_batches(
                    self.items,
                    self.task.tokenizer,
                    num_samples=self.args.rollout_calibration_samples,
                )
            )
            assert engine.settings is not None, "it was calibrated"
            if self.exchange.share_settings(engine.settings):
                return
            settings = load_settings(self.exchange.folder)
        engine.use_settings(settings)


def main() -> None:
    """Rolls out until the run has all of its batches."""
    args = parse_and_validate_args(add_arguments, args_defaults=DEFAULTS)
    if args.load is None:
        raise SystemExit("give --load CHECKPOINT, the one that the run starts from")
    if args.trace_reward is not None and args.trace_failed_reward is None:
        raise SystemExit(
            "give --trace-failed-reward NUMBER: a batch of a run has all of its samples, so that "
            "one whose reward function failed cannot be left out"
        )
    exchange = Exchange(args.rollout_run)
    compat.data_set_helpers_not_compiled()
    training.initialize_megatron()
    worker = Worker(args, exchange)
    try:
        follow(worker)
    except PausedError as error:
        print(f"worker {args.rollout_worker}: {error}", flush=True)
        raise SystemExit(EXIT_PAUSED) from None


def follow(worker: Worker) -> None:
    """Rolls out whatever may be begun, until the run has all batches or nothing is left to do."""
    exchange, args = worker.exchange, worker.args
    while exchange.num_complete() < exchange.settings.num_batches:
        claim = exchange.claim(args.rollout_worker)
        if claim is None:
            if args.rollout_until_idle and not exchange.claims():
                return
            time.sleep(args.rollout_poll_s)
            continue
        try:
            worker.roll_out(claim)
        except FileNotFoundError:
            exchange.give_up(claim)
            if exchange.published_version() == claim.policy_version:
                raise
        except BaseException:
            exchange.give_up(claim)
            raise
    print(f"worker {args.rollout_worker}: the run has all of its rollouts", flush=True)


if __name__ == "__main__":
    main()
