"""What a rollout is asked for, checked before anything runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import torch


def require_usable(
    prompts: Sequence[Sequence[int]],
    sample_ids: Sequence[str],
    *,
    max_new_tokens: int,
    max_sequence_length: int,
    vocab_size: int,
    top_logprobs: int,
    stored: Collection[str],
) -> None:
    """Checks prompts and names of samples.

    Args:
        prompts: Token ids of each prompt.
        sample_ids: Name of each sample.
        max_new_tokens: Tokens sampled per prompt at most.
        max_sequence_length: Longest prompt and response together.
        vocab_size: Rows of the embedding.
        top_logprobs: Number of most probable tokens that are reported.
        stored: Samples that the hint store has already.

    Raises:
        ValueError: Counts differ, a name is used twice or stored already, or a prompt is empty,
            too long for the context, or has a token outside the vocabulary; or more tokens are to
            be reported than there are.
    """
    if top_logprobs > vocab_size:
        raise ValueError(f"top_logprobs={top_logprobs} exceeds the vocabulary of {vocab_size}")
    if len(prompts) != len(sample_ids):
        raise ValueError(f"{len(prompts)} prompts, but {len(sample_ids)} sample ids")
    twice = [sample_id for sample_id, count in Counter(sample_ids).items() if count > 1]
    if twice:
        raise ValueError(f"sample ids must be unique; used twice: {', '.join(twice[:5])}")
    known = set(stored)
    for sample_id, prompt in zip(sample_ids, prompts, strict=True):
        if sample_id in known:
            raise ValueError(
                f"sample {sample_id} has records in the hint store; drop them before it is rolled "
                "out again, or give the sample another id"
            )
        if not prompt:
            raise ValueError(f"sample {sample_id}: the prompt is empty; give it at least one token")
        if len(prompt) + max_new_tokens > max_sequence_length:
            raise ValueError(
                f"sample {sample_id}: a prompt of {len(prompt)} tokens and max_new_tokens="
                f"{max_new_tokens} exceed the context of {max_sequence_length} tokens"
            )
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            raise ValueError(
                f"sample {sample_id}: tokens must lie in 0 to {vocab_size - 1}; the prompt has "
                f"{min(prompt)} to {max(prompt)}"
            )


def require_tokens(batches: Iterable[torch.Tensor], vocab_size: int) -> None:
    """Checks tokens before a model sees them: on a GPU a foreign one would end the process.

    Args:
        batches: integer [B, S] each.
        vocab_size: Rows of the embedding.

    Raises:
        ValueError: A token is outside the vocabulary.
    """
    for number, batch in enumerate(batches):
        if batch.numel() and not 0 <= int(batch.min()) <= int(batch.max()) < vocab_size:
            raise ValueError(
                f"batch {number}: tokens must lie in 0 to {vocab_size - 1}; got {int(batch.min())} "
                f"to {int(batch.max())}"
            )
