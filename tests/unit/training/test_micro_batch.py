"""Assembling samples: padding, row order, masks, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_trace.hints.codec import encode_hint
from megatron_trace.hints.store import HintStore
from megatron_trace.hints.types import HintKey, QuantizerSettings, Site
from megatron_trace.testing.recorded_samples import random_samples
from megatron_trace.training.micro_batch import make_micro_batch

LENGTHS = ((5, 3), (3, 0), (7, 4), (1, 6), (1, 0))
VOCAB = 16


@pytest.fixture
def sites(build):
    """TraceSites with settings that need no forward pass."""
    _, sites = build("trace")
    sites.settings = QuantizerSettings(dict.fromkeys(sites.shape.places, 2.0**-9))
    return sites


def _samples(sites, lengths=LENGTHS):
    return random_samples(
        lengths, sites.shape, vocab_size=VOCAB, settings_digest=sites.settings.digest()
    )


def _numbered_store(sites, samples, num_bits=1):
    """Hints whose first scale byte is the number of the row over all samples."""
    store, first = HintStore(), 1
    for sample in samples:
        for place in sites.recorded_places:
            width = sites.shape.row_width(place[1])
            scale_bytes = torch.full(
                (sample.num_rows, width // 16), 1 + place[0], dtype=torch.uint8
            )
            scale_bytes[:, 0] = torch.arange(first, first + sample.num_rows)
            codes = torch.zeros(sample.num_rows, width, dtype=torch.uint8)
            key = HintKey(sample.sample_id, *place, 0, sample.settings_digest)
            store.put(encode_hint(key, codes, scale_bytes, 2.0**-9, num_bits))
        first += sample.num_rows
    return store


def test_hint_rows_stand_where_the_models_rows_stand(sites):
    samples = _samples(sites)
    micro_batch = make_micro_batch(samples, _numbered_store(sites, samples), sites)
    expected = torch.zeros(10, 5, dtype=torch.int64)
    first = 1
    for column, sample in enumerate(samples):
        expected[: sample.num_rows, column] = torch.arange(first, first + sample.num_rows)
        first += sample.num_rows
    for place in sites.recorded_places:
        rows = micro_batch.hints[place]
        assert rows.scale_bytes[:, 0].view(10, 5).tolist() == expected.tolist(), place
        assert rows.has_hint.view(10, 5).tolist() == (expected > 0).tolist(), place
        assert set(rows.scale_bytes[rows.has_hint][:, 1].tolist()) == {1 + place[0]}, place


def test_routing_rows_stand_where_the_models_rows_stand(sites):
    samples = _samples(sites)
    micro_batch = make_micro_batch(samples, _numbered_store(sites, samples), sites)
    routing = micro_batch.routing.view(2, 10, 5, 4).cpu()
    for column, sample in enumerate(samples):
        expected = sample.routing.long().transpose(0, 1)
        assert torch.equal(routing[:, : sample.num_rows, column], expected)


def test_logprobs_and_mask_stand_where_response_tokens_are_predicted(sites):
    samples = [
        replace(s, logprobs=-1.0 - torch.arange(len(s.response_tokens))) for s in _samples(sites)
    ]
    micro_batch = make_micro_batch(samples, _numbered_store(sites, samples), sites)
    assert micro_batch.loss_mask.sum(1).tolist() == [3, 0, 4, 6, 0]
    for b, sample in enumerate(samples):
        mask = micro_batch.loss_mask[b]
        assert micro_batch.tokens[b, 1:][mask].tolist() == list(sample.response_tokens)
        assert micro_batch.rollout_logprobs[b][mask].tolist() == sample.logprobs.tolist()
        assert not micro_batch.rollout_logprobs[b][~mask].any()


def test_padding_is_on_the_right_with_the_token_given(sites):
    samples = _samples(sites)
    store = _numbered_store(sites, samples)
    micro_batch = make_micro_batch(samples, store, sites, padding_token=9)
    assert micro_batch.tokens[1].tolist() == [*samples[1].tokens] + [9] * 8
    assert micro_batch.positions[1].tolist() == list(range(10))
    assert micro_batch.valid[:, 1].tolist() == [True, True] + [False] * 8


@pytest.mark.parametrize("method", ["bf16", "qat"])
def test_methods_without_hints_need_no_store(build, sites, method):
    _, other = build(method)
    if method == "qat":
        other.settings = sites.settings
    assert make_micro_batch(_samples(sites), None, other).hints == {}


def test_method_trace_without_a_store_is_refused(sites):
    with pytest.raises(ValueError, match="needs the store"):
        make_micro_batch(_samples(sites), None, sites)


def test_only_recorded_layers_and_sites_are_looked_up(build, sites):
    samples = _samples(sites)
    _, half = build("trace", hint_layers="latter_half", hint_sites=("k",))
    half.settings = sites.settings
    micro_batch = make_micro_batch(samples, _numbered_store(sites, samples), half)
    assert set(micro_batch.hints) == {(1, Site.K)}


def _refused(sites, samples, message, store=None, error=ValueError):
    store = store or _numbered_store(sites, samples)
    with pytest.raises(error, match=message):
        make_micro_batch(samples, store, sites)


def test_a_prompt_longer_than_the_context_is_refused_by_name(sites):
    _refused(sites, _samples(sites, ((4, 2), (40, 1))), "sample-1 forwards 40 .*context of 32")


def test_no_samples_are_refused(sites):
    _refused(sites, [], "at least one sample", store=HintStore())


def test_a_sample_without_a_prompt_is_refused(sites):
    _refused(sites, _samples(sites, ((0, 4),)), "sample-0 has no prompt token")


def test_samples_of_one_token_are_refused(sites):
    _refused(sites, _samples(sites, ((1, 0), (1, 0))), "needs a token to forward")


def test_routing_of_another_model_is_refused(sites):
    samples = _samples(sites)
    samples[2] = replace(samples[2], routing=samples[2].routing[:, :1])
    _refused(sites, samples, r"sample-2 has routing of \(MoE layers, top-k\) \(1, 4\).*\(2, 4\)")


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_tokens_of_another_vocabulary_are_refused(sites, token):
    """A GPU would only report an assertion of some kernel, and end the process."""
    samples = _samples(sites)
    response = (*samples[2].response_tokens[:-1], token)
    samples[2] = replace(samples[2], response_tokens=response)
    _refused(sites, samples, rf"sample-2 has tokens .*{token}.* vocabulary is 0 to 15")


@pytest.mark.parametrize(("expert", "message"), [(16, "not all of 0 to 15"), (-1, "not all of")])
def test_an_expert_that_does_not_exist_is_refused(sites, expert, message):
    samples = _samples(sites)
    samples[2].routing[3, 1, 2] = expert
    _refused(sites, samples, f"sample-2: the experts of row 3 in MoE layer 1 are {message}")


def test_a_row_with_the_same_expert_twice_is_refused(sites):
    samples = _samples(sites)
    samples[0].routing[1, 0] = torch.tensor([3, 5, 3, 1])
    _refused(sites, samples, "experts of row 1 in MoE layer 0 are not distinct")


def test_hints_of_another_policy_version_are_refused(sites):
    samples = _samples(sites)
    store = _numbered_store(sites, samples)
    samples[0] = replace(samples[0], policy_version=1)
    _refused(sites, samples, "policy version 0, but 1", store)


def test_samples_rolled_out_under_other_settings_are_refused(sites):
    samples = _samples(sites)
    samples[3] = replace(samples[3], settings_digest="0123456789abcdef")
    store = _numbered_store(sites, samples)
    _refused(sites, samples, "sample-3 was rolled out under quantiser settings 0123", store)


def test_samples_of_a_bf16_rollout_are_refused_by_name(sites):
    samples = [replace(s, settings_digest="") for s in _samples(sites)]
    _refused(sites, samples, r"\(none: BF16\)", HintStore())


def test_hints_with_another_number_of_rows_are_refused(sites):
    samples = _samples(sites)
    store = _numbered_store(sites, samples)
    longer = _samples(sites, ((5, 4), *LENGTHS[1:]))
    _refused(sites, longer, "number of rows 7, but 8", store)


def test_hints_of_another_width_are_refused(build, sites):
    samples = _samples(sites)
    _, wide = build("trace", config={"hidden_size": 256})
    wide.settings = sites.settings
    with pytest.raises(ValueError, match="values of a row 128, expected 256"):
        make_micro_batch(samples, _numbered_store(sites, samples), wide)


def test_hints_with_other_bits_than_configured_are_refused(sites):
    samples = _samples(sites)
    _refused(sites, samples, "bits per value 4, expected 1", _numbered_store(sites, samples, 4))


def _with_top(samples, num_top):
    return [
        replace(
            sample,
            top_tokens=torch.arange(len(sample.response_tokens) * num_top, dtype=torch.int32).view(
                -1, num_top
            ),
            top_logprobs=torch.full((len(sample.response_tokens), num_top), -0.5 - number),
        )
        for number, sample in enumerate(samples)
    ]


def test_most_likely_tokens_stand_where_the_sampled_ones_do(sites):
    samples = _with_top(_samples(sites), 3)
    micro_batch = make_micro_batch(samples, _numbered_store(sites, samples), sites)
    top_tokens, top_logprobs = micro_batch.top_tokens.cpu(), micro_batch.top_logprobs.cpu()
    for row, sample in enumerate(samples):
        positions = micro_batch.loss_mask[row].cpu()
        assert torch.equal(top_tokens[row, positions], sample.top_tokens.long())
        assert torch.equal(top_logprobs[row, positions], sample.top_logprobs)
        assert not top_tokens[row, ~positions].any()
        assert torch.isneginf(top_logprobs[row, ~positions]).all()


def test_samples_with_unequally_many_likely_tokens_are_refused(sites):
    samples = _samples(sites)
    mixed = [*_with_top(samples[:2], 3), *samples[2:]]
    with pytest.raises(ValueError, match=r"equally many top_tokens at a position; got \[0, 3\]"):
        make_micro_batch(mixed, _numbered_store(sites, samples), sites)


def test_tokens_that_were_given_between_turns_have_no_loss(sites):
    samples = _samples(sites)
    given = torch.tensor([0, 1, 0, 1], dtype=torch.uint8)
    samples[2] = replace(samples[2], given=given)  # 7 prompt tokens, 4 of the response
    micro_batch = make_micro_batch(samples, _numbered_store(sites, samples), sites)
    assert micro_batch.loss_mask[2].nonzero()[:, 0].tolist() == [6, 8]
    assert micro_batch.loss_mask[0].sum() == 3
