"""A trainer whose first pass runs under torch.inference_mode trains afterwards as any other."""

from __future__ import annotations

import pytest
import torch

from megatron_trace.training.micro_batch import make_micro_batch
from megatron_trace.training.model import token_logprobs


def _pass(model, sites, rolled):
    micro_batch = make_micro_batch(rolled.samples, rolled.store, sites)
    with sites.micro_batch(micro_batch):
        return token_logprobs(model, sites, micro_batch)


@pytest.mark.parametrize("method", ["qat", "trace"])
def test_a_pass_under_inference_mode_leaves_nothing_that_training_cannot_use(
    build, rollout, method
):
    rolled = rollout()
    reports, gradients = [], []
    for evaluates in (False, True):
        model, sites = build(method, settings=rolled.settings)
        if evaluates:
            with torch.inference_mode():
                _pass(model, sites, rolled)
        sites.reset_report()
        _pass(model, sites, rolled).sum().backward()
        reports.append(sites.report().sites)
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert reports[0] == reports[1]
    for without, after in zip(*gradients, strict=True):
        assert torch.equal(without, after)
