"""Memory of a micro-batch in one piece: its parts on the host, and where they are on a device."""

from __future__ import annotations

import pytest
import torch

from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.training.staging import ALIGNMENT_BYTES, StagingMemory, aligned_bytes

SHAPES = [((3, 5), torch.int64), ((7,), torch.bool), ((0, 4), torch.uint8), ((257,), torch.uint8)]


def _filled(memory):
    tensors = []
    for index, (shape, dtype) in enumerate(SHAPES):
        values = torch.arange(torch.Size(shape).numel()).view(shape) + 10 * index
        tensors.append((memory.copy_of(values.to(dtype)), values.to(dtype)))
    return tensors


@pytest.fixture
def memory():
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in SHAPES]
    return StagingMemory.new(sum(map(aligned_bytes, sizes)), pin_memory=False)


def test_every_tensor_begins_aligned_and_keeps_its_values(memory):
    for got, expected in _filled(memory):
        assert_same_bytes(got, expected, f"{expected.dtype}")
        assert got.storage_offset() * got.itemsize % ALIGNMENT_BYTES == 0


def test_every_tensor_is_found_in_the_copy(memory):
    tensors = _filled(memory)
    _, found = memory.moved(torch.device("cpu"), non_blocking=False)
    for got, expected in tensors:
        assert_same_bytes(found(got), expected, f"{expected.dtype}")


def test_more_than_was_planned_is_refused(memory):
    _filled(memory)
    with pytest.raises(AssertionError, match="planned"):
        memory.zeros((1,), torch.uint8)


def test_a_tensor_of_other_memory_is_not_found(memory):
    _filled(memory)
    _, found = memory.moved(torch.device("cpu"), non_blocking=False)
    with pytest.raises(AssertionError, match="other memory"):
        found(torch.zeros(4096, dtype=torch.int64))
