"""Packed K/V caches for tests and tools, and attention over them in FP64.

Legend: R requests, N query heads, G key/value heads, D head dim, T new tokens of all requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from megatron_trace.formats import NVFP4, unpack_codes
from megatron_trace.rollout.kernels import reference
from megatron_trace.rollout.pages import PackedPages, PageLayout, Pages, ReadablePages
from megatron_trace.testing.assertions import assert_same_bytes

# Head dim, tokens of a page, key/value heads, query heads of each, tokens of the requests.
DECODE_CASES = [
    (256, 64, 2, 8, [1, 31, 32, 33, 0, 1000, 64, 4097]),
    (256, 32, 1, 16, [777, 5]),
    (256, 256, 2, 5, [3000, 100]),
    (256, 16, 4, 1, [130]),
    (128, 64, 2, 8, [1, 63, 200, 0, 5000]),
    (128, 16, 2, 12, [999]),
    (64, 128, 2, 7, [1, 127, 129, 3001]),
    (64, 4, 1, 16, [513, 2]),
    (256, 64, 2, 8, [20000] * 3 + [1] * 60),
]

# As E4M3 scale a NaN: what lies where no token was written must not be read.
STALE = 0xFF


@dataclass(frozen=True)
class PackedCache:
    """The cache of one layer, and a step's queries.

    Attributes:
        keys: Pages of keys.
        values: Pages of values.
        block_table: int32 [R, pages].
        lengths: int32 [R], tokens of each request.
        cu_query_lengths: int32 [R + 1].
        query: BF16 [T, N, D].
    """

    keys: PackedPages
    values: PackedPages
    block_table: torch.Tensor
    lengths: torch.Tensor
    cu_query_lengths: torch.Tensor
    query: torch.Tensor

    @property
    def scale(self) -> float:
        """Factor of the logits."""
        return self.query.shape[-1] ** -0.5

    @property
    def arguments(self) -> tuple[torch.Tensor | PackedPages | float, ...]:
        """Arguments of `paged_attention`."""
        return (
            self.query,
            self.keys,
            self.values,
            self.cu_query_lengths,
            self.lengths,
            self.block_table,
            self.scale,
        )

    @property
    def kv_bytes(self) -> int:
        """Bytes of codes and block scales of the requests' tokens."""
        layout = self.keys.layout
        per_token = 2 * self.keys.num_heads * (layout.code_bytes + layout.num_blocks)
        return int(self.lengths.sum()) * per_token


