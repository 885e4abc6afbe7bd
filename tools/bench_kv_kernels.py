"""What `bench_kv.py` compares with: BF16 decode attention, and kernels that only load or decode.

Legend: Z sequences times key/value heads, H query heads of each, L tokens, D head dim.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
import triton
import triton.language as tl

from megatron_trace.rollout.kernels.library import current_stream, library


def bf16_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    block: int = 64,
    warps: int = 8,
    stages: int = 2,
) -> torch.Tensor:
    """Gives decode attention, the context cut into parts that a second kernel adds up.

    Args:
        query: BF16 [Z, H, D].
        keys: BF16 [..., L, D], contiguous.
        values: BF16 [..., L, D], contiguous.
        block: Tokens of a step.
        warps: Warps of a program.
        stages: Steps whose loads are under way.

    Returns:
        BF16 [Z, H, D].
    """
    rows, ratio, head_dim = query.shape
    length = keys.shape[-2]
    splits = max(1, min(264 // rows, triton.cdiv(length, 2 * block)))
    padded = max(16, triton.next_power_of_2(ratio))
    parts = query.new_empty((rows, splits, padded, head_dim), dtype=torch.float32)
    sums = query.new_empty((rows, splits, padded, 2), dtype=torch.float32)
    output = torch.empty_like(query)
    shape = {"H": ratio, "ROWS": padded, "D": head_dim, "SPLITS": splits}
    _bf16_kernel[(rows, splits)](
        query,
        keys,
        values,
        parts,
        sums,
        length,
        head_dim**-0.5,
        N=block,
        **shape,
        num_warps=warps,
        num_stages=stages,
    )
    _combine_kernel[(rows,)](parts, sums, output, **shape)
    return output


def ceiling(lines: torch.Tensor, mode: int, blocks_per_sm: int) -> None:
    """Reads lines of 144 bytes: only loads (0), decodes too (1), and multiplies them too (2)."""
    out = _ceiling_output(lines.device)
    multiprocessors = torch.cuda.get_device_properties(lines.device).multi_processor_count
    error = library(Path(__file__).with_suffix(".cu")).trace_ceiling(
        ctypes.c_void_p(lines.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_longlong(lines.shape[0]),
        ctypes.c_int(mode),
        ctypes.c_int(blocks_per_sm * multiprocessors),
        current_stream(lines.device),
    )
    if error:
        raise RuntimeError(f"the ceiling kernel was refused by CUDA: error {error}")


@functools.cache
def _ceiling_output(device: torch.device) -> torch.Tensor:
    return torch.empty(1 << 22, device=device)


@triton.jit
def _bf16_kernel(
    query_ptr,
    keys_ptr,
    values_ptr,
    parts_ptr,
    sums_ptr,
    length,
    scale,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    N: tl.constexpr,
):
    z, split = tl.program_id(0), tl.program_id(1)
    row, column = tl.arange(0, ROWS), tl.arange(0, D)
    query = tl.load(
        query_ptr + (z * H + row[:, None]) * D + column[None, :], mask=row[:, None] < H, other=0.0
    )
    maximum = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    output = tl.zeros((ROWS, D), tl.float32)
    tokens_of_split = tl.cdiv(length, SPLITS * N) * N
    start = split * tokens_of_split
    stop = tl.minimum(start + tokens_of_split, length)
    base = z.to(tl.int64) * length
    for n in range(start, stop, N):
        token = n + tl.arange(0, N)
        known = token < stop
        at = (base + token)[:, None] * D + column[None, :]
        key = tl.load(keys_ptr + at, mask=known[:, None], other=0.0)
        score = tl.dot(query, tl.trans(key)) * (scale * 1.4426950408889634)
        score = tl.where(known[None, :], score, -1e30)
        largest = tl.maximum(maximum, tl.max(score, 1))
        shrink, weight = tl.exp2(maximum - largest), tl.exp2(score - largest[:, None])
        total = total * shrink + tl.sum(weight, 1)
        maximum = largest
        value = tl.load(values_ptr + at, mask=known[:, None], other=0.0)
        output = output * shrink[:, None] + tl.dot(weight.to(tl.bfloat16), value)
    at = (z * SPLITS + split) * ROWS + row
    tl.store(parts_ptr + at[:, None] * D + column[None, :], output)
    tl.store(sums_ptr + 2 * at, maximum)
    tl.store(sums_ptr + 2 * at + 1, total)


@triton.jit
def _combine_kernel(
    parts_ptr,
    sums_ptr,
    output_ptr,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
):
    z = tl.program_id(0)
    row, column = tl.arange(0, ROWS), tl.arange(0, D)
    maximum = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    output = tl.zeros((ROWS, D), tl.float32)
    for split in range(SPLITS):
        at = (z * SPLITS + split) * ROWS + row
        part = tl.load(sums_ptr + 2 * at)
        largest = tl.maximum(maximum, part)
        shrink, grow = tl.exp2(maximum - largest), tl.exp2(part - largest)
        total = total * shrink + tl.load(sums_ptr + 2 * at + 1) * grow
        values = tl.load(parts_ptr + at[:, None] * D + column[None, :])
        output = output * shrink[:, None] + values * grow[:, None]
        maximum = largest
    tl.store(
        output_ptr + (z * H + row[:, None]) * D + column[None, :],
        (output / total[:, None]).to(tl.bfloat16),
        mask=row[:, None] < H,
    )
