"""What the Triton kernels of attention share: softmax over tiles of tokens, and over parts of them.

Legend: rows are queries; `maximum` and `total` are those of the logits (base 2) seen so far and of
their weights, FP32 [rows].
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LOWEST: tl.constexpr = tl.constexpr(-1.0e30)
# Tokens of a tile, and tiles of a part at least.
TOKENS = 32
_TILES_OF_SPLIT = 4
# Programs of a launch: some for every multiprocessor, so that none is left alone at the end.
_PROGRAMS = 1056


def splits_of(longest: int, programs: int) -> int:
    """Gives into how many parts contexts are cut.

    Args:
        longest: Tokens of a context at most.
        programs: Programs of a launch that cuts nothing.
    """
    return min(triton.cdiv(longest, _TILES_OF_SPLIT * TOKENS), max(1, _PROGRAMS // programs))


@triton.jit
def seen(score, known, maximum, total, RAISED: tl.constexpr = 0.0):
    """Gives the weights of a tile of logits, and what becomes of those before it.

    Args:
        score: FP32 [rows, tokens], base 2.
        known: bool, fits score; others weigh 0.
        maximum: See above.
        total: See above.
        RAISED: Weights are 2^RAISED times what they would be.

    Returns:
        weight: FP32 [rows, tokens].
        shrink: FP32 [rows], by which what was summed before is multiplied.
        maximum, total: With this tile.
    """
    score = tl.where(known, score, LOWEST)
    largest = tl.maximum(maximum, tl.max(score, 1))
    shrink = tl.exp2(maximum - largest)
    weight = tl.where(known, tl.exp2(score - (largest[:, None] - RAISED)), 0.0)
    return weight, shrink, largest, total * shrink + tl.sum(weight, 1)


@triton.jit
def joined(maximum, total, part_maximum, part_total):
    """Gives two parts as one.

    Returns:
        shrink: FP32 [rows], by which what was summed in the first is multiplied.
        grow: FP32 [rows], likewise of the second.
        maximum, total: Of both.
    """
    largest = tl.maximum(maximum, part_maximum)
    shrink, grow = tl.exp2(maximum - largest), tl.exp2(part_maximum - largest)
    return shrink, grow, largest, total * shrink + part_total * grow
