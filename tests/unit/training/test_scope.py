"""A pass finds its micro-batch in forward, backward and recomputation; several are in flight."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from megatron.core.pipeline_parallel.schedules import custom_backward, deallocate_output_tensor

from megatron_trace.config import HINT_SITES
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.tiny_trainer import VOCAB_SIZE, recorded_rollout, tiny_trainer
from megatron_trace.training.micro_batch import make_micro_batch
from megatron_trace.training.model import token_logprobs

RECOMPUTATION = {
    "none": {},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "full, by blocks": {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 3,
    },
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "attention and moe": {
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn", "moe"],
    },
}


@pytest.fixture(scope="module")
def rolled(_one_rank):
    return recorded_rollout(((5, 3), (3, 0), (7, 4), (2, 6), (4, 4)), sites=HINT_SITES)


def _trainer(rolled, method="trace", recomputation="none", **options):
    model, sites = tiny_trainer(
        method, settings=rolled.settings, config=RECOMPUTATION[recomputation], **options
    )
    model.train()
    micro_batches = [make_micro_batch([s], rolled.store, sites) for s in rolled.samples]
    return model, sites, micro_batches


def _forward(model, sites, micro_batch):
    with sites.micro_batch(micro_batch):
        return token_logprobs(model, sites, micro_batch)


def _backward(model, logprobs):
    """Gives the gradients of one backward pass."""
    model.zero_grad(set_to_none=True)
    logprobs.sum().backward()
    return _taken_gradients(model)


def _taken_gradients(model):
    """Gives the gradients, which later backward passes then no longer add to."""
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return grads


def _one_at_a_time(model, sites, micro_batches):
    results = []
    for micro_batch in micro_batches:
        with sites.micro_batch(micro_batch):
            logprobs = token_logprobs(model, sites, micro_batch)
            results.append((logprobs.detach(), _backward(model, logprobs)))
    return results


def _assert_same(got, expected, what):
    assert got.keys() == expected.keys()
    for name, grad in expected.items():
        assert_same_bytes(got[name], grad, f"{what}, {name}")


@pytest.mark.parametrize("recomputation", list(RECOMPUTATION))
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("bf16", {}),
        ("trace", {}),
        ("trace", {"hint_sites": HINT_SITES, "guard_min_parity_agreement": 0.97}),
    ],
    ids=["bf16", "trace", "trace with fc2, rows rejected"],
)
def test_five_micro_batches_in_flight_give_what_each_gives_alone(
    rolled, method, options, recomputation
):
    """Backward in another order than forward, and without recomputation one at a time."""
    model, sites, micro_batches = _trainer(rolled, method, **options)
    expected = _one_at_a_time(model, sites, micro_batches)
    alone = sites.report()
    model, sites, micro_batches = _trainer(rolled, method, recomputation, **options)
    in_flight = [_forward(model, sites, micro_batch) for micro_batch in micro_batches]
    assert sites.micro_batch_in_force is None
    for index in (2, 0, 4, 3, 1):
        logprobs, grads = expected[index]
        assert_same_bytes(in_flight[index].detach(), logprobs, f"log-probs {index}")
        _assert_same(_backward(model, in_flight[index]), grads, f"micro-batch {index}")
        assert sites.micro_batch_in_force is None
    for site, counts in sites.report().sites.items():
        assert counts.rejected > 0 or "guard_min_parity_agreement" not in options
        # Recomputation calls again, and counts no row again.
        assert counts == replace(alone.sites[site], calls=counts.calls), site
    sites.assert_ran()


def test_one_backward_may_go_through_the_outputs_of_several_passes(rolled):
    model, sites, micro_batches = _trainer(rolled, "trace", "full")
    parts = [
        _backward(model, _forward(model, sites, micro_batch)) for micro_batch in micro_batches[:2]
    ]
    outputs = [_forward(model, sites, micro_batch) for micro_batch in micro_batches[:2]]
    together = _backward(model, torch.cat(outputs, 1))
    for name, grad in together.items():
        # Autograd adds the later pass first.
        zero = torch.zeros(())
        first, second = (part.get(name, zero) for part in parts)
        assert_same_bytes(grad, (second + first).expand_as(grad), name)


def test_backward_as_megatrons_pipeline_runs_it_finds_the_micro_batch(rolled):
    """The schedules free the output's values and call autograd's engine directly."""
    model, sites, _ = _trainer(rolled, "trace", "full")
    # Of two samples, so that the logits are no view.
    parts = (rolled.samples[:2], rolled.samples[2:4])
    micro_batches = [make_micro_batch(part, rolled.store, sites) for part in parts]
    expected = _one_at_a_time(model, sites, micro_batches)
    outputs = []
    for micro_batch in micro_batches:
        with sites.micro_batch(micro_batch):
            # Stands for a stage that is not the last: its output is what the model gave.
            outputs.append(model(micro_batch.tokens[:, :-1], micro_batch.positions, None))
    for output, micro_batch, (_, grads) in zip(outputs, micro_batches, expected, strict=True):
        values = output.detach().requires_grad_()
        logprobs = values.float().log_softmax(-1)
        targets = micro_batch.tokens[:, 1:].unsqueeze(-1)
        logprobs.gather(-1, targets).sum().backward()
        model.zero_grad(set_to_none=True)
        deallocate_output_tensor(output, True)
        assert output.numel() == 1
        custom_backward(output, values.grad)
        _assert_same(_taken_gradients(model), grads, "gradients")


@pytest.mark.parametrize("recomputation", ["none", "full", "moe"])
def test_an_evaluation_between_forward_and_backward_changes_nothing(rolled, recomputation):
    model, sites, (first, second, *_) = _trainer(rolled, "trace", recomputation)
    (_, expected), *_ = _one_at_a_time(model, sites, [first])
    logprobs = _forward(model, sites, first)
    model.eval()
    with torch.no_grad(), sites.micro_batch(second, replay_routing=False):
        token_logprobs(model, sites, second)
    model.train()
    _assert_same(_backward(model, logprobs), expected, "gradients")


def _raise(_):
    raise KeyError("in backward")


@pytest.mark.parametrize("recomputation", ["none", "full", "moe"])
def test_an_exception_in_backward_leaves_nothing_in_force_and_a_retry_works(rolled, recomputation):
    model, sites, (first, second, *_) = _trainer(rolled, "trace", recomputation)
    expected = dict(enumerate(_one_at_a_time(model, sites, [first, second])))
    in_flight = [_forward(model, sites, micro_batch) for micro_batch in (first, second)]
    hook = model.decoder.layers[0].self_attention.linear_qkv.weight.register_hook(_raise)
    with pytest.raises(KeyError, match="in backward"):
        in_flight[0].sum().backward()
    hook.remove()
    assert sites.micro_batch_in_force is None
    _assert_same(_backward(model, in_flight[1]), expected[1][1], "the other in flight")
    ((_, grads),) = _one_at_a_time(model, sites, [first])
    _assert_same(grads, expected[0][1], "the retry")


def test_a_pass_without_micro_batch_chooses_its_own_experts_whatever_is_in_flight(rolled):
    """Also if an exception has just left a backward pass unfinished."""
    model, sites, (first, *_) = _trainer(rolled, "bf16", "full")
    tokens = torch.arange(8, device=first.tokens.device)[None] % VOCAB_SIZE
    expected = _backward(model, model(tokens, tokens, None))
    plain = model(tokens, tokens, None)
    logprobs = _forward(model, sites, first)
    hook = model.decoder.layers[0].self_attention.linear_qkv.weight.register_hook(_raise)
    with pytest.raises(KeyError):
        logprobs.sum().backward()
    hook.remove()
    _assert_same(_backward(model, plain), expected, "in flight before")


def test_backward_from_hidden_states_is_refused_outside_of_the_scope(rolled):
    """Nobody knows then which pass is recomputed; inside of the scope it is the one in force."""
    for method in ("bf16", "trace"):
        model, sites, (first, *_) = _trainer(rolled, method, "full")
        hidden = []
        model.decoder.register_forward_hook(lambda m, i, output, kept=hidden: kept.append(output))
        _forward(model, sites, first)
        with pytest.raises(RuntimeError, match=r"inside `with sites\.micro_batch|from the model's"):
            hidden[0].sum().backward()
        with sites.micro_batch(first):
            token_logprobs(model, sites, first)
            hidden[1].sum().backward()


def test_a_backward_that_raised_lends_its_micro_batch_to_no_other(rolled):
    """What it left in force must not become the micro-batch of a pass that nobody knows."""
    model, sites, (first, second, *_) = _trainer(rolled, "trace", "full")
    hidden = []
    model.decoder.register_forward_hook(lambda m, i, output: hidden.append(output))
    logprobs = _forward(model, sites, first)
    hook = model.decoder.layers[0].self_attention.linear_qkv.weight.register_hook(_raise)
    with pytest.raises(KeyError):
        logprobs.sum().backward()
    hook.remove()
    _forward(model, sites, second)
    with pytest.raises(RuntimeError, match=r"inside `with sites\.micro_batch|from the model's"):
        hidden[1].sum().backward()


def test_a_backward_that_raised_lends_its_micro_batch_to_none_that_was_in_flight(rolled):
    """No scope is entered in between, which would clear what was left."""
    model, sites, (first, second, *_) = _trainer(rolled, "trace", "full")
    hidden = []
    model.decoder.register_forward_hook(lambda m, i, output: hidden.append(output))
    logprobs, _ = (_forward(model, sites, micro_batch) for micro_batch in (first, second))
    hook = model.decoder.layers[0].self_attention.linear_qkv.weight.register_hook(_raise)
    with pytest.raises(KeyError):
        logprobs.sum().backward()
    hook.remove()
    with pytest.raises(RuntimeError, match=r"inside `with sites\.micro_batch|from the model's"):
        hidden[1].sum().backward()


def test_a_micro_batch_is_freed_with_its_pass(rolled):
    model, sites, (first, *_) = _trainer(rolled, "trace", "full")
    logprobs = _forward(model, sites, first)
    _backward(model, logprobs)
    alive = weakref.ref(first)
    del first, logprobs
    gc.collect()
    assert alive() is None
