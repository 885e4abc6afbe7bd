"""Triton kernel of `bad_values`: notes NaN and Inf, and counts what a scale cannot hold.

It reads the values once and writes only where something is bad, where torch writes whole tensors on
the way.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from megatron_trace.formats.kernels_inputs import INTERPRETED, prepared_values

# Values of a program.
_VALUES = 8192
# By device, dtype, block size and what is asked for: the kernel as Triton compiled it for values at
# 16 aligned bytes. Triton's own binder takes the host longer.
_compiled: dict[tuple, Any] = {}


def note_bad_values(
    x: torch.Tensor,
    first_bad: torch.Tensor | None,
    num_beyond: torch.Tensor | None,
    limit: float,
    block_size: int,
) -> None:
    """Does what `bad_values.note_bad_values` does.

    Args:
        x: float [..., K] on a GPU.
        first_bad: See there, as the others.
        num_beyond: See there.
        limit: See there.
        block_size: See there.

    Raises:
        ValueError: x has another dtype or half a block, or a tensor is not on the GPU of x.
    """
    x = prepared_values(x)
    device, num_values = x.get_device(), x.numel()
    for name, tensor in (("first_bad", first_bad), ("num_beyond", num_beyond)):
        if tensor is not None and (
            tensor.dtype is not torch.int64 or tensor.numel() != 1 or tensor.get_device() != device
        ):
            raise ValueError(
                f"{name} must be int64 [1] on {x.device}; got {tensor.dtype} "
                f"{tuple(tensor.shape)} on {tensor.device}"
            )
    num_blocks, left = divmod(num_values, block_size)
    if left:
        raise ValueError(f"x must hold whole blocks of {block_size}; got {tuple(x.shape)}")
    if num_values == 0 or (first_bad is None and num_beyond is None):
        return
    limit = 0.0 if num_beyond is None else _rounded(limit, x.dtype)
    kind = (device, x.dtype, block_size, first_bad is None, num_beyond is None)
    grid = (-(-num_values // _VALUES), 1, 1)
    constants = {"SIZE": block_size, "BLOCKS": _VALUES // block_size}
    compiled, aligned = _compiled.get(kind), not x.data_ptr() & 15
    tensors = (x, first_bad, num_beyond)
    if compiled is not None and aligned and device == torch.cuda.current_device():
        pointers = [None if one is None else one.data_ptr() for one in tensors]
        compiled[grid](*pointers, num_blocks, limit, *constants.values())
        return
    with torch.cuda.device_of(x):
        compiled = _note_kernel[grid](*tensors, num_blocks, limit, **constants, num_warps=4)
    if aligned and not INTERPRETED:
        _compiled[kind] = compiled


@functools.lru_cache(maxsize=4096)
def _rounded(limit: float, dtype: torch.dtype) -> float:
    return torch.tensor(limit).to(dtype).item()


@triton.jit(
    do_not_specialize=["num_blocks", "limit"],
    do_not_specialize_on_alignment=["first_bad_ptr", "num_beyond_ptr"],
)
def _note_kernel(
    x_ptr,
    first_bad_ptr,
    num_beyond_ptr,
    num_blocks,
    limit,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    left = tl.minimum(num_blocks - first, BLOCKS).to(tl.int32)
    x_ptr += first * SIZE
    block = tl.arange(0, BLOCKS)[:, None]
    x = tl.load(x_ptr + block * SIZE + tl.arange(0, SIZE)[None, :], mask=block < left, other=0.0)
    magnitude = tl.abs(x.to(tl.float32))
    is_number = magnitude == magnitude
    if num_beyond_ptr is not None:
        found = tl.max(magnitude, axis=1) > limit
        found = found & (tl.min(is_number.to(tl.int32), axis=1) != 0)
        count = tl.sum(found.to(tl.int32), axis=0)
        if count != 0:
            tl.atomic_add(num_beyond_ptr, count.to(tl.int64), sem="relaxed")
    if first_bad_ptr is not None:
        is_finite = is_number & (magnitude != float("inf"))
        if tl.min(tl.min(is_finite.to(tl.int32), axis=1), axis=0) == 0:
            _note_first(x_ptr, first_bad_ptr, 3 * SIZE * first, left, SIZE, BLOCKS)


@triton.jit
def _note_first(x_ptr, first_bad_ptr, start, left, SIZE: tl.constexpr, BLOCKS: tl.constexpr):
    """Notes the first NaN or Inf of a program's values, which are read again: few registers."""
    PART: tl.constexpr = 1024 // SIZE
    NONE: tl.constexpr = 3 * BLOCKS * SIZE
    least = tl.full((), NONE, tl.int32)
    for part in range(BLOCKS // PART):
        block = part * PART + tl.arange(0, PART)[:, None]
        value = block * SIZE + tl.arange(0, SIZE)[None, :]
        x = tl.load(x_ptr + value, mask=block < left, other=0.0).to(tl.float32)
        # As `bad_values`: three kinds, NaN, Inf and -Inf; of finite values a number beyond all.
        kind = tl.where(x == x, tl.where(x > 0, 1, 2), 0)
        is_finite = (x == x) & (tl.abs(x) != float("inf"))
        noted = tl.where(is_finite, NONE, 3 * value + kind)
        least = tl.minimum(least, tl.min(tl.min(noted, axis=1), axis=0))
    tl.atomic_min(first_bad_ptr, start + least, sem="relaxed")
