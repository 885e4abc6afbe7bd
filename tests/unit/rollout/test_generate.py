"""What a rollout returns and records."""

from __future__ import annotations

import contextlib

import pytest
import torch
from megatron.core.inference.utils import InferenceMode
from megatron.core.transformer.moe.router_replay import RouterReplay

from megatron_trace.formats import pack_bits
from megatron_trace.hints import RecordKind, Site, decode_codes
from megatron_trace.rollout import SamplingSettings
from megatron_trace.rollout.serving import _one_thread_beside_a_gpu
from megatron_trace.rollout.storing import is_diagnostic
from megatron_trace.testing.rollouts import assert_same_rollout, record_of
from megatron_trace.testing.tiny_rollout import random_prompts, roll_out, tiny_engine

PLACES = [(layer, site) for layer in (0, 1) for site in (Site.FC1, Site.K, Site.V)]
WIDTHS = {Site.FC1: 128, Site.K: 64, Site.V: 64}


def test_every_place_of_every_sample_has_its_hint(trace_engine):
    prompts = random_prompts(70)  # more than the 64 requests that run at a time
    samples, store = roll_out(trace_engine, prompts)
    assert [list(sample.prompt_tokens) for sample in samples] == prompts
    assert [sample.sample_id for sample in samples] == [f"s{index}" for index in range(70)]
    for sample in samples:
        assert list(store.places(sample.sample_id)) == PLACES
        for layer, site in PLACES:
            hint = record_of(store, sample, layer, site)
            assert (hint.num_rows, hint.num_values) == (len(sample.tokens) - 1, WIDTHS[site])
            assert hint.global_scale == trace_engine.settings.global_scale(layer, site)
        assert sample.routing.shape == (sample.num_rows, 2, 4)
        assert sample.routing.dtype == torch.int16
        assert sample.settings_digest == trace_engine.settings.digest()


def test_a_hint_is_the_mantissa_bit_of_the_full_codes(trace_engine):
    samples, store = roll_out(trace_engine, random_prompts(3))
    for sample in samples:
        for layer, site in PLACES:
            hint = record_of(store, sample, layer, site)
            codes = record_of(store, sample, layer, site, RecordKind.CODES)
            assert (hint.num_bits, codes.num_bits) == (1, 4)
            assert torch.equal(hint.payload, pack_bits(decode_codes(codes)))
            assert torch.equal(hint.scale_bytes, codes.scale_bytes)


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("scales", ["raw", "residue"])
def test_hints_are_the_same_whether_full_codes_are_recorded_too(weights, bits, scales):
    options = {"hint_sites": ("fc1", "fc2", "k", "v"), "hint_bits": bits, "hint_scales": scales}
    prompts = random_prompts(6)
    with_codes = roll_out(tiny_engine(weights, diagnostic_share=1.0, **options), prompts)
    engine = tiny_engine(weights, **options)
    samples, store = roll_out(engine, prompts)
    for sample in samples:
        for layer in (0, 1):
            for site in (Site.FC1, Site.FC2, Site.K, Site.V):
                hint, other = (
                    record_of(given, sample, layer, site) for given in (store, with_codes[1])
                )
                assert torch.equal(hint.payload, other.payload), (layer, site)
                assert torch.equal(hint.scale_bytes, other.scale_bytes), (layer, site)
    # Of fc1's 128 values a row, codes take 64 bytes.
    assert engine._recorder.kept_bytes((0, Site.FC1))[0] == 128 * bits // 8


def test_the_same_seed_gives_the_same_rollout_and_another_seed_another(trace_engine):
    prompts = random_prompts(20)
    first = roll_out(trace_engine, prompts, seed=11)
    torch.manual_seed(123)  # the engine has its own generator
    assert_same_rollout(first, roll_out(trace_engine, prompts, seed=11))
    other, _ = roll_out(trace_engine, prompts, seed=12)
    assert [s.tokens for s in other] != [s.tokens for s in first[0]]


def test_the_same_prompt_twice_in_a_batch_has_the_same_records(trace_engine):
    prompts = random_prompts(5)
    samples, store = roll_out(trace_engine, prompts + prompts, greedy=True)
    assert_same_rollout((samples[:5], store), (samples[5:], store))


def test_records_without_a_store_are_not_kept_and_change_nothing(trace_engine):
    prompts = random_prompts(6)
    samples, _ = roll_out(trace_engine, prompts)
    before = trace_engine.seconds["record"]
    unrecorded = trace_engine.generate(
        prompts,
        [sample.sample_id for sample in samples],
        store=None,
        sampling=SamplingSettings(max_new_tokens=6),
        seed=0,
    )
    assert [s.tokens for s in unrecorded] == [s.tokens for s in samples]
    assert trace_engine.seconds["record"] - before < 1e-2


