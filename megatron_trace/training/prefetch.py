"""Micro-batches read ahead by one thread, within a bound on the host memory of their hints.

    files -- thread: map, check, copy --> page-locked host memory -- side stream --> device
             at most `max_host_bytes` of hints                       one micro-batch ahead

Each micro-batch is what `make_micro_batch` gives, in the same order: only when it is read differs.
On a CPU the thread is all there is, and a micro-batch's own memory is the host's.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

import torch

from megatron_trace.hints.files import HintFiles, HintSource
from megatron_trace.hints.types import RolloutSample
from megatron_trace.training.micro_batch import (
    MicroBatch,
    StagedMicroBatch,
    map_tensors,
    planned_hint_bytes,
    stage_micro_batch,
)
from megatron_trace.training.sites import TraceSites

# Without a bound on bytes: the item in use, and the next one.
_ITEMS_WITHOUT_BOUND = 2


@dataclass(frozen=True)
class Job[T]:
    """Something to make, and the bytes that it will hold.

    Attributes:
        num_bytes: Bytes, at most.
        build: Makes it.
    """

    num_bytes: int
    build: Callable[[], T]


@dataclass(frozen=True, eq=False)
class Held[T]:
    """Something that was made, whose bytes count until it is given back."""

    item: T
    num_bytes: int


class ReadAhead[T]:
    """Does jobs in one thread, in order, while the bytes of what is held stay within a bound.

    What was taken counts until it is released; release it before waiting for the next one.

    Args:
        jobs: Iterated in the thread, like all that it reads from.
        max_bytes: Most bytes that may be held; None for one item more than the one in use.

    Attributes:
        peak_bytes: Most bytes that were held at a time.
    """

    def __init__(self, jobs: Iterable[Job[T]], *, max_bytes: int | None) -> None:
        self.peak_bytes = 0
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._ready: deque[Held[T]] = deque()
        self._held_items = self._held_bytes = 0
        self._error: BaseException | None = None
        self._ended = self._closed = False
        self._thread = threading.Thread(
            target=self._work, args=(jobs,), name="trace-prefetch", daemon=True
        )
        self._thread.start()

    def take(self, *, wait: bool = True) -> Held[T] | None:
        """Gives the next item; None after the last one.

        Args:
            wait: Whether to wait for it; if not, None also says that it is not there yet.

        Raises:
            BaseException: What making this item raised; of a bound that it exceeds, ValueError.
        """
        with self._changed:
            while wait and not (self._ready or self._ended):
                self._changed.wait()
            if self._ready:
                return self._ready.popleft()
            if wait and self._error is not None:
                raise self._error
            return None

    def release(self, held: Held[T]) -> None:
        """Says that the memory of an item that was taken is free again."""
        with self._changed:
            self._held_items -= 1
            self._held_bytes -= held.num_bytes
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread, after the item that it is making."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join()

    def _work(self, jobs: Iterable[Job[T]]) -> None:
        error = None
        try:
            for job in jobs:
                if not self._reserve(job.num_bytes):
                    break
                held = Held(job.build(), job.num_bytes)
                # Nothing of it may outlive its use by waiting here for the next one.
                del job
                self._give(held)
                del held
        except BaseException as raised:  # noqa: BLE001  `take` raises it in the consumer's thread.
            error = raised
        with self._changed:
            self._error, self._ended = error, True
            self._changed.notify_all()

    def _reserve(self, num_bytes: int) -> bool:
        """Waits until so many bytes may be held; gives False if nobody wants them any more."""
        require_within(num_bytes, self._max_bytes)
        with self._changed:
            while not self._closed and self._is_full(num_bytes):
                self._changed.wait()
            self._held_items += 1
            self._held_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self._held_bytes)
            return not self._closed

    def _is_full(self, num_bytes: int) -> bool:
        if self._max_bytes is None:
            return self._held_items >= _ITEMS_WITHOUT_BOUND
        return self._held_bytes + num_bytes > self._max_bytes

    def _give(self, held: Held[T]) -> None:
        with self._changed:
            if not self._closed:
                self._ready.append(held)
            self._changed.notify_all()


@dataclass(frozen=True, eq=False)
class _OnDevice:
    micro_batch: MicroBatch
    held: Held[StagedMicroBatch]
    copied: torch.cuda.Event | None


class MicroBatchPrefetcher:
    """Iterates over micro-batches that are read ahead; a context manager, or call `close`.

    The hints of a micro-batch count as held from before they are read until the next one is asked
    for, so reading overlaps with training if the bound holds two. One whose hints alone exceed the
    bound raises. On a GPU what counts is page-locked memory (torch rounds each tensor of it up to
    a power of two), and the copy of the next micro-batch runs beside the use of this one.
    Beyond the bound come the mapped pages of the micro-batch that is being read, which the system
    can drop, and on a CPU those micro-batches that a pipeline has in flight.

    Args:
        batches: The samples of each micro-batch; iterated in the thread.
        store: Where the hints are; the prefetcher's own, as `HintFiles` is not safe for two
            threads. Files of samples that were read are closed again.
        sites: `TraceSites` of the model that will forward them; its settings must not change.
        max_host_bytes: Most bytes of hints that may be held; None for one micro-batch ahead.
        padding_token: Token id of padding.
        num_positions: S of all micro-batches, or T; None takes the least of each.
        packed: Whether samples stand one after another.
    """

    def __init__(
        self,
        batches: Iterable[Sequence[RolloutSample]],
        store: HintSource | None,
        sites: TraceSites,
        *,
        max_host_bytes: int | None,
        padding_token: int = 0,
        num_positions: int | None = None,
        packed: bool = False,
    ) -> None:
        self._device = sites.device
        on_gpu = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if on_gpu else None
        self._in_use: _OnDevice | None = None
        self._next: _OnDevice | None = None
        self._ahead = ReadAhead(
            (
                reading_job(
                    samples,
                    store,
                    sites,
                    padding_token=padding_token,
                    num_positions=num_positions,
                    packed=packed,
                    pin_memory=on_gpu,
                )
                for samples in batches
            ),
            max_bytes=max_host_bytes,
        )

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
            map_tensors(current.micro_batch, partial(_used_on, stream))
        return current.micro_batch

    def close(self) -> None:
        """Ends the thread; micro-batches that were given stay valid."""
        self._release_in_use()
        if self._next is not None and self._next.copied is not None:
            self._next.copied.synchronize()
        self._next = None
        self._ahead.close()

    def _moved(self, held: Held[StagedMicroBatch] | None) -> _OnDevice | None:
        if held is None:
            return None
        if self._stream is None:
            return _OnDevice(held.item.on_device(), held, None)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            micro_batch, copied = held.item.on_device(non_blocking=True), torch.cuda.Event()
            copied.record(self._stream)
        return _OnDevice(micro_batch, held, copied)

    def _release_in_use(self) -> None:
        if self._in_use is None:
            return
        if self._in_use.copied is not None:
            self._in_use.copied.synchronize()
        held, self._in_use = self._in_use.held, None
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
    job = reading_job(samples, store, sites, num_positions=num_positions, packed=packed)
    require_within(job.num_bytes, max_host_bytes)
    return job.build().on_device()


def reading_job(
    samples: Sequence[RolloutSample],
    store: HintSource | None,
    sites: TraceSites,
    *,
    padding_token: int = 0,
    num_positions: int | None = None,
    packed: bool = False,
    pin_memory: bool = False,
) -> Job[StagedMicroBatch]:
    """Gives the job of reading a micro-batch, arguments as those of `stage_micro_batch`."""

    def build() -> StagedMicroBatch:
        # A thread begins on device 0, where page-locked memory would make it a context.
        device = torch.cuda.device(sites.device) if pin_memory else contextlib.nullcontext()
        with device:
            staged = stage_micro_batch(
                samples,
                store,
                sites,
                padding_token=padding_token,
                num_positions=num_positions,
                packed=packed,
                pin_memory=pin_memory,
            )
        if isinstance(store, HintFiles):
            store.release(sample.sample_id for sample in samples)
        return staged

    planned = planned_hint_bytes(samples, store, sites, num_positions=num_positions, packed=packed)
    return Job(planned, build)


def require_within(num_bytes: int, max_bytes: int | None) -> None:
    """Raises ValueError if a micro-batch's hints alone exceed the bound."""
    if max_bytes is not None and num_bytes > max_bytes:
        raise ValueError(
            f"the hints of a micro-batch take {num_bytes} bytes, but at most {max_bytes} may be "
            "held; raise the bound (--trace-hint-memory-mb), or make micro-batches smaller "
            "(--micro-batch-size)"
        )


def _used_on(stream: torch.cuda.Stream, tensor: torch.Tensor) -> torch.Tensor:
    tensor.record_stream(stream)
    return tensor
