"""`sampling.draw` in Triton: a row of probabilities is read once, and its sums by all of the GPU.

Legend: N rows, V tokens of the vocabulary, B blocks of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Tokens of a block: their sums in FP64 must fit a program, and so must the sums of all blocks.
_BLOCK = 2048


def draw(
    logprobs: torch.Tensor, uniform: torch.Tensor, *, block_tokens: int = _BLOCK
) -> torch.Tensor:
    """Gives `sampling.draw`: the tokens, int64 [N], at which the distributions pass given numbers.

    Sums in FP64 have another order than torch's; a token without probability is never drawn.

    Args:
        logprobs: FP32 [N, V], whose rows are contiguous.
        uniform: FP64 [N], from 0 to 1.
        block_tokens: Tokens of a block.
    """
    num_rows, num_tokens = logprobs.shape
    blocks = triton.cdiv(num_tokens, block_tokens)
    sums = logprobs.new_empty((num_rows, blocks), dtype=torch.float64)
    tokens = logprobs.new_empty(num_rows, dtype=torch.int64)
    if num_rows == 0:
        return tokens
    with torch.cuda.device_of(logprobs):
        _sum_kernel[num_rows, blocks](
            logprobs, sums, logprobs.stride(0), num_tokens, blocks, BLOCK=block_tokens, num_warps=4
        )
        _draw_kernel[(num_rows,)](
            logprobs,
            sums,
            uniform,
            tokens,
            logprobs.stride(0),
            num_tokens,
            blocks,
            BLOCK=block_tokens,
            BLOCKS=max(16, triton.next_power_of_2(blocks)),
            num_warps=4,
        )
    return tokens


@triton.jit
def _probabilities(logprobs_ptr, stride, num_tokens, row, block, BLOCK: tl.constexpr):
    token = block * BLOCK + tl.arange(0, BLOCK)
    at = logprobs_ptr + row.to(tl.int64) * stride + token
    return tl.exp(tl.load(at, mask=token < num_tokens, other=float("-inf")).to(tl.float64))


@triton.jit
def _first_past(values, number, SIZE: tl.constexpr):
    """Gives where sums pass a number: a place with a value; and the sum before it."""
    place = tl.arange(0, SIZE)
    sums = tl.cumsum(values, axis=0)
    first = tl.min(tl.where((sums > number) & (values > 0), place, SIZE), axis=0)
    # The sums of a block and of its parts are rounded apart.
    last = tl.max(tl.where(values > 0, place, 0), axis=0)
    first = tl.minimum(first, last)
    return first, tl.sum(tl.where(place == first - 1, sums, 0.0), axis=0)


@triton.jit
def _sum_kernel(logprobs_ptr, sums_ptr, stride, num_tokens, blocks, BLOCK: tl.constexpr):
    row, block = tl.program_id(0), tl.program_id(1)
    values = _probabilities(logprobs_ptr, stride, num_tokens, row, block, BLOCK)
    tl.store(sums_ptr + row * blocks + block, tl.sum(values, axis=0))


@triton.jit
def _draw_kernel(
    logprobs_ptr,
    sums_ptr,
    uniform_ptr,
    tokens_ptr,
    stride,
    num_tokens,
    blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0)
    place = tl.arange(0, BLOCKS)
    sums = tl.load(sums_ptr + row * blocks + place, mask=place < blocks, other=0.0)
    number = tl.load(uniform_ptr + row) * tl.sum(sums, axis=0)
    block, before = _first_past(sums, number, BLOCKS)
    values = _probabilities(logprobs_ptr, stride, num_tokens, row, block, BLOCK)
    token, _ = _first_past(values, number - before, BLOCK)
    tl.store(tokens_ptr + row, (block * BLOCK + token).to(tl.int64))
