"""Megatron's allocator of pages, with two promises: a place is written once, a prefix is whole.

Legend: P pages of S tokens, N rows of a step, L MoE layers, k experts of a token.
"""

from __future__ import annotations

import numpy as np
import torch
from megatron.core.inference.contexts.kv_block_allocator import KVBlockAllocator


class WrittenOnceAllocator(KVBlockAllocator):
    """Counts what is written in each page, and registers prefixes of unshared pages only.

    Attributes:
        num_written: int64 [P], tokens written to each page since it was handed out.
        registers: Whether the request that is being added may register its pages. Megatron
            0.19.2 registers a page whose content another page has already; when the first one
            goes, requests no longer find the prefix, and one that finds its continuation fails.
    """

    num_written: np.ndarray
    registers: bool
    # Integer [P, S, L, k], once a step was stored; memory is taken where it is written.
    _routing: np.ndarray | None = None

    @classmethod
    def in_place_of(cls, other: KVBlockAllocator) -> WrittenOnceAllocator:
        """Gives an allocator of the same pages, unused."""
        allocator = cls(
            other.context,
            other.total_count,
            other.paused_count,
            enable_prefix_caching=other.enable_prefix_caching,
            prefix_caching_eviction_policy=other.prefix_caching_eviction_policy,
        )
        allocator.num_written = np.zeros(allocator.total_count, dtype=np.int64)
        allocator.registers = True
        return allocator

    def allocate_memory_blocks(self, num_blocks: int) -> torch.Tensor | None:
        """Gives pages that count as empty, int32 [num_blocks]; None if there are too few."""
        blocks = super().allocate_memory_blocks(num_blocks)
        if blocks is not None:
            self.num_written[blocks.numpy()] = 0
        return blocks

    def make_available(self, num_blocks: int) -> None:
        """Drops pages that only the prefix cache holds, until so many are free or none is left."""
        if self.enable_prefix_caching and self.total_avail < num_blocks:
            missing = num_blocks - self.total_avail
            self.evict_lru_blocks(min(missing, int(self.get_evictable_block_count())))

    def register_kv_block_hashes(
        self,
        block_ids: list[int],
        block_hashes: list[int],
        parent_hashes: list[int] | None = None,
    ) -> None:
        """Registers pages up to the first whose content is registered already."""
        if not self.registers:
            return
        known = (n for n, value in enumerate(block_hashes) if value in self.kv_hash_to_block_id)
        count = next(known, len(block_hashes))
        self.registers = count == len(block_hashes)
        parents = None if parent_hashes is None else parent_hashes[:count]
        super().register_kv_block_hashes(block_ids[:count], block_hashes[:count], parents)

    def store_routing(self, pages: np.ndarray, offsets: np.ndarray, routing: np.ndarray) -> None:
        """Stores the experts of tokens at some pages and offsets, integer [N, L, k].

        All at once: Megatron 0.19.2 sorts them by page, and loops over the pages.
        """
        self._routing_pages(routing)[pages, offsets] = routing

    def store_block_routing(
        self, block_id: int, positions: np.ndarray, routing: np.ndarray
    ) -> None:
        """Stores the experts of some places of a page, integer [places, L, k]."""
        self._routing_pages(routing)[block_id, positions] = routing

    def get_block_routing(self, block_id: int) -> np.ndarray | None:
        """Gives the experts of a page, [S, L, k]; anything where nothing was written."""
        return None if self._routing is None else self._routing[block_id]

    def _routing_pages(self, routing: np.ndarray) -> np.ndarray:
        if self._routing is None:
            shape = self.total_count, self.context.block_size_tokens, *routing.shape[1:]
            self._routing = np.zeros(shape, dtype=routing.dtype)
        return self._routing

    def write(self, pages: np.ndarray, offsets: np.ndarray) -> int | None:
        """Notes that the rows of a step are written.

        Args:
            pages: integer [N], the page of each row; rows of a page are next to each other.
            offsets: integer [N], place within the page.

        Returns:
            None if every row goes to the first free place of its page, else the first that does
            not; then nothing is noted.
        """
        if not len(pages):
            return None
        starts = np.flatnonzero(np.diff(pages, prepend=-1))
        lengths = np.diff(starts, append=len(pages))
        free = self.num_written[pages[starts]]
        expected = np.repeat(free - starts, lengths) + np.arange(len(pages))
        wrong = np.flatnonzero(expected != offsets)
        if len(wrong) or len(np.unique(pages[starts])) != len(starts):
            return int(wrong[0]) if len(wrong) else 0
        self.num_written[pages[starts]] += lengths
        return None
