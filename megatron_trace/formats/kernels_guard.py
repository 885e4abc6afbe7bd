"""What the row guard counts, in Triton, for every format; hints/guard.py says what it means.

`kernels_guided` decides by it and rounds in the same pass. The kernel here only counts, for rows
whose columns are split over ranks.

Legend: as `kernels_tiles`. A program counts one row, and reads it once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_trace.formats import kernels_bf16 as bf16
from megatron_trace.formats import kernels_octets as octets
from megatron_trace.formats import kernels_octets_four_over_six as four_over_six
from megatron_trace.formats import kernels_octets_mxfp4 as mxfp4
from megatron_trace.formats import kernels_octets_mxfp8 as mxfp8
from megatron_trace.formats import kernels_tiles as tiles
from megatron_trace.formats.kernels_inputs import guided_inputs
from megatron_trace.formats.number_format import NumberFormat

# Octets of a tile at most: those of a row of 1024 values.
_LARGEST_TILE = 128


def guard_counts(
    x: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    number_format: NumberFormat,
    *,
    num_bits: int,
    max_scale_steps: int,
) -> torch.Tensor:
    """Gives what the guard counts in every row, as `hints.guard` specifies.

    Args:
        x: float [N, K] on a GPU; the trainer's values.
        hint: uint8 [N, K * num_bits / 8].
        scale_bytes: uint8 [N, B]; the rollout's block scales.
        global_scale: FP32 0-d tensor or number, or one for each row; None if there is none.
        number_format: The format.
        num_bits: Bits a value of the hint.
        max_scale_steps: Steps beyond which a block is far.

    Returns:
        int32 [4, N]: blocks that are far, blocks that count, lowest bits that agree, bits that
        count.

    Raises:
        ValueError: Shapes disagree, num_bits is not that of a hint, or x is not on a GPU.
    """
    num_rows, length = x.shape
    require_length(length)
    x, words, scale_bytes, scales, constants = guided_inputs(
        x, hint, scale_bytes, global_scale, number_format, num_bits
    )
    counts = x.new_empty((4, num_rows), dtype=torch.int32)
    if num_rows == 0:
        return counts
    constants.pop("ROUNDED")
    tile = min(max(triton.next_power_of_2(length // 8), 32), _LARGEST_TILE)
    with torch.cuda.device_of(x):
        _guard_kernel[(num_rows,)](
            x,
            words,
            scale_bytes,
            scales,
            counts,
            num_rows,
            length // 8,
            max_scale_steps,
            **constants,
            TILES=triton.cdiv(length // 8, tile),
            T=tile,
            num_warps=tile // 32,
        )
    return counts


def require_length(length: int) -> None:
    """Raises ValueError where the counts of a row might not fit the bits that they have."""
    if length >= 1 << 16:
        raise ValueError(f"the guard judges rows of less than 65536 values; got {length}")


@triton.jit(do_not_specialize=["num_rows", "max_scale_steps"])
def _guard_kernel(
    x_ptr,
    hint_ptr,
    scale_bytes_ptr,
    scale_ptr,
    counts_ptr,
    num_rows,
    row_octets,
    max_scale_steps,
    NUM_BITS: tl.constexpr,
    FORMAT: tl.constexpr,
    RULE: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    TILES: tl.constexpr,
    T: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = row * row_octets
    x_ptr += first * 8
    hint_ptr += first * (8 if NUM_BITS == 8 else 1)
    scale_bytes_ptr += first // BLOCK
    # A row has one global scale, whatever the others have.
    scale = tiles.load_scales(scale_ptr + (row if ROW else 0), first, row_octets, 0, BLOCK, 0, T)
    given = x_ptr, hint_ptr, scale_bytes_ptr, scale
    if PAIRS and (FORMAT == "nvfp4" or FORMAT == "nvfp4_4over6"):
        if bf16.is_usual(scale):
            blocks, bits = _counts_of_row(
                given, row_octets, max_scale_steps, NUM_BITS, FORMAT, RULE, BLOCK, True, TILES, T
            )
        else:
            blocks, bits = _counts_of_row(
                given, row_octets, max_scale_steps, NUM_BITS, FORMAT, RULE, BLOCK, False, TILES, T
            )
    else:
        blocks, bits = _counts_of_row(
            given, row_octets, max_scale_steps, NUM_BITS, FORMAT, RULE, BLOCK, PAIRS, TILES, T
        )
    blocks = tl.sum(blocks, axis=0)
    bits = tl.sum(bits, axis=0)
    tl.store(counts_ptr + row, (blocks & 0xFFFF) // BLOCK)
    tl.store(counts_ptr + num_rows + row, (blocks >> 16) // BLOCK)
    tl.store(counts_ptr + 2 * num_rows + row, bits & 0xFFFF)
    tl.store(counts_ptr + 3 * num_rows + row, (bits >> 16) * 8)


@triton.jit
def _counts_of_row(
    given,
    row_octets,
    max_scale_steps,
    NUM_BITS: tl.constexpr,
    FORMAT: tl.constexpr,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    TILES: tl.constexpr,
    T: tl.constexpr,
):
    """Gives int32 [T] and [T], the sums of what `judged` counts over the tiles of a row."""
    x_ptr, hint_ptr, scale_bytes_ptr, scale = given
    blocks = tl.zeros((T,), tl.int32)
    bits = tl.zeros((T,), tl.int32)
    for tile in range(TILES):
        x = tiles.load(x_ptr, row_octets, tile, PAIRS, T)
        hint = octets.load_hint(hint_ptr, scale_bytes_ptr, row_octets, tile, T, NUM_BITS, BLOCK)
        inside = tl.arange(0, T) + tile * T < row_octets
        # The values are not computed.
        _, of_blocks, of_bits = judged(
            x, hint, scale, max_scale_steps, NUM_BITS, FORMAT, RULE, PAIRS, False, T
        )
        blocks += tl.where(inside, of_blocks, 0)
        bits += tl.where(inside, of_bits, 0)
    return blocks, bits


@triton.jit
def accepts(blocks, bits, max_far_blocks, min_parity_agreement):
    """Says whether the guard accepts rows, of the sums of what `judged` counts in each."""
    # Of octets instead of blocks, which does not change their share.
    far, num_blocks = blocks & 0xFFFF, blocks >> 16
    agreeing, num_bits = bits & 0xFFFF, (bits >> 16) * 8
    far_share = tl.div_rn(far.to(tl.float32), tl.maximum(num_blocks, 1).to(tl.float32))
    parity = tl.div_rn(agreeing.to(tl.float32), tl.maximum(num_bits, 1).to(tl.float32))
    parity = tl.where(num_bits == 0, 1.0, parity)
    return (far_share <= max_far_blocks) & (parity >= min_parity_agreement)


@triton.jit
def judged(
    x,
    hint,
    scale,
    max_scale_steps,
    NUM_BITS: tl.constexpr,
    FORMAT: tl.constexpr,
    RULE: tl.constexpr,
    PAIRS: tl.constexpr,
    CODES: tl.constexpr,
    T: tl.constexpr,
):
    """Gives a tile guided by its hint, and what the guard counts in it.

    Args:
        x: The tile; pairs of NVFP4 and 4over6 need a usual global scale.
        hint: What `octets.load_hint` gives.
        scale: FP32, the global scale.
        max_scale_steps: Steps beyond which a block is far.
        NUM_BITS: Bits a value of the hint.
        FORMAT: See `kernels_tiles`.
        RULE: See there.
        PAIRS: See there.
        CODES: Whether to give codes instead of values.
        T: Octets.

    Returns:
        out: What `tiles.guided` gives.
        blocks: int32 [T], whether the octet's block is far, and in the upper 16 bits, whether it
            counts.
        bits: int32 [T], lowest bits that agree, and in the upper 16 bits, whether they count.
    """
    word, byte = hint
    if PAIRS and (FORMAT == "nvfp4" or FORMAT == "nvfp4_4over6"):
        out, lowest = bf16.guided(x, word, byte, scale, NUM_BITS, T, CODES)
        counted = byte != 0
        same = lowest ^ lowest_bits_of(word, NUM_BITS)
        agreeing = tl.where(counted, 8 - bf16.number_of_bits(same), 0)
    else:
        out = tiles.guided(x, hint, scale, NUM_BITS, FORMAT, 0, PAIRS, CODES, T)
        values = bf16.unpaired(x, T) if PAIRS else x
        agreeing, counted = _agreeing_octets(values, word, byte, scale, NUM_BITS, FORMAT)
    distance = _distance(x, byte, scale, FORMAT, RULE, PAIRS, T)
    known = (distance != 0) | (byte != 0)
    far = distance > max_scale_steps
    # Two counts in a register: a row has less than 2^16 values, and 2^13 octets.
    blocks = far.to(tl.int32) | (known.to(tl.int32) << 16)
    return out, blocks, agreeing | (counted.to(tl.int32) << 16)


@triton.jit
def _distance(
    x, byte, scale, FORMAT: tl.constexpr, RULE: tl.constexpr, PAIRS: tl.constexpr, T: tl.constexpr
):
    """Gives int32 [T], `NumberFormat.scale_distance` of the blocks of octets."""
    if FORMAT == "nvfp4_4over6":
        values = bf16.unpaired(x, T) if PAIRS else x
        four, six = four_over_six.candidate_bytes(values, scale, T)
        distance = tl.minimum(tl.abs(four - byte), tl.abs(six - byte))
    else:
        # What else it gives is not computed. Pairs have a usual scale.
        _, _, own = tiles.nearest(x, scale, 1, FORMAT, RULE, 0, PAIRS, T, PAIRS)
        distance = tl.abs(own - byte) * (1 if FORMAT == "nvfp4" else 8)
    return distance


@triton.jit
def _agreeing_octets(x, word, byte, scale, NUM_BITS: tl.constexpr, FORMAT: tl.constexpr):
    """Gives int32 [T], lowest bits of octets [T, 8] that agree, and whether their block counts."""
    if FORMAT == "mxfp4" or FORMAT == "mxfp8":
        a, _, zero = mxfp4.guided_quotients(x, byte)
    else:
        a, _, zero = octets.guided_quotients(x, byte, scale)
    # Not tl.minimum: a NaN is to become the largest.
    if FORMAT == "mxfp8":
        _, code = mxfp8.rounded(tl.where(a < 448.0, a, 448.0))
    else:
        _, biased, _ = octets.round_to_ladder(tl.where(a < 6.0, a, 6.0))
        # The sum holds the parity of the code.
        code = biased.to(tl.int32, bitcast=True)
    wanted = word if NUM_BITS == 8 else word[:, None] >> (NUM_BITS * tl.arange(0, 8)[None, :])
    counted = zero == 0
    agrees = (((code ^ wanted) & 1) == 0) & counted
    return tl.sum(agrees.to(tl.int32), axis=1), tl.reshape(counted, (x.shape[0],))


@triton.jit
def lowest_bits_of(word, NUM_BITS: tl.constexpr):
    """Gives the lowest bits of 8 values as 8 bits, of a hint of 1, 2 or 4 bits a value."""
    if NUM_BITS == 2:
        word = word & 0x5555
        word = (word | (word >> 1)) & 0x3333
        word = (word | (word >> 2)) & 0x0F0F
        word = (word | (word >> 4)) & 0x00FF
    elif NUM_BITS == 4:
        word = word & 0x11111111
        word = (word | (word >> 3)) & 0x03030303
        word = (word | (word >> 6)) & 0x000F000F
        word = (word | (word >> 12)) & 0x000000FF
    return word
