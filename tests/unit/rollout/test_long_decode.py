"""A request that is moved to a length computes what one does that came there by itself."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from megatron_trace import compat
from megatron_trace.rollout.decode_graphs import DecodeGraphs
from megatron_trace.rollout.sampling import SamplingSettings
from megatron_trace.rollout.serving import EngineLimits, Server
from megatron_trace.testing.long_decode import LongDecode, begin_decoding, move_to
from megatron_trace.testing.rollouts import assert_same_rollout
from megatron_trace.testing.tiny_rollout import (
    EOD_TOKEN,
    MAX_SEQUENCE_LENGTH,
    random_prompts,
    roll_out,
    tiny_engine,
    tiny_weights,
)

PROMPT = [index % EOD_TOKEN for index in range(21)]
GREEDY = SamplingSettings(max_new_tokens=40, greedy=True)
# So that no request of many ends, whatever is drawn.
NO_TOKEN = -1


def _server(engine, max_requests, *, eod_token=EOD_TOKEN):
    limits = EngineLimits(
        MAX_SEQUENCE_LENGTH, max_requests=max_requests, block_size_tokens=16, max_step_tokens=64
    )
    packed = engine.trace.quantises_kv
    return Server(engine.model, engine.sites, packed=packed, eod_token=eod_token, limits=limits)


@pytest.mark.parametrize("method", ["bf16", "trace"])
def test_a_moved_request_samples_what_one_does_that_has_been_prefilled(weights, method):
    engine = tiny_engine(weights, method)
    grown, moved = _server(engine, 1), _server(engine, 1)
    run = grown.begin(sampling=GREEDY, keep=False)
    with grown.computing():
        grown.add([PROMPT], ["grown"], [0])
        run.step()
        first = int(grown.context.token_to_input_ids[0])
        table = grown.context.request_to_kv_block_ids[0]
        positions = torch.arange(len(PROMPT))
        rows = grown.context.stored_rows(table[positions // 16].long(), positions % 16)
        run.step()
        expected = int(grown.context.token_to_input_ids[0])
    grown.reset()
    other = moved.begin(sampling=GREEDY, keep=False)
    with moved.computing():
        moved.add([[first]], ["moved"], [0])
        begin_decoding(moved)
        move_to(moved.context, len(PROMPT))
        table = moved.context.request_to_kv_block_ids[0]
        places = table[positions // 16].long(), positions % 16
        moved.context.put_stored_rows(*places, rows)
        other.step()
        assert int(moved.context.token_to_input_ids[0]) == expected
        assert int(moved.context.request_kv_length_offsets[0]) == len(PROMPT) + 1
    moved.reset()


def test_steps_are_timed_where_the_requests_are_said_to_be(trace_engine):
    server = _server(trace_engine, 3, eod_token=NO_TOKEN)
    context = server.context
    with LongDecode(server, 3, keep=True).running() as decode:
        for length in (17, 40):
            time = decode.times(length, warm_up=1, steps=2)
            assert context.request_kv_length_offsets[:3].tolist() == [length // 16 * 16 + 1 + 3] * 3
            assert 0 < time.decoder_ms < time.step_ms
        assert 4 <= decode.distinct_experts() <= 12, "three tokens, four of 16 experts each"
    tables = context.kv_block_allocator
    assert tables.total_avail == tables.total_count - 1, "all pages are free again"


def test_rows_are_kept_of_the_steps_for_which_recording_is_on(trace_engine):
    server = _server(trace_engine, 3, eod_token=NO_TOKEN)
    recorder = trace_engine.sites.recorder
    with LongDecode(server, 3, keep=False).running() as decode:
        for length, keep in ((17, True), (33, False), (49, True)):
            decode.record(keep)
            assert decode.mean_ms(length, warm_up=1, steps=2) > 0
        recorder._ring.take_all()
        table = server.context.request_to_kv_block_ids[:3].long()
        rows = (recorder._kept._words != 0).any(-1).view(-1, 16)[table].sum(0)
    assert rows.sum(-1).tolist() == [0, 9, 0, 9], "of three steps of three requests, by page"


def test_the_model_of_an_engine_that_is_gone_is_freed_when_another_is_built(weights):
    engine = tiny_engine(weights, "bf16")
    # So that Megatron remembers this one's layers.
    compat.forget_moe_layers()
    roll_out(engine, random_prompts(2))
    model = weakref.ref(engine.model)
    del engine
    tiny_engine(None, "bf16")
    gc.collect()
    assert model() is None


@pytest.mark.gpu
def test_replayed_graphs_over_plain_pages_compute_what_their_kernels_do(weights):
    rollouts = []
    for captured in (False, True):
        graphs = DecodeGraphs((4, 8, 13), captured=captured)
        engine = tiny_engine(weights, "bf16", max_requests=13, limits={"cuda_graphs": graphs})
        rollouts.append(roll_out(engine, random_prompts(11, longest=24), max_new_tokens=12))
    assert engine._server.forward.num_replayed > 6
    assert_same_rollout(*rollouts)


def _decoded(weights, *, captured):
    """Gives what six steps of three requests, padded to four, sample, keep and leave as states."""
    engine = tiny_engine(
        weights,
        pattern="GE*E",
        eod_token=NO_TOKEN,
        max_requests=4,
        hint_layers="all",
        hint_sites=("fc1", "fc2", "k", "v"),
        limits={"cuda_graphs": DecodeGraphs((4,), captured=captured)},
    )
    server, found = engine._server, {}
    torch.manual_seed(0)
    with LongDecode(server, 3, keep=True).running() as decode:
        for step in range(6):
            decode.step()
            sampled = server._sampler._steps[-1].sampled
            found |= {f"tokens {step}": sampled.tokens, f"logprobs {step}": sampled.logprobs}
        recorder, context = engine.sites.recorder, server.context
        recorder._ring.take_all()
        slots = slice(0, 3)  # The last one is that of padding.
        found["rows"] = recorder._kept._words.clone()
        found["conv"] = context.mamba_conv_states[:, slots].clone()
        found["recurrent"] = context.mamba_ssm_states[:, slots].clone()
    num_computed = 3 + sum(len(value) for name, value in found.items() if "tokens" in name)
    assert (found["rows"] != 0).any(-1).sum() == num_computed, "padding is kept nowhere"
    return found, server.forward


def test_padded_steps_of_gated_delta_nets_keep_a_row_for_each_token():
    _decoded(tiny_weights(seed=1, pattern="GE*E"), captured=False)


@pytest.mark.gpu
def test_replayed_graphs_of_gated_delta_nets_compute_and_record_what_their_kernels_do():
    """Decode alone, from random states: prompts are computed by fla, and never captured."""
    weights = tiny_weights(seed=1, pattern="GE*E")
    expected, _ = _decoded(weights, captured=False)
    found, forward = _decoded(weights, captured=True)
    assert forward.num_replayed == 6
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