def random_cache(
    layout: PageLayout,
    lengths: Sequence[int],
    new_tokens: Sequence[int] | None = None,
    *,
    num_heads: int,
    ratio: int,
    device: torch.device | str = "cpu",
    seed: int = 0,
    padding_rows: int = 0,
) -> PackedCache:
    """Gives a cache of random codes and block scales, its pages in random order.

    Zero, denormal and the largest block scales, -0 and the largest codes are among them. Beyond a
    request's length, and in a page of no request, all bytes are STALE.

    Args:
        layout: Layout of the pages.
        lengths: Tokens of each request.
        new_tokens: New ones of each; None is one each.
        num_heads: G.
        ratio: N / G.
        device: Where it lies.
        seed: Seed of everything random.
        padding_rows: Rows of the query beyond those of the requests.
    """
    generator = torch.Generator(device).manual_seed(seed)
    page = layout.page_tokens
    counts = [-(-length // page) for length in lengths]
    num_pages = sum(counts) + 1
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).int()
    table = torch.full((len(lengths), max([*counts, 1])), -1, dtype=torch.int32)
    used = 0
    for row, count in enumerate(counts):
        table[row, :count] = order[used : used + count]
        used += count

    def pages(global_scale: float) -> PackedPages:
        shape = layout.shape(num_pages, num_heads)
        stored = torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)
        _, scale_bytes = layout.split(stored)
        # Zero and the smallest, and from a sixteenth of the largest to the largest.
        usual = 94 + scale_bytes % 33
        scale_bytes.copy_(torch.where(scale_bytes < 16, scale_bytes, usual))
        packed = PackedPages(stored, layout, torch.tensor(global_scale, device=device))
        for row, length in enumerate(lengths):
            if length % page:
                _poison(packed, int(table[row, length // page]), length % page)
        stored[int(order[-1])] = STALE
        return packed

    keys, values = pages(2.3e-3), pages(1.1e-3)
    new = [1] * len(lengths) if new_tokens is None else list(new_tokens)
    starts = torch.tensor([0, *new]).cumsum(0).int()
    shape = (sum(new) + padding_rows, num_heads * ratio, layout.head_dim)
    query = torch.randn(shape, device=device, generator=generator).bfloat16()
    return PackedCache(
        keys,
        values,
        table.to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        starts.to(device),
        query,
    )


def plain_cache(cache: PackedCache) -> tuple[Pages, Pages]:
    """Gives plain pages of the same keys and values, BF16; NaN where no token was written."""
    longest, page = int(cache.lengths.max()), cache.keys.page_tokens
    every = []
    for packed in (cache.keys, cache.values):
        values = packed.read(cache.block_table, cache.lengths, longest)
        shape = (len(packed.stored), page, *values.shape[2:])
        stored = torch.full(shape, torch.nan, dtype=values.dtype, device=values.device)
        for row, length in enumerate(cache.lengths.tolist()):
            position = torch.arange(length, device=values.device)
            pages = cache.block_table[row, position // page].long()
            stored[pages, position % page] = values[row, :length]
        every.append(Pages(stored))
    return every[0], every[1]


def exact_plain_attention(cache: PackedCache, keys: Pages, values: Pages) -> torch.Tensor:
    """Gives attention in FP64 over plain pages of a cache, [T, N, D]."""
    return _attention(cache, Pages(keys.stored.double()), Pages(values.stored.double()))


def exact_attention(cache: PackedCache) -> torch.Tensor:
    """Gives attention in FP64 over the cache's exact values, [T, N, D]."""
    return _attention(cache, _Exact(cache.keys), _Exact(cache.values))


def _attention(cache: PackedCache, keys: ReadablePages, values: ReadablePages) -> torch.Tensor:
    """Gives attention in FP64, of one request after the other.

    All at once, each would take the memory of the longest: 60 requests of a token beside one of
    20,000 took 120 GiB.
    """
    query = cache.query.double()
    output = torch.zeros_like(query)
    starts = cache.cu_query_lengths.tolist()
    for row, (start, end) in enumerate(pairwise(starts)):
        output[start:end] = reference.paged_attention(
            query[start:end],
            keys,
            values,
            cache.cu_query_lengths[row : row + 2] - start,
            cache.lengths[row : row + 1],
            cache.block_table[row : row + 1],
            cache.scale,
        )
    return output


def assert_append_equals_reference(
    append: Callable[..., Any],
    x: torch.Tensor,
    global_scale: float,
    *,
    page_tokens: int,
    num_bits: int | None,
    what: str = "append",
) -> None:
    """Asserts equal pages and records; values are the keys in reverse.

    Args:
        append: A kernel of `reference.append`.
        x: float [T, G, D], the keys.
        global_scale: Of both.
        page_tokens: Tokens of a page; tokens go to places in random order.
        num_bits: Bits a value of the hint; None gives none.
        what: Name of the input in messages.
    """
    num_tokens, num_heads, head_dim = x.shape
    layout = PageLayout(NVFP4, head_dim, page_tokens)
    num_pages = num_tokens // page_tokens + 1
    order = torch.randperm(num_pages * page_tokens, generator=torch.Generator().manual_seed(0))
    place = order[:num_tokens].to(x.device)
    scale = torch.tensor(global_scale, device=x.device)
    written = []
    for function in (append, reference.append):
        stored = torch.full(
            (2, *layout.shape(num_pages, num_heads)), STALE, dtype=torch.uint8, device=x.device
        )
        keys, values = (PackedPages(part, layout, scale) for part in stored)
        block, offset = place // page_tokens, place % page_tokens
        records = function(x, x.flip(0), keys, values, block, offset, num_bits=num_bits)
        assert all((record is None) == (num_bits is None) for record in records), what
        parts = [part for record in records if record is not None for part in record]
        written.append([stored, *parts])
    names = ("pages", "hint of keys", "scales of keys", "hint of values", "scales of values")
    for name, ours, theirs in zip(names[: len(written[0])], *written, strict=True):
        assert_same_bytes(ours, theirs, f"{what}: {name}")


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Gives |got - expected| / |expected| in FP64; NaN if anything is."""
    difference = got.double() - expected
    return float(difference.norm() / expected.norm().clamp_min(1e-300))


def _poison(pages: PackedPages, page: int, first: int) -> None:
    offset = torch.arange(first, pages.page_tokens, device=pages.stored.device)
    line, token = pages.layout.place(offset)
    for part in pages.layout.split(pages.stored[page]):
        part[:, line, token] = STALE


@dataclass(frozen=True)
class _Exact:
    """Pages whose values are read in FP64, without rounding to BF16."""

    pages: PackedPages

    def read(
        self, block_table: torch.Tensor, lengths: torch.Tensor, num_tokens: int
    ) -> torch.Tensor:
        codes, scale_bytes = self.pages.read_packed(block_table, lengths, num_tokens)
        number_format = self.pages.layout.number_format
        assert self.pages.global_scale is not None, "E4M3 scales have a global scale"
        blocks = scale_bytes.contiguous().view(torch.float8_e4m3fn).double()
        scales = blocks * self.pages.global_scale.double()
        values = number_format.specification.decode(
            unpack_codes(codes), torch.full_like(scale_bytes, 0x38), 1.0, torch.float64
        )
        return values * scales.repeat_interleave(number_format.block_size, dim=-1)
