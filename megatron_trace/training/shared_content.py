"""Content of a micro-batch in shared memory, told in few bytes: each tensor as a place there."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from megatron_trace.formats.number_format import NUMBER_FORMATS, NumberFormat
from megatron_trace.training.batch_content import BatchContent
from megatron_trace.training.staging import StagingMemory


def told(content: BatchContent, memory: StagingMemory) -> bytes:
    """Gives what `content_in` understands; all tensors are parts of the memory."""
    stream = io.BytesIO()
    _Teller(stream, memory).dump(content)
    return stream.getvalue()


def content_in(memory: torch.Tensor, message: bytes) -> BatchContent:
    """Gives the content whose tensors are in the memory, or in a copy of it on another device.

    Args:
        memory: uint8 [bytes], a multiple of 8.
        message: What `told` gave.
    """
    return _Listener(io.BytesIO(message), memory).load()


class _Teller(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, memory: StagingMemory) -> None:
        super().__init__(stream, protocol=5)
        self._memory = memory

    def persistent_id(self, obj: Any) -> object:
        if isinstance(obj, torch.Tensor):
            first = self._memory.start_of(obj) // obj.itemsize
            return obj.dtype, tuple(obj.shape), obj.stride(), first
        if isinstance(obj, NumberFormat):
            return obj.name
        return None


class _Listener(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, memory: torch.Tensor) -> None:
        super().__init__(stream)
        self._by_dtype = {torch.uint8: memory}

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, str):
            return NUMBER_FORMATS[pid]
        dtype, shape, stride, first = pid
        memory = self._by_dtype.get(dtype)
        if memory is None:
            memory = self._by_dtype[dtype] = self._by_dtype[torch.uint8].view(dtype)
        return memory.as_strided(shape, stride, first)
