"""One training step of a tiny model in any layout of ranks, and what it gave.

Weights, samples and hints are given as one rank has them; each rank takes its part. One rank
forwards the samples of all data-parallel replicas, one micro-batch after another.

Legend: S positions of a padded sample, B samples of a micro-batch.
"""

from __future__ import annotations

import faulthandler
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_trace.hints.files import HintFiles
from megatron_trace.hints.types import QuantizerSettings, RolloutSample, Site
from megatron_trace.models.expert_names import local_name
from megatron_trace.models.gated_delta_net import LocalGatedDeltaNet
from megatron_trace.testing.recorded_samples import seen_values
from megatron_trace.testing.single_process import init_rank
from megatron_trace.testing.tiny_trainer import tiny_trainer
from megatron_trace.training.layout import RankLayout
from megatron_trace.training.micro_batch import MicroBatch, make_micro_batch
from megatron_trace.training.model import token_logprobs
from megatron_trace.training.over_ranks import agreed, summed_report
from megatron_trace.training.pipeline import trainer_forward_step
from megatron_trace.training.report import TraceReport
from megatron_trace.training.shape import ModelShape, Place
from megatron_trace.training.sites import TraceSites
from megatron_trace.training.weights import expert_weight_digest


@dataclass(frozen=True)
class Task:
    """What one training step is given.

    Attributes:
        weights: Parameters of the whole model, with global expert indices in their names.
        settings: Quantiser settings of the rollout.
        hint_folder: Folder of `HintFiles`.
        replicas: Samples of each data-parallel replica.
        num_positions: S of every micro-batch, or T of a pack.
        trace: Fields of `TraceConfig`.
        config: Fields of `TransformerConfig`, beside the sizes of the layout.
        distributed_optimizer: Whether optimizer states are split over data-parallel ranks.
        parallel: Sizes of the layout, as Megatron's `initialize_model_parallel` takes them.
        dtype: dtype of the trainer.
        packed: Whether samples stand one after another.
    """

    weights: Mapping[str, torch.Tensor]
    settings: QuantizerSettings
    hint_folder: Path
    replicas: Sequence[Sequence[RolloutSample]]
    num_positions: int
    trace: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    distributed_optimizer: bool = False
    parallel: Mapping[str, int] = field(default_factory=dict)
    pattern: str = "*E*E"
    dtype: torch.dtype = torch.float32
    packed: bool = False


