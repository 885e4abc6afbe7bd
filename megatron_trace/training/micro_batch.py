"""MicroBatch: rollout samples in the row order of the trainer model, with hints and routing.

Samples stand side by side, padded on the right, or packed one after another (`row_order`). Under
tensor, sequence and context parallelism every rank of a data-parallel replica makes the micro-batch
of the same samples, and takes its own rows and columns of their hints and routing.

    samples --batch_rows--> tokens, masks, routing --+
    store --batch_hints--> hints, codes -------------+--> staged on the host --> on the device
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Self

import torch

from megatron_trace.hints.files import HintSource
from megatron_trace.hints.types import RolloutSample
from megatron_trace.training.batch_content import BatchContent, map_tensors
from megatron_trace.training.staging import StagingMemory
from megatron_trace.training.staging_job import StagingJob

if TYPE_CHECKING:
    from megatron_trace.training.sites import TraceSites


@dataclass(frozen=True, eq=False)
class MicroBatch(BatchContent):
    """Samples that are forwarded together, on the model's device.

    Attributes:
        made_for: `TraceSites` of the model that forwards it.
    """

    made_for: TraceSites = field(kw_only=True)

    @classmethod
    def of(cls, content: BatchContent, sites: TraceSites) -> Self:
        """Gives content that is on the model's device as a micro-batch of the model."""
        own = {part.name: getattr(content, part.name) for part in fields(BatchContent)}
        return cls(**own, made_for=sites)


@dataclass(frozen=True)
class MovedMicroBatch:
    """A micro-batch that was brought to the model's device.

    Attributes:
        micro_batch: The micro-batch.
        memories: A tensor of each piece of memory that its tensors are in.
    """

    micro_batch: MicroBatch
    memories: tuple[torch.Tensor, ...]


def moved_micro_batch(
    content: BatchContent, memory: torch.Tensor, sites: TraceSites
) -> MovedMicroBatch:
    """Gives the micro-batch of content that is on the model's device.

    Args:
        content: The content, residues of block scales still packed.
        memory: What all its tensors are parts of.
        sites: `TraceSites` of the model that will forward it.
    """
    memories, records = [memory], []
    for packed in (content.hints, content.codes):
        unpacked = {
            place: rows.unpacked(sites.trace.implementation) for place, rows in packed.items()
        }
        memories += [
            rows.scale_bytes for place, rows in unpacked.items() if rows is not packed[place]
        ]
        records.append(unpacked)
    content = replace(content, hints=records[0], codes=records[1])
    return MovedMicroBatch(MicroBatch.of(content, sites), tuple(memories))


@dataclass(frozen=True, eq=False)
class StagedMicroBatch:
    """A micro-batch that was read, but is not on the model's device yet.

    Attributes:
        on_host: Its content where the hints were read to, residues of block scales still packed.
        memory: What all its tensors are parts of.
        sites: `TraceSites` of the model that will forward it.
    """

    on_host: BatchContent
    memory: StagingMemory
    sites: TraceSites

    def on_device(self, *, non_blocking: bool = False) -> MicroBatch:
        """Gives the micro-batch to forward.

        Args:
            non_blocking: Whether copies from page-locked memory are left to the current stream.
        """
        return self.moved(non_blocking=non_blocking).micro_batch

    def moved(self, *, non_blocking: bool) -> MovedMicroBatch:
        """Gives the micro-batch to forward, and what memory it is in."""
        there, found = self.memory.moved(self.sites.device, non_blocking=non_blocking)
        return moved_micro_batch(map_tensors(self.on_host, found), there, self.sites)


def make_micro_batch(
    samples: Sequence[RolloutSample],
    store: HintSource | None,
    sites: TraceSites,
    *,
    padding_token: int = 0,
    num_positions: int | None = None,
    packed: bool = False,
) -> MicroBatch:
    """Assembles samples, their hints and their routing for one forward pass of a trainer model.

    With pipelining each chunk of the model gets its own, of the same samples: it has the hints and
    routing of the layers that the chunk holds, and no other hint is read.

    Args:
        samples: Finished rollouts; an empty response is allowed and contributes no loss.
        store: Where the hints are. Not read by the methods bf16 and qat, but for diagnostics.
        sites: `TraceSites` of the model that will forward the micro-batch.
        padding_token: Token id of padding.
        num_positions: S, where several micro-batches must have the same, or of a pack its T over
            all ranks; None takes the least.
        packed: Whether samples stand one after another in one sequence, instead of side by side.

    Raises:
        LookupError: A recorded place has no hint, and `missing_hints` is `error`.
        ValueError: The samples do not fit the model, S or T, or hints are of another policy
            version, other quantiser settings, or another shape; or the model cannot forward packs.
    """
    return stage_micro_batch(
        samples,
        store,
        sites,
        padding_token=padding_token,
        num_positions=num_positions,
        packed=packed,
    ).on_device()


def stage_micro_batch(
    samples: Sequence[RolloutSample],
    store: HintSource | None,
    sites: TraceSites,
    *,
    padding_token: int = 0,
    num_positions: int | None = None,
    packed: bool = False,
    pin_memory: bool = False,
) -> StagedMicroBatch:
    """Reads what `make_micro_batch` reads, and leaves it on the host.

    Args:
        samples: As of `make_micro_batch`, like the next ones.
        store: Where the hints are.
        sites: `TraceSites` of the model that will forward the micro-batch.
        padding_token: Token id of padding.
        num_positions: S or T, or None.
        packed: Whether samples stand one after another.
        pin_memory: Whether its memory is page-locked, from which a stream can copy while other
            work goes on.

    Raises:
        LookupError: See `make_micro_batch`.
        ValueError: See `make_micro_batch`.
    """
    job = StagingJob(
        samples,
        store,
        sites.staging_plan(),
        padding_token=padding_token,
        num_positions=num_positions,
        packed=packed,
    )
    return staged(job, sites, pin_memory=pin_memory)


def staged(job: StagingJob, sites: TraceSites, *, pin_memory: bool) -> StagedMicroBatch:
    """Does a job in memory of its own; arguments and errors as of `stage_micro_batch`."""
    memory = StagingMemory.new(job.num_bytes, pin_memory=pin_memory)
    return StagedMicroBatch(job.content(memory), memory, sites)


def planned_hint_bytes(
    samples: Sequence[RolloutSample],
    store: HintSource | None,
    sites: TraceSites,
    *,
    num_positions: int | None = None,
    packed: bool = False,
) -> int:
    """Gives `hint_bytes` of the micro-batch that `stage_micro_batch` would give on the host.

    No hint is read for it, so it counts those of every recorded place, also where `missing_hints`
    allows that none is found.

    Raises:
        ValueError: The samples do not fit the model, S or T.
    """
    plan = sites.staging_plan()
    job = StagingJob(samples, store, plan, num_positions=num_positions, packed=packed)
    return job.hint_bytes
