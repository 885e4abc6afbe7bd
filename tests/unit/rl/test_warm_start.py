"""The supervised warm start, on a model of one layer."""

import pytest
import torch

from megatron_trace.models.hybrid import HybridModules, build_hybrid_model
from megatron_trace.rl.tasks import END_TOKEN, PADDING_TOKEN, CharTokenizer, TaskItem
from megatron_trace.rl.warm_start import (
    WarmStartSettings,
    answer_accuracy,
    supervised_batch,
    warm_start,
)
from megatron_trace.testing.single_process import tiny_moe_config

ITEMS = [TaskItem(f"{n}?", str((n * 3) % 10), "any", {}) for n in range(10)]
TOKENIZER = CharTokenizer.of_tasks(ITEMS)
pytestmark = pytest.mark.usefixtures("one_rank")
SETTINGS = WarmStartSettings(steps=30, batch_size=16, learning_rate=1e-2, warmup_steps=5)


def build(**overrides):
    torch.manual_seed(0)
    return build_hybrid_model(
        tiny_moe_config("*E", **overrides),
        pattern="*E",
        vocab_size=TOKENIZER.vocab_size,
        max_sequence_length=8,
        modules=HybridModules(),
    )


def test_batch_is_right_padded_and_masks_the_answers():
    tokens, answer_mask = supervised_batch(
        [TaskItem("12", "2", "any", {}), TaskItem("1", "21", "any", {})], CharTokenizer("12")
    )
    assert tokens.tolist() == [[2, 3, 3, END_TOKEN], [2, 3, 2, END_TOKEN]]
    assert answer_mask.tolist() == [[False, True, True], [True, True, True]]
    tokens, answer_mask = supervised_batch(
        [TaskItem("12", "2", "any", {}), TaskItem("1", "2", "any", {})], CharTokenizer("12")
    )
    assert tokens[1].tolist() == [2, 3, END_TOKEN, PADDING_TOKEN]
    assert answer_mask[1].tolist() == [True, True, False]


def test_warm_start_learns_ten_answers():
    model = build()
    assert answer_accuracy(model, ITEMS, TOKENIZER) < 0.5
    losses = warm_start(model, ITEMS, TOKENIZER, SETTINGS, progress=False)
    assert len(losses) == SETTINGS.steps
    assert losses[-1] < 0.1 * losses[0]
    assert answer_accuracy(model, ITEMS, TOKENIZER) == 1.0


def test_warm_start_gives_the_same_weights_again():
    first, second = build(), build()
    for model in (first, second):
        warm_start(model, ITEMS, TOKENIZER, SETTINGS, progress=False)
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_warm_start_leaves_no_gradients():
    model = build()
    warm_start(model, ITEMS, TOKENIZER, WarmStartSettings(steps=1), progress=False)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_low_precision_model_is_refused():
    model = build().to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"in FP32; parameter .* is torch\.bfloat16"):
        warm_start(model, ITEMS, TOKENIZER, SETTINGS, progress=False)


def test_item_without_answer_is_refused():
    with pytest.raises(ValueError, match="tasks line 4 has no answer"):
        supervised_batch([TaskItem("1", None, "any", {}, source="tasks line 4")], TOKENIZER)