@dataclass(frozen=True)
class Slice:
    """Which part of a parameter a rank has.

    Attributes:
        dim: Dim that is split.
        size: Number of parts.
        rank: Which one.
        sections: Sizes of the parts (such as gate and up) that are split each by itself.
    """

    dim: int
    size: int
    rank: int
    sections: tuple[int, ...]

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Gives the part."""
        pieces = whole.split(self.sections, self.dim)
        return torch.cat([x.chunk(self.size, self.dim)[self.rank] for x in pieces], self.dim)


@dataclass(frozen=True)
class Outcome:
    """What a step gave on one rank; all tensors are on the CPU.

    Attributes:
        layout: Where the rank stands.
        shape: Sizes of its model.
        replica: Its data-parallel replica.
        loss: Summed loss of each micro-batch; on the last pipeline stage only.
        grads: Gradients by global name; empty with the distributed optimizer, which splits them.
        weights: Parameters after the step by global name.
        slices: Which part of a parameter these are.
        values: What each quantiser gave, call by call.
        digests: Digest of the quantised expert weights, before and after the step.
        report: Counts of the quantisers, summed over all ranks.
        guided: Rows that this rank guided, by site.
        hint_bytes: Bytes of hints that were read.
    """

    layout: RankLayout
    shape: ModelShape
    replica: int
    loss: list[float]
    grads: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    slices: dict[str, Slice]
    values: dict[Place, list[torch.Tensor]]
    digests: tuple[str, str]
    report: TraceReport
    guided: dict[Site, int]
    hint_bytes: int


def train_layouts(
    rank: int, tasks: Mapping[str, Task], folder: Path, *, timeout_s: float | None = None
) -> Iterator[tuple[str, Outcome]]:
    """Trains a step in one layout after another, on one of the processes of `run_ranks`.

    Neighbours with the same sizes share their process groups, whose start takes seconds with NCCL.
    Says on stderr how long each took.

    Args:
        rank: This process.
        tasks: What is given, by name of the layout; each takes all processes.
        folder: Folder for the file stores of the process groups, fresh for this call.
        timeout_s: Seconds of one layout after which this process prints where it stands, and ends.

    Yields:
        Name of the layout, and what it gave.
    """
    world_size = dist.get_world_size()
    sizes: Mapping[str, int] | None = None
    for number, (name, task) in enumerate(tasks.items()):
        if timeout_s is not None:
            faulthandler.dump_traceback_later(timeout_s, exit=True)
        begun = time.perf_counter()
        if task.parallel != sizes:
            if sizes is not None:
                parallel_state.destroy_model_parallel()
            # A group left open keeps its connections, and there are dozens a layout.
            dist.barrier()
            dist.destroy_process_group()
            store = folder / f"store-{number}"
            init_rank(store, rank=rank, world_size=world_size, seed=0, **task.parallel)
            sizes = task.parallel
        grouped = time.perf_counter()
        sys.stderr.write(f"{name}: groups in {grouped - begun:.1f} s\n")
        try:
            outcome = train_step(task)
        except BaseException as error:
            error.add_note(f"in layout {name}")
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()
        sys.stderr.write(f"{name}: step in {time.perf_counter() - grouped:.1f} s\n")
        yield name, outcome
    parallel_state.destroy_model_parallel()


def train_step(task: Task, *, alone: bool = False) -> Outcome:
    """Trains one step on this rank of an initialised layout.

    Args:
        task: What is given.
        alone: Whether this is the only rank, and forwards the samples of all replicas.
    """
    parallel = {} if alone else dict(task.parallel)
    parallel["sequence_parallel"] = parallel.get("tensor_model_parallel_size", 1) > 1
    model, sites = tiny_trainer(
        "trace",
        settings=task.settings,
        config={**task.config, **parallel},
        dtype=task.dtype,
        pattern=task.pattern.replace("|", "") if alone else task.pattern,
        **task.trace,
    )
    names, slices = parts_of_whole(model, sites)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(slices[names[name]].of(task.weights[names[name]]))
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=task.distributed_optimizer)
    ddp = DistributedDataParallel(model.config, ddp_config, model)
    optimizer: Any = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            # Adam divides by the gradient's size: this large, noise stays noise.
            adam_eps=1e-2,
            weight_decay=0.0,
            clip_grad=1.0,
            params_dtype=task.dtype,
            bf16=task.dtype == torch.bfloat16,
            use_distributed_optimizer=task.distributed_optimizer,
        ),
        [ddp],
    )
    ddp.zero_grad_buffer()
    replica = 0 if alone else parallel_state.get_data_parallel_rank()
    parts = task.replicas if alone else task.replicas[replica : replica + 1]
    hints = HintFiles(task.hint_folder)
    num_tokens = sum(len(s.response_tokens) for part in task.replicas for s in part)
    # DDP averages over these ranks, and each has the gradient of its own tokens.
    num_averaged = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    losses = []
    before = expert_weight_digest(model, sites)
    with seen_values(sites) as seen:
        for samples in parts:
            make = partial(
                make_micro_batch,
                samples,
                hints,
                sites,
                num_positions=task.num_positions,
                packed=task.packed,
            )
            micro_batch = agreed(make, _world())
            if parallel.get("pipeline_model_parallel_size", 1) > 1:
                losses += _pipelined(ddp, micro_batch, 1 / num_tokens)
                continue
            with sites.micro_batch(micro_batch):
                logprobs = token_logprobs(ddp, sites, micro_batch)
                loss = -logprobs[micro_batch.loss_mask].sum()
                (loss * num_averaged / num_tokens).backward()
            losses.append(loss.item())
    finalize_model_grads([ddp])
    sites.assert_ran()
    grads: dict[str, torch.Tensor] = {}
    if not task.distributed_optimizer:
        grads = {names[n]: _grad(p).cpu().clone() for n, p in model.named_parameters()}
    done, _, _ = optimizer.step()
    if not done:
        raise RuntimeError("the optimizer skipped its step: a gradient is not finite")
    report = sites.report()
    return Outcome(
        layout=sites.shape.layout,
        shape=sites.shape,
        replica=replica,
        loss=losses,
        grads=grads,
        weights={names[n]: p.detach().cpu().clone() for n, p in model.named_parameters()},
        slices=slices,
        values={place: [x.cpu() for x in values.outputs] for place, values in seen.items()},
        digests=(before, expert_weight_digest(model, sites)),
        report=summed_report(report, _world()),
        guided={site: counts.guided for site, counts in report.sites.items()},
        hint_bytes=hints.bytes_read.tensor_bytes,
    )


def _pipelined(
    ddp: DistributedDataParallel, micro_batch: MicroBatch, loss_scale: float
) -> list[float]:
    """Trains on a micro-batch by Megatron's schedule; gives the loss on the last stage only."""
    seq_length, micro_batch_size = micro_batch.forward_shape
    # The schedule multiplies by the context-parallel ranks.
    loss_scale *= parallel_state.get_data_parallel_world_size()

    def loss_of(logprobs: torch.Tensor, given: MicroBatch) -> tuple[torch.Tensor, float]:
        loss = -logprobs[given.loss_mask].sum()
        return loss * loss_scale, loss.item()

    return get_forward_backward_func()(
        forward_step_func=trainer_forward_step(loss_of),
        data_iterator=iter([micro_batch]),
        model=[ddp],
        num_microbatches=1,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        forward_only=False,
    )


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "the layout is initialised"
    return group


