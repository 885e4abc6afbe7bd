"""Output and gradients of one MoE layer, and of attention, beside the same arithmetic in torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from megatron_trace.config import HINT_SITES
from megatron_trace.formats import ops, reference
from megatron_trace.hints.types import Site
from megatron_trace.testing.assertions import assert_same_bytes, tolerance
from megatron_trace.testing.moe_reference import TorchProduct, quantised_weight, routed_experts
from megatron_trace.training.micro_batch import make_micro_batch
from megatron_trace.training.model import token_logprobs
from megatron_trace.training.rounding import Rounding

# Measured on a CPU 0: the same products in the same order. On a GPU Megatron's router multiplies
# FP32 in TF32, where Transformer Engine is installed: measured 1.1e-4 for the output, others not.
TOLERANCE = tolerance(cpu=1e-5, gpu=1e-3)


def _close(got, expected, name):
    scale = expected.abs().max().item()
    assert scale > 0, f"{name} is all zero, so the comparison would say nothing"
    error = (got - expected).abs().max().item() / scale
    assert error <= TOLERANCE, f"{name}: relative error {error:.1e}"


@pytest.fixture(
    params=[
        ("qat", {}),
        ("trace", {}),
        ("trace", {"hint_sites": HINT_SITES}),
        ("trace", {"hint_sites": HINT_SITES, "save_packed_activations": True}),
    ],
    ids=["qat", "trace", "fc2 hints", "fc2 hints, packed"],
)
def ready(request, build, rollout):
    method, options = request.param
    rolled = rollout(sites=HINT_SITES)
    model, sites = build(method, guard=False, **options)
    sites.settings = rolled.settings
    return model, sites, make_micro_batch(rolled.samples, rolled.store, sites)


def _moe_reference(moe, sites, micro_batch, x, router_weight):
    """Gives the layer's output on x [S, B, H] in plain torch, and the experts' weight leaves."""
    roundings = (
        Rounding(sites.settings.global_scale(0, Site.FC1), micro_batch.hints.get((0, Site.FC1))),
        Rounding(sites.settings.global_scale(0, Site.FC2), _hints_of_slots(micro_batch)),
    )
    experts = moe.experts.local_experts
    products = tuple(
        TorchProduct(
            [quantised_weight(getattr(e, name).weight.bfloat16()).float() for e in experts]
        )
        for name in ("linear_fc1", "linear_fc2")
    )
    tokens = x.flatten(0, 1)
    logits = tokens @ router_weight.T
    chosen = micro_batch.routing[0]
    probs = torch.zeros_like(logits).scatter(1, chosen, logits.gather(1, chosen).softmax(-1))
    routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)
    return routed_experts(tokens, probs, routing_map, products, roundings).view(x.shape), products


def _hints_of_slots(micro_batch):
    """Gives layer 0's hints of fc2 in the order of expert, then token."""
    hint = micro_batch.hints.get((0, Site.FC2))
    if hint is None:
        return None
    experts = micro_batch.routing[0]
    token, slot = [], []
    for expert in range(16):
        rows, columns = (experts == expert).nonzero(as_tuple=True)
        token.append(rows)
        slot.append(columns)
    token, slot = torch.cat(token), torch.cat(slot)
    payload, scale_bytes = (
        part.unflatten(1, (experts.shape[1], -1))[token, slot]
        for part in (hint.payload, hint.scale_bytes)
    )
    return replace(hint, payload=payload, scale_bytes=scale_bytes, has_hint=hint.has_hint[token])


def test_a_moe_layer_has_output_and_gradients_of_the_reference(ready):
    model, sites, micro_batch = ready
    moe = model.decoder.layers[1].mlp
    generator = torch.Generator().manual_seed(3)
    x, grad = (
        torch.randn(*micro_batch.valid.shape, 128, generator=generator).to(sites.device)
        for _ in range(2)
    )
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    router_weight = moe.router.weight.detach().clone().requires_grad_()
    expected, products = _moe_reference(moe, sites, micro_batch, theirs, router_weight)
    expected.backward(grad)
    with sites.micro_batch(micro_batch):
        output, _ = moe(ours)
        output.backward(grad)
    _close(output, expected, "output")
    _close(ours.grad, theirs.grad, "input gradient")
    _close(moe.router.weight.grad, router_weight.grad, "router gradient")
    for name, product in zip(("linear_fc1", "linear_fc2"), products, strict=True):
        for index, (expert, leaf) in enumerate(
            zip(moe.experts.local_experts, product.weights, strict=True)
        ):
            _close(getattr(expert, name).weight.grad, leaf.grad, f"{name} of expert {index}")


