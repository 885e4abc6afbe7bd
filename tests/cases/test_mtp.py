"""Case 33: layers of multi-token prediction stay plain, whatever Megatron numbers them."""

from __future__ import annotations

import pytest
import torch

from megatron_trace.config import HINT_SITES
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.recorded_samples import seen_values
from megatron_trace.testing.tiny_trainer import recorded_rollout, tiny_trainer
from megatron_trace.training.micro_batch import make_micro_batch
from megatron_trace.training.model import token_logprobs

pytestmark = pytest.mark.usefixtures("one_rank")

FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
MTP = {"pattern": "*E*E/*E", "config": {"mtp_num_layers": 1}}


def _run(model, sites, rolled):
    model.train()
    micro_batch = make_micro_batch(rolled.samples, rolled.store, sites)
    with sites.micro_batch(micro_batch), seen_values(sites) as seen:
        logprobs = token_logprobs(model, sites, micro_batch)
        logprobs[micro_batch.loss_mask].sum().backward()
    return micro_batch, logprobs.detach(), seen


@pytest.mark.parametrize("recomputation", [{}, FULL], ids=["plain", "recomputed"])
@pytest.mark.parametrize("method", ["bf16", "trace"])
def test_33_mtp_takes_no_routes_of_a_decoder_layer_and_no_hints(method, recomputation):
    rolled = recorded_rollout(sites=HINT_SITES)
    options = {"hint_sites": HINT_SITES} if method == "trace" else {}
    model, sites = tiny_trainer(
        method,
        settings=rolled.settings,
        pattern=MTP["pattern"],
        config=MTP["config"] | recomputation,
        **options,
    )
    attention, moe = model.mtp.layers[0].mtp_model_layer.layers
    assert (attention.layer_number, moe.layer_number) == (1, 2)
    routes = []
    moe.mlp.router.register_forward_hook(lambda m, i, o: routes.append((i[0], o[1])))
    micro_batch, _, seen = _run(model, sites, rolled)
    assert routes
    for x, routing_map in routes:
        live = x.flatten(0, 1).float() @ moe.mlp.router.weight.float().T
        own = torch.zeros_like(routing_map).scatter(1, live.topk(4).indices, True)
        assert torch.equal(routing_map, own)
        recorded = torch.zeros_like(routing_map).scatter(1, micro_batch.routing[0], True)
        assert not torch.equal(routing_map, recorded)
    assert {layer for layer, _ in seen} == (set() if method == "bf16" else {0, 1})
    for name, parameter in moe.named_parameters():
        if "experts" not in name:
            assert parameter.grad is not None, name
    sites.assert_ran()


def test_33_decoder_layers_are_guided_as_without_mtp():
    rolled = recorded_rollout(sites=HINT_SITES)
    model, sites = tiny_trainer("trace", settings=rolled.settings, hint_sites=HINT_SITES)
    weights = model.state_dict()
    _, expected, seen = _run(model, sites, rolled)
    with_mtp, own = tiny_trainer("trace", settings=rolled.settings, hint_sites=HINT_SITES, **MTP)
    with_mtp.load_state_dict(weights, strict=False)
    _, logprobs, seen_with_mtp = _run(with_mtp, own, rolled)
    assert_same_bytes(logprobs, expected, "log-probs")
    for place, values in seen.items():
        for got, wanted in zip(seen_with_mtp[place].outputs, values.outputs, strict=True):
            assert_same_bytes(got, wanted, f"{place}")
    assert own.report() == sites.report()
    assert own.shape == sites.shape
