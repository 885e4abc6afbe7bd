"""Decode steps that are padded to be captured compute and record what others do."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch

from megatron_trace.hints import RecordKind, Site
from megatron_trace.rollout import SamplingSettings
from megatron_trace.rollout.decode_graphs import DecodeGraphs, EngineForward, default_sizes
from megatron_trace.rollout.grouped_experts import GroupedExperts
from megatron_trace.rollout.kept_rows import KeptRows
from megatron_trace.testing.rollouts import assert_same_rollout, record_of, records_of
from megatron_trace.testing.tiny_rollout import random_prompts, roll_out, tiny_engine, tiny_weights

RECORDED = {"hint_layers": "all", "hint_sites": ("fc1", "fc2", "k", "v"), "diagnostic_share": 0.5}
PROMPTS = random_prompts(11, longest=24)
# Steps of 11 requests or fewer are padded, but for those of 4 and 8.
SIZES = (4, 8, 13)


def _padded(weights, *, captured=False, **options):
    graphs = DecodeGraphs(SIZES, captured=captured)
    options = {"max_requests": 13, **RECORDED, **options}
    return tiny_engine(weights, limits={"cuda_graphs": graphs}, **options)


def _unpadded(weights, **options):
    """An engine with the same experts, whose steps Megatron pads to all 13 requests."""
    engine = tiny_engine(weights, **{"max_requests": 13, **RECORDED, **options})
    _group_experts(engine)
    return engine


def _group_experts(engine):
    for layer in engine.layers:
        if layer.moe is not None:
            layer.moe.routed_experts = GroupedExperts(layer.moe, engine.sites, layer.index)


def _roll_out(engine, **sampling):
    # Samples end at different steps, so that steps get smaller.
    return roll_out(engine, PROMPTS, **{"max_new_tokens": 12, "stop_tokens": (3, 4), **sampling})


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("pattern", ["*E*E", "GE*E"])
def test_padded_decode_steps_give_the_same_tokens_and_records(pattern, monkeypatch):
    weights = tiny_weights(seed=1, pattern=pattern)
    padded, unpadded = (
        build(weights, pattern=pattern, max_requests=13) for build in (_padded, _unpadded)
    )
    kept: list[int] = []
    keep_rows = KeptRows.keep
    monkeypatch.setattr(
        KeptRows,
        "keep",
        lambda self, numbers, rows: (kept.extend(numbers.tolist()), keep_rows(self, numbers, rows)),
    )
    rollout = _roll_out(padded)
    num_kept = len(kept)
    assert_same_rollout(rollout, _roll_out(unpadded))
    samples, store = rollout
    assert len({len(sample.tokens) for sample in samples}) > 3
    assert {site for _, _, site in records_of(store, samples[0])} == set(Site)
    # Rows of padding are none of them.
    assert num_kept == sum(len(sample.tokens) - 1 for sample in samples)


@pytest.mark.usefixtures("exact_products")
def test_grouped_experts_agree_with_experts_one_by_one(weights):
    apart = tiny_engine(weights, **RECORDED | {"diagnostic_share": 1.0})
    greedy = {"greedy": True, "max_new_tokens": 4}
    samples, store = _roll_out(apart, **greedy)
    grouped = tiny_engine(weights, **RECORDED | {"diagnostic_share": 1.0})
    _group_experts(grouped)
    others, other_store = _roll_out(grouped, **greedy)
    gaps = []
    for one, other in zip(samples, others, strict=True):
        rows = slice(0, len(PROMPTS[int(one.sample_id[1:])]))
        for site in (Site.FC1, Site.FC2):
            # The first layer's inputs are the same; the sum of its slots is rounded otherwise.
            codes, expected = (
                record_of(found, sample, 0, site, RecordKind.CODES)
                for found, sample in ((other_store, other), (store, one))
            )
            for name in ("payload", "scale_bytes"):
                assert torch.equal(getattr(codes, name)[rows], getattr(expected, name)[rows]), site
        if one.tokens == other.tokens:
            gaps.append((one.logprobs - other.logprobs).abs().mean())
    assert len(gaps) > len(samples) // 2
    assert torch.stack(gaps).mean() < 5e-3


def test_grouped_experts_take_the_weights_that_are_pushed(weights, other_weights):
    engine = _padded(weights)
    first = _roll_out(engine)
    engine.push_weights(other_weights, 1)
    assert [s.tokens for s in _roll_out(engine)[0]] != [s.tokens for s in first[0]]
    engine.push_weights(weights, 0)
    assert_same_rollout(_roll_out(engine), first)


class _Graph:
    """Stands for a captured graph: kernels run again, and nothing of the host does."""

    def __init__(self, forward, inference_input, logits):
        self._forward, self._input, self._logits = forward, inference_input, logits

    def replay(self):
        sites = self._forward.inference_context.sites
        step = sites.recorder._step
        noted = copy.copy(sites.calls), copy.copy(sites.quantised_values), copy.copy(vars(step))
        step.times_put = Counter()
        with torch.inference_mode():
            self._logits.copy_(self._forward._computed(self._input))
        sites.calls, sites.quantised_values, fields = noted
        vars(step).update(fields)


@pytest.fixture
def replays(monkeypatch):
    """Lets padded steps be captured on any device, see `_Graph`."""

    def captured_forward(forward, inference_input):
        watch = forward.inference_context.sites.watch
        counts = watch._counts.clone()
        logits = forward._computed(inference_input).clone()
        watch._counts.copy_(counts)  # A capture computes nothing.
        return _Graph(forward, inference_input, logits), logits

    monkeypatch.setattr(EngineForward, "_captured_forward", captured_forward)

    def engine(weights, **options):
        engine = _padded(weights, **options)
        engine._server.forward._captures = True
        return engine

    return engine


@pytest.mark.usefixtures("exact_products")
def test_what_the_host_does_is_done_again_for_each_replay(weights, replays):
    plain, replaying = _padded(weights), replays(weights)
    expected = _roll_out(plain)
    for _ in range(2):
        assert_same_rollout(_roll_out(replaying), expected)
        assert replaying.report.quantised_values == plain.report.quantised_values
        assert replaying.report.saturated_values == plain.report.saturated_values
        assert replaying.sites.calls == plain.sites.calls
    assert replaying._server.forward.num_replayed > 5


@pytest.mark.usefixtures("exact_products")
def test_recording_can_be_off_and_on_by_turns_under_graphs(weights, replays):
    engine = replays(weights)
    expected = _roll_out(engine)
    for _ in range(3):
        off = engine.generate(
            PROMPTS,
            [f"s{index}" for index in range(len(PROMPTS))],
            store=None,
            sampling=SamplingSettings(max_new_tokens=12, stop_tokens=(3, 4)),
            seed=0,
        )
        assert [sample.tokens for sample in off] == [sample.tokens for sample in expected[0]]
        assert_same_rollout(_roll_out(engine), expected)


@pytest.mark.usefixtures("exact_products")
def test_other_scales_after_a_replay_are_captured_anew(weights, replays):
    engine, plain = replays(weights), _padded(weights)
    _roll_out(engine)
    captured = engine._server.forward.num_captured
    for one in (engine, plain):
        tokens = [torch.randint(0, 15, (8, 12), generator=torch.Generator().manual_seed(9))]
        one.recalibrate(weights, tokens, 2)
    assert_same_rollout(_roll_out(engine), _roll_out(plain))
    assert engine._server.forward.num_captured > captured


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (torch.OutOfMemoryError("no room"), "^no room$"),
        (RuntimeError("not permitted"), r"of \d+ rows cannot be captured .*: not permitted"),
    ],
    ids=("out of memory", "waits"),
)
def test_a_capture_that_fails_tells_why(weights, replays, monkeypatch, error, told):
    def failing(forward, inference_input):
        raise error

    engine = replays(weights)
    monkeypatch.setattr(EngineForward, "_captured_forward", failing)
    with pytest.raises(type(error), match=told):
        _roll_out(engine)


def test_a_nan_in_a_padded_step_names_the_place_and_the_engine_works_again(weights):
    engine = _padded(weights)
    expected = _roll_out(engine)
    poisoned = engine.layers[1].moe.experts.local_experts[0].linear_fc1.weight
    poisoned.data.fill_(float("nan"))
    with pytest.raises(RuntimeError, match=r"NaN or Inf .* layer 1, site fc2, sample s"):
        _roll_out(engine)
    engine.push_weights(weights, 0)
    assert_same_rollout(_roll_out(engine), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "cuda_graphs needs a GPU, and the model lies on cpu"),
        ({"method": "bf16"}, "cuda_graphs needs a GPU"),
        ({"number_format": "mxfp4"}, "not wait .* a cache of mxfp4 has no other"),
        ({"kv_attention": "torch"}, "that of plain torch does: kv_attention=torch asks for it"),
        ({"method": "quads"}, "cuda_graphs contradicts method=quads"),
        ({"packed_experts": "torch"}, "cuda_graphs contradicts packed_experts=torch"),
        ({"limits": {"cuda_graphs": (8, 65)}}, "a batch of 65, but max_requests=64"),
        ({"limits": {"cuda_graphs": (0,)}}, "batch sizes of at least 1"),
    ],
    ids=str,
)
def test_what_cannot_be_captured_is_refused(options, message):
    if torch.cuda.is_available() and "a GPU" in message:
        pytest.skip("there is one")
    with pytest.raises(ValueError, match=message):
        tiny_engine(None, **{"limits": {"cuda_graphs": True}, **options})


def test_default_sizes_waste_a_third_of_the_rows_at_most():
    assert default_sizes(40) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40)
    assert default_sizes(1) == (1,)
    sizes = default_sizes(257)
    for requests in range(1, 258):
        assert min(size for size in sizes if size >= requests) * 2 <= requests * 3


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", ["*E*E", "GE*E"])
def test_replayed_graphs_compute_and_record_what_their_kernels_do(pattern):
    weights = tiny_weights(seed=1, pattern=pattern)
    plain = _padded(weights, pattern=pattern)
    captured = _padded(weights, captured=True, pattern=pattern)
    expected = _roll_out(plain)
    assert_same_rollout(_roll_out(captured), expected)
    assert_same_rollout(_roll_out(captured), expected)
    forward = captured._server.forward
    assert 0 < forward.num_captured <= len(SIZES)
    assert forward.num_replayed > 5
    assert captured.report.quantised_values == plain.report.quantised_values
    assert captured.report.saturated_values == plain.report.saturated_values


@pytest.mark.gpu
def test_a_push_under_graphs_there_and_back_restores_every_bit(weights, other_weights):
    engine = _padded(weights, captured=True)
    first = _roll_out(engine)
    forward = engine._server.forward
    captured = {key: graph for key, graph in forward._graphs.items() if graph is not None}
    digest = engine.push_weights(weights, 0)
    engine.push_weights(other_weights, 1)
    assert [s.tokens for s in _roll_out(engine)[0]] != [s.tokens for s in first[0]]
    assert engine.push_weights(weights, 0) == digest
    assert_same_rollout(_roll_out(engine), first)
    assert captured
    assert all(forward._graphs[key] is graph for key, graph in captured.items()), "as captured"


@pytest.mark.gpu
def test_other_scales_are_captured_anew(weights):
    engine, plain = (_padded(weights, captured=captured) for captured in (True, False))
    _roll_out(engine)
    for one in (engine, plain):
        tokens = [torch.randint(0, 15, (8, 12), generator=torch.Generator().manual_seed(9))]
        one.recalibrate(weights, tokens, 2)
    assert_same_rollout(_roll_out(engine), _roll_out(plain))


@pytest.mark.gpu
def test_a_nan_under_a_graph_names_the_place(weights):
    engine = _padded(weights, captured=True)
    expected = _roll_out(engine)
    for expert in engine.layers[1].moe.experts.local_experts:
        expert.linear_fc1.weight.data.fill_(float("nan"))
    with pytest.raises(RuntimeError, match=r"NaN or Inf .* layer 1, site fc2, sample s"):
        _roll_out(engine)
    engine.push_weights(weights, 0)
    assert_same_rollout(_roll_out(engine), expected)
