"""Log-probs of several tokens where tensor-parallel ranks have parts of the vocabulary."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_trace.testing.ranks import run_ranks
from megatron_trace.training.logprobs import chosen_logprobs

pytestmark = pytest.mark.distributed
NUM_RANKS = 2


def inputs():
    """Logits [2, 3, 8] and four tokens at each position, of both ranks' parts."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 8, generator=generator) * 5
    return logits, torch.randint(0, 8, (2, 3, 4), generator=generator)


def weighted(logprobs):
    return (logprobs * torch.arange(24.0).view(2, 3, 4)).sum()


def of_part(rank):
    """Gives log-probs and the gradient of this rank's part of the vocabulary."""
    logits, tokens = inputs()
    part = logits.chunk(NUM_RANKS, dim=-1)[rank].clone().requires_grad_()
    groups = SimpleNamespace(tp=dist.group.WORLD)
    logprobs = chosen_logprobs(part, tokens, groups, temperature=2.0)
    weighted(logprobs).backward()
    return logprobs.detach(), part.grad


def test_ranks_with_parts_of_the_vocabulary_get_the_log_probs_and_gradients_of_one():
    logits, tokens = inputs()
    logits.requires_grad_()
    expected = (logits / 2.0).log_softmax(-1).gather(-1, tokens)
    weighted(expected).backward()
    assert logits.grad is not None
    parts = run_ranks(Path(__file__), "of_part", world_size=NUM_RANKS)
    for logprobs, _ in parts:
        torch.testing.assert_close(logprobs, expected.detach())
    torch.testing.assert_close(torch.cat([grad for _, grad in parts], dim=-1), logits.grad)
