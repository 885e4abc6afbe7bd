"""The block that `bench_step.py` trains: weights, samples, hints in files, models of the cases."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_trace.config import DEFAULT_HINT_SITES, HINT_SITES, TraceConfig
from megatron_trace.hints.files import HintFiles
from megatron_trace.hints.files_writer import HintFilesWriter
from megatron_trace.hints.store import HintStore
from megatron_trace.hints.types import RolloutSample
from megatron_trace.models.architecture import Architecture
from megatron_trace.models.expert_names import local_name
from megatron_trace.models.local_config import architecture_config
from megatron_trace.rl.optimizer import OptimizerSettings, build_optimizer
from megatron_trace.testing.recorded_samples import calibrate, random_samples, record
from megatron_trace.testing.tiny_trainer import RecordedRollout
from megatron_trace.training.micro_batch import MicroBatch
from megatron_trace.training.model import build_trainer_model
from megatron_trace.training.sites import TraceSites

ALL_SITES = "all"
DEFAULT_SITES = "+".join(DEFAULT_HINT_SITES)
# Weights change in each round, but stay so near to the rollout's that the guard accepts its hints.
LEARNING_RATE = 1e-6


@dataclass(frozen=True)
class Case:
    """What is trained in which way.

    Attributes:
        method: Method of TRACE.
        experts: The trainer's routed experts.
        sites: Guided sites, joined by `+`; or `all` that the block has.
        layers: Guided decoder layers.
    """

    method: Any
    experts: Any
    sites: str = ALL_SITES
    layers: str = "all"

    @property
    def name(self) -> str:
        """What tables call it."""
        layers = "" if self.layers == "all" else f", {self.layers}"
        sites = "all sites" if self.sites == ALL_SITES else self.sites.replace("+", ", ")
        guided = f" ({sites}{layers})" if self.method == "trace" else ""
        return f"{self.method}{guided}, {self.experts}"

    @property
    def text(self) -> str:
        """What `--cases` calls it, without defaults."""
        parts = [self.method, self.experts, self.sites, self.layers]
        while len(parts) > 2 and parts[-1] in (ALL_SITES, "all"):
            parts.pop()
        return ":".join(parts)

    def trace(self, pattern: str) -> TraceConfig:
        """Gives its configuration for a block of a pattern."""
        fields: dict[str, Any] = {"method": self.method, "experts": self.experts}
        if self.method == "trace":
            sites = all_sites(pattern) if self.sites == ALL_SITES else tuple(self.sites.split("+"))
            fields |= {"hint_sites": sites, "hint_layers": self.layers}
        return TraceConfig(**fields)


def all_sites(pattern: str) -> tuple[str, ...]:
    """Gives the sites that a block of a pattern has: without attention there are no k and v."""
    return HINT_SITES if "*" in pattern else ("fc1", "fc2")


@dataclass
class Trainer:
    """One case's model, and where its micro-batches come from.

    Attributes:
        case: The case.
        reader: What reads its hints: `process`, `thread`, or `at-once` before it is timed.
        model: The model; cases that differ by the reader share it.
        sites: Its `TraceSites`.
        files: Where its hints are.
        stream: Its micro-batches without end, once it reads.
        turns: By kind of turn, the milliseconds of each micro-batch of each turn.
        host: Milliseconds in which the host handed over each micro-batch that counts.
        waited: Milliseconds in which it waited for what each of these reads.
        peak_bytes: Most bytes on the device beyond those before the micro-batch.
    """

    case: Case
    reader: str
    model: Any
    sites: TraceSites
    files: HintFiles
    stream: Iterator[MicroBatch] | None = None
    turns: dict[str, list[list[float]]] = field(default_factory=dict)
    host: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"{self.case.name}, {self.reader}"

    @property
    def peers(self) -> tuple[str, str]:
        """What it has in common with the cases that it is compared with: experts and reader."""
        return self.case.experts, self.reader

    @functools.cached_property
    def parameters(self) -> list[Any]:
        """Its parameters, found once."""
        return list(self.model.parameters())


class Block:
    """One block of a published model: its samples, their hints in files, and its weights.

    Args:
        options: The options.
        architecture: Sizes.
        folder: Gets the hint files.
    """

    def __init__(
        self, options: argparse.Namespace, architecture: Architecture, folder: Path
    ) -> None:
        self.options, self.architecture, self.folder = options, architecture, folder
        recorder, sites = self.build(Case("qat", "local"))
        lengths = [(options.length // 2, options.length // 2 + 1)] * options.samples
        samples = random_samples(lengths, sites.shape, vocab_size=architecture.vocab_size)
        calibrate(recorder, sites, samples[:1])
        self.settings, store = sites.settings, HintStore()
        places = list(sites.shape.places)
        per_record = max(options.tokens) // options.length
        self.samples: list[RolloutSample] = []
        for first in range(0, len(samples), per_record):
            part = samples[first : first + per_record]
            self.samples += record(recorder, sites, part, store, places=places)
        self.store_seconds, self.hint_bytes = self._write(store)
        self.ddp, self.optimizer = build_optimizer(
            recorder, OptimizerSettings(learning_rate=LEARNING_RATE)
        )
        self.parameters = {local_name(name): p for name, p in recorder.named_parameters()}
        self.trainers: list[Trainer] = []

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples that are forwarded."""
        return sum(sample.num_rows for sample in self.samples)

    def build(self, case: Case) -> tuple[Any, TraceSites]:
        """Builds the trainer model of a case."""
        options, architecture = self.options, self.architecture
        fields: dict[str, Any] = {
            "num_layers": len(options.pattern),
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "use_cpu_initialization": not torch.cuda.is_available(),
            "gradient_accumulation_fusion": case.experts != "local",
        }
        torch.manual_seed(0)
        model, sites = build_trainer_model(
            architecture_config(architecture, **fields),
            pattern=options.pattern,
            vocab_size=architecture.vocab_size,
            max_sequence_length=options.length + 1,
            trace=case.trace(options.pattern),
            rotary_base=architecture.rope_base,
            rotary_percent=architecture.rope_share,
        )
        return model, sites

    def _write(self, store: HintStore) -> tuple[float, int]:
        """Writes the hints to files; gives the seconds and the bytes."""
        rollout = RecordedRollout(store, self.samples, self.settings)
        started = time.perf_counter()
        with HintFilesWriter(self.folder) as files:
            rollout.put_records(files)
            files.commit(self.samples)
            return time.perf_counter() - started, files.num_bytes

    def trainer(self, case: Case) -> tuple[Any, TraceSites]:
        """Gives a model of a case with the shared weights and gradients."""
        model, sites = self.build(case)
        if sites.quantises:
            sites.settings = self.settings
        for name, parameter in model.named_parameters():
            shared: Any = self.parameters[local_name(name)]
            own: Any = parameter
            own.data, own.main_grad = shared.data, shared.main_grad
            own.register_post_accumulate_grad_hook(_add_to_main_grad)
        return model, sites

    def optimizer_step(self) -> float:
        """Steps and gives the milliseconds; gradients are zero afterwards."""
        timer = Timer(next(iter(self.parameters.values())).device)
        with timer:
            self.optimizer.step()
        self.ddp.zero_grad_buffer()
        return timer.milliseconds


def _add_to_main_grad(parameter: Any) -> None:
    """Does what Megatron's DDP does."""
    if not parameter.grad_added_to_main_grad:
        parameter.main_grad.add_(parameter.grad)
    parameter.grad = None


class Timer:
    """Milliseconds of what runs inside, on the device's own clock.

    Attributes:
        host_milliseconds: Until the host had handed over all of it.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._started = self.host_milliseconds = 0.0
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * self._on_gpu)]

    def __enter__(self) -> None:
        """Begins."""
        if self._on_gpu:
            self._events[0].record()
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        """Ends."""
        self.host_milliseconds = (time.perf_counter() - self._started) * 1e3
        if self._on_gpu:
            self._events[1].record()

    @property
    def milliseconds(self) -> float:
        """Time between begin and end; waits for the end."""
        if not self._on_gpu:
            return self.host_milliseconds
        self._events[1].synchronize()
        return self._events[0].elapsed_time(self._events[1])
