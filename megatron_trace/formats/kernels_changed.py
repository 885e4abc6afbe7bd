"""Triton kernel that says which of many tensors differ from others of their sizes.

Hundreds of comparisons, of a matrix each, would take the host longer than the GPU.

Legend: P pairs of tensors.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

_WORD_BYTES = 8
_WORDS = 4096


class Words(NamedTuple):
    """Where a tensor lies that is one piece of whole words.

    Attributes:
        address: Its first byte.
        number: Words.
    """

    address: int
    number: int


def words_of(tensor: torch.Tensor) -> Words | None:
    """Gives where a tensor lies; None if it is not one piece of whole words."""
    address, num_bytes = tensor.data_ptr(), tensor.nbytes
    if (address | num_bytes) % _WORD_BYTES or not tensor.is_contiguous():
        return None
    return Words(address, num_bytes // _WORD_BYTES)


def changed_bits(
    tensors: Sequence[torch.Tensor], others: Sequence[Words | None]
) -> torch.Tensor | None:
    """Gives which tensors differ in any bit from what lies elsewhere.

    Args:
        tensors: P tensors on one GPU, of any size.
        others: Where as many of the same sizes lie on it.

    Returns:
        bool [P]; None if some are not one piece of whole words each.
    """
    known = [words for words in others if words is not None]
    addresses = [tensor.data_ptr() for tensor in tensors if tensor.is_contiguous()]
    if not len(known) == len(addresses) == len(tensors):
        return None
    if any(address % _WORD_BYTES for address in addresses):
        return None
    device, numbers = tensors[0].device, [words.number for words in known]
    # As torch would ask each Python number by itself.
    pairs = array("q", [*addresses, *(words.address for words in known), *numbers])
    on_device = torch.frombuffer(pairs, dtype=torch.int64).to(device, non_blocking=True)
    changed = torch.zeros(len(numbers), dtype=torch.bool, device=device)
    with torch.cuda.device_of(on_device):
        _changed_kernel[(max(triton.cdiv(max(numbers), _WORDS), 1), len(numbers))](
            on_device, changed.view(torch.uint8), len(numbers), WORDS=_WORDS, num_warps=8
        )
    return changed


@triton.jit(do_not_specialize=["num_pairs"])
def _changed_kernel(pairs_ptr, changed_ptr, num_pairs, WORDS: tl.constexpr):
    pair = tl.program_id(1)
    first = tl.load(pairs_ptr + pair).to(tl.pointer_type(tl.int64))
    second = tl.load(pairs_ptr + num_pairs + pair).to(tl.pointer_type(tl.int64))
    num_words = tl.load(pairs_ptr + 2 * num_pairs + pair)
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    mask = word < num_words
    differs = tl.load(first + word, mask=mask, other=0) != tl.load(
        second + word, mask=mask, other=0
    )
    if tl.max(differs.to(tl.int32), axis=0) != 0:
        tl.store(changed_ptr + pair, 1)
