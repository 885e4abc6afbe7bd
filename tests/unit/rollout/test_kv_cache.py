"""K/V are stored packed, hold what rounding to nearest gives, and are read back from the bytes."""

from __future__ import annotations

import pytest
import torch

from megatron_trace.formats import MXFP4, NVFP4, encode, ops, pack_codes
from megatron_trace.formats.reference import rtn
from megatron_trace.hints import Site
from megatron_trace.rollout.kv_cache import kv_bytes_per_token
from megatron_trace.rollout.pages import Pages
from megatron_trace.testing.single_process import tiny_moe_config
from megatron_trace.testing.tiny_rollout import random_prompts, roll_out


@pytest.fixture
def written(trace_engine, monkeypatch):
    """Gives (layer number, key, value, stored keys, stored values) of every write of a rollout."""
    context = trace_engine._server.context
    append = context.append_key_value_cache
    writes = []

    def observed(layer_number, key, value):
        append(layer_number, key, value)
        rows = slice(0, context.active_token_count)
        block = context.gpu_view.token_to_block_idx[rows].long()
        offset = context.gpu_view.token_to_local_position_within_kv_block[rows].long()
        layer = context.layer_map[layer_number - 1]
        stored = context.stored_rows(block, offset)[:, layer].clone()
        writes.append((layer, key[rows, 0].clone(), value[rows, 0].clone(), *stored))

    monkeypatch.setattr(context, "append_key_value_cache", observed)
    roll_out(trace_engine, random_prompts(20))
    return writes


def test_stored_bytes_are_codes_and_scales_of_rounding_to_nearest(trace_engine, written):
    assert len(written) == 2 * 6, "two layers, one prefill and five decodes"
    for layer, key, value, *stored in written:
        for site, x, found in zip((Site.K, Site.V), (key, value), stored, strict=True):
            scale = trace_engine.settings.global_scale(layer, site)
            codes, scale_bytes = encode(x, scale)
            assert torch.equal(found, torch.cat((pack_codes(codes), scale_bytes), dim=-1))
            expected = rtn(x, scale, dtype=torch.bfloat16)
            rows = trace_engine._server.context.cached_rows(layer, site, found)
            values = ops.decode(*rows, scale, dtype=torch.bfloat16)
            assert torch.equal(values, expected.flatten(1))


def test_the_cache_takes_its_bytes_per_token(trace_engine, bf16_engine):
    # 2 layers x 2 (K, V) x 2 heads x (16 bytes of codes + 2 of scales), or x 32 values of 2 bytes
    assert (trace_engine.kv_bytes_per_token, bf16_engine.kv_bytes_per_token) == (144, 512)
    assert trace_engine.kv_bytes_per_token_bf16 == bf16_engine.kv_bytes_per_token_bf16 == 512
    for engine in (trace_engine, bf16_engine):
        context = engine._server.context
        num_tokens = context.kv_block_allocator.total_count * context.block_size_tokens
        assert context.memory_buffer.nbytes == num_tokens * engine.kv_bytes_per_token
        assert context.block_size_bytes == context.block_size_tokens * engine.kv_bytes_per_token
        # all requests fit at full length, and the block that padding rows are written to
        assert context.kv_block_allocator.total_count == 64 * (64 // 16) + 1


def test_packed_kv_takes_4_5_bits_per_value():
    config = tiny_moe_config("*E*E*E*E", kv_channels=128, num_query_groups=4)
    packed = kv_bytes_per_token(config, 4, NVFP4)
    assert packed == 2 * 4 * 4 * 128 * 4.5 / 8
    assert kv_bytes_per_token(config, 4, MXFP4) == 2 * 4 * 4 * 128 * 4.25 / 8


def test_pages_are_read_by_table_and_cut_to_length():
    stored = torch.arange(6 * 4).view(6, 4, 1, 1).float()  # page p, token t: 4 p + t
    table = torch.tensor([[5, 0, -1], [2, 3, -1]])
    read = Pages(stored).read(table, torch.tensor([6, 5]), 6)[..., 0, 0]
    assert read.tolist() == [[20, 21, 22, 23, 0, 1], [8, 9, 10, 11, 12, 0]]
