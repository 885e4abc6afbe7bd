"""Supervised warm start: a fixed number of FP32 steps on prompts with their right answers.

It exists so that a tiny model samples both right and wrong answers, without which no group of
samples has an advantage. It knows nothing of quantisation.

Legend: B samples, S + 1 tokens of the longest one, S positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.models.hybrid.hybrid_model import HybridModel
from tqdm import tqdm

from megatron_trace.models.hybrid import causal_mask
from megatron_trace.rl.tasks import PADDING_TOKEN, TaskItem
from megatron_trace.rl.tokenizer import Tokenizer


@dataclass(frozen=True)
class WarmStartSettings:
    """Settings of the warm start.

    Attributes:
        steps: Optimizer steps; fixed, so that a slower machine gives the same weights.
        batch_size: Samples of a step.
        learning_rate: Peak learning rate.
        warmup_steps: Steps of linear increase; afterwards it decreases linearly to zero.
        weight_decay: AdamW's weight decay.
        max_grad_norm: Gradients are scaled down to this norm.
        seed: Seed of the order of samples.
    """

    steps: int
    batch_size: int = 256
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    seed: int = 0


def warm_start(
    model: HybridModel,
    items: Sequence[TaskItem],
    tokenizer: Tokenizer,
    settings: WarmStartSettings,
    *,
    progress: bool = True,
) -> list[float]:
    """Trains the model in place and gives the loss of every step (nats per answer token).

    Args:
        model: FP32 model of one process.
        items: Training items; every one needs an answer.
        tokenizer: Tokenizer of the model.
        settings: See `WarmStartSettings`.
        progress: Whether to show a progress bar on a terminal.

    Raises:
        ValueError: A parameter is not FP32, or an item has no answer.
    """
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise ValueError(
                f"the warm start trains in FP32; parameter {name} is {parameter.dtype}"
            )
    tokens, answer_mask = _on_device_of(model, *supervised_batch(items, tokenizer))
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        betas=(0.9, 0.98),
        weight_decay=settings.weight_decay,
        fused=True,
    )
    model.train()
    losses = []
    order = _sample_order(len(items), settings)
    # None: no bar where the output is not a terminal.
    bar = tqdm(
        range(settings.steps), desc="warm start", unit="step", disable=None if progress else True
    )
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * _schedule(step, settings)
        rows = next(order).to(tokens.device)
        loss = _loss(model, tokens[rows], answer_mask[rows])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    model.zero_grad(set_to_none=True)
    return losses


def supervised_batch(
    items: Sequence[TaskItem], tokenizer: Tokenizer
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives right-padded tokens of prompt, answer and end token, and where the answer is predicted.

    Returns:
        int64 [B, S + 1] tokens, and bool [B, S]: True where token s + 1 belongs to the answer or
        ends it.

    Raises:
        ValueError: An item has no answer.
    """
    rows = []
    for item in items:
        if item.answer is None:
            raise ValueError(
                f"{item} has no answer to learn from; the warm start "
                "needs a task whose entries have one"
            )
        answer = [*tokenizer.encode(item.answer), tokenizer.end_token]
        rows.append((tokenizer.encode(item.prompt), answer))
    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    tokens = torch.full((len(rows), longest), PADDING_TOKEN)
    answer_mask = torch.zeros(len(rows), longest - 1, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        tokens[row, :end] = torch.tensor(prompt + answer)
        answer_mask[row, len(prompt) - 1 : end - 1] = True
    return tokens, answer_mask


@torch.no_grad()
def answer_accuracy(model: HybridModel, items: Sequence[TaskItem], tokenizer: Tokenizer) -> float:
    """Gives the share of items whose answer the model would write greedily, to the letter."""
    tokens, answer_mask = _on_device_of(model, *supervised_batch(items, tokenizer))
    was_training = model.training
    model.eval()
    predicted = _logits(model, tokens).argmax(dim=-1)
    model.train(was_training)
    right = (predicted == tokens[:, 1:]) | ~answer_mask
    return right.all(dim=1).float().mean().item()


def _on_device_of(model: HybridModel, *tensors: torch.Tensor) -> list[torch.Tensor]:
    device = next(model.parameters()).device
    return [tensor.to(device) for tensor in tensors]


def _loss(model: HybridModel, tokens: torch.Tensor, answer_mask: torch.Tensor) -> torch.Tensor:
    logits = _logits(model, tokens)
    return F.cross_entropy(logits[answer_mask].float(), tokens[:, 1:][answer_mask])


def _logits(model: HybridModel, tokens: torch.Tensor) -> torch.Tensor:
    num_samples, num_positions = tokens.shape[0], tokens.shape[1] - 1
    positions = torch.arange(num_positions, device=tokens.device).expand(num_samples, -1)
    mask = causal_mask(num_positions).to(tokens.device)
    return model(tokens[:, :-1], positions, mask)


def _schedule(step: int, settings: WarmStartSettings) -> float:
    rising = (step + 1) / max(settings.warmup_steps, 1)
    falling = (settings.steps - step) / max(settings.steps - settings.warmup_steps, 1)
    return min(1.0, rising, falling)


def _sample_order(num_items: int, settings: WarmStartSettings) -> Iterator[torch.Tensor]:
    """Gives the rows of each step: every item once per epoch, in a new order each time."""
    generator = torch.Generator().manual_seed(settings.seed)
    rows = torch.empty(0, dtype=torch.int64)
    while True:
        while len(rows) < settings.batch_size:
            rows = torch.cat([rows, torch.randperm(num_items, generator=generator)])
        yield rows[: settings.batch_size]
        rows = rows[settings.batch_size :]
