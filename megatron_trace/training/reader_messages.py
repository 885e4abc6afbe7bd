"""What a trainer and the process that reads its hints say to each other, and how it travels.

    trainer                                reading process
    Begin(client, plan)          ----->    keeps the plan, looks what was committed meanwhile
    Read(client, samples, ...)   ----->    Size: what the micro-batch takes
    Map(segment) + descriptor    ----->    maps memory of the trainer's
    Stage(client, segment)       ----->    bytes: the content, its tensors as places in the segment
    Unmap(segment)               ----->    forgets it

Every message has one answer: what is said above, None, or a `Failed`.
"""

from __future__ import annotations

import pickle
import socket
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_trace.hints.types import RolloutSample
from megatron_trace.training.staging_plan import StagingPlan

# Length of the pickle, and number of buffers beside it, whose lengths follow.
_HEAD = struct.Struct("<QQ")
_TOKENS = ("prompt_tokens", "response_tokens")
# Most buffers of one call of the system.
_MOST_BUFFERS = 512


@dataclass(frozen=True)
class Begin:
    """Micro-batches of one model chunk are wanted, and of others no more.

    Attributes:
        client: Who wants them.
        plan: What is read for its model.
        ended: Those who want no more.
    """

    client: int
    plan: StagingPlan
    ended: tuple[int, ...]


@dataclass(frozen=True)
class Read:
    """A micro-batch is wanted.

    Attributes:
        client: Who wants it.
        samples: Its samples, or names of those that are read from the files.
        folders: Where the hints of each sample are; None if there are none.
        padding_token: As of `StagingJob`.
        num_positions: As of `StagingJob`.
        packed: As of `StagingJob`.
    """

    client: int
    samples: tuple[Mapping[str, Any] | str, ...]
    folders: tuple[Path, ...] | None
    padding_token: int
    num_positions: int | None
    packed: bool


@dataclass(frozen=True)
class Size:
    """What a micro-batch takes.

    Attributes:
        hint_bytes: Bytes of its hints and codes.
        num_bytes: Bytes of the memory for all its tensors.
    """

    hint_bytes: int
    num_bytes: int


@dataclass(frozen=True)
class Map:
    """Memory for micro-batches; its descriptor comes after the message."""

    segment: int
    num_bytes: int


@dataclass(frozen=True)
class Stage:
    """The micro-batch that was asked for last is wanted in a segment."""

    client: int
    segment: int


@dataclass(frozen=True)
class Unmap:
    """A segment is not used any more."""

    segment: int


@dataclass(frozen=True)
class Failed:
    """What went wrong."""

    error: Exception


class EndedError(Exception):
    """The other side has ended."""


class Channel:
    """Sends and receives messages; each in few calls, during which other threads of Python run.

    Args:
        connection: A connected socket of this machine.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def send(self, message: object, *, descriptor: int | None = None) -> None:
        """Sends a message, arrays without a copy, and a file descriptor after it.

        Raises:
            EndedError: The other side has ended.
        """
        buffers: list[pickle.PickleBuffer] = []
        body = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        raw = [buffer.raw() for buffer in buffers]
        sizes = struct.pack(f"<{len(raw)}Q", *(len(part) for part in raw))
        try:
            self._send_all([_HEAD.pack(len(body), len(raw)) + sizes + body, *raw])
            if descriptor is not None:
                socket.send_fds(self.connection, [b"\0"], [descriptor])
        except OSError as error:
            raise EndedError from error

    def receive(self) -> Any:
        """Gives the next message; waits for it.

        Raises:
            EndedError: The other side has ended.
        """
        length, num_buffers = _HEAD.unpack(self._exactly(_HEAD.size))
        sizes = struct.unpack(f"<{num_buffers}Q", self._exactly(8 * num_buffers))
        body = self._exactly(length)
        return pickle.loads(body, buffers=[self._exactly(size) for size in sizes])

    def receive_descriptor(self) -> int:
        """Gives the file descriptor that was sent after the last message."""
        _, descriptors, _, _ = socket.recv_fds(self.connection, 1, 1)
        if not descriptors:
            raise EndedError
        return descriptors[0]

    def _send_all(self, parts: list[bytes | memoryview]) -> None:
        while parts:
            sent = self.connection.sendmsg(parts[:_MOST_BUFFERS])
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = memoryview(parts[0])[sent:]

    def _exactly(self, size: int) -> bytearray:
        memory = bytearray(size)
        view = memoryview(memory)
        while view:
            try:
                got = self.connection.recv_into(view, len(view), socket.MSG_WAITALL)
            except OSError as error:
                raise EndedError from error
            if not got:
                raise EndedError
            view = view[got:]
        return memory


def sample_message(sample: RolloutSample) -> dict[str, Any]:
    """Gives a sample in arrays: a Python object for each token would take long to send.

    While tokens are made an array of, no other thread of Python has a turn: .3 ms for 32768.
    """
    values: dict[str, Any] = {}
    for field in fields(sample):
        value = getattr(sample, field.name)
        if field.name in _TOKENS:
            value = array("q", value)
        elif isinstance(value, torch.Tensor):
            value = value.numpy(force=True)
        values[field.name] = value
    return values


def sample_of(message: Mapping[str, Any]) -> RolloutSample:
    """Gives the sample of a message."""
    values: dict[str, Any] = {name: tuple(message[name]) for name in _TOKENS}
    for name, value in message.items():
        if name not in _TOKENS:
            values[name] = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    return RolloutSample(**values)
