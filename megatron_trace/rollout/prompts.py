"""What a rollout is asked for, checked before anything runs."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import numpy as np
import torch

from megatron_trace.rollout.sampling import SamplingSettings

# Token ids of a prompt; a tensor or an array is integer, of one dim, and on any device.
Prompt = Sequence[int] | torch.Tensor | np.ndarray


def token_lists(prompts: Iterable[Prompt]) -> list[list[int]]:
    """Gives the tokens of prompts as lists of Python integers.

    Raises:
        ValueError: A prompt is no sequence of integers.
    """
    lists = []
    for number, prompt in enumerate(prompts):
        tokens = prompt.tolist() if isinstance(prompt, torch.Tensor | np.ndarray) else prompt
        try:
            lists.append([operator.index(token) for token in tokens])
        except TypeError as error:
            raise ValueError(
                f"prompt {number} must be a sequence of integers, or a tensor or array of them of "
                f"one dim; got {prompt!r:.60}"
            ) from error
    return lists


def require_several_names(sample_ids: Iterable[str]) -> None:
    """Refuses one string, whose characters would be taken for names.

    Raises:
        ValueError: It is one string.
    """
    if isinstance(sample_ids, str):
        raise ValueError(f"sample_ids must be several names; got one string, give [{sample_ids!r}]")


def require_usable(
    prompts: Sequence[Sequence[int]],
    sample_ids: Sequence[str],
    sampling: SamplingSettings,
    *,
    max_sequence_length: int,
    vocab_size: int,
    stored: Collection[str],
) -> None:
    """Checks prompts and names of samples.

    Args:
        prompts: Token ids of the prompt of each sample.
        sample_ids: Name of each sample.
        sampling: How tokens are sampled.
        max_sequence_length: Longest prompt and response together.
        vocab_size: Rows of the embedding.
        stored: Samples that the hint store has already.

    Raises:
        ValueError: Counts differ, the names are one string, a name is used twice or stored already,
            or a prompt is empty, too long for the context, or has a token outside the vocabulary;
            or the sampling asks for more tokens, or other ones, than there are.
    """
    if sampling.top_logprobs > vocab_size:
        raise ValueError(
            f"top_logprobs={sampling.top_logprobs} exceeds the vocabulary of {vocab_size}"
        )
    if any(not 0 <= token < vocab_size for token in sampling.stop_tokens):
        raise ValueError(
            f"stop_tokens must lie in 0 to {vocab_size - 1}; got {sampling.stop_tokens}"
        )
    require_several_names(sample_ids)
    if len(prompts) != len(sample_ids):
        of_each = sampling.samples_per_prompt
        times = "" if of_each == 1 else f" ({len(prompts) // of_each} of {of_each} samples each)"
        raise ValueError(f"{len(prompts)} prompts{times}, but {len(sample_ids)} sample ids")
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
        if len(prompt) + sampling.max_new_tokens > max_sequence_length:
            raise ValueError(
                f"sample {sample_id}: a prompt of {len(prompt)} tokens and max_new_tokens="
                f"{sampling.max_new_tokens} exceed the context of {max_sequence_length} tokens"
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
