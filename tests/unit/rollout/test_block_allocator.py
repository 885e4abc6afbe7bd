"""A place of the cache is written once, and a prefix is registered only whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from megatron.core.inference.config import PrefixCachingEvictionPolicy
from megatron.core.inference.contexts.kv_block_allocator import KVBlockAllocator

from megatron_trace.rollout.block_allocator import WrittenOnceAllocator


@pytest.fixture
def allocator() -> WrittenOnceAllocator:
    """Nine pages and the one for padding."""
    context = cast("Any", SimpleNamespace(prefix_cache_lru_clock=0))
    return WrittenOnceAllocator.in_place_of(
        KVBlockAllocator(
            context,
            10,
            0,
            enable_prefix_caching=True,
            prefix_caching_eviction_policy=PrefixCachingEvictionPolicy.LRU,
        )
    )


def test_rows_that_go_to_the_first_free_places_are_noted(allocator):
    assert allocator.write(np.array([3, 3, 5, 3]), np.array([0, 1, 0, 2])) is not None
    assert allocator.write(np.array([3, 3, 5]), np.array([0, 1, 0])) is None
    assert allocator.write(np.array([5, 3]), np.array([1, 2])) is None
    assert allocator.num_written[[3, 5]].tolist() == [3, 2]
    assert allocator.write(np.array([], dtype=int), np.array([], dtype=int)) is None


@pytest.mark.parametrize(
    ("pages", "offsets", "wrong"),
    [([4, 3], [0, 0], 1), ([4, 4], [0, 2], 1), ([3, 3], [1, 1], 1), ([3], [2], 0)],
    ids=["written", "gap", "twice", "beyond"],
)
def test_a_row_elsewhere_is_named_and_nothing_noted(allocator, pages, offsets, wrong):
    allocator.write(np.array([3]), np.array([0]))
    assert allocator.write(np.array(pages), np.array(offsets)) == wrong
    assert allocator.num_written.tolist() == [0, 0, 0, 1] + [0] * 6


def test_a_page_that_is_handed_out_again_is_empty(allocator):
    (page,) = allocator.allocate_memory_blocks(1)
    allocator.write(np.array([page]), np.array([0]))
    allocator.release_memory_blocks(page[None])
    assert allocator.allocate_memory_blocks(1) == page
    assert allocator.num_written[page] == 0


def test_pages_behind_one_whose_content_is_registered_already_are_not_registered(allocator):
    first = allocator.allocate_memory_blocks(2).tolist()
    second = allocator.allocate_memory_blocks(3).tolist()
    allocator.register_kv_block_hashes(first, [11, 12], [0, 11])
    assert allocator.registers
    allocator.register_kv_block_hashes(second, [21, 12, 22], [0, 11, 12])
    assert not allocator.registers
    allocator.register_kv_block_hashes(second[2:], [23], [22])
    assert allocator.kv_hash_to_block_id == {11: first[0], 12: first[1], 21: second[0]}
