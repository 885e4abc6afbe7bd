"""Fine-tuning up-cycled layers: what is trained, what stays, and going on after an interruption."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_trace.study import smollm2
from megatron_trace.study.gguf_llama import hybrid_weights
from megatron_trace.study.smollm2_moe import FineTuning, trained_part
from megatron_trace.study.upcycling import Upcycling
from megatron_trace.testing import llama_reference

SHAPE = dataclasses.replace(llama_reference.TINY, num_layers=3)
UPCYCLING = Upcycling(num_layers=2, num_groups=2, granularity=2)
SETTINGS = FineTuning(
    num_rows=12,
    num_held_out=4,
    row_tokens=17,
    steps=8,
    batch_rows=4,
    chunk_steps=4,
    warmup_steps=2,
    other_tokens=10,
)


@pytest.fixture(scope="module")
def weights():
    return hybrid_weights(llama_reference.random_tensors(SHAPE, seed=1), SHAPE)


def _train(weights, folder, settings=SETTINGS):
    # A few tokens that repeat, which any model can learn.
    tokens = (torch.arange(17) + torch.arange(16)[:, None]) % 5 + 3
    return trained_part(
        weights,
        smollm2.dense_config(SHAPE),
        1,
        tokens,
        UPCYCLING,
        settings,
        folder,
        SHAPE.rotary_base,
    )


def test_experts_and_routers_are_trained_and_the_rest_stays(weights, tmp_path):
    part, facts = _train(weights, tmp_path)
    kept = "decoder.layers.0.self_attention.linear_qkv.weight"
    assert torch.equal(part[kept], weights["decoder.layers.2.self_attention.linear_qkv.weight"])
    assert not [name for name in part if "output_layer" in name]
    losses = facts["held_out_loss"]
    assert losses["upcycled, fc2 scaled"] == pytest.approx(losses["dense"], abs=1e-4)
    assert losses["fine-tuned"] < losses["dense"]
    assert facts["loss_over_tokens"] == 5 + SETTINGS.other_tokens
    assert facts["experts"].keys() == {1, 2}
    assert facts["experts"] != facts["experts_at_init"]


def test_an_interrupted_training_ends_with_the_same_weights(weights, tmp_path, monkeypatch):
    whole, _ = _train(weights, tmp_path / "whole")
    calls = []
    clip = torch.nn.utils.clip_grad_norm_

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return clip(*arguments)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _train(weights, tmp_path / "half")
    assert len(torch.load(tmp_path / "half" / "state.pt")["losses"]) == 4
    again, _ = _train(weights, tmp_path / "half")
    assert len(calls) == 7 + 4
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_a_training_that_ends_while_the_learning_rate_rises_is_refused():
    with pytest.raises(ValueError, match="warmup_steps must be from 1 to below steps=8"):
        FineTuning(steps=8, warmup_steps=10)
