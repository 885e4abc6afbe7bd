"""Triton kernels of the hint codec: the same names, arguments and bits as `packing` and `residues`.

Legend: as `kernels_inputs`; a group is 8 blocks of a row, whose residues take 3 bytes. R rows, G
groups.

`restored` reads x once, and computes the trainer's block scales on the way. It is not fused with
guided: between the two the guard judges the rows by the restored scales.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_trace.formats import kernels_octets as octets
from megatron_trace.formats.checks import as_row_scales, require_guide, require_multiple
from megatron_trace.formats.kernels_inputs import INTERPRETED, WORDS, words_of
from megatron_trace.formats.packing import residue_bytes

_NUM_WARPS = 4
_OCTETS: tl.constexpr = tl.constexpr(32 * _NUM_WARPS)
_MAX_TILES = 4
_WORDS: tl.constexpr = tl.constexpr(1024)
_GROUPS: tl.constexpr = tl.constexpr(128)


def restored(
    x: torch.Tensor,
    hint: torch.Tensor,
    residues: torch.Tensor,
    global_scale: torch.Tensor | float,
    *,
    num_bits: int,
) -> torch.Tensor:
    """Gives `residues.restored`.

    Args:
        x: float [..., K] on a GPU; the trainer's values.
        hint: uint8 [..., K * num_bits / 8]; packed lowest bits (1, 2) or codes (4).
        residues: uint8 [..., B], 0 to 7.
        global_scale: FP32 0-d tensor or number, or one for each row; the rollout's, decode side.
        num_bits: 1, 2 or 4.

    Returns:
        uint8 [..., B], E4M3.

    Raises:
        ValueError: Shapes disagree, K is not a multiple of 16, num_bits is not 1, 2 or 4, or a
            tensor is not on the GPU of x.
    """
    require_guide(x, hint, residues, num_bits)
    _require_gpu(x=x, hint=hint, residues=residues)
    x = x.contiguous()
    x = x if x.data_ptr() % 16 == 0 else x.clone()
    num_octets = x.numel() // 8
    num_tiles = triton.cdiv(num_octets, _OCTETS.value)
    tiles = min(_MAX_TILES, max(num_tiles, 1))
    scale_bytes = torch.empty_like(residues, memory_format=torch.contiguous_format)
    scales = as_row_scales(global_scale, x)
    row = x.shape[-1] // 8 if scales.dim() else 0
    if row:
        scales = scales.expand(*x.shape[:-1], 1).reshape(-1).contiguous()
    _launch(
        _restored_kernel,
        x,
        triton.cdiv(num_tiles, tiles),
        words_of(hint, num_bits),
        residues.contiguous(),
        scale_bytes,
        scales,
        num_octets,
        NUM_BITS=num_bits,
        ROW=row,
        TILES=tiles,
    )
    return scale_bytes


def narrowed(packed_codes: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Gives `packing.narrowed`.

    Args:
        packed_codes: uint8 [..., K / 2] on a GPU, K % 8 == 0.
        num_bits: 1, 2 or 4; at 4, the argument itself is given.

    Returns:
        uint8 [..., K * num_bits / 8].
    """
    if num_bits == 4:
        return packed_codes
    require_multiple(packed_codes, 4)
    _require_gpu(packed_codes=packed_codes)
    *rows, length = packed_codes.shape
    hint = packed_codes.new_empty((*rows, length * num_bits // 4))
    words = words_of(packed_codes, 4)
    num_words = words.numel()
    _launch(
        _narrowed_kernel,
        words,
        triton.cdiv(num_words, _WORDS.value),
        hint.flatten().view(WORDS[num_bits]),
        num_words,
        NUM_BITS=num_bits,
    )
    return hint


def pack_residues(residues: torch.Tensor) -> torch.Tensor:
    """Gives `packing.pack_residues`.

    Args:
        residues: uint8 [..., B] on a GPU, 0 to 7.

    Returns:
        uint8 [..., residue_bytes(B)].
    """
    _require_gpu(residues=residues)
    *rows, num_blocks = residues.shape
    packed = residues.new_empty((*rows, residue_bytes(num_blocks)))
    _launch_groups(_pack_residues_kernel, residues.contiguous(), packed, num_blocks)
    return packed


def unpack_residues(packed: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Gives `packing.unpack_residues`.

    Args:
        packed: uint8 [..., residue_bytes(B)] on a GPU.
        num_blocks: B.

    Returns:
        uint8 [..., B], 0 to 7.

    Raises:
        ValueError: A row has another number of bytes.
    """
    _require_gpu(packed=packed)
    *rows, num_bytes = packed.shape
    if num_bytes != residue_bytes(num_blocks):
        raise ValueError(
            f"residues of {num_blocks} blocks take {residue_bytes(num_blocks)} bytes; got "
            f"{tuple(packed.shape)}"
        )
    residues = packed.new_empty((*rows, num_blocks))
    _launch_groups(_unpack_residues_kernel, packed.contiguous(), residues, num_blocks)
    return residues


@triton.jit(do_not_specialize=["num_octets"])
def _restored_kernel(
    x_ptr,
    hint_ptr,
    residues_ptr,
    scale_bytes_ptr,
    scale_ptr,
    num_octets,
    NUM_BITS: tl.constexpr,
    ROW: tl.constexpr,
    TILES: tl.constexpr,
):
    first, left = octets.octets_of_program(num_octets, _OCTETS, TILES)
    x_ptr += first * 8
    hint_ptr += first
    residues_ptr += first // 2
    scale_bytes_ptr += first // 2
    for tile in range(TILES):
        x = octets.load_tile(x_ptr, left, tile, _OCTETS)
        word, residue = octets.load_hint(hint_ptr, residues_ptr, left, tile, _OCTETS)
        scales = octets.load_block_scales(scale_ptr, first, left, tile, ROW, _OCTETS)
        # What else it gives is not computed.
        _, _, own = octets.rounded_octets(x, scales, 1, _OCTETS)
        own = tl.minimum(own, 126)
        byte = own + ((residue - own + 4) & 7) - 4
        byte = tl.where(byte < 1, byte + 8, byte)
        byte = tl.where(byte > 126, byte - 8, byte)
        if NUM_BITS == 4:
            word = word & 0x77777777
        halves = tl.reshape((word != 0).to(tl.int32), (_OCTETS // 2, 2))
        has_magnitude = tl.broadcast_to(tl.max(halves, axis=1)[:, None], (_OCTETS // 2, 2))
        has_magnitude = tl.reshape(has_magnitude, (_OCTETS,))
        byte = tl.where((residue == 0) & (has_magnitude == 0), 0, byte)
        index = tl.arange(0, _OCTETS) + tile * _OCTETS
        mask = (index < left) & (index % 2 == 0)
        tl.store(scale_bytes_ptr + index // 2, byte.to(tl.uint8), mask=mask)


@triton.jit(do_not_specialize=["num_words"])
def _narrowed_kernel(words_ptr, hint_ptr, num_words, NUM_BITS: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * _WORDS + tl.arange(0, _WORDS)
    mask = index < num_words
    word = tl.load(words_ptr + index, mask=mask, other=0)
    if NUM_BITS == 2:
        word = word & 0x33333333
        word = ((word >> 2) | word) & 0x0F0F0F0F
        word = ((word >> 4) | word) & 0x00FF00FF
        word = (word >> 8) | word
    else:
        word = word & 0x11111111
        word = ((word >> 3) | word) & 0x03030303
        word = ((word >> 6) | word) & 0x000F000F
        word = (word >> 12) | word
    tl.store(hint_ptr + index, word.to(hint_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _pack_residues_kernel(residues_ptr, packed_ptr, num_rows, num_blocks, num_bytes):
    row, group, mask = _groups_of_program(num_rows, num_blocks)
    block = group * 8 + tl.arange(0, 8)[None, :]
    residues = tl.load(
        residues_ptr + row * num_blocks + block, mask=mask & (block < num_blocks), other=0
    )
    word = tl.sum(residues.to(tl.int32) << (3 * tl.arange(0, 8)[None, :]), axis=1)[:, None]
    column = tl.arange(0, 4)[None, :]
    byte = group * 3 + column
    tl.store(
        packed_ptr + row * num_bytes + byte,
        ((word >> (8 * column)) & 0xFF).to(tl.uint8),
        mask=mask & (column < 3) & (byte < num_bytes),
    )


@triton.jit(do_not_specialize=["num_rows"])
def _unpack_residues_kernel(packed_ptr, residues_ptr, num_rows, num_blocks, num_bytes):
    row, group, mask = _groups_of_program(num_rows, num_blocks)
    column = tl.arange(0, 4)[None, :]
    byte = group * 3 + column
    packed = tl.load(
        packed_ptr + row * num_bytes + byte,
        mask=mask & (column < 3) & (byte < num_bytes),
        other=0,
    )
    word = tl.sum(packed.to(tl.int32) << (8 * column), axis=1)[:, None]
    column = tl.arange(0, 8)[None, :]
    block = group * 8 + column
    tl.store(
        residues_ptr + row * num_blocks + block,
        ((word >> (3 * column)) & 7).to(tl.uint8),
        mask=mask & (block < num_blocks),
    )


@triton.jit
def _groups_of_program(num_rows, num_blocks):
    """Gives row (int64), group of the row, and whether there is one, each [_GROUPS, 1]."""
    groups_of_row = (num_blocks + 7) // 8
    index = tl.program_id(0).to(tl.int64) * _GROUPS + tl.arange(0, _GROUPS)[:, None]
    row = index // groups_of_row
    return row, (index - row * groups_of_row).to(tl.int32), row < num_rows


def _launch_groups(kernel, source: torch.Tensor, target: torch.Tensor, num_blocks: int) -> None:
    if target.numel() == 0:
        return
    num_bytes = residue_bytes(num_blocks)
    num_rows = max(source.numel(), target.numel()) // max(num_blocks, num_bytes)
    programs = triton.cdiv(num_rows * triton.cdiv(num_blocks, 8), _GROUPS.value)
    _launch(kernel, source, programs, target, num_rows, num_blocks, num_bytes)


def _launch(kernel, first: torch.Tensor, programs: int, *arguments, **constants: int) -> None:
    if programs == 0:
        return
    with torch.cuda.device_of(first):
        kernel[(programs,)](first, *arguments, **constants, num_warps=_NUM_WARPS)


def _require_gpu(**tensors: torch.Tensor) -> None:
    first = next(iter(tensors.values()))
    for name, tensor in tensors.items():
        if not (tensor.is_cuda or INTERPRETED) or tensor.device != first.device:
            raise ValueError(
                f"implementation triton needs {name} on a GPU, on one; got {tensor.device}; use "
                "torch or auto there"
            )
