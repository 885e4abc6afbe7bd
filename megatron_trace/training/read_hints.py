"""The process that reads hints ahead: started by `HintReader`, ended with its trainer.

It imports neither Megatron nor Transformer Engine and never touches a GPU.
"""

from __future__ import annotations

import mmap
import os
import pickle
import select
import socket
import traceback
from typing import Any

import torch

from megatron_trace.hints.folders import HintFolders
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
    sample_of,
)
from megatron_trace.training.shared_content import told
from megatron_trace.training.staging import StagingMemory
from megatron_trace.training.staging_job import StagingJob
from megatron_trace.training.staging_plan import StagingPlan

# How often it looks whether its trainer is still there, should nobody close the connection.
_LOOK_EVERY_S = 5.0


class _Reader:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._store = HintFolders()
        self._plans: dict[int, StagingPlan] = {}
        self._jobs: dict[int, tuple[StagingJob, list[str]]] = {}
        self._segments: dict[int, torch.Tensor] = {}

    def answer(self, message: Any) -> object:
        """Does what a message asks for."""
        match message:
            case Begin(client, plan, ended):
                for other in ended:
                    self._plans.pop(other, None)
                    _, unread = self._jobs.pop(other, (None, ()))
                    self._store.release(unread)
                self._plans[client] = plan
                self._store.refresh()
            case Read():
                return self._read(message)
            case Map(segment, num_bytes):
                self._segments[segment] = mapped(self._channel.receive_descriptor(), num_bytes)
            case Stage(client, segment):
                return self._stage(client, segment)
            case Unmap(segment):
                del self._segments[segment]
        return None

    def _read(self, message: Read) -> Size:
        names = [of if isinstance(of, str) else of["sample_id"] for of in message.samples]
        if message.folders is not None:
            self._store.sources.update(zip(names, message.folders, strict=True))
        samples = [
            self._store.sample(of) if isinstance(of, str) else sample_of(of)
            for of in message.samples
        ]
        job = StagingJob(
            samples,
            None if message.folders is None else self._store,
            self._plans[message.client],
            padding_token=message.padding_token,
            num_positions=message.num_positions,
            packed=message.packed,
        )
        self._jobs[message.client] = job, names
        return Size(job.hint_bytes, job.num_bytes)

    def _stage(self, client: int, segment: int) -> bytes:
        job, names = self._jobs.pop(client)
        memory = StagingMemory(self._segments[segment][: job.num_bytes].zero_())
        content = job.content(memory)
        self._store.release(names)
        return told(content, memory)


def mapped(descriptor: int, num_bytes: int) -> torch.Tensor:
    """Gives shared memory, uint8 [bytes], and closes its descriptor."""
    try:
        return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
    finally:
        os.close(descriptor)


def as_sent(error: Exception) -> Exception:
    """Gives an error that arrives as it is, with where it was raised."""
    sent = error
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  Its words arrive in any case.
        sent = RuntimeError(f"{type(error).__name__}: {error}")
    sent.add_note("in the process that reads hints:\n" + traceback.format_exc())
    return sent


def main(descriptor: int) -> None:
    """Answers messages until the trainer ends or closes the connection.

    Args:
        descriptor: The connection.
    """
    torch.set_num_threads(1)  # The training has the other cores.
    trainer = os.getppid()
    channel = Channel(socket.socket(fileno=descriptor))
    reader = _Reader(channel)
    # Not select, which takes no descriptor from 1024 on: a large job's trainer has that many open.
    waiting = select.poll()
    waiting.register(channel.connection, select.POLLIN)
    try:
        channel.send(None)
        while os.getppid() == trainer:
            if not waiting.poll(_LOOK_EVERY_S * 1000):
                continue
            message = channel.receive()
            try:
                reply = reader.answer(message)
            except EndedError:
                raise
            except Exception as error:  # noqa: BLE001  The trainer raises it.
                reply = Failed(as_sent(error))
            channel.send(reply)
    except EndedError:
        return
