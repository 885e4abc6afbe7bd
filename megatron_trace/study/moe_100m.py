"""A MoE of 106M parameters, trained in minutes on one H200 on chains of reasoning-gym problems.

    python tools/moe_100m.py tasks out/moe_100m.jsonl.gz    (needs reasoning-gym)
    python tools/moe_100m.py train out/moe_100m.jsonl.gz --work out/moe_100m --log out/log.json

Most steps see rows of 512 tokens, the last ones rows of 8192, so that positions up to 8K are known
to the model.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel

from megatron_trace.rl.tasks import (
    END_TOKEN,
    CharTokenizer,
    TaskItem,
    load_tasks,
    save_tasks,
    split_tasks,
)
from megatron_trace.study.chain_training import (
    HELD_OUT_SEED,
    Phase,
    Recipe,
    TrainingLog,
    model_config,
    read_state,
    train,
    write_state,
)
from megatron_trace.study.chains import Chains
from megatron_trace.study.experts_differ import experts_differ
from megatron_trace.study.locks import locked
from megatron_trace.study.model import StudyModel
from megatron_trace.study.solving import accuracy, answer_loss
from megatron_trace.study.task_mix import TaskOfMix, items_of_mix

NUM_HELD_OUT = 6_000
ITEMS_PER_TASK = 30_000
MIX = (
    TaskOfMix(
        "chain_sum",
        "{metadata[expression]}=",
        {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 2},
    ),
    TaskOfMix(
        "basic_arithmetic",
        "{metadata[expression]}==",
        {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 1},
    ),
    TaskOfMix("products", "{metadata[expression]}=", {"min_digits": 1, "max_digits": 2}),
    TaskOfMix(
        "gcd",
        "{metadata[numbers][0]}&{metadata[numbers][1]}=",
        {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 200},
    ),
    TaskOfMix(
        "lcm",
        "{metadata[numbers][0]}|{metadata[numbers][1]}=",
        {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 60},
    ),
    TaskOfMix(
        "fraction_simplification",
        "{metadata[numerator]}/{metadata[denominator]}~",
        {"min_value": 1, "max_value": 99, "min_factor": 2, "max_factor": 12, "styles": ["plain"]},
    ),
    TaskOfMix(
        "base_conversion",
        "{metadata[source_repr]};{metadata[source_base]}:{metadata[target_base]}=",
        {"min_base": 2, "max_base": 16, "min_value": 0, "max_value": 500},
    ),
    TaskOfMix("count_bits", "{metadata[binary]}#", {"min_n": 1, "max_n": 65_535}),
    TaskOfMix("spell_backward", "{metadata[word]}<", {"min_word_len": 3, "max_word_len": 10}),
    TaskOfMix(
        "caesar_cipher",
        "{metadata[rotation]}:{metadata[cipher_text]}>",
        {"min_words": 1, "max_words": 5, "min_rotation": 1, "max_rotation": 25},
    ),
    TaskOfMix(
        "letter_counting",
        "{metadata[target_letter]}@{metadata[span]}=",
        {"min_words": 1, "max_words": 4},
    ),
)


RECIPE = Recipe(
    name="moe_100m",
    phases=(
        Phase(steps=624, num_rows=96, row_tokens=512, rows_at_once=96),
        Phase(steps=123, num_rows=8, row_tokens=8192, rows_at_once=8),
    ),
)
# Tasks of short problems, which the trained model solves neither always nor hardly ever.
SHORT_TASKS = ("chain_sum", "basic_arithmetic", "products", "gcd", "lcm", "letter_counting")
# For two cores and an hour: an eighth of the tokens, all of short tasks.
CPU_RECIPE = Recipe(
    name="moe_100m_cpu",
    phases=(Phase(steps=1200, num_rows=16, row_tokens=256, rows_at_once=16),),
    save_every=300,
    prompt_tokens=(16, 64, 128),
    tasks=SHORT_TASKS,
)
# As wide, but of two layers and hardly trained: it tries the whole study in a minute.
REHEARSAL = Recipe(
    name="moe_100m_rehearsal",
    phases=(
        Phase(steps=2, num_rows=4, row_tokens=256, rows_at_once=4),
        Phase(steps=1, num_rows=1, row_tokens=1024, rows_at_once=1),
    ),
    num_layers=2,
    warmup_steps=1,
    prompt_tokens=(16, 64, 700),
)


def make_tasks(*, items_per_task: int = ITEMS_PER_TASK, seed: int = 0) -> list[TaskItem]:
    """Gives the problems of the mix, made by reasoning-gym, in the order of the tasks."""
    mix = [dataclasses.replace(part, size=items_per_task) for part in MIX]
    return items_of_mix(mix, seed=seed, drop_characters=" []'\",")


def split(items: Sequence[TaskItem]) -> tuple[list[TaskItem], list[TaskItem]]:
    """Gives the problems that the model is trained on, and those that it never sees."""
    return split_tasks(items, num_held_out=min(NUM_HELD_OUT, len(items) // 10), seed=0)


def load(work: Path, *, tasks: Path | None = None, recipe: Recipe = RECIPE) -> StudyModel:
    """Gives the trained model; trains it first, or further, if `work` does not hold it yet.

    Of several processes the first trains, and the others wait for it.

    Args:
        work: Folder for the state of the training.
        tasks: JSONL file of the problems, made by `tools/moe_100m.py tasks`; None makes it here,
            which needs reasoning-gym.
        recipe: How it is trained.

    Raises:
        ValueError: `work` holds the state of another recipe.
    """
    finished = work / f"{recipe.name}.pt"
    with locked(work / f"{recipe.name}.lock"):
        if not finished.exists():
            write_state(finished, _trained(work, tasks or _own_tasks(work), recipe))
    state = read_state(finished, recipe)
    return StudyModel(
        name=recipe.name,
        config=model_config(recipe),
        pattern=recipe.pattern,
        vocab_size=state["vocab_size"],
        context=recipe.context,
        weights=state["weights"],
        prompts=state["prompts"],
        calibration=state["calibration"],
        eod_token=END_TOKEN,
        facts=state["facts"],
    )


def _trained(work: Path, tasks: Path, recipe: Recipe) -> dict[str, Any]:
    """Trains, and gives all that a study needs, so that it does not read the problems again."""
    items = load_tasks(tasks)
    tokenizer = CharTokenizer.of_tasks(items)
    train_items, held_out = (
        [item for item in part if not recipe.tasks or item.task in recipe.tasks]
        for part in split(items)
    )
    device = torch.cuda.current_device()
    chains = Chains(train_items, tokenizer, device)
    saved = work / f"{recipe.name}-training.pt"
    model, log = train(chains, recipe, saved, vocab_size=tokenizer.vocab_size)
    return {
        "recipe": asdict(recipe),
        "weights": {name: value.detach().cpu() for name, value in model.named_parameters()},
        "vocab_size": tokenizer.vocab_size,
        "prompts": _prompts(train_items, held_out, tokenizer, recipe),
        "calibration": _calibration(chains, recipe),
        "facts": _facts(model, Chains(held_out, tokenizer, device), recipe, log),
    }


def _own_tasks(work: Path) -> Path:
    path = work / "tasks.jsonl.gz"
    if not path.exists():
        save_tasks(path, make_tasks())
    return path


def _facts(model: HybridModel, unseen: Chains, recipe: Recipe, log: TrainingLog) -> dict[str, Any]:
    """Gives what the report prints of a trained model."""
    model.eval()
    shortest, longest = recipe.phases[0], recipe.phases[-1]
    parts = [
        (shortest.num_rows, shortest.row_tokens, shortest.rows_at_once),
        (longest.num_rows * 2, longest.row_tokens, longest.rows_at_once),
    ]
    facts: dict[str, Any] = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "recipe": asdict(recipe),
        "steps": len(log.losses),
        "training_s": round(log.seconds, 1),
        "last_loss": sum(log.losses[-50:]) / len(log.losses[-50:]),
    }
    for number, (num_rows, row_tokens, at_once) in enumerate(parts):
        rows = unseen.draw(num_rows, row_tokens, seed=HELD_OUT_SEED - 1 - number)
        facts[f"held_out_accuracy_{row_tokens}"] = accuracy(model, rows, unseen.tasks, at_once)
    loss, count = 0.0, 0
    rows = unseen.draw(shortest.num_rows, shortest.row_tokens, seed=HELD_OUT_SEED - 3)
    with torch.no_grad():
        for first in range(0, shortest.num_rows, shortest.rows_at_once):
            part = slice(first, first + shortest.rows_at_once)
            loss += answer_loss(model, rows.tokens[part], rows.answer_mask[part]).item()
            count += int(rows.answer_mask[part].sum())
    facts["held_out_loss"] = loss / count
    facts["experts"] = {
        layer: asdict(found)
        for layer, found in experts_differ(
            model, [rows.tokens[:4, : min(512, shortest.row_tokens)]]
        ).items()
    }
    return facts


def _prompts(
    solved_items: Sequence[TaskItem],
    open_items: Sequence[TaskItem],
    tokenizer: CharTokenizer,
    recipe: Recipe,
) -> list[list[int]]:
    """Gives prompts of solved problems and an open one, each length of the recipe in turn."""
    order = random.Random(3)
    prompts = []
    for number, item in enumerate(open_items[:256]):
        prompt = tokenizer.encode(item.prompt)
        room = recipe.prompt_tokens[number % len(recipe.prompt_tokens)] - len(prompt)
        shots: list[int] = []
        while True:
            shot = order.choice(solved_items)
            tokens = [*tokenizer.encode(shot.prompt + (shot.answer or "")), END_TOKEN]
            if len(shots) + len(tokens) > room:
                break
            shots += tokens
        prompts.append(shots + prompt)
    return prompts


def _calibration(chains: Chains, recipe: Recipe) -> list[torch.Tensor]:
    """Gives chains of the shortest and the longest rows, cut so that none is padded."""
    shortest, longest = recipe.phases[0], recipe.phases[-1]
    parts = [(min(32, shortest.num_rows), shortest.row_tokens), (2, longest.row_tokens)]
    return [
        chains.draw(num_rows, row_tokens, seed=HELD_OUT_SEED - 4 - number)
        .tokens[:, : row_tokens - chains.longest]
        .cpu()
        for number, (num_rows, row_tokens) in enumerate(parts)
    ]
