"""Trains the cases of `bench_step.py` by turns, and makes the rows of its table.

    round         1               2               3        an optimizer step before some of them
    turns    (b a) (c d)     (d c) (a b)     (a b) (d c)   shuffled; each some micro-batches

Cases that are compared have experts and reader in common, and take their turns one after another.
Each case keeps its reader from its first turn to its last, as a training does: while a micro-batch
is trained on, the next one is read, by one process for all of them or by a thread of each. Only
micro-batches whose weights were quantised before count; the first one after each optimizer step is
noted apart.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from bench_step_block import Block, Case, Timer, Trainer
from bench_step_pairs import paired_ratio, shuffled_groups
from bench_step_profile import Collections, host_profiled, profiled, waits_profiled

from megatron_trace.hints.files import HintFiles
from megatron_trace.hints.types import RolloutSample
from megatron_trace.training.hint_reader import HintReader
from megatron_trace.training.micro_batch import MicroBatch, make_micro_batch
from megatron_trace.training.model import token_logprobs
from megatron_trace.training.prefetch import MicroBatchPrefetcher

# The goal of issue 8: a guided step takes at most 3 % longer than an unguided one.
MOST = 1.03


def measure_training(
    block: Block,
    cases: Sequence[Case],
    num_tokens: int,
    process: HintReader,
    reported: Callable[[str], contextlib.AbstractContextManager[None]],
    made: Callable[[], None],
) -> list[dict[str, Any]]:
    """Trains all cases by turns; gives a row of the table for each that could run.

    Args:
        block: The block.
        cases: The cases.
        num_tokens: Tokens of a micro-batch.
        process: What reads for the cases whose reader is a process.
        reported: Context in which an error of the named part is noted, and not raised.
        made: Called after each micro-batch.
    """
    options, per_batch = block.options, num_tokens // block.options.length
    device = next(iter(block.parameters.values())).device
    starts = range(0, len(block.samples) - per_batch + 1, per_batch)
    batches = [block.samples[first : first + per_batch] for first in starts]
    budget_s = options.budget_s[min(options.tokens.index(num_tokens), len(options.budget_s) - 1)]
    with contextlib.ExitStack() as stack:
        trainers: list[Trainer] = []
        for case in cases:
            with reported(case.name):
                model, sites = block.trainer(case)
                for reader in options.readers:
                    trainer = Trainer(case, reader, model, sites, HintFiles(block.folder))
                    trainer.stream = stack.enter_context(_reading(trainer, batches, process))
                    trainers.append(trainer)
        print(f"built, {passed_s(options):.1f} s so far", flush=True)
        collections = stack.enter_context(Collections())
        turns = _Turns(trainers, device, reported, made)
        turns.take(range(options.warm_up), "warm_up", tell=True)
        optimizer: list[float] = []
        order = random.Random(num_tokens)
        began = passed_s(options)
        rows: list[dict[str, Any]] = []
        try:
            for round_number in range(options.rounds):
                # One round is the least.
                if round_number and passed_s(options) - began > budget_s:
                    break
                turns.shuffle(order)
                if round_number % options.rounds_per_step == 0:
                    optimizer.append(block.optimizer_step())
                    turns.take(range(1), "first")
                    turns.shuffle(order)
                turns.take(range(options.micro_batches), "later")
                if round_number == 0:
                    print(f"round 0 done, {passed_s(options):.1f} s so far", flush=True)
        finally:  # Also when its time is up: of rounds that all cases have done.
            kept = [trainer for trainer in trainers if trainer in turns.trainers]
            num_rounds = min((len(of.turns.get("later", ())) for of in kept), default=0)
            if num_rounds:
                for trainer in kept:
                    del trainer.turns["later"][num_rounds:]
                rows = [row_of(of, num_tokens, statistics.median(optimizer)) for of in kept]
                add_ratios(rows)
                print_training(rows)
                print(collections, flush=True)
        if num_tokens == options.tokens[0] and options.profile:
            for trainer in kept:
                if trainer.case.text in options.profile_cases:
                    with reported(f"profile of {trainer.name}"):
                        _profile(trainer, options.profile)
    return rows


def _profile(trainer: Trainer, num_rows: int) -> None:
    assert trainer.stream is not None, "every trainer has a reader"
    for profiler in (profiled, host_profiled, waits_profiled):
        step(trainer, next(trainer.stream))
        run = partial(step, trainer, next(trainer.stream))
        profiler(trainer.name, run, num_rows)


def passed_s(options: argparse.Namespace) -> float:
    """Gives the seconds since the program began to measure."""
    return time.perf_counter() - options.started


@contextlib.contextmanager
def _reading(
    trainer: Trainer, batches: Sequence[Sequence[RolloutSample]], process: HintReader
) -> Iterator[Iterator[MicroBatch]]:
    """Gives a case's micro-batches without end: read ahead, or made now and used again."""
    if trainer.reader == "at-once":
        made = [make_micro_batch(samples, trainer.files, trainer.sites) for samples in batches]
        yield itertools.cycle(made)
        return
    # By names, as in Megatron's loop: what reads the hints reads the samples, too.
    names = [[sample.sample_id for sample in samples] for samples in batches]
    with MicroBatchPrefetcher(
        itertools.cycle(names),
        trainer.files,
        trainer.sites,
        max_host_bytes=None,
        reader=process if trainer.reader == "process" else None,
    ) as stream:
        yield stream


