"""HintReader: a process of its own that reads micro-batches into memory shared with the trainer.

    trainer: next samples --names or arrays--> process: map, check, place
    device <--one copy-- shared page-locked memory <--+

A thread of the trainer would do the same work, but each of its calls of Python or torch takes
Python's lock, and the training waits for it as often.
"""

from __future__ import annotations

import itertools
import json
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megatron_trace.hints.files import HintFiles, HintSource
from megatron_trace.hints.folders import HintFolders
from megatron_trace.hints.types import RolloutSample
from megatron_trace.training.micro_batch import MovedMicroBatch, moved_micro_batch
from megatron_trace.training.reader_messages import (
    Begin,
    Channel,
    EndedError,
    Failed,
    Map,
    Read,
    Size,
    Stage,
    Unmap,
    sample_message,
)
from megatron_trace.training.shared_content import content_in
from megatron_trace.training.shared_memory import Segment, rounded_bytes
from megatron_trace.training.sites import TraceSites

HintReaderChoice = Literal["auto", "process", "thread"]

# What is told to all processes of a job at once: the trainer may save a checkpoint first, for which
# it must finish its step. The process ends with it in any case.
_FOR_THE_TRAINER = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
# As multiprocessing's own start method `spawn` does, but without the trainer's main module.
_START = (
    "import json, signal, sys; sys.path[:] = json.loads(sys.argv[2]); "
    f"[signal.signal(getattr(signal, of), signal.SIG_IGN) for of in {_FOR_THE_TRAINER}]; "
    "from megatron_trace.training.read_hints import main; main(int(sys.argv[1]))"
)
_PATIENCE_S = 60.0
_CLOSED = "the process that reads hints was closed: take all micro-batches before HintReader.close"


@dataclass(frozen=True, eq=False)
class SharedMicroBatch:
    """A micro-batch in shared memory.

    Attributes:
        segment: The memory.
        num_bytes: Bytes of it that the micro-batch takes.
        told: Its content, as `content_in` takes it.
        sites: `TraceSites` of the model that will forward it.
    """

    segment: Segment
    num_bytes: int
    told: bytes
    sites: TraceSites

    def moved(self, *, non_blocking: bool) -> MovedMicroBatch:
        """Gives the micro-batch to forward, in other memory, and what memory that is.

        Args:
            non_blocking: Whether the copy is left to the current stream.

        Raises:
            RuntimeError: The reader was closed, and the memory went with it.
        """
        if self.segment.is_closed:
            raise RuntimeError(_CLOSED)
        memory = self.segment.memory[: self.num_bytes]
        there = memory.to(self.sites.device, non_blocking=non_blocking, copy=True)
        return moved_micro_batch(content_in(there, self.told), there, self.sites)