def test_all_layers_are_recorded_by_default(weights):
    engine = tiny_engine(weights, hint_sites=("v",))
    samples, store = roll_out(engine, random_prompts(4))
    assert store.places(samples[0].sample_id) == ((0, Site.V), (1, Site.V))


def test_only_the_chosen_layers_and_sites_are_recorded(weights):
    engine = tiny_engine(
        weights,
        hint_layers="latter_half",
        hint_sites=("fc1", "v"),
        hint_bits=4,
        diagnostic_share=0.5,
    )
    samples, store = roll_out(engine, random_prompts(40))
    with_codes = [s.sample_id for s in samples if store.places(s.sample_id, RecordKind.CODES)]
    for sample in samples:
        assert store.places(sample.sample_id) == ((1, Site.FC1), (1, Site.V))
        assert record_of(store, sample, 1, Site.V).num_bits == 4
    assert with_codes == [s.sample_id for s in samples if is_diagnostic(s.sample_id, 0.5)]
    assert 10 < len(with_codes) < 30
    # Full codes also show the sites that are not guided.
    assert store.places(with_codes[0], RecordKind.CODES) == tuple(
        (1, site) for site in (Site.FC1, Site.K, Site.V)
    )


def test_hints_of_fc2_hold_every_expert_slot_and_change_nothing_else(trace_engine, weights):
    engine = tiny_engine(weights, hint_layers="1", hint_sites=("fc1", "fc2"))
    prompts = random_prompts(70)
    samples, store = roll_out(engine, prompts)
    others, other_store = roll_out(trace_engine, prompts)
    for sample, other in zip(samples, others, strict=True):
        assert sample.tokens == other.tokens
        assert store.places(sample.sample_id) == ((1, Site.FC1), (1, Site.FC2))
        hint = record_of(store, sample, 1, Site.FC2)
        assert (hint.num_rows, hint.num_values) == (sample.num_rows, 4 * 64)
        assert hint.global_scale == engine.settings.global_scale(1, Site.FC2)
        same = [record_of(given, sample, 1, Site.FC1) for given in (store, other_store)]
        assert torch.equal(same[0].payload, same[1].payload)


def test_a_slot_of_fc2_is_the_expert_that_the_routing_record_names(weights):
    """Expert 5's fc1 is made zero, so that its slots, and no others, have zero blocks."""
    spoiled = {
        name: torch.zeros_like(value) if "local_experts.5.linear_fc1" in name else value
        for name, value in weights.items()
    }
    engine = tiny_engine(spoiled, hint_layers="all", hint_sites=("fc2",))
    samples, store = roll_out(engine, random_prompts(20))
    seen = 0
    for sample in samples:
        for layer in (0, 1):
            scales = record_of(store, sample, layer, Site.FC2).scale_bytes.unflatten(1, (4, -1))
            expected = sample.routing[:, layer] == 5
            assert torch.equal((scales == 0).all(-1), expected)
            seen += int(expected.sum())
    assert seen > 0


def test_qat_rolls_out_as_trace_does_and_stores_no_hints(trace_engine, weights):
    engine = tiny_engine(weights, "qat")
    assert engine.settings == trace_engine.settings
    prompts = random_prompts(8)
    samples, store = roll_out(engine, prompts)
    traced, _ = roll_out(trace_engine, prompts)
    assert len(store) == 0
    assert [s.tokens for s in samples] == [s.tokens for s in traced]
    assert all(torch.equal(a.logprobs, b.logprobs) for a, b in zip(samples, traced, strict=True))


def test_bf16_quantises_nothing(bf16_engine):
    samples, store = roll_out(bf16_engine, random_prompts(8))
    assert len(store) == 0
    assert not bf16_engine.sites.calls
    assert bf16_engine.settings is None
    assert {sample.settings_digest for sample in samples} == {""}


def test_engines_in_turn_do_not_disturb_each_other(trace_engine, bf16_engine):
    prompts = random_prompts(6)
    instances = list(RouterReplay.global_router_replay_instances)
    first, first_bf16 = roll_out(trace_engine, prompts), roll_out(bf16_engine, prompts)
    assert_same_rollout(first, roll_out(trace_engine, prompts))
    assert_same_rollout(first_bf16, roll_out(bf16_engine, prompts))
    assert RouterReplay.global_router_replay_instances == instances
    assert not InferenceMode.is_active()


def test_a_response_may_be_the_end_token_alone(weights):
    prompt = random_prompts(1)[0]
    (sample,), _ = roll_out(tiny_engine(weights, "bf16"), [prompt], greedy=True, max_new_tokens=1)
    assert (len(sample.response_tokens), sample.finish_reason) == (1, "length")
    first_token = sample.response_tokens[0]
    engine = tiny_engine(weights, eod_token=first_token, hint_layers="all")
    (sample,), store = roll_out(engine, [prompt], greedy=True)
    assert (sample.response_tokens, sample.finish_reason) == ((first_token,), "stop")
    assert sample.num_rows == len(prompt)
    assert record_of(store, sample, 0, Site.K).num_rows == len(prompt)


