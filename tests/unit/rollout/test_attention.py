"""Paged attention over groups of requests equals attention of one request at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron_trace.rollout.kernels.reference import paged_attention
from megatron_trace.rollout.pages import Pages

HEADS, KV_HEADS, HEAD_DIM, PAGE = 4, 2, 16, 4


def _paged(sequences: list[torch.Tensor], generator: torch.Generator):
    """Scatters sequences [M, G, D] over pages in random order; gives pages and block table."""
    counts = [-(-len(sequence) // PAGE) for sequence in sequences]
    order = torch.randperm(sum(counts), generator=generator)
    pages = torch.zeros(len(order) + 1, PAGE, KV_HEADS, HEAD_DIM)
    table = torch.full((len(sequences), max(counts) + 1), -1, dtype=torch.int32)
    used = 0
    for row, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
        table[row, :count] = order[used : used + count]
        for index in range(count):
            chunk = sequence[index * PAGE : (index + 1) * PAGE]
            pages[order[used + index], : len(chunk)] = chunk
        used += count
    return Pages(pages), table


def test_mixed_prefill_and_decode_equals_each_request_alone():
    generator = torch.Generator().manual_seed(0)
    # (tokens so far, new ones); 0 tokens is a padded request with a row of padding
    requests = [(9, 1), (5, 5), (1, 1), (12, 5), (0, 1), (8, 8)]
    new = [n for _, n in requests]
    queries = torch.randn(sum(new) + 3, HEADS, HEAD_DIM, generator=generator)
    shape = (KV_HEADS, HEAD_DIM)
    keys = [torch.randn(n, *shape, generator=generator) for n, _ in requests]
    values = [torch.randn(n, *shape, generator=generator) for n, _ in requests]
    key_pages, table = _paged(keys, torch.Generator().manual_seed(1))
    value_pages, same_table = _paged(values, torch.Generator().manual_seed(1))
    assert torch.equal(table, same_table)
    cumulative = torch.tensor([0, *new]).cumsum(0).int()
    lengths = torch.tensor([n for n, _ in requests]).int()

    output = paged_attention(
        queries, key_pages, value_pages, cumulative, lengths, table, HEAD_DIM**-0.5
    )

    expected = torch.zeros_like(queries)
    for row, (length, num_new) in enumerate(requests):
        if length == 0:
            continue
        rows = slice(int(cumulative[row]), int(cumulative[row + 1]))
        mask = torch.ones(length, length, dtype=torch.bool).tril()[-num_new:]
        expected[rows] = F.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (queries[rows], keys[row], values[row])),
            attn_mask=mask,
            enable_gqa=True,
        )[0].transpose(0, 1)
    # Measured 2.4e-7: one call pads the shorter requests of a group.
    torch.testing.assert_close(output, expected, atol=2e-6, rtol=0)
    assert not output[int(cumulative[-1]) :].any(), "rows of no request must stay zero"


def test_what_lies_beyond_a_request_in_its_page_is_not_read():
    generator = torch.Generator().manual_seed(0)
    sequence = torch.randn(2, 3, KV_HEADS, HEAD_DIM, generator=generator)
    query = torch.randn(1, HEADS, HEAD_DIM, generator=generator)

    def attend(beyond: float) -> torch.Tensor:
        pages = torch.full((2, 1, PAGE, KV_HEADS, HEAD_DIM), beyond)
        pages[:, 0, :3] = sequence
        return paged_attention(
            query,
            Pages(pages[0]),
            Pages(pages[1]),
            torch.tensor([0, 1]),
            torch.tensor([3]),
            torch.tensor([[0]]),
            0.25,
        )

    assert torch.equal(attend(0.0), attend(1e6))
