"""Triton kernel that says which of many tensors differ from others of their sizes.

Hundreds of comparisons, of a matrix each, would take the host longer than the GPU.

Legend: P pairs of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_WORD_BYTES = 8
_WORDS = 4096


def can_compare(tensor: torch.Tensor) -> bool:
    """Says whether a tensor is one piece of whole words on a GPU."""
    whole = tensor.data_ptr() % _WORD_BYTES == 0 and tensor.nbytes % _WORD_BYTES == 0
    return tensor.is_cuda and whole and tensor.is_contiguous()


def changed_bits(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> torch.Tensor:
    """Gives which tensors differ from the other ones in any bit.

    Args:
        tensors: P tensors of which `can_compare` is true, on one GPU; of any size.
        others: As many of the same sizes there.

    Returns:
        bool [P].
    """
    device = tensors[0].device
    words = [tensor.nbytes // _WORD_BYTES for tensor in tensors]
    pointers = [[tensor.data_ptr() for tensor in of] for of in (tensors, others)]
    pairs = torch.tensor([*pointers, words], dtype=torch.int64).to(device, non_blocking=True)
    changed = torch.zeros(len(words), dtype=torch.bool, device=device)
    with torch.cuda.device_of(pairs):
        _changed_kernel[(max(triton.cdiv(max(words), _WORDS), 1), len(words))](
            pairs, changed.view(torch.uint8), len(words), WORDS=_WORDS, num_warps=8
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
