"""What a model answers in chains of problems: its loss, and which problems it solves.

Legend: B rows, S + 1 tokens of a row, M problems of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from megatron_trace.study.chains import Rows
from megatron_trace.study.model import plain_logits


def answer_loss(
    model: torch.nn.Module, tokens: torch.Tensor, answer_mask: torch.Tensor
) -> torch.Tensor:
    """Gives the negative log-probability of the answer tokens, summed, in nats.

    Args:
        model: The model or its DDP wrapper.
        tokens: int64 [B, S + 1].
        answer_mask: bool [B, S].
    """
    logits = plain_logits(model, tokens[:, :-1])
    target = tokens[:, 1:].masked_fill(~answer_mask, -100)
    return F.cross_entropy(
        logits.float().flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum"
    )


@torch.no_grad()
def solved(model: torch.nn.Module, rows: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives which problems the model answers greedily to the letter, the earlier ones given.

    Args:
        model: The model.
        rows: Rows of B rows with up to M problems.

    Returns:
        bool [problems]: whether the answer is right; int64 [problems]: task; int64 [problems]:
        position of its first answer token.
    """
    predicted = plain_logits(model, rows.tokens[:, :-1]).argmax(-1)
    wrong = (predicted != rows.tokens[:, 1:]) & rows.answer_mask
    num_rows, num_problems = rows.task.shape
    number = rows.problem[:, 1:] + num_problems * torch.arange(
        num_rows, device=predicted.device
    ).unsqueeze(1)
    flat = number[rows.answer_mask]
    wrongs = torch.zeros(rows.task.numel(), device=predicted.device)
    wrongs.index_add_(0, flat, wrong[rows.answer_mask].float())
    position = torch.arange(1, rows.tokens.shape[1], device=predicted.device)
    starts = torch.full((rows.task.numel(),), rows.tokens.shape[1], device=predicted.device)
    starts.scatter_reduce_(
        0, flat, position.expand_as(number)[rows.answer_mask], "amin", include_self=True
    )
    asked = flat.unique()
    return wrongs[asked] == 0, rows.task.flatten()[asked], starts[asked]


def accuracy(
    model: torch.nn.Module, rows: Rows, tasks: Sequence[str], rows_at_once: int
) -> dict[str, Any]:
    """Gives the shares of the problems that are solved: of all, by task, and by position.

    Args:
        model: The model, in evaluation mode.
        rows: Rows of held-out problems.
        tasks: Names of the tasks.
        rows_at_once: Rows of a forward pass.
    """
    right, task, start = _solved_at_once(model, rows, rows_at_once)
    return {
        "all": _mean(right),
        **{name: _mean(right[task == index]) for index, name in enumerate(tasks)},
        "by_position": {
            f"to {high}": _mean(right[(start >= low) & (start < high)])
            for low, high in _ranges(rows.tokens.shape[1])
        },
    }


def _solved_at_once(model: torch.nn.Module, rows: Rows, at_once: int) -> list[torch.Tensor]:
    parts = [
        solved(
            model,
            Rows(
                **{
                    name: getattr(rows, name)[first : first + at_once]
                    for name in ("tokens", "answer_mask", "problem", "task")
                }
            ),
        )
        for first in range(0, len(rows.tokens), at_once)
    ]
    return [torch.cat(part).cpu() for part in zip(*parts, strict=True)]


def _ranges(row_tokens: int) -> Iterable[tuple[int, int]]:
    low, high = 0, 64
    while low < row_tokens:
        yield low, high
        low, high = high, high * 2


def _mean(right: torch.Tensor) -> float:
    return round(right.float().mean().item(), 4)