class _Turns:
    """Lets cases train one after another; one that raises gets no further turn.

    Attributes:
        trainers: Those that go on, in the order of their next turns.
    """

    def __init__(
        self,
        trainers: Sequence[Trainer],
        device: torch.device,
        reported: Callable[[str], contextlib.AbstractContextManager[None]],
        made: Callable[[], None],
    ) -> None:
        self.trainers = list(trainers)
        self._device, self._reported, self._made = device, reported, made

    def shuffle(self, order: random.Random) -> None:
        """Puts the next turns in another order, in which cases that are compared stay together."""
        self.trainers = shuffled_groups(self.trainers, lambda trainer: trainer.peers, order)

    def take(self, micro_batches: range, what: str, *, tell: bool = False) -> None:
        """Has every case train once, and notes its milliseconds under a name."""
        left, first_turns = [], {}
        for trainer in self.trainers:
            started = time.perf_counter()
            with self._reported(trainer.name):
                # Of cases that share a model, one quantises its weights for all of them.
                turn = first_turns.get(id(trainer.model)) if what == "first" else None
                if turn is None:
                    turn = [self._timed(trainer, counts=what == "later") for _ in micro_batches]
                    first_turns[id(trainer.model)] = turn
                trainer.turns.setdefault(what, []).append(turn)
                left.append(trainer)
            if tell:
                seconds = time.perf_counter() - started
                print(f"{trainer.name}: warm-up {seconds:.2f} s", flush=True)
        self.trainers = left

    def _timed(self, trainer: Trainer, *, counts: bool) -> float:
        assert trainer.stream is not None, "every trainer has a reader"
        on_gpu, before = self._device.type == "cuda", 0
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        timer = Timer(self._device)
        with timer:
            started = time.perf_counter()
            micro_batch = next(trainer.stream)
            waited = (time.perf_counter() - started) * 1e3
            step(trainer, micro_batch)
        milliseconds = timer.milliseconds
        if on_gpu:
            peak = torch.cuda.max_memory_allocated() - before
            trainer.peak_bytes = max(trainer.peak_bytes, peak)
        if counts:
            trainer.host.append(timer.host_milliseconds)
            trainer.waited.append(waited)
        self._made()
        return milliseconds


def step(trainer: Trainer, micro_batch: MicroBatch) -> None:
    """Does the forward and backward pass of a micro-batch."""
    for parameter in trainer.parameters:
        parameter.grad_added_to_main_grad = False
    with trainer.sites.micro_batch(micro_batch):
        logprobs = token_logprobs(trainer.model, trainer.sites, micro_batch)
        (-logprobs[micro_batch.loss_mask].mean()).backward()


def row_of(trainer: Trainer, num_tokens: int, optimizer_ms: float) -> dict[str, Any]:
    """Gives the medians of a case, and its turns."""
    rounds = [statistics.fmean(turn) for turn in trainer.turns["later"]]
    every = [time for turn in trainer.turns["later"] for time in turn]
    first = [turn[0] for turn in trainer.turns["first"]]
    later = statistics.median(every)
    coverage = {}
    if trainer.sites.quantises:
        report = trainer.sites.report()
        coverage = {str(site): round(counts.coverage, 4) for site, counts in report.sites.items()}
    return {
        "case": dataclasses.asdict(trainer.case) | {"name": trainer.name},
        "peers": trainer.peers,
        "tokens": num_tokens,
        "micro_batches": len(every),
        "micro_batch_ms": later,
        "micro_batch_ms_least": min(every),
        "micro_batch_ms_most": max(every),
        "host_ms": statistics.median(trainer.host),
        "waited_ms": statistics.median(trainer.waited),
        "weights_ms": statistics.median(first) - later,
        "optimizer_ms": optimizer_ms,
        "peak_bytes": trainer.peak_bytes,
        "coverage": coverage,
        "rounds_ms": rounds,
        "first_ms": first,
    }


def add_ratios(rows: Sequence[dict[str, Any]]) -> None:
    """Adds to rows what they take over qat with the same experts and reader, by pairs of rounds."""
    plain = {row["peers"]: row for row in rows if row["case"]["method"] == "qat"}
    for row in rows:
        base = plain.get(row["peers"])
        if base is not None and base is not row:
            ratio = paired_ratio(row["rounds_ms"], base["rounds_ms"])
            row["over_qat"] = ratio.as_dict(MOST) | {"text": str(ratio)}


def print_training(rows: Sequence[dict[str, Any]]) -> None:
    """Prints the table; over qat with the interval of 95 %, and what it says of the goal."""
    print(
        f"{'case':48} {'tokens':>6} {'n':>3} {'ms':>7} {'least':>7} {'most':>7} {'host':>7} "
        f"{'wait':>5} {'weights':>7} {'GiB':>5}  {'over qat, same experts and reader':36} coverage"
    )
    for row in rows:
        over = row.get("over_qat")
        said = f"{over['text']} {over['verdict']}" if over else ""
        print(
            f"{row['case']['name']:48} {row['tokens']:6} {row['micro_batches']:3} "
            f"{row['micro_batch_ms']:7.2f} {row['micro_batch_ms_least']:7.2f} "
            f"{row['micro_batch_ms_most']:7.2f} {row['host_ms']:7.2f} {row['waited_ms']:5.2f} "
            f"{row['weights_ms']:7.2f} {row['peak_bytes'] / 2**30:5.2f}  {said:36} "
            f"{row['coverage']}",
            flush=True,
        )