def test_a_response_ends_at_the_end_token_or_at_its_length(trace_engine):
    samples, _ = roll_out(trace_engine, random_prompts(64), max_new_tokens=12)
    reasons = {sample.finish_reason for sample in samples}
    assert reasons == {"stop", "length"}
    for sample in samples:
        assert 15 not in sample.response_tokens[:-1]
        if sample.finish_reason == "stop":
            assert sample.response_tokens[-1] == 15
        else:
            assert len(sample.response_tokens) == 12


def test_routing_survives_blocks_that_change_hands(bf16_engine):
    """Requests finish in the very step in which others take their blocks of 16 tokens."""
    prompts = [[1] * 10] * 32 + [[2] * 11] * 32
    samples, _ = roll_out(bf16_engine, prompts, max_new_tokens=7)
    for sample in samples:
        experts = sample.routing
        assert experts.shape[0] == sample.num_rows
        assert all(len(set(row.tolist())) == 4 for row in experts.flatten(0, 1))


def test_no_prompts_give_no_samples(trace_engine):
    samples, store = roll_out(trace_engine, [])
    assert samples == []
    assert len(store) == 0


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("share", [1, 3])
def test_a_sample_is_the_same_in_any_company(trace_engine, weights, share):
    """Alone, among others, in another order, and with other requests beside it at a time."""
    prompts, ids = random_prompts(24), [f"s{index}" for index in range(24)]
    samples, store = roll_out(trace_engine, prompts, sample_ids=ids)
    chosen = list(range(0, 24, 4))[::-share]
    engine = tiny_engine(weights, hint_layers="all", diagnostic_share=1.0, max_requests=3)
    engine.use_settings(trace_engine.settings)
    for rollout_engine in (trace_engine, engine):
        others = roll_out(
            rollout_engine, [prompts[n] for n in chosen], sample_ids=[ids[n] for n in chosen]
        )
        assert_same_rollout(([samples[n] for n in chosen], store), others)


@pytest.mark.parametrize("kind", ["sampling", "raw"])
def test_the_most_probable_tokens_are_those_of_the_reported_distribution(bf16_engine, kind):
    sampling = {"top_k": 4, "temperature": 0.7, "logprobs": kind, "top_logprobs": 6}
    samples, _ = roll_out(bf16_engine, random_prompts(10), **sampling)
    for sample in samples:
        tops, values = sample.top_tokens, sample.top_logprobs
        assert tops.shape == values.shape == (len(sample.response_tokens), 6)
        assert torch.equal(values, values.sort(dim=-1, descending=True).values)
        rows = torch.tensor(sample.response_tokens)[:, None] == tops
        assert (rows.sum(-1) == 1).all(), "a sampled token is one of the four that are kept"
        assert torch.equal(values[rows], sample.logprobs)
        if kind == "sampling":
            # BF16 logits tie, and a token as probable as the fourth is kept too.
            assert (values.exp().sum(-1) - 1).abs().max() < 1e-5
            assert (values[:, 5:] == -torch.inf).all()
        else:
            assert torch.isfinite(values).all()
            assert (values.exp().sum(-1) < 1).all()


def test_more_most_probable_tokens_than_there_are_tokens_are_refused(bf16_engine):
    with pytest.raises(ValueError, match="top_logprobs=17 exceeds the vocabulary of 16"):
        roll_out(bf16_engine, random_prompts(1), top_logprobs=17)


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.6}, {"temperature": 2.0, "top_k": 5}],
    ids=str,
)
def test_logprobs_are_those_of_the_sampling_distribution(bf16_engine, sampling):
    prompt = random_prompts(1)[0]
    many = [prompt] * 200
    samples, _ = roll_out(bf16_engine, many, max_new_tokens=1, **sampling)
    by_token = {s.response_tokens[0]: float(s.logprobs[0].exp()) for s in samples}
    counts = [s.response_tokens[0] for s in samples]
    assert all(0 < p <= 1 for p in by_token.values())
    if "top_k" in sampling:
        assert len(by_token) <= sampling["top_k"]
    for token, probability in by_token.items():
        # 4.5 standard deviations of 200 draws
        deviation = 4.5 * (probability * (1 - probability) / 200) ** 0.5 + 1e-6
        assert abs(counts.count(token) / 200 - probability) < deviation, token
    assert sum(by_token.values()) == pytest.approx(1.0, abs=0.1)


def test_one_thread_computes_beside_a_gpu_and_all_of_them_after_an_error():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for device, expected in (("cuda", 1), ("cpu", 2)):
            within = []
            with (
                contextlib.suppress(RuntimeError),
                _one_thread_beside_a_gpu(torch.device(device)),
            ):
                within.append(torch.get_num_threads())
                raise RuntimeError("a step failed")
            assert (within, torch.get_num_threads()) == ([expected], 2)
    finally:
        torch.set_num_threads(num_threads)