def test_attention_has_output_and_gradients_of_the_reference(ready):
    model, sites, micro_batch = ready
    core = model.decoder.layers[0].self_attention.core_attention
    generator = torch.Generator().manual_seed(4)
    shape = (*micro_batch.valid.shape, 2, 32)
    q = torch.randn(*shape[:2], 4, 32, generator=generator)
    k, v = (torch.randn(shape, generator=generator) for _ in range(2))
    grad = torch.randn(*shape[:2], 128, generator=generator)
    q, k, v, grad = (tensor.to(sites.device) for tensor in (q, k, v, grad))
    ours = [t.clone().requires_grad_() for t in (q, k, v)]
    theirs = [t.clone().requires_grad_() for t in (q, k, v)]
    rounded = [theirs[0]]
    for x, site in zip(theirs[1:], (Site.K, Site.V), strict=True):
        rows, scale = x.detach().flatten(2), sites.settings.global_scale(0, site)
        values = reference.rtn(rows, scale, dtype=torch.bfloat16)
        hint = micro_batch.hints.get((0, site))
        if hint is not None:
            has_hint = hint.has_hint.view(rows.shape[:2]).unsqueeze(-1)
            guided = reference.guided(
                rows.flatten(0, 1),
                hint.payload,
                hint.scale_bytes,
                scale,
                num_bits=1,
                dtype=torch.bfloat16,
            )
            values = torch.where(has_hint, guided.view(rows.shape), values)
        rounded.append(ops.straight_through(x, values.view(x.shape)))
    expected = F.scaled_dot_product_attention(
        *(x.permute(1, 2, 0, 3) for x in rounded), is_causal=True, enable_gqa=True
    )
    expected = expected.permute(2, 0, 1, 3).flatten(-2)
    expected.backward(grad)
    with sites.micro_batch(micro_batch):
        output = core(*ours, None)
        output.backward(grad)
    assert_same_bytes(output.detach(), expected.detach(), "output")
    for name, a, b in zip("qkv", ours, theirs, strict=True):
        assert_same_bytes(a.grad, b.grad, f"gradient of {name}")


def test_every_parameter_gets_a_gradient(ready):
    model, sites, micro_batch = ready
    with sites.micro_batch(micro_batch):
        logprobs = token_logprobs(model, sites, micro_batch)
        logprobs[micro_batch.loss_mask].mean().backward()
    without = [n for n, p in model.named_parameters() if p.grad is None]
    assert without == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["qat", "trace"])
def test_packed_activations_give_the_same_bits(build, rollout, method, dtype):
    rolled = rollout(sites=HINT_SITES)
    runs = []
    for packed in (False, True):
        model, sites = build(
            method, dtype=dtype, hint_sites=HINT_SITES, save_packed_activations=packed
        )
        sites.settings = rolled.settings
        micro_batch = make_micro_batch(rolled.samples, rolled.store, sites)
        with sites.micro_batch(micro_batch):
            logprobs = token_logprobs(model, sites, micro_batch)
            logprobs[micro_batch.loss_mask].mean().backward()
        sites.assert_ran()
        runs.append((logprobs.detach(), {n: p.grad for n, p in model.named_parameters()}))
    (logprobs, grads), (packed_logprobs, packed_grads) = runs
    assert_same_bytes(packed_logprobs, logprobs, "log-probs")
    for name, grad in grads.items():
        assert_same_bytes(packed_grads[name], grad, name)


def test_padding_contributes_nothing_to_gradients(build, rollout):
    """The same samples alone and padded to a longer one; FP32, measured 1.2e-6."""
    rolled = rollout(((4, 3), (9, 8)))
    grads = []
    for samples in (rolled.samples[:1], rolled.samples):
        model, sites = build("trace")
        sites.settings = rolled.settings
        micro_batch = make_micro_batch(samples, rolled.store, sites)
        with sites.micro_batch(micro_batch):
            logprobs = token_logprobs(model, sites, micro_batch)
            logprobs[0][micro_batch.loss_mask[0]].sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    for name, alone in grads[0].items():
        if alone.abs().max() > 0:
            _close(grads[1][name], alone, name)
