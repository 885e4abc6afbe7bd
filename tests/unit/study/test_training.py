"""Training of the study's models, and whether their experts differ."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_trace.models.hybrid import HybridModules, build_hybrid_model, decoder_layers
from megatron_trace.rl.tasks import CharTokenizer, TaskItem
from megatron_trace.study.experts_differ import experts_differ
from megatron_trace.study.pretraining import (
    PretrainingSettings,
    packed_accuracy,
    packed_rows,
    pretrain,
)
from megatron_trace.testing.single_process import tiny_moe_config

ITEMS = [TaskItem(f"{a}+{b}=", str(a + b), "sum", {}) for a in range(9) for b in range(9)]
SETTINGS = PretrainingSettings(
    steps=4, batch_rows=2, row_tokens=20, learning_rate=1e-3, chunk_steps=2
)


def _model():
    torch.manual_seed(0)
    return build_hybrid_model(
        tiny_moe_config("*E"),
        pattern="*E",
        vocab_size=CharTokenizer.of_tasks(ITEMS).vocab_size,
        max_sequence_length=32,
        modules=HybridModules(),
    )


def _rows():
    tokenizer = CharTokenizer.of_tasks(ITEMS)
    return packed_rows(ITEMS, tokenizer, num_rows=6, row_tokens=20, seed=0)


def test_a_row_holds_whole_problems_and_asks_for_answers_only():
    tokens, answer_mask = _rows()
    tokenizer = CharTokenizer.of_tasks(ITEMS)
    for row, mask in zip(tokens.tolist(), answer_mask.tolist(), strict=True):
        texts = tokenizer.decode(row).split("\N{REPLACEMENT CHARACTER}")
        problems = [text for text in texts if text]
        for text in problems:
            left, _, answer = text.partition("=")
            a, b = left.split("+")
            assert int(a) + int(b) == int(answer)
        asked = sum(len(text.partition("=")[2]) + 1 for text in problems)
        assert sum(mask) == asked


def test_a_killed_training_ends_with_the_same_weights(tmp_path):
    tokens, mask = _rows()
    whole, killed = _model(), _model()
    losses = pretrain(whole, tokens, mask, SETTINGS, tmp_path / "whole")
    calls = 0

    def kill(*_):
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt

    hook = killed.register_forward_pre_hook(kill)
    with pytest.raises(KeyboardInterrupt):
        pretrain(killed, tokens, mask, SETTINGS, tmp_path / "killed")
    hook.remove()
    again = _model()
    assert pretrain(again, tokens, mask, SETTINGS, tmp_path / "killed") == losses
    for (name, one), (_, other) in zip(
        whole.named_parameters(), again.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name


def test_another_training_in_the_folder_is_refused(tmp_path):
    tokens, mask = _rows()
    pretrain(_model(), tokens, mask, SETTINGS, tmp_path)
    with pytest.raises(ValueError, match="remove it"):
        pretrain(_model(), tokens, mask, dataclasses.replace(SETTINGS, steps=5), tmp_path)


def test_an_answer_counts_if_every_token_of_it_is_right():
    tokens, mask = _rows()

    class Oracle(torch.nn.Linear):
        def forward(self, inputs, positions, attention_mask):
            logits = torch.nn.functional.one_hot(tokens[:, 1:], 20).float()
            first = mask[0].nonzero()[0]
            logits[0, first] = -logits[0, first]
            return logits

    answers = int((mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]).sum())
    assert packed_accuracy(Oracle(1, 1), tokens, mask) == pytest.approx(1 - 1 / answers)


def test_experts_of_random_weights_differ_and_copies_do_not():
    model, tokens = _model(), _rows()[0][:, :12]
    assert abs(experts_differ(model, [tokens])[0].cosine) < 0.1
    experts = decoder_layers(model)[0].moe.experts.local_experts
    for expert in experts:
        expert.load_state_dict(experts[0].state_dict())
    found = experts_differ(model, [tokens])[0]
    assert found.cosine == pytest.approx(1.0, abs=1e-5)
    assert 1 <= found.experts_in_use <= 16
