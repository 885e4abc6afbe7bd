"""Log-probabilities of next tokens from logits that ranks have in parts.

Tensor-parallel ranks have parts of the vocabulary, context-parallel ranks some positions.

Legend: S positions of a sample, P of them on this context-parallel rank, B samples, V vocabulary,
K tokens of interest at a position.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.utils import VocabUtility

from megatron_trace.hints.sharding import cp_positions


def target_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    groups: ProcessGroupCollection,
    *,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Gives the log-probability of a token at every position.

    Args:
        logits: float [B, P, V / tp].
        targets: int64 [B, P].
        groups: The model's; `tp` splits the vocabulary.
        temperature: What logits are divided by.

    Returns:
        FP32 [B, P], equal on all tensor-parallel ranks.
    """
    # A new tensor: Megatron's cross entropy writes into what it is given.
    scaled = logits.float() / temperature
    if groups.tp.size() > 1:
        return -vocab_parallel_cross_entropy(scaled, targets, tp_group=groups.tp)
    return scaled.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def chosen_logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    groups: ProcessGroupCollection,
    *,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Gives the log-probabilities of several tokens at every position.

    Args:
        logits: float [B, P, V / tp].
        tokens: int64 [B, P, K].
        groups: The model's; `tp` splits the vocabulary.
        temperature: What logits are divided by.

    Returns:
        FP32 [B, P, K], equal on all tensor-parallel ranks.
    """
    scaled = logits.float() / temperature
    if groups.tp.size() == 1:
        return scaled.log_softmax(-1).gather(-1, tokens)
    largest = scaled.detach().amax(-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=groups.tp)
    scaled = scaled - largest.unsqueeze(-1)
    total = reduce_from_tensor_model_parallel_region(scaled.exp().sum(-1), group=groups.tp)
    first, last = VocabUtility.vocab_range_from_per_partition_vocab_size(
        scaled.shape[-1], groups.tp.rank(), groups.tp.size()
    )
    here = (tokens >= first) & (tokens < last)
    found = scaled.gather(-1, torch.where(here, tokens - first, 0))
    chosen = reduce_from_tensor_model_parallel_region(
        torch.where(here, found, 0.0), group=groups.tp
    )
    return chosen - total.log().unsqueeze(-1)


def whole_samples(
    values: torch.Tensor,
    groups: ProcessGroupCollection,
    rows_of_samples: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gives what all context-parallel ranks have of some samples, in the order of positions.

    Every rank gets the same, and may compute the same loss from it, also one that needs whole
    sequences. Backward gives a rank the gradient of its own positions: as always under Megatron's
    DDP, which averages over the data- and context-parallel ranks, a loss is to be multiplied by
    their number (Megatron's schedules do it for the context-parallel ones).

    Args:
        values: [B, P, ...] of this rank, or of packed samples [1, T, ...].
        groups: The model's; `cp` splits the positions.
        rows_of_samples: Of packed samples, `MicroBatch.token_rows_of_samples`, int64 [B, S].

    Returns:
        [B, S, ...]; 0 where a packed sample has no token.
    """
    size = groups.cp.size()
    if size == 1 and rows_of_samples is None:
        return values
    rows = values.transpose(0, 1)
    if size > 1:
        rows = gather_from_sequence_parallel_region(
            rows.contiguous(), tensor_parallel_output_grad=False, group=groups.cp
        )
    if rows_of_samples is not None:
        rows = rows.squeeze(1)
        return torch.cat([rows, torch.zeros_like(rows[:1])])[rows_of_samples]
    num_positions = rows.shape[0]
    arrived = [
        position
        for rank in range(size)
        for part in cp_positions(num_positions, size, rank)
        for position in part
    ]
    return rows[torch.tensor(arrived, device=values.device).argsort()].transpose(0, 1)
