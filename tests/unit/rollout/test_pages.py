"""Packed pages: where the bytes of a token and head lie, and that attention reads just those."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_trace.formats import MXFP4, NVFP4, NVFP4_4OVER6, NumberFormat
from megatron_trace.rollout.kernels import ops, reference
from megatron_trace.rollout.pages import PackedPages, PageLayout
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.paged_kv import exact_attention, random_cache, relative_error
from megatron_trace.testing.tiny_rollout import random_prompts, roll_out

LAYOUTS = [(16, 4), (64, 8), (96, 4), (128, 2), (256, 4), (128, 1)]


def _empty(layout: PageLayout, num_pages: int, num_heads: int, scale: float | None) -> PackedPages:
    return PackedPages(
        torch.full(layout.shape(num_pages, num_heads), 0xFF, dtype=torch.uint8),
        layout,
        None if scale is None else torch.tensor(scale),
    )


@pytest.mark.parametrize(("head_dim", "page_tokens"), LAYOUTS)
def test_what_is_written_for_a_token_and_head_is_read_back_there(head_dim, page_tokens):
    layout = PageLayout(NVFP4, head_dim, page_tokens)
    pages = _empty(layout, 5, 3, 1.0)
    num_tokens = 3 * page_tokens - 1
    number = torch.arange(num_tokens * 3).view(num_tokens, 3, 1)
    codes = (number % 251).expand(-1, -1, layout.code_bytes).to(torch.uint8)
    scales = (number % 127).expand(-1, -1, layout.num_blocks).to(torch.uint8)
    table = torch.tensor([[3, 0, 4]])
    order = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(0))
    block, offset = table[0, order // page_tokens], order % page_tokens
    pages.write(block, offset, codes[order], scales[order])
    found = pages.read_packed(table, torch.tensor([num_tokens]), num_tokens)
    assert_same_bytes(found[0][0], codes, "codes")
    assert_same_bytes(found[1][0], scales, "scale bytes")
    assert (pages.stored[[1, 2]] == 0xFF).all(), "pages of no token must stay as they were"


@pytest.mark.parametrize(("head_dim", "page_tokens"), LAYOUTS)
def test_a_line_has_256_values_where_head_dim_and_page_allow(head_dim, page_tokens):
    layout = PageLayout(NVFP4, head_dim, page_tokens)
    whole = 256 % head_dim == 0 and page_tokens * head_dim >= 256
    assert (layout.line_bytes == 144) == whole
    per_page = math.prod(layout.shape(1, 1))
    assert per_page == page_tokens * head_dim * 4.5 / 8


def test_a_line_is_the_codes_of_its_tokens_then_their_block_scales():
    layout = PageLayout(NVFP4, 64, 8)
    pages = _empty(layout, 1, 2, 1.0)
    codes = torch.arange(4)[:, None, None].expand(4, 2, 32).to(torch.uint8)
    pages.write(torch.zeros(4, dtype=torch.int64), torch.arange(4), codes, codes[..., :4] + 100)
    line = pages.stored[0, 1, 0]
    assert line[:128].tolist() == [0] * 32 + [1] * 32 + [2] * 32 + [3] * 32
    assert line[128:].tolist() == [100] * 4 + [101] * 4 + [102] * 4 + [103] * 4


@pytest.mark.parametrize("number_format", [NVFP4, NVFP4_4OVER6, MXFP4], ids=lambda f: f.name)
@pytest.mark.parametrize("num_bits", [None, 1, 4])
def test_appended_bytes_are_those_of_the_format(number_format: NumberFormat, num_bits):
    scale = 2e-3 if number_format.has_global_scale else None
    layout = PageLayout(number_format, 64, 4)
    x = torch.randn(2, 7, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    pages = [_empty(layout, 2, 2, scale) for _ in range(2)]
    place = torch.arange(7)
    records = ops.append(*x, *pages, place // 4, place % 4, num_bits=num_bits)
    for values, page, record in zip(x, pages, records, strict=True):
        expected = number_format.specification.rtn(values, scale, **number_format.rules)
        found = page.read(torch.tensor([[0, 1]]), torch.tensor([7]), 7)
        assert_same_bytes(found[0], expected, "values")
        assert (record is None) == (num_bits is None)
        if record is not None:
            _, hint, scale_bytes = number_format.specification.rtn_record(
                values.flatten(1), scale, num_bits=num_bits, **number_format.rules
            )
            assert_same_bytes(record[0], hint, "hint")
            assert_same_bytes(record[1], scale_bytes, "scale bytes")


@pytest.mark.parametrize(("heads", "ratio"), [(1, 8), (2, 5), (4, 1)])
def test_attention_over_pages_is_that_over_the_values_of_one_request(heads, ratio):
    cache = random_cache(
        PageLayout(NVFP4, 64, 8), [9, 0, 24, 1], [2, 1, 5, 1], num_heads=heads, ratio=ratio
    )
    output = exact_attention(cache)
    assert not output[2].any(), "a request of no tokens gets zeros"
    for row, length in enumerate(cache.lengths.tolist()):
        rows = slice(*cache.cu_query_lengths[row : row + 2].tolist())
        if length == 0:
            continue
        one = slice(row, row + 1)
        keys, values = (
            _dense(pages, cache.block_table[row], length).repeat_interleave(ratio, dim=1)
            for pages in (cache.keys, cache.values)
        )
        query = cache.query[rows].double()
        new = query.shape[0]
        scores = torch.einsum("lhd,mhd->hlm", query, keys) * cache.scale
        seen = torch.arange(length) <= torch.arange(length - new, length)[:, None]
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        expected = torch.einsum("hlm,mhd->lhd", weights, values)
        torch.testing.assert_close(output[rows], expected, rtol=0, atol=1e-12, msg=f"{one}")


def _dense(pages: PackedPages, table: torch.Tensor, length: int) -> torch.Tensor:
    """Gives FP64 [M, G, D], read token by token with the line's arithmetic written out."""
    ladder = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    layout, rows = pages.layout, []
    tokens = layout.tokens_per_line
    for position in range(length):
        page, offset = int(table[position // 8]), position % 8
        line, place = pages.stored[page, :, offset // tokens], offset % tokens
        codes = line[:, place * 32 :][:, :32]
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()
        scales = line[:, tokens * 32 + place * 4 :][:, :4].contiguous()
        scales = scales.view(torch.float8_e4m3fn).double() * pages.global_scale.double()
        values = ladder[codes & 7] * torch.where(codes < 8, 1.0, -1.0)
        rows.append(values * scales.repeat_interleave(16, dim=1))
    return torch.stack(rows)


def test_rounding_values_to_bf16_costs_less_than_a_third_of_a_percent():
    cache = random_cache(PageLayout(NVFP4, 128, 16), [200, 33], num_heads=2, ratio=4)
    # Measured 2.5e-3; kernels, which round only q, weights and output, have 1.7e-3 on an H200.
    error = relative_error(reference.paged_attention(*cache.arguments), exact_attention(cache))
    assert error < 3.3e-3


def test_rows_of_the_engine_can_be_moved_to_other_places(trace_engine):
    roll_out(trace_engine, random_prompts(20))
    context = trace_engine._server.context
    total, size = context.kv_block_allocator.total_count, context.block_size_tokens
    places = torch.randperm(total * size, generator=torch.Generator().manual_seed(0))[:40]
    source, target = places[:20], places[20:]
    rows = context.stored_rows(source // size, source % size).clone()
    context.put_stored_rows(target // size, target % size, rows)
    assert_same_bytes(context.stored_rows(target // size, target % size), rows)


def test_implementations_say_why_they_cannot_run_on_a_cpu():
    cache = random_cache(PageLayout(NVFP4, 256, 16), [5], num_heads=1, ratio=8)
    with pytest.raises(ValueError, match="triton needs a query on a GPU; got cpu"):
        ops.paged_attention(*cache.arguments, max_new_tokens=1, implementation="triton")
    with pytest.raises(ValueError, match="cuda cannot run: it needs a GPU, and the pages lie on"):
        ops.paged_attention(*cache.arguments, max_new_tokens=1, implementation="cuda")
    with pytest.raises(ValueError, match="implementation must be one of auto, torch, triton, cuda"):
        ops.paged_attention(*cache.arguments, max_new_tokens=1, implementation="fla")
    key = torch.ones(1, 1, 256, dtype=torch.bfloat16)
    place = torch.zeros(1, dtype=torch.int64)
    pages = (cache.keys, cache.values, place, place)
    with pytest.raises(ValueError, match="triton needs keys on a GPU; got cpu"):
        ops.append(key, key, *pages, num_bits=None, implementation="triton")
