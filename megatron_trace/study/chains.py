"""Chains of solved problems, drawn and packed on the model's device by the number of the step.

A row is problems one after another, each `prompt answer <end>`, as a few-shot prompt is. No row is
stored: a seed names it, so that a resumed training sees what an uninterrupted one would have seen.

Legend: N problems, F tokens of all problems, B rows, S + 1 tokens of a row, M problems of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_trace.rl.tasks import END_TOKEN, PADDING_TOKEN, CharTokenizer, TaskItem


@dataclass(frozen=True, eq=False)
class Rows:
    """Packed rows.

    Attributes:
        tokens: int64 [B, S + 1]; padded on the right.
        answer_mask: bool [B, S]; True where token s + 1 belongs to an answer or ends it.
        problem: int64 [B, S + 1]; which of its row's problems a token belongs to.
        task: int64 [B, M]; task of every problem of a row, those that did not fit included.
    """

    tokens: torch.Tensor
    answer_mask: torch.Tensor
    problem: torch.Tensor
    task: torch.Tensor


class Chains:
    """Problems of a mix of tasks, ready to be drawn from.

    Args:
        items: The problems; each needs an answer.
        tokenizer: Tokenizer of the model.
        device: Where rows are made.

    Attributes:
        tasks: Names of the tasks, in the order of their numbers.
        longest: Tokens of the longest problem: no row has more padding.
    """

    def __init__(
        self, items: Sequence[TaskItem], tokenizer: CharTokenizer, device: torch.device | int
    ) -> None:
        self.tasks = tuple(sorted({item.task for item in items}))
        by_task = sorted(items, key=lambda item: self.tasks.index(item.task))
        prompts = [tokenizer.encode(item.prompt) for item in by_task]
        answers = [[*tokenizer.encode(item.answer or ""), END_TOKEN] for item in by_task]
        flat = [
            token for pair in zip(prompts, answers, strict=True) for part in pair for token in part
        ]
        lengths = torch.tensor([len(p) + len(a) for p, a in zip(prompts, answers, strict=True)])
        self._flat_F = torch.tensor(flat).to(device)
        self._start_N = (lengths.cumsum(0) - lengths).to(device)
        self._length_N = lengths.to(device)
        self._prompt_N = torch.tensor([len(prompt) for prompt in prompts]).to(device)
        counts = [sum(item.task == task for item in by_task) for task in self.tasks]
        self._count = torch.tensor(counts)
        self._shortest, self.longest = int(lengths.min()), int(lengths.max())

    def draw(self, num_rows: int, row_tokens: int, *, seed: int) -> Rows:
        """Gives rows of whole problems, of all tasks alike.

        Args:
            num_rows: B.
            row_tokens: S + 1.
            seed: Names the rows; the same seed gives the same rows on every device.
        """
        generator = torch.Generator().manual_seed(seed)
        shape = (num_rows, row_tokens // self._shortest + 1)
        task = torch.randint(len(self.tasks), shape, generator=generator)
        within = torch.rand(shape, generator=generator, dtype=torch.float64) * self._count[task]
        first = self._count.cumsum(0) - self._count
        device = self._flat_F.device
        item = (first[task] + within.long()).to(device)
        end = self._length_N[item].cumsum(1)
        position = torch.arange(row_tokens, device=device).expand(num_rows, -1).contiguous()
        problem = torch.searchsorted(end, position, right=True)
        ends_at, own = end.gather(1, problem), item.gather(1, problem)
        offset = position - (ends_at - self._length_N[own])
        fits = ends_at <= row_tokens
        token = self._flat_F[(self._start_N[own] + offset).clamp(max=len(self._flat_F) - 1)]
        answered = (offset >= self._prompt_N[own]) & fits
        return Rows(
            tokens=torch.where(fits, token, PADDING_TOKEN),
            answer_mask=answered[:, 1:],
            problem=problem,
            task=task.to(device),
        )
