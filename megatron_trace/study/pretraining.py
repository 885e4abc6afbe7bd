"""Supervised training of a small model on packed problems, resumable between chunks of steps.

A row holds several problems one after another, each `prompt answer <end>`, so that a sequence is
long although a problem is short. Loss is taken on answers and their end tokens.

Legend: N rows, B rows of a step, S positions.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.hybrid.hybrid_model import HybridModel
from tqdm import tqdm

from megatron_trace.rl.tasks import END_TOKEN, PADDING_TOKEN, CharTokenizer, TaskItem
from megatron_trace.study.model import plain_logits


@dataclass(frozen=True)
class PretrainingSettings:
    """Settings of the training.

    Attributes:
        steps: Optimizer steps; fixed, so that a slower machine gives the same weights.
        batch_rows: Rows of a step.
        row_tokens: Tokens of a row, S + 1.
        learning_rate: Peak learning rate; warmed up, then decreased linearly to zero.
        warmup_steps: Steps of linear increase.
        weight_decay: AdamW's weight decay.
        chunk_steps: Steps between two saved states.
        seed: Seed of weights and order.
    """

    steps: int
    batch_rows: int
    row_tokens: int
    learning_rate: float
    warmup_steps: int = 50
    weight_decay: float = 0.01
    chunk_steps: int = 200
    seed: int = 0


def packed_rows(
    items: Sequence[TaskItem],
    tokenizer: CharTokenizer,
    *,
    num_rows: int,
    row_tokens: int,
    seed: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives rows of whole problems, of all tasks alike, in random order, padded on the right.

    Returns:
        int64 [N, S + 1] tokens, and bool [N, S]: True where token s + 1 belongs to an answer or
        ends it.
    """
    order = random.Random(seed)
    encoded: dict[str, list[tuple[list[int], list[int]]]] = {}
    for item in items:
        answer = [*tokenizer.encode(item.answer or ""), END_TOKEN]
        encoded.setdefault(item.task, []).append((tokenizer.encode(item.prompt), answer))
    tasks = list(encoded.values())
    tokens = torch.full((num_rows, row_tokens), PADDING_TOKEN)
    answer_mask = torch.zeros(num_rows, row_tokens - 1, dtype=torch.bool)
    for row in range(num_rows):
        start = 0
        while True:
            prompt, answer = order.choice(order.choice(tasks))
            end = start + len(prompt) + len(answer)
            if end > row_tokens:
                break
            tokens[row, start:end] = torch.tensor(prompt + answer)
            answer_mask[row, start + len(prompt) - 1 : end - 1] = True
            start = end
    return tokens, answer_mask


def pretrain(
    model: HybridModel,
    tokens: torch.Tensor,
    answer_mask: torch.Tensor,
    settings: PretrainingSettings,
    folder: Path,
) -> list[float]:
    """Trains the model in place and gives the loss of every step; continues what `folder` holds.

    Args:
        model: FP32 model of one process, with its initial weights.
        tokens: int64 [N, S + 1].
        answer_mask: bool [N, S].
        settings: See `PretrainingSettings`.
        folder: Gets the state after every chunk.
    """
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.98), weight_decay=settings.weight_decay, fused=True
    )
    saved = folder / "pretraining.pt"
    losses: list[float] = []
    if saved.exists():
        losses = _load(saved, model, optimizer, settings)
    model.train()
    bar = tqdm(
        range(len(losses), settings.steps),
        initial=len(losses),
        total=settings.steps,
        desc="training",
        unit="step",
        disable=None,
    )
    for step in bar:
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
        rows = torch.randint(len(tokens), (settings.batch_rows,), generator=generator)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * _schedule(step, settings)
        loss = answer_loss(model, tokens[rows].to(device), answer_mask[rows].to(device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
        if len(losses) % settings.chunk_steps == 0 or len(losses) == settings.steps:
            _save(saved, model, optimizer, settings, losses)
    model.zero_grad(set_to_none=True)
    return losses


def answer_loss(
    model: HybridModel, tokens: torch.Tensor, answer_mask: torch.Tensor
) -> torch.Tensor:
    """Gives the mean negative log-probability of the answer tokens, in nats."""
    logits = plain_logits(model, tokens[:, :-1])
    return F.cross_entropy(logits[answer_mask].float(), tokens[:, 1:][answer_mask])


@torch.no_grad()
def packed_accuracy(model: HybridModel, tokens: torch.Tensor, answer_mask: torch.Tensor) -> float:
    """Gives the share of answers that the model would write greedily, to the letter.

    Args:
        model: The model.
        tokens: int64 [N, S + 1].
        answer_mask: bool [N, S].
    """
    was_training = model.training
    model.eval()
    right = plain_logits(model, tokens[:, :-1]).argmax(-1).cpu() == tokens[:, 1:]
    model.train(was_training)
    begins = answer_mask & ~F.pad(answer_mask, (1, 0))[:, :-1]
    answer = begins.flatten().cumsum(0)[answer_mask.flatten()] - 1
    wrong = torch.zeros(int(begins.sum()), dtype=torch.bool)
    wrong[answer[~right[answer_mask]]] = True
    return 1.0 - wrong.float().mean().item()


def _schedule(step: int, settings: PretrainingSettings) -> float:
    rising = (step + 1) / max(settings.warmup_steps, 1)
    falling = (settings.steps - step) / max(settings.steps - settings.warmup_steps, 1)
    return min(1.0, rising, falling)


def _save(
    path: Path,
    model: HybridModel,
    optimizer: torch.optim.Optimizer,
    settings: PretrainingSettings,
    losses: list[float],
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = {
        "settings": asdict(settings),
        "weights": dict(model.named_parameters()),
        "optimizer": optimizer.state_dict(),
        "losses": losses,
    }
    temporary = path.with_name(path.name + ".tmp")
    torch.save(state, temporary)
    os.replace(temporary, path)


def _load(
    path: Path,
    model: HybridModel,
    optimizer: torch.optim.Optimizer,
    settings: PretrainingSettings,
) -> list[float]:
    state = torch.load(path, map_location="cpu")
    if state["settings"] != asdict(settings):
        raise ValueError(
            f"{path} was trained with {state['settings']}, not {asdict(settings)}; remove it or "
            "give another work folder"
        )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state["weights"][name])
    optimizer.load_state_dict(state["optimizer"])
    return state["losses"]
