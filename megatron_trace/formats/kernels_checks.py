"""Triton kernels that count what must not be among values: NaN, Inf, and what a scale cannot hold.

Each reads the values once and writes a count, where torch writes whole tensors on the way.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from megatron_trace.formats.kernels_inputs import prepared_values

# Values of a program.
_VALUES = 8192


def add_blocks_beyond(count: torch.Tensor, x: torch.Tensor, limit: float, block_size: int) -> None:
    """Adds the number of blocks whose largest magnitude exceeds a limit; a NaN does not.

    Args:
        count: int64 [1] on the GPU of x.
        x: float [..., K] on a GPU, K a multiple of the block size.
        limit: The limit, which is rounded to the dtype of x first.
        block_size: Neighbouring values of a block, a power of two.
    """
    _count(count, x, _rounded(limit, x.dtype), block_size, BEYOND=True)


def num_non_finite(x: torch.Tensor) -> torch.Tensor:
    """Counts the groups of 16 values, of the last at most so many, that hold a NaN or Inf.

    Args:
        x: float of any shape on a GPU.

    Returns:
        int64 0-d.
    """
    count = torch.zeros((), dtype=torch.int64, device=x.device)
    _count(count, x, 0.0, 16, BEYOND=False)
    return count


@functools.lru_cache(maxsize=4096)
def _rounded(limit: float, dtype: torch.dtype) -> float:
    return torch.tensor(limit).to(dtype).item()


def _count(count: torch.Tensor, x: torch.Tensor, limit: float, size: int, *, BEYOND: bool) -> None:
    x = prepared_values(x)
    num_blocks = triton.cdiv(x.numel(), size)
    if num_blocks:
        blocks = _VALUES // size
        with torch.cuda.device_of(x):
            _count_kernel[(triton.cdiv(num_blocks, blocks),)](
                x, count, x.numel(), limit, SIZE=size, BEYOND=BEYOND, BLOCKS=blocks, num_warps=4
            )


@triton.jit(do_not_specialize=["limit"])
def _count_kernel(
    x_ptr,
    count_ptr,
    num_values,
    limit,
    SIZE: tl.constexpr,
    BEYOND: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * (BLOCKS * SIZE)
    left = tl.minimum(num_values - first, BLOCKS * SIZE).to(tl.int32)
    value = tl.arange(0, BLOCKS)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = tl.load(x_ptr + first + value, mask=value < left, other=0.0)
    magnitude = tl.abs(x.to(tl.float32))
    is_number = magnitude == magnitude
    if BEYOND:
        found = tl.max(magnitude, axis=1) > limit
        found = found & (tl.min(is_number.to(tl.int32), axis=1) != 0)
    else:
        is_finite = is_number & (magnitude != float("inf"))
        found = tl.min(is_finite.to(tl.int32), axis=1) == 0
    count = tl.sum(found.to(tl.int32), axis=0)
    if count != 0:
        tl.atomic_add(count_ptr, count.to(tl.int64))
