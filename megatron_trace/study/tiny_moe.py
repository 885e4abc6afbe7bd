"""The tiny MoE: trained in minutes on a CPU on a mix of reasoning-gym tasks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from megatron.core.transformer import TransformerConfig

from megatron_trace.models.hybrid import HybridModules, build_hybrid_model
from megatron_trace.models.local_config import local_moe_config
from megatron_trace.rl.tasks import (
    END_TOKEN,
    CharTokenizer,
    TaskItem,
    load_tasks,
    save_tasks,
    split_tasks,
)
from megatron_trace.study.experts_differ import experts_differ
from megatron_trace.study.model import StudyModel
from megatron_trace.study.pretraining import (
    PretrainingSettings,
    packed_accuracy,
    packed_rows,
    pretrain,
)
from megatron_trace.study.task_mix import TaskOfMix, items_of_mix

PATTERN = "*E" * 8
CONTEXT = 160
NUM_HELD_OUT = 300
NUM_PROMPTS = 128
# Solved problems before the open one in a prompt; 8 of them are about 100 tokens.
SHOTS = (0, 1, 2, 4, 6, 8)


MIX = (
    TaskOfMix(
        "chain_sum",
        "{metadata[expression]}=",
        {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    ),
    TaskOfMix("spell_backward", "{metadata[word]}<", {"min_word_len": 3, "max_word_len": 7}),
    TaskOfMix(
        "gcd",
        "{metadata[numbers][0]}&{metadata[numbers][1]}=",
        {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 60},
        size=8_000,
    ),
    TaskOfMix("count_bits", "{metadata[binary]}#", {"min_n": 1, "max_n": 4095}, size=8_000),
)
SETTINGS = PretrainingSettings(steps=700, batch_rows=12, row_tokens=129, learning_rate=4e-3)


def tiny_moe_config() -> TransformerConfig:
    """Gives the configuration: hidden 128, 8 experts top-2 of width 64, 2 KV heads x 32."""
    return local_moe_config(
        num_layers=len(PATTERN),
        hidden_size=128,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=32,
        ffn_hidden_size=64,
        num_moe_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=64,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-2,
    )


def mixed_items(path: Path) -> list[TaskItem]:
    """Gives the items of all tasks of the mix, in the order of the tasks.

    Args:
        path: JSONL prompt file; written if it does not exist, which needs reasoning-gym.
    """
    if not path.exists():
        save_tasks(path, items_of_mix(MIX))
    return load_tasks(path)


def load(work: Path) -> StudyModel:
    """Gives the trained model; trains it first, or further, if `work` does not hold it yet.

    Args:
        work: Folder for the state of the training.
    """
    items = mixed_items(work / "tiny_moe" / "tasks.jsonl")
    tokenizer = CharTokenizer.of_tasks(items)
    train_items, held_out = split_tasks(items, num_held_out=NUM_HELD_OUT, seed=0)
    torch.manual_seed(SETTINGS.seed)
    model = build_hybrid_model(
        tiny_moe_config(),
        pattern=PATTERN,
        vocab_size=tokenizer.vocab_size,
        max_sequence_length=CONTEXT,
        modules=HybridModules(),
    )
    length = SETTINGS.row_tokens
    tokens, answer_mask = packed_rows(
        train_items, tokenizer, num_rows=8_000, row_tokens=length, seed=1
    )
    before = experts_differ(model, [tokens[:8, :96]])
    losses = pretrain(model, tokens, answer_mask, SETTINGS, work / "tiny_moe")
    after = experts_differ(model, [tokens[:8, :96]])
    by_task = {
        part.task: packed_accuracy(
            model,
            *packed_rows(
                [item for item in held_out if item.task == part.task],
                tokenizer,
                num_rows=24,
                row_tokens=length,
                seed=2,
            ),
        )
        for part in MIX
    }
    return StudyModel(
        name="tiny_moe",
        config=tiny_moe_config(),
        pattern=PATTERN,
        vocab_size=tokenizer.vocab_size,
        context=CONTEXT,
        weights={name: value.detach().cpu() for name, value in model.named_parameters()},
        prompts=_prompts(train_items, held_out, tokenizer),
        calibration=[tokens[100:164, :96]],
        eod_token=END_TOKEN,
        facts={
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "training": asdict(SETTINGS),
            "last_loss": sum(losses[-20:]) / 20,
            "held_out_accuracy": by_task,
            "experts_at_init": {layer: asdict(found) for layer, found in before.items()},
            "experts": {layer: asdict(found) for layer, found in after.items()},
        },
    )


def _prompts(
    solved: Sequence[TaskItem], open_items: Sequence[TaskItem], tokenizer: CharTokenizer
) -> list[list[int]]:
    """Gives prompts of some solved problems and an open one, of all lengths in turn."""
    order = random.Random(3)
    prompts = []
    for number, item in enumerate(open_items[:NUM_PROMPTS]):
        tokens: list[int] = []
        for shot in order.sample(solved, SHOTS[number % len(SHOTS)]):
            tokens += [*tokenizer.encode(shot.prompt + (shot.answer or "")), END_TOKEN]
        prompts.append(tokens + tokenizer.encode(item.prompt))
    return prompts
