"""Packed samples give what separate samples give: codes, log-probs, gradients, counts."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from megatron_trace.config import HINT_SITES
from megatron_trace.hints.types import Site
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.recorded_samples import seen_values
from megatron_trace.training.layout import RankLayout
from megatron_trace.training.micro_batch import make_micro_batch, planned_hint_bytes
from megatron_trace.training.model import build_gpt_trainer_model, token_logprobs
from megatron_trace.training.row_order import row_order

# 5, 7, 3 and 1 rows; the last has an empty response.
LENGTHS = ((3, 3), (5, 3), (2, 2), (2, 0))
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 3), (4, 2)]


def run(model, sites, rolled, groups, **arguments):
    """Forwards groups of samples; gives log-probs by sample, gradients, codes and counts."""
    model.zero_grad()
    sites.reset_report()
    logprobs = {}
    with seen_values(sites) as seen:
        for group in groups:
            micro_batch = make_micro_batch(group, rolled.store, sites, **arguments)
            with sites.micro_batch(micro_batch):
                found = token_logprobs(model, sites, micro_batch)
                (-found[micro_batch.loss_mask].sum()).backward()
            for b, sample in enumerate(group):
                logprobs[sample.sample_id] = found[b, : sample.num_rows].detach()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    sites.assert_ran()
    return logprobs, grads, {place: of.outputs for place, of in seen.items()}, sites.report()


def of_each_expert(outputs):
    """Gives the rows of each expert, micro-batch after micro-batch."""
    return [torch.cat(outputs[expert::16]) for expert in range(16)]


def assert_packed_like_separate(model, sites, rolled, **arguments):
    separate = run(model, sites, rolled, [[sample] for sample in rolled.samples])
    packed = run(model, sites, rolled, [rolled.samples], packed=True, **arguments)
    num_rows = sum(sample.num_rows for sample in rolled.samples)
    for sample_id, expected in separate[0].items():
        assert torch.allclose(packed[0][sample_id], expected, rtol=1e-6, atol=1e-6), sample_id
    assert packed[1].keys() == separate[1].keys()
    for name, expected in separate[1].items():
        error = (packed[1][name] - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
        # Sums over rows in another order; measured 6e-7 at most.
        assert error <= 1e-5, f"{name}: {error:.1e}"
    for place, outputs in separate[2].items():
        if place[1] is Site.FC2:
            for expert, expected in enumerate(of_each_expert(outputs)):
                got = of_each_expert(packed[2][place])[expert]
                # Padding comes last in a pack, and so in every expert.
                assert_same_bytes(got[: len(expected)], expected, f"{place}, expert {expert}")
        else:
            expected = torch.cat(outputs)
            assert len(expected) == num_rows
            assert_same_bytes(torch.cat(packed[2][place])[:num_rows], expected, f"{place}")
    counts = [report.sites for report in (separate[3], packed[3])]
    for site, expected in counts[0].items():
        assert counts[1][site].guided == expected.guided > 0, site
        assert counts[1][site].rejected == expected.rejected, site
    return packed[3]


@pytest.mark.parametrize("num_positions", [None, 21])
def test_packed_samples_give_what_separate_samples_give(build, rollout, num_positions):
    rolled = rollout(LENGTHS, sites=HINT_SITES)
    model, sites = build("trace", settings=rolled.settings, hint_sites=HINT_SITES)
    report = assert_packed_like_separate(model, sites, rolled, num_positions=num_positions)
    padding = 0 if num_positions is None else 5
    assert report.sites[Site.FC1].padding == 2 * padding
    assert report.sites[Site.FC2].padding == 2 * 4 * padding


def test_packed_samples_are_recomputed_with_their_hints(build, rollout):
    rolled = rollout(LENGTHS, sites=HINT_SITES)
    full = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    made = {
        name: build("trace", settings=rolled.settings, hint_sites=HINT_SITES, config=config)
        for name, config in (("kept", {}), ("recomputed", full))
    }
    kept, again = (run(*of, rolled, [rolled.samples], packed=True) for of in made.values())
    for name, expected in kept[1].items():
        assert torch.equal(again[1][name], expected), name
    for place, outputs in kept[2].items():
        for got, expected in zip(again[2][place][: len(outputs)], outputs, strict=True):
            assert_same_bytes(got, expected, f"{place}")


def test_gated_delta_net_keeps_packed_samples_apart(build, rollout):
    rolled = rollout(LENGTHS, pattern="GE*E", sites=HINT_SITES)
    # fla's kernels, which round to TF32, are compared packed in test_fla_backward.py.
    own = {"settings": rolled.settings, "hint_sites": HINT_SITES, "delta_rule": "torch"}
    model, sites = build("trace", pattern="GE*E", **own)
    assert_packed_like_separate(model, sites, rolled)


def test_a_gpt_model_forwards_packed_samples(build, rollout):
    rolled = rollout(LENGTHS)
    hybrid, sites = build("trace", settings=rolled.settings)
    config = replace(hybrid.config, num_layers=2)
    torch.manual_seed(0)
    model, own = build_gpt_trainer_model(
        config,
        vocab_size=16,
        max_sequence_length=32,
        trace=sites.trace,
        dtype=torch.float32,
    )
    own.settings = rolled.settings
    rows = {}
    for packed in (False, True):
        micro_batch = make_micro_batch(rolled.samples, rolled.store, own, packed=packed)
        with own.micro_batch(micro_batch):
            rows[packed] = token_logprobs(model, own, micro_batch)[micro_batch.loss_mask]
    assert torch.allclose(rows[True], rows[False], rtol=1e-6, atol=1e-6)


def test_megatrons_attention_refuses_packs_before_anything_runs(build, rollout):
    rolled = rollout(LENGTHS)
    _, sites = build("trace", settings=rolled.settings, attention="megatron")
    with pytest.raises(ValueError, match=r"cannot forward packed samples.*attention=sdpa"):
        make_micro_batch(rolled.samples, rolled.store, sites, packed=True)


def on_ranks(sites, rolled, tp_size, cp_size):
    """Gives the packed micro-batch of every rank, as its model would make it."""
    whole = sites.shape
    for cp_rank, tp_rank in itertools.product(range(cp_size), range(tp_size)):
        sites.shape = replace(whole, layout=RankLayout(tp_size, tp_rank, cp_size, cp_rank))
        try:
            micro_batch = make_micro_batch(rolled.samples, rolled.store, sites, packed=True)
            planned = planned_hint_bytes(rolled.samples, rolled.store, sites, packed=True)
            yield sites.shape, micro_batch, planned
        finally:
            sites.shape = whole


@pytest.mark.parametrize(("tp_size", "cp_size"), LAYOUTS)
def test_hints_and_routing_of_all_ranks_are_those_of_separate_samples(
    build, rollout, tp_size, cp_size
):
    rolled = rollout(LENGTHS, sites=HINT_SITES)
    _, sites = build("trace", settings=rolled.settings, hint_sites=HINT_SITES)
    separate = [make_micro_batch([sample], rolled.store, sites) for sample in rolled.samples]
    found = {}
    for shape, micro_batch, planned in on_ranks(sites, rolled, tp_size, cp_size):
        assert micro_batch.hint_bytes == planned
        for place, hints in micro_batch.hints.items():
            rows = micro_batch.rows_at(place[1])
            columns = shape.columns(place[1]) or range(shape.row_width(place[1]))
            assert torch.equal(hints.has_hint, rows.real)
            for row in rows.real.nonzero()[:, 0].tolist():
                sample, position = int(rows.samples[row]), int(rows.positions[row])
                whole = separate[sample].hints[place]
                cut = slice(columns.start // 8, columns.stop // 8)
                assert torch.equal(hints.payload[row], whole.payload[position, cut])
                cut = slice(columns.start // 16, columns.stop // 16)
                assert torch.equal(hints.scale_bytes[row], whole.scale_bytes[position, cut])
                if place[1] in (Site.FC1, Site.FC2):
                    expected = separate[sample].routing[:, position]
                    assert torch.equal(micro_batch.routing[:, row], expected)
                key = place, sample, position, columns.start
                assert key not in found or shape.kv_values // 32 < tp_size, key
                found[key] = True
    for place in sites.recorded_places:
        seen = {key[1:3] for key in found if key[0] == place}
        assert seen == {(b, p) for b, s in enumerate(rolled.samples) for p in range(s.num_rows)}


@pytest.mark.parametrize(("tp_size", "cp_size"), LAYOUTS)
def test_padding_of_packs_is_spread_evenly_over_the_experts(build, rollout, tp_size, cp_size):
    rolled = rollout(LENGTHS)
    _, sites = build("trace", settings=rolled.settings)
    loads = sum(
        torch.stack([torch.bincount(layer.flatten(), minlength=16) for layer in each.routing.cpu()])
        for _, each, _ in on_ranks(sites, rolled, tp_size, cp_size)
    )
    real = torch.stack([sample.routing.transpose(0, 1).flatten(1) for sample in rolled.samples][:1])
    assert real.numel()
    total = row_order(
        tuple(sample.num_rows for sample in rolled.samples),
        RankLayout(tp_size=tp_size, cp_size=cp_size),
        num_positions=None,
        packed=True,
    ).num_positions
    assert loads.sum(1).tolist() == [4 * total] * 2
    recorded = torch.cat([sample.routing.to(torch.int64) for sample in rolled.samples])
    for layer in range(2):
        of_tokens = torch.bincount(recorded[:, layer].flatten(), minlength=16)
        padded = loads[layer] - of_tokens
        assert int(padded.min()) >= 0
        raised = loads[layer][padded > 0]
        assert not len(raised) or int(raised.max()) <= int(loads[layer].min()) + 1


def test_a_pack_that_does_not_fit_names_the_least(build, rollout):
    rolled = rollout(LENGTHS)
    _, sites = build("trace", settings=rolled.settings)
    with pytest.raises(ValueError, match=r"num_positions=15 does not hold packed .* 16 is the lea"):
        make_micro_batch(rolled.samples, rolled.store, sites, packed=True, num_positions=15)
    # A single sample cannot be too long for a pack that holds it beside others.
    make_micro_batch(rolled.samples, rolled.store, sites, packed=True, num_positions=40)


def test_own_positions_of_all_context_parallel_ranks_are_all_tokens(build, rollout):
    rolled = rollout(LENGTHS)
    _, sites = build("trace", settings=rolled.settings)
    for packed in (False, True):
        owned = 0
        for cp_rank in range(2):
            sites.shape = replace(sites.shape, layout=RankLayout(cp_size=2, cp_rank=cp_rank))
            micro_batch = make_micro_batch(rolled.samples, rolled.store, sites, packed=packed)
            owned = owned + (micro_batch.own_positions & micro_batch.valid.T).int()
        assert torch.equal(owned, micro_batch.valid.T.int())
        sites.shape = replace(sites.shape, layout=RankLayout())
