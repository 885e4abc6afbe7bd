"""Host memory of a micro-batch in one piece, which one copy takes to the device.

A micro-batch of forty layers has some five hundred tensors; the host of the training would start as
many copies, at tens of microseconds each, before it can go on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch

# Kernels load 16 bytes at a time; torch's own allocations begin at such multiples, too.
ALIGNMENT_BYTES = 256


class StagingMemory:
    """Memory from which tensors are cut, one after another.

    Args:
        memory: uint8 [bytes] of zeros, which hold all tensors; see `aligned_bytes`.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._used = 0

    @classmethod
    def new(cls, num_bytes: int, *, pin_memory: bool) -> Self:
        """Gives new memory.

        Args:
            num_bytes: Its bytes.
            pin_memory: Whether it is page-locked, so that a stream can copy it while other work
                goes on.
        """
        return cls(torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pin_memory))

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Gives a new tensor of zeros."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        first, end = self._used, self._used + aligned_bytes(num_bytes)
        assert end <= len(self._memory), f"{end} bytes of {len(self._memory)} were planned"
        self._used = end
        return self._memory[first : first + num_bytes].view(dtype).view(shape)

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gives a new tensor with the values of another one."""
        return self.zeros(tuple(tensor.shape), tensor.dtype).copy_(tensor)

    def moved(
        self, device: torch.device, *, non_blocking: bool
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        """Copies everything to a device.

        Args:
            device: The device; if it is the host, nothing is copied.
            non_blocking: Whether the copy is left to the current stream.

        Returns:
            uint8 [bytes], the memory there; and what gives each tensor of this memory there.
        """
        there = self._memory[: self._used].to(device, non_blocking=non_blocking)

        def found(tensor: torch.Tensor) -> torch.Tensor:
            first = self.start_of(tensor)
            return there[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

        return there, found

    def start_of(self, tensor: torch.Tensor) -> int:
        """Gives the byte at which a tensor of this memory begins; 0 of one without values."""
        first = tensor.data_ptr() - self._memory.data_ptr() if tensor.numel() else 0
        assert tensor.is_contiguous(), "tensors of this memory are"
        assert 0 <= first <= self._used - tensor.nbytes, "the tensor is of other memory"
        return first


def aligned_bytes(num_bytes: int) -> int:
    """Gives the bytes that a tensor of so many takes."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
