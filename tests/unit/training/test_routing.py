"""Replay by key, and even routing of padding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron.core.transformer.moe.router_replay import RouterReplay

from megatron_trace.hints.types import Site
from megatron_trace.models.routing import replay_instances
from megatron_trace.testing.assertions import tolerance
from megatron_trace.testing.recorded_samples import random_samples
from megatron_trace.testing.tiny_trainer import recorded_rollout
from megatron_trace.training.batch_rows import slot_order
from megatron_trace.training.even_experts import even_experts
from megatron_trace.training.micro_batch import make_micro_batch
from megatron_trace.training.model import token_logprobs
from megatron_trace.training.routing import are_others, would_be_others

LENGTHS = ((5, 3), (3, 0), (7, 4), (2, 6))


def _experts_used(model, sites, micro_batch, **options):
    """Gives the expert sets [L, N, k] that the dispatchers saw."""
    with torch.no_grad(), sites.micro_batch(micro_batch, **options):
        token_logprobs(model, sites, micro_batch)
    maps = [layer.mlp.token_dispatcher.routing_map for layer in model.decoder.layers[1::2]]
    return torch.stack([m.nonzero()[:, 1].view(-1, 4) for m in maps])


def _micro_batch(sites, lengths=LENGTHS, seed=0):
    samples = random_samples(lengths, sites.shape, vocab_size=16, seed=seed)
    return make_micro_batch(samples, None, sites)


def test_tokens_go_to_the_rollouts_experts(build):
    model, sites = build("bf16")
    micro_batch = _micro_batch(sites)
    used = _experts_used(model, sites, micro_batch)
    assert torch.equal(used, micro_batch.routing.sort(-1).values)


def test_outside_of_a_micro_batch_and_with_replay_off_the_router_chooses(build):
    model, sites = build("bf16")
    micro_batch = _micro_batch(sites)
    free = _experts_used(model, sites, micro_batch, replay_routing=False)
    assert not torch.equal(free, micro_batch.routing.sort(-1).values)
    positions = micro_batch.positions
    with torch.no_grad():
        model(micro_batch.tokens[:, :-1], positions, None)
    chosen = model.decoder.layers[1].mlp.token_dispatcher.routing_map.nonzero()[:, 1].view(-1, 4)
    assert torch.equal(chosen, free[0])


def test_with_replay_off_the_share_of_other_expert_sets_is_counted(build):
    model, sites = build("bf16")
    micro_batch = _micro_batch(sites)
    free = _experts_used(model, sites, micro_batch, replay_routing=False)
    different = (free != micro_batch.routing.sort(-1).values).any(-1)
    report = sites.report()
    assert report.routing_compared == 2 * 26
    assert report.routing_different == int(different[:, micro_batch.valid.flatten()].sum())
    own = [
        replace(s, routing=free.cpu().view(2, 10, 4, 4)[:, : s.num_rows, b].transpose(0, 1).short())
        for b, s in enumerate(random_samples(LENGTHS, sites.shape, vocab_size=16))
    ]
    sites.reset_report()
    _experts_used(model, sites, make_micro_batch(own, None, sites), replay_routing=False)
    assert sites.report().routing_mismatch == 0.0


@pytest.mark.parametrize("noise", [0.0, 1e-3, 0.3])
def test_rows_that_would_go_elsewhere_are_told_without_sorting_their_scores(noise):
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(500, 64, generator=generator).softmax(1)
    heard = scores * (1 + noise * torch.rand(500, 64, generator=generator))
    recorded = heard.topk(8).indices
    different = would_be_others(scores, recorded)
    assert torch.equal(different, are_others(scores.topk(8).indices, recorded))
    assert bool(different.any()) == (noise > 0)


def test_of_experts_with_equal_scores_the_recorded_one_counts_as_taken():
    scores = torch.tensor([[0.4, 0.3, 0.3], [0.3, 0.4, 0.3]])
    recorded = torch.tensor([[0, 2], [0, 2]])
    assert would_be_others(scores, recorded).tolist() == [False, True]


def test_replay_touches_nothing_of_the_process(build):
    before = list(RouterReplay.global_router_replay_instances)
    model, sites = build("bf16")
    _experts_used(model, sites, _micro_batch(sites))
    assert before == RouterReplay.global_router_replay_instances
    assert all(r.recorded_topk_idx is None for r in replay_instances(model))


def test_gate_weights_come_from_the_live_logits(build):
    model, sites = build("bf16")
    micro_batch = _micro_batch(sites)
    router = model.decoder.layers[1].mlp.router
    seen = {}
    router.register_forward_hook(lambda m, i, o: seen.update(x=i[0], probs=o[0]))
    _experts_used(model, sites, micro_batch)
    logits = seen["x"].flatten(0, 1).float() @ router.weight.float().T
    chosen = micro_batch.routing[0]
    expected = torch.zeros_like(logits).scatter(1, chosen, logits.gather(1, chosen).softmax(-1))
    torch.testing.assert_close(
        seen["probs"].float(), expected, rtol=tolerance(cpu=1e-6, gpu=1e-3), atol=1e-7
    )


def test_gradient_flows_for_replayed_experts_outside_of_the_live_top_k(build):
    """The gate's gradient is that of a softmax over the replayed experts' live logits."""
    model, sites = build("bf16")
    micro_batch = _micro_batch(sites)
    router = model.decoder.layers[3].mlp.router
    seen = {}
    router.register_forward_hook(lambda m, i, o: seen.update(x=i[0], probs=o[0]))
    with sites.micro_batch(micro_batch):
        logprobs = token_logprobs(model, sites, micro_batch)
        seen["probs"].retain_grad()
        logprobs[micro_batch.valid.T].sum().backward()
    x, chosen = seen["x"].detach().flatten(0, 1), micro_batch.routing[1]
    weight = router.weight.detach().clone().requires_grad_()
    logits = x @ weight.T
    probs = logits.gather(1, chosen).softmax(-1)
    probs.backward(seen["probs"].grad.gather(1, chosen))
    torch.testing.assert_close(
        router.weight.grad, weight.grad, rtol=1e-4, atol=tolerance(cpu=1e-6, gpu=1e-4)
    )
    outside = (logits.topk(4).indices.unsqueeze(1) != chosen.unsqueeze(2)).all(-1)
    outside &= micro_batch.valid.flatten().unsqueeze(-1)
    of_outside = seen["probs"].grad.gather(1, chosen)[outside]
    assert len(of_outside) > 50
    assert of_outside.all()


def test_rows_of_another_forward_are_refused(build):
    model, sites = build("bf16")
    micro_batch = _micro_batch(sites)
    tokens = torch.zeros(1, 4, dtype=torch.int64, device=sites.device)
    with (
        pytest.raises(ValueError, match="MoE layer 0 got 4 rows"),
        sites.micro_batch(micro_batch),
    ):
        model(tokens, tokens, None)


def test_replay_needs_a_model_that_was_built_for_it(build):
    model, sites = build("bf16", config={"moe_enable_routing_replay": False})
    micro_batch = _micro_batch(sites)
    with (
        pytest.raises(RuntimeError, match="moe_enable_routing_replay=False"),
        sites.micro_batch(micro_batch),
    ):
        pass
    _experts_used(model, sites, micro_batch, replay_routing=False)


@pytest.mark.parametrize(
    ("num_experts", "num_rows", "top_k"),
    [(16, 63, 4), (8, 63, 2), (128, 1, 8), (5, 7, 5), (8, 0, 2)],
)
def test_padding_alone_is_spread_evenly_over_distinct_experts(num_experts, num_rows, top_k):
    experts = even_experts(torch.zeros(num_experts, dtype=torch.int64), num_rows, top_k)
    assert experts.shape == (num_rows, top_k)
    assert all(len(set(row)) == top_k for row in experts.tolist())
    loads = torch.bincount(experts.flatten(), minlength=num_experts)
    assert int(loads.max() - loads.min()) <= 1


def test_padding_fills_up_what_real_rows_left_empty():
    loads = torch.tensor([7, 0, 3, 0, 0, 1, 0, 2])
    total = loads + torch.bincount(even_experts(loads, 15, 3).flatten(), minlength=8)
    assert int(total.max() - total.min()) <= 1


def test_an_overloaded_expert_gets_no_padding():
    loads = torch.tensor([1000, 0, 0, 0])
    experts = even_experts(loads, 6, 2)
    assert torch.bincount(experts.flatten(), minlength=4).tolist() == [0, 4, 4, 4]


def test_more_experts_per_row_than_there_are_is_refused():
    with pytest.raises(ValueError, match="5 distinct experts"):
        even_experts(torch.zeros(4, dtype=torch.int64), 2, 5)


def test_slots_are_sorted_by_expert_and_row():
    experts = torch.stack([torch.randperm(300)[:4] for _ in range(500)])
    order = slot_order(experts)
    assert order.dtype == torch.int32
    assert torch.equal(order.long(), experts.flatten().sort(stable=True).indices)


def test_slots_that_were_sorted_on_the_host_get_the_hints_that_the_device_would_sort(build):
    rolled = recorded_rollout(sites=("fc1", "fc2", "k", "v"))
    model, sites = build("trace", settings=rolled.settings, hint_sites=("fc1", "fc2", "k", "v"))
    micro_batch = make_micro_batch(rolled.samples, rolled.store, sites)
    assert set(micro_batch.slot_orders) == set(sites.shape.moe_layers)
    found, counts = [], []
    for of in (micro_batch, replace(micro_batch, slot_orders={})):
        sites.reset_report()
        with torch.no_grad(), sites.micro_batch(of):
            found.append(token_logprobs(model, sites, of))
        counts.append(sites.report().sites)
    assert torch.equal(*found)
    assert counts[0] == counts[1]
    fc2 = counts[0][Site.FC2]
    assert fc2.guided == sum(of.num_rows for of in rolled.samples) * 2 * sites.shape.top_k
    assert fc2.missing == fc2.rejected == 0 < fc2.padding


def test_padding_experts_do_not_change_real_rows(build):
    """Bit-equal but where products depend on how many rows an expert has.

    Measured on a CPU with AVX 0, on one without 2.4e-7, an FP32 step; routing changes them by 1e-2.
    """
    model, sites = build("bf16")
    micro_batch = _micro_batch(sites)
    shifted = micro_batch.routing.clone()
    padding = ~micro_batch.valid.flatten()
    shifted[:, padding] = (shifted[:, padding] + 5) % 16
    logprobs = []
    for routing in (micro_batch.routing, shifted):
        with torch.no_grad(), sites.micro_batch(replace(micro_batch, routing=routing)) as mb:
            logprobs.append(token_logprobs(model, sites, mb))
    real = micro_batch.valid.T
    assert (logprobs[0] - logprobs[1])[real].abs().max() <= tolerance(
        cpu=0, gpu=1e-5, without_avx=2e-6
    )