def _grad(parameter: Any) -> torch.Tensor:
    return parameter.main_grad


def parts_of_whole(
    model: HybridModel, sites: TraceSites
) -> tuple[dict[str, str], dict[str, Slice]]:
    """Gives which parameters of the whole model a rank has.

    Returns:
        names: Name in the whole model, as on one rank, by name in this rank's.
        slices: Which part of it, by name in the whole model.
    """
    decoder: Any = model.decoder
    numbers = [layer.layer_number - 1 for layer in decoder.layers]
    names = {
        name: _global_name(local_name(name), sites.shape, numbers)
        for name, _ in model.named_parameters()
    }
    sections = _delta_net_sections(model)
    slices = {
        names[name]: slice_of(local_name(name), parameter, sites.shape.layout, sections.get(name))
        for name, parameter in model.named_parameters()
    }
    return names, slices


def _global_name(name: str, shape: ModelShape, layers: Sequence[int]) -> str:
    """Gives a parameter's name with the global indices of its layer and expert."""
    parts = name.split(".")
    if "layers" in parts:
        index = parts.index("layers") + 1
        parts[index] = str(layers[int(parts[index])])
    if "local_experts" in parts:
        first = min(expert for _, expert, _ in shape.expert_matrices)
        index = parts.index("local_experts") + 1
        parts[index] = str(int(parts[index]) + first)
    return ".".join(parts)


def slice_of(
    name: str, parameter: Any, layout: RankLayout, sections: Sequence[int] | None = None
) -> Slice:
    """Gives which part of the whole parameter, named as on one rank, a rank has.

    Args:
        name: Name of the parameter.
        parameter: This rank's part.
        layout: Where the rank stands.
        sections: Sizes of the parts of this rank's, where the parameter does not say them.
    """
    if not getattr(parameter, "tensor_model_parallel", False):
        return Slice(0, 1, 0, sections=(parameter.shape[0],))
    size, rank = layout.tp_size, layout.tp_rank
    if "local_experts" in name:
        size, rank = layout.etp_size, layout.etp_rank
    own = parameter.shape[parameter.partition_dim]
    if sections is None:
        # A grouped linear does not say of its fc1 that gate and up are split each by itself.
        has_halves = getattr(parameter, "partition_stride", 1) == 2 or name.endswith(
            "linear_fc1.weight"
        )
        sections = (own // 2, own // 2) if has_halves else (own,)
    return Slice(parameter.partition_dim, size, rank, tuple(size * part for part in sections))


def _delta_net_sections(model: HybridModel) -> dict[str, tuple[int, ...]]:
    """Gives the parts of Gated DeltaNet's parameters that tensor parallelism splits each alone."""
    return {
        f"{name}.{parameter}": sections
        for name, module in model.named_modules()
        if isinstance(module, LocalGatedDeltaNet)
        for parameter, sections in module.split_sections.items()
    }