class HintReader:
    """A process that reads micro-batches, of any number of model chunks of this process.

    It is started when it is first used, or by `start`, and kept for later passes: a start takes
    seconds, and page-locking memory half a second a GiB. Call `close` at the end; it also ends with
    the trainer, however that ends. Safe to use from several threads.

    Args:
        device: Device of the models; a GPU has the memory page-locked.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Held while a message is answered, which takes long; the other one never is.
        self._exchange, self._state = threading.Lock(), threading.Lock()
        self._numbers = itertools.count()
        self._child: _Child | None = None
        # Each segment, and the client that has it; None if it is free.
        self._segments: dict[int, tuple[Segment, int | None]] = {}
        self._ended: list[int] = []
        self._closed = False

    @property
    def process_id(self) -> int | None:
        """Number of the process; None before it is started and after `close`."""
        return None if self._child is None else self._child.process.pid

    def start(self) -> None:
        """Starts the process, if it does not run yet; does not wait until it has started.

        Raises:
            RuntimeError: It cannot be started.
        """
        with self._exchange:
            self._running()

    def new_client(self) -> int:
        """Gives the number of a new client, which will `begin`."""
        return next(self._numbers)

    def begin(self, client: int, sites: TraceSites) -> None:
        """Says which model chunk a client wants micro-batches of.

        Args:
            client: The client.
            sites: Its `TraceSites`; its settings must not change.

        Raises:
            RuntimeError: The process cannot be started, or has ended.
        """
        with self._state:
            ended, self._ended = tuple(self._ended), []
        self._ask(Begin(client, sites.staging_plan(), ended))

    def read(
        self,
        client: int,
        samples: Sequence[RolloutSample] | Sequence[str],
        store: HintSource | None,
        *,
        padding_token: int,
        num_positions: int | None,
        packed: bool,
    ) -> Size:
        """Says which micro-batch a client wants next, and gives what it takes.

        Args:
            client: The client.
            samples: The samples, or their names in the store.
            store: Where the hints are.
            padding_token: As of `make_micro_batch`, like the next ones.
            num_positions: S or T, or None.
            packed: Whether samples stand one after another.

        Raises:
            ValueError: See `make_micro_batch`; or the store is not one of files.
            RuntimeError: The process has ended.
        """
        folders = None
        if store is not None:
            files = require_files(store)
            names = [of if isinstance(of, str) else of.sample_id for of in samples]
            folders = tuple(files.folder_of(name).absolute() for name in names)
        sent = tuple(of if isinstance(of, str) else sample_message(of) for of in samples)
        return self._ask(Read(client, sent, folders, padding_token, num_positions, packed))

    def stage(self, client: int, size: Size, sites: TraceSites) -> SharedMicroBatch:
        """Gives the micro-batch that was asked for last; `release` its segment after its use.

        Raises:
            LookupError: See `make_micro_batch`.
            ValueError: See `make_micro_batch`.
            RuntimeError: The process has ended, or there is no shared memory.
        """
        segment = self._segment_of(client, size.num_bytes)
        told = self._ask(Stage(client, segment.number))
        return SharedMicroBatch(segment, size.num_bytes, told, sites)

    def release(self, segment: Segment) -> None:
        """Says that nothing copies from a segment any more; does not wait."""
        with self._state:
            if segment.number in self._segments:  # Else it went with `close`.
                self._segments[segment.number] = segment, None

    def end(self, client: int) -> None:
        """Ends a client: its segments are free; does not wait."""
        with self._state:
            self._ended.append(client)
            for number, (segment, owner) in self._segments.items():
                if owner == client:
                    self._segments[number] = segment, None

    def close(self) -> None:
        """Ends the process and gives back the memory; clients have ended, and copies."""
        with self._exchange, self._state:
            self._closed = True
            if self._child is not None:
                self._child.close()
                self._child = None
            for segment, _ in self._segments.values():
                segment.close()
            self._segments.clear()

    def _ask(self, message: object, *, descriptor: int | None = None) -> Any:
        with self._exchange:
            reply = self._running().ask(message, descriptor)
        if isinstance(reply, Failed):
            raise reply.error
        return reply

    def _running(self) -> _Child:
        if self._closed:
            raise RuntimeError(_CLOSED)
        if self._child is None:
            self._child = _Child()
        return self._child

    def _segment_of(self, client: int, num_bytes: int) -> Segment:
        with self._state:
            free = [segment for segment, owner in self._segments.values() if owner is None]
            fitting = [segment for segment in free if segment.num_bytes >= num_bytes]
            if fitting:
                segment = min(fitting, key=lambda segment: segment.num_bytes)
                self._segments[segment.number] = segment, client
                return segment
            # All are too small. As many go as make up for the new one: what is kept does not grow
            # beyond what was in use at a time.
            size, given_back = rounded_bytes(num_bytes), list[Segment]()
            for segment in sorted(free, key=lambda segment: segment.num_bytes):
                if sum(of.num_bytes for of in given_back) >= size:
                    break
                given_back.append(self._segments.pop(segment.number)[0])
        for segment in given_back:
            segment.close()
            self._ask(Unmap(segment.number))
        segment = Segment(next(self._numbers), size, self._device)
        try:
            self._ask(Map(segment.number, size), descriptor=segment.descriptor)
        except BaseException:
            segment.close()
            raise
        segment.close_descriptor()
        with self._state:
            self._segments[segment.number] = segment, client
        return segment


class _Child:
    """The process, and the way to it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # As an import does, which passes over all else.
            folders = [of for of in sys.path if isinstance(of, str)]
            command = [sys.executable, "-c", _START, str(theirs.fileno()), json.dumps(folders)]
            try:
                self.process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
                )
            except OSError as error:
                ours.close()
                raise RuntimeError(
                    f"the process that reads hints cannot be started ({error}); choose "
                    "--trace-hint-reader thread"
                ) from error
        self._channel = Channel(ours)
        self._is_ready = False
        # Also when the trainer ends without a word; then it finds the connection closed.
        self.close = weakref.finalize(self, _end, self.process, ours)

    def ask(self, message: object, descriptor: int | None) -> Any:
        """Gives the answer to a message; waits for it."""
        try:
            if not self._is_ready:
                self._channel.receive()
                self._is_ready = True
            self._channel.send(message, descriptor=descriptor)
            return self._channel.receive()
        except EndedError:
            raise RuntimeError(self._why_it_ended()) from None

    def _why_it_ended(self) -> str:
        try:
            code = self.process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            return f"the process that reads hints ({self.process.pid}) does not answer any more"
        if not self._is_ready:
            return (
                f"the process that reads hints could not start (exit status {code}; its own words "
                f"are above): {sys.executable} must find megatron_trace; or choose "
                "--trace-hint-reader thread"
            )
        by = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
        cure = (
            "; the system kills so what takes too much memory: raise the memory of the job, or "
            "lower --trace-hint-memory-mb"
            if code == -signal.SIGKILL
            else "; its own words, if any, are above"
        )
        return f"the process that reads hints ({self.process.pid}) ended {by}{cure}"


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    """Ends the process at once: nothing of it is wanted, and it may be amid its imports."""
    connection.close()
    process.kill()
    process.wait()


def require_files(store: HintSource) -> HintFiles | HintFolders:
    """Gives a store that another process can read.

    Raises:
        ValueError: It is in the memory of this one.
    """
    if isinstance(store, HintFiles | HintFolders):
        return store
    raise ValueError(
        f"a process of its own cannot read hints in memory ({type(store).__name__}): write them to "
        "files, or choose --trace-hint-reader thread"
    )


def wants_process(choice: HintReaderChoice, device: torch.device, store: HintSource | None) -> bool:
    """Says whether a process of its own reads hints ahead, and not a thread.

    Args:
        choice: What was asked for; `auto` takes a process where a GPU would wait for a thread.
        device: Device of the model.
        store: Where the hints are.

    Raises:
        ValueError: A process was asked for, but the hints are in memory.
    """
    if choice == "process" and store is not None:
        require_files(store)
    if choice != "auto":
        return choice == "process"
    return device.type == "cuda" and isinstance(store, HintFiles | HintFolders)
