"""Memory that a trainer and its reading process share, page-locked where the trainer has a GPU.

The memory has no name: what is left of it ends with the last of the processes, however they end,
and the size of /dev/shm does not bound it.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import torch


class Segment:
    """A piece of shared memory.

    Args:
        num_bytes: Its bytes, at least 1.
        device: Device that copies from it; a GPU has it page-locked.

    Attributes:
        number: What it is called.
        descriptor: Its file descriptor, until `close_descriptor`.
        memory: uint8 [num_bytes].

    Raises:
        RuntimeError: There is not so much memory, or it cannot be page-locked.
    """

    def __init__(self, number: int, num_bytes: int, device: torch.device) -> None:
        self.number = number
        self.num_bytes = num_bytes
        self.is_closed = False
        self._locked_for: torch.device | None = None
        why = self._take()
        if why:
            raise RuntimeError(
                f"no {num_bytes} bytes of shared memory for hints that are read ahead: {why}; "
                "raise the memory of the job or its container, lower --trace-hint-memory-mb, make "
                "micro-batches smaller, or choose --trace-hint-reader thread"
            )
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)
        if device.type == "cuda":
            self._lock(device)

    def _take(self) -> str:
        """Takes the memory; gives why it cannot."""
        # Asked for more than it has, the system would rather kill a process than say so.
        available = available_bytes()
        if self.num_bytes > available:
            return f"{available} are available"
        try:
            self.descriptor = os.memfd_create("trace-hints")
            try:
                # Takes the pages now: where there are none, the error is here, not a signal later.
                os.posix_fallocate(self.descriptor, 0, self.num_bytes)
                self._map = mmap.mmap(self.descriptor, self.num_bytes)
            except OSError:
                os.close(self.descriptor)
                raise
        except OSError as error:
            return str(error.strerror)
        return ""

    def _lock(self, device: torch.device) -> None:
        # The thread that gets here begins on device 0, where this would make it a context.
        with torch.cuda.device(device):
            runtime: Any = torch.cuda.cudart()
            error = runtime.cudaHostRegister(self.memory.data_ptr(), self.num_bytes, 0)
        if error != runtime.cudaError.success:
            self.close_descriptor()
            raise RuntimeError(
                f"{self.num_bytes} bytes of shared memory cannot be page-locked ({error}); raise "
                "the limit of locked memory (ulimit -l), or choose --trace-hint-reader thread"
            )
        self._locked_for = device

    def close_descriptor(self) -> None:
        """Closes the descriptor, once the other process has mapped the memory."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def close(self) -> None:
        """Gives the memory back; nothing may copy from it any more."""
        self.close_descriptor()
        if self._locked_for is not None:
            # In the context that locked it, like there.
            with torch.cuda.device(self._locked_for):
                runtime: Any = torch.cuda.cudart()
                runtime.cudaHostUnregister(self.memory.data_ptr())
            self._locked_for = None
        self.is_closed = True
        del self.memory
        self._map.close()


def available_bytes() -> int:
    """Gives the memory that can still be had: of the machine, and at most its container's."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    sizes = {name: value for name, _, value in (line.partition(":") for line in lines)}
    available = int(sizes["MemAvailable"].split()[0]) * 1024
    try:
        bound = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:  # Not in a container that bounds it.
        return available
    return available if bound == "max" else min(available, int(bound))


def rounded_bytes(num_bytes: int) -> int:
    """Gives a size that many micro-batches have in common: 2 or 3 times a power of two."""
    power = 2 ** max(num_bytes - 1, 16383).bit_length()
    return power if num_bytes > power // 4 * 3 else power // 4 * 3
