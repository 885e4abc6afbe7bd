"""Micro-batches read ahead, within a bound on the host memory of their hints.

    files -- process or thread: map, check, copy --> page-locked memory -- side stream --> device
             at most `max_host_bytes` of hints                          one micro-batch ahead

Each micro-batch is what `make_micro_batch` gives, in the same order: only when it is read differs.
A thread reads by itself; for a process (`HintReader`) it only carries messages. On a CPU the host's
memory is the device's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

import torch

from megatron_trace.hints.files import HintFiles, HintSource
from megatron_trace.hints.folders import HintFolders
from megatron_trace.hints.types import RolloutSample
from megatron_trace.training.hint_reader import HintReader, SharedMicroBatch, require_files
from megatron_trace.training.micro_batch import (
    MicroBatch,
    MovedMicroBatch,
    StagedMicroBatch,
    staged,
)
from megatron_trace.training.read_ahead import Held, Job, ReadAhead, require_within
from megatron_trace.training.sites import TraceSites
from megatron_trace.training.staging_job import StagingJob

# Samples of a micro-batch, or their names in a store of files.
Wanted = Sequence[RolloutSample] | Sequence[str]
OnHost = StagedMicroBatch | SharedMicroBatch


@dataclass(frozen=True, eq=False)
class _OnDevice:
    moved: MovedMicroBatch
    held: Held[OnHost]
    copied: torch.cuda.Event | None


class MicroBatchPrefetcher:
    """Iterates over micro-batches that are read ahead; a context manager, or call `close`.

    The hints of a micro-batch count as held from before they are read until the next one is asked
    for, so reading overlaps with training if the bound holds two. One whose hints alone exceed the
    bound raises. On a GPU what counts is page-locked memory (a thread's is rounded up by torch,
    each micro-batch to a power of two; a process's to half of one), and the copy of the next
    micro-batch runs beside the use of this one. Beyond the bound come the mapped pages of the
    micro-batch that is being read, which the system can drop, and on a CPU those micro-batches that
    a pipeline has in flight.

    Args:
        batches: The samples of each micro-batch, or their names in a store of files, which is the
            cheaper way; iterated in a thread.
        store: Where the hints are. With a thread the prefetcher's own, as `HintFiles` is not safe
            for two; files of samples that were read are closed again.
        sites: `TraceSites` of the model that will forward them; its settings must not change.
        max_host_bytes: Most bytes of hints that may be held; None for one micro-batch ahead.
        padding_token: Token id of padding.
        num_positions: S of all micro-batches, or T; None takes the least of each.
        packed: Whether samples stand one after another.
        reader: Process that reads; None lets the thread do it.

    Raises:
        ValueError: There is a reader, but the hints are in memory.
    """

    def __init__(
        self,
        batches: Iterable[Wanted],
        store: HintSource | None,
        sites: TraceSites,
        *,
        max_host_bytes: int | None,
        padding_token: int = 0,
        num_positions: int | None = None,
        packed: bool = False,
        reader: HintReader | None = None,
    ) -> None:
        if reader is not None and store is not None:
            require_files(store)
        self._sites, self._device = sites, sites.device
        on_gpu = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if on_gpu else None
        self._in_use: _OnDevice | None = None
        self._next: _OnDevice | None = None
        self._reader = reader
        self._client = None if reader is None else reader.new_client()
        form = _Form(padding_token, num_positions, packed)
        if reader is None or self._client is None:
            jobs = (_reading_job(batch, store, sites, form, pin_memory=on_gpu) for batch in batches)
        else:
            jobs = _jobs_of(reader, self._client, batches, store, sites, form)
        self._ahead = ReadAhead[OnHost](jobs, max_bytes=max_host_bytes)

    @property
    def peak_host_bytes(self) -> int:
        """Most bytes of hints that were held at a time."""
        return self._ahead.peak_bytes

    def __enter__(self) -> Self:
        """Gives itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes it."""
        self.close()

    def __iter__(self) -> Iterator[MicroBatch]:
        """Gives itself."""
        return self

    def __next__(self) -> MicroBatch:
        """Gives the next micro-batch, on the model's device.

        Raises:
            LookupError: A hint of this micro-batch is missing, and `missing_hints` is `error`.
            ValueError: Its samples or hints do not fit, or exceed the bound.
        """
        self._release_in_use()
        current, self._next = self._next or self._moved(self._ahead.take()), None
        if current is None:
            raise StopIteration
        self._in_use = current
        if current.copied is not None:
            self._next = self._moved(self._ahead.take(wait=False))
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(current.copied)
            # Allocated on the side stream, which must not use the memory again before this one
            # is done with it.
            for memory in current.moved.memories:
                memory.record_stream(stream)
        return current.moved.micro_batch

    def close(self) -> None:
        """Ends the thread, and leaves the process to others; given micro-batches stay valid."""
        self._release_in_use()
        if self._next is not None and self._next.copied is not None:
            self._next.copied.synchronize()
        self._next = None
        self._ahead.close()
        if self._reader is not None and self._client is not None:
            self._reader.end(self._client)
            self._reader = None

    def _moved(self, held: Held[OnHost] | None) -> _OnDevice | None:
        if held is None:
            return None
        if self._stream is None:
            return _OnDevice(held.item.moved(non_blocking=False), held, None)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            moved, copied = held.item.moved(non_blocking=True), torch.cuda.Event()
            copied.record(self._stream)
        return _OnDevice(moved, held, copied)

    def _release_in_use(self) -> None:
        if self._in_use is None:
            return
        if self._in_use.copied is not None:
            self._in_use.copied.synchronize()
        held, self._in_use = self._in_use.held, None
        if self._reader is not None and isinstance(held.item, SharedMicroBatch):
            self._reader.release(held.item.segment)
        self._ahead.release(held)


def read_micro_batch(
    samples: Sequence[RolloutSample],
    store: HintSource | None,
    sites: TraceSites,
    *,
    max_host_bytes: int | None = None,
    num_positions: int | None = None,
    packed: bool = False,
) -> MicroBatch:
    """Gives the micro-batch that a prefetcher would give, read at once.

    Args:
        samples: Its samples.
        store: Where the hints are; files of the samples are closed again.
        sites: `TraceSites` of the model that will forward it.
        max_host_bytes: Most bytes that its hints may have.
        num_positions: S or T; None takes the least.
        packed: Whether samples stand one after another.

    Raises:
        LookupError: See `make_micro_batch`.
        ValueError: See `make_micro_batch`; or its hints exceed the bound.
    """
    form = _Form(num_positions=num_positions, packed=packed)
    job = _reading_job(samples, store, sites, form, pin_memory=False)
    require_within(job.num_bytes, max_host_bytes)
    return job.build().moved(non_blocking=False).micro_batch


@dataclass(frozen=True)
class _Form:
    """How samples become a micro-batch, as of `StagingJob`."""

    padding_token: int = 0
    num_positions: int | None = None
    packed: bool = False


def _reading_job(
    batch: Wanted, store: HintSource | None, sites: TraceSites, form: _Form, *, pin_memory: bool
) -> Job[OnHost]:
    """Gives the job of reading a micro-batch in this process."""
    files = store if isinstance(store, HintFiles | HintFolders) else None
    samples = [of if isinstance(of, RolloutSample) else _named(of, files) for of in batch]
    job = StagingJob(samples, store, sites.staging_plan(), **vars(form))

    def build() -> OnHost:
        # A thread begins on device 0, where page-locked memory would make it a context.
        device = torch.cuda.device(sites.device) if pin_memory else contextlib.nullcontext()
        with device:
            micro_batch = staged(job, sites, pin_memory=pin_memory)
        if files is not None:
            files.release(sample.sample_id for sample in samples)
        return micro_batch

    return Job(job.hint_bytes, build)


def _named(name: str, files: HintFiles | HintFolders | None) -> RolloutSample:
    if files is None:
        raise ValueError(f"sample {name} is given by its name, which needs hints in files")
    return files.sample(name)


def _jobs_of(
    reader: HintReader,
    client: int,
    batches: Iterable[Wanted],
    store: HintSource | None,
    sites: TraceSites,
    form: _Form,
) -> Iterator[Job[OnHost]]:
    """Gives the jobs of having micro-batches read; what they do, a process does."""
    reader.begin(client, sites)
    for batch in batches:
        size = reader.read(client, batch, store, **vars(form))
        yield Job(size.hint_bytes, partial(reader.stage, client, size, sites))
