"""Rounding of a tile of octets in whichever format: what several kernels are made of.

Legend: as `kernels_inputs`. FORMAT is the name of a `NumberFormat`, RULE its rule, ROW how many
octets share a global scale (0: all), BLOCK how many a block has: 4 in MX formats, which have no
global scale. With PAIRS a tile is [T, 4] pairs of BF16, see `kernels_bf16`; without, it is [T, 8]
of any float dtype.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_trace.formats import kernels_bf16 as bf16
from megatron_trace.formats import kernels_bf16_four_over_six as bf16_four_over_six
from megatron_trace.formats import kernels_bf16_mx as bf16_mx
from megatron_trace.formats import kernels_octets as octets
from megatron_trace.formats import kernels_octets_four_over_six as four_over_six
from megatron_trace.formats import kernels_octets_mxfp4 as mxfp4
from megatron_trace.formats import kernels_octets_mxfp8 as mxfp8


@triton.jit
def nearest(
    x,
    scales,
    NUM_BITS: tl.constexpr,
    FORMAT: tl.constexpr,
    RULE: tl.constexpr,
    ROW: tl.constexpr,
    PAIRS: tl.constexpr,
    T: tl.constexpr,
    USUAL: tl.constexpr = False,
):
    """Gives a tile rounded to nearest under its own block scales.

    Args:
        x: The tile.
        scales: Global scales, FP32 or FP32 [T]; not used by MX formats.
        NUM_BITS: Bits a value of the hint, or 0, for which the word is not to be used.
        FORMAT: See above.
        RULE: See above.
        ROW: See above.
        PAIRS: See above.
        T: Octets.
        USUAL: Whether the global scales are known to be usual, see `kernels_bf16`.

    Returns:
        y: int32 [T, 4] pairs, or FP32 [T, 8].
        word: int32 [T], a hint of each octet; codes of 8 bits are int32 [T, 8].
        byte: int32 [T], the block scales.
    """
    BITS: tl.constexpr = NUM_BITS if NUM_BITS else 1
    if PAIRS and FORMAT == "nvfp4":
        if USUAL or bf16.are_usual((scales,), ROW, 1):
            y, word, byte = bf16.recorded(x, scales, BITS, T)
        else:
            y, word, byte = octets.rounded_octets(
                bf16.unpaired(x, T), _scales_of_blocks(scales, ROW, T), BITS, T
            )
            y = bf16.paired(y, T)
    elif PAIRS and FORMAT == "mxfp4":
        y, word, byte = bf16_mx.recorded(x, BITS, RULE, T)
    elif PAIRS and FORMAT == "mxfp8":
        y, word, byte = mxfp8.rounded_pairs(x, BITS, RULE, T)
    elif PAIRS and FORMAT == "nvfp4_4over6":
        y, word, byte, decided = bf16_four_over_six.recorded(x, scales, BITS, RULE, T)
        if tl.min(decided.to(tl.int32), axis=0) == 0:
            y, word, byte = four_over_six.rounded_octets(
                bf16.unpaired(x, T), _scales_of_blocks(scales, ROW, T), BITS, RULE, T
            )
            y = bf16.paired(y, T)
    else:
        values = bf16.unpaired(x, T) if PAIRS else x
        if FORMAT == "mxfp4":
            y, word, byte = mxfp4.rounded_octets(values, BITS, RULE, T)
        elif FORMAT == "mxfp8":
            y, word, byte = mxfp8.rounded_octets(values, BITS, RULE, T)
        elif FORMAT == "nvfp4_4over6":
            y, word, byte = four_over_six.rounded_octets(
                values, _scales_of_blocks(scales, ROW, T), BITS, RULE, T
            )
        else:
            y, word, byte = octets.rounded_octets(
                values, _scales_of_blocks(scales, ROW, T), BITS, T
            )
        if PAIRS:
            y = bf16.paired(y, T)
    return y, word, byte


@triton.jit
def guided(
    x,
    hint,
    scales,
    NUM_BITS: tl.constexpr,
    FORMAT: tl.constexpr,
    ROW: tl.constexpr,
    PAIRS: tl.constexpr,
    CODES: tl.constexpr,
    T: tl.constexpr,
    USUAL: tl.constexpr = False,
):
    """Gives a tile guided by its hint.

    Args:
        x: The tile.
        hint: What `octets.load_hint` gives.
        scales: Global scales, FP32 or FP32 [T]; not used by MX formats.
        NUM_BITS: Bits a value of the hint.
        FORMAT: See above.
        ROW: See above.
        PAIRS: See above.
        CODES: Whether to give codes, as `nearest` gives words, instead of values.
        T: Octets.
        USUAL: As of `nearest`.

    Returns:
        As the first or the second of `nearest`.
    """
    word, byte = hint
    if PAIRS and (FORMAT == "nvfp4" or FORMAT == "nvfp4_4over6"):
        if USUAL or bf16.are_usual((scales,), ROW, 1):
            out, _ = bf16.guided(x, word, byte, scales, NUM_BITS, T, CODES)
        else:
            out = _guided_octets(bf16.unpaired(x, T), word, byte, scales, NUM_BITS, FORMAT, CODES)
            if not CODES:
                out = bf16.paired(out, T)
    elif PAIRS and FORMAT == "mxfp4":
        out = bf16_mx.guided(x, word, byte, NUM_BITS, CODES)
    elif PAIRS and FORMAT == "mxfp8":
        out = mxfp8.guided_pairs(x, word, byte, NUM_BITS, CODES, T)
    else:
        values = bf16.unpaired(x, T) if PAIRS else x
        out = _guided_octets(values, word, byte, scales, NUM_BITS, FORMAT, CODES)
        if PAIRS and not CODES:
            out = bf16.paired(out, T)
    return out


@triton.jit
def _guided_octets(
    x, word, byte, scales, NUM_BITS: tl.constexpr, FORMAT: tl.constexpr, CODES: tl.constexpr
):
    if FORMAT == "mxfp4" or FORMAT == "mxfp8":
        a, effective, zero = mxfp4.guided_quotients(x, byte)
    else:
        a, effective, zero = octets.guided_quotients(x, byte, scales)
    if FORMAT == "mxfp8":
        chosen = mxfp8.guided_magnitudes(x, word, a, NUM_BITS, CODES)
    else:
        chosen = octets.guided_magnitudes(x, word, a, NUM_BITS, CODES)
    sign_bits = octets.sign_bits_of(x)
    if not CODES:
        out = octets.dequantised(chosen, sign_bits, effective, zero)
    elif FORMAT == "mxfp8":
        out = mxfp8.codes_of(chosen, sign_bits, zero)
    else:
        out = octets.code_words(chosen, sign_bits, zero)
    return out


@triton.jit
def load(x_ptr, left, tile, PAIRS: tl.constexpr, T: tl.constexpr):
    """Gives a tile."""
    if PAIRS:
        x = bf16.load_pair_tile(x_ptr, left, tile, T)
    else:
        x = octets.load_tile(x_ptr, left, tile, T)
    return x


@triton.jit
def load_octets(x_ptr, octet, mask, PAIRS: tl.constexpr):
    """Gives octets by number [T], where the mask [T] says so."""
    return bf16.load_octets(x_ptr, octet, mask) if PAIRS else octets.load_octets(x_ptr, octet, mask)


@triton.jit
def store_octets(y_ptr, y, octet, mask, ROUNDED: tl.constexpr, PAIRS: tl.constexpr):
    """Stores rounded octets by number [T], where the mask [T] says so; as `store` does."""
    if PAIRS:
        bf16.store_octets(y_ptr, y, octet, mask)
    else:
        octets.store_octets(y_ptr, y.to(ROUNDED), octet, mask)


@triton.jit
def load_all(x_ptr, left, PAIRS: tl.constexpr, T: tl.constexpr, TILES: tl.constexpr):
    """Gives a tuple of tiles; all loads are under way before the first is used."""
    loaded = ()
    for tile in tl.static_range(TILES):
        loaded += (load(x_ptr, left, tile, PAIRS, T),)
    return loaded


@triton.jit
def store(y_ptr, y, left, tile, ROUNDED: tl.constexpr, PAIRS: tl.constexpr, T: tl.constexpr):
    """Stores a rounded tile; FP32 is rounded to ROUNDED first."""
    if PAIRS:
        bf16.store_pairs(y_ptr, y, left, tile, T)
    else:
        octets.store_tile(y_ptr, y.to(ROUNDED), left, tile, T)


@triton.jit
def load_scales(
    scale_ptr, first, left, tile, BLOCK: tl.constexpr, ROW: tl.constexpr, T: tl.constexpr
):
    """Gives the global scales of a tile's octets, FP32 or FP32 [T]; 1 if the format has none."""
    return 1.0 if BLOCK == 4 else octets.load_scales(scale_ptr, first, left, tile, ROW, T)


@triton.jit
def load_all_scales(
    scale_ptr,
    first,
    left,
    BLOCK: tl.constexpr,
    ROW: tl.constexpr,
    T: tl.constexpr,
    TILES: tl.constexpr,
):
    """Gives a tuple of what `load_scales` gives, of every tile."""
    scales = ()
    for tile in tl.static_range(TILES):
        scales += (load_scales(scale_ptr, first, left, tile, BLOCK, ROW, T),)
    return scales


@triton.jit
def _scales_of_blocks(scales, ROW: tl.constexpr, T: tl.constexpr):
    """Gives FP32, or FP32 [T / 2, 1, 1], of what `load_scales` gives."""
    if ROW:
        # The octets of a block have the same.
        scales = tl.reduce(tl.reshape(scales, (T // 2, 2, 1)), 1, octets.max_of, keep_dims=True)
    return scales
