"""Triton kernel that judges rows by the guard and rounds them, guided or to nearest, in one pass.

Legend: as `kernels_tiles`. N rows of x, M rows of a hint, LANES octets of a row that threads beside
one another have at once. A program has T / LANES rows; what is one number for each of them is a
scalar where there is only one, and otherwise [T].

A row is guided, and stored so, while the guard counts: nearly all rows are accepted. The others are
read again and rounded to nearest.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_trace.formats import kernels_bf16 as bf16
from megatron_trace.formats import kernels_octets as octets
from megatron_trace.formats import kernels_tiles as tiles
from megatron_trace.formats.kernels_guard import accepts, judged


@triton.jit(
    do_not_specialize=["num_rows", "max_scale_steps"],
    do_not_specialize_on_alignment=[
        "scale_bytes_ptr",
        "has_hint_ptr",
        "order_ptr",
        "scale",
        "accepted_ptr",
        "rejected_ptr",
    ],
)
def guided_kernel(
    x_ptr,
    hint_ptr,
    scale_bytes_ptr,
    has_hint_ptr,
    order_ptr,
    scale,
    out_ptr,
    out_bytes_ptr,
    accepted_ptr,
    rejected_ptr,
    num_rows,
    max_scale_steps,
    max_far_blocks,
    min_parity_agreement,
    NUM_BITS: tl.constexpr,
    CODE_BITS: tl.constexpr,
    CODES: tl.constexpr,
    SLOTS: tl.constexpr,
    SCALE: tl.constexpr,
    FORMAT: tl.constexpr,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDED: tl.constexpr,
    PAIRS: tl.constexpr,
    ROW_OCTETS: tl.constexpr,
    LANES: tl.constexpr,
    LOOPS: tl.constexpr,
    TILES: tl.constexpr,
    T: tl.constexpr,
):
    ROWS: tl.constexpr = T // LANES
    first = tl.program_id(0).to(tl.int64) * ROWS
    thread = tl.arange(0, T)
    row = first if ROWS == 1 else first + thread // LANES
    there = row < num_rows
    hint_row = row
    if order_ptr is not None:
        hint_row = tl.load(order_ptr + row, mask=there, other=0)
    present = tl.load(has_hint_ptr + hint_row // SLOTS, mask=there, other=0) != 0
    if SCALE == "none":
        global_scale = 1.0
    elif SCALE == "number":
        global_scale = tl.full((), scale, tl.float32)
    else:
        global_scale = tl.load(scale + (first if SCALE == "rows" else 0))

    lane = thread % LANES
    x_ptr += first * (ROW_OCTETS * 8)
    STORES: tl.constexpr = out_ptr is not None
    if CODES:
        out_ptr = _as_words(out_ptr, CODE_BITS)
        out_bytes_ptr += first * (ROW_OCTETS // BLOCK)
    if STORES:
        # An octet is 8 values, or 8 codes of 8 bits, or a word.
        out_ptr += first * (ROW_OCTETS * (1 if CODES and CODE_BITS == 4 else 8))
    hint_ptr = _as_words(hint_ptr, NUM_BITS)
    place = (thread // LANES) * ROW_OCTETS + lane
    hint_place = hint_row.to(tl.int64) * ROW_OCTETS + lane
    given = x_ptr, hint_ptr, scale_bytes_ptr, place, hint_place, lane, global_scale
    taken = out_ptr, out_bytes_ptr
    limits = max_scale_steps, max_far_blocks, min_parity_agreement
    # Asked once, of all tiles: a question each takes registers.
    ASKS: tl.constexpr = PAIRS and (FORMAT == "nvfp4" or FORMAT == "nvfp4_4over6")
    usual = bf16.is_usual(global_scale) if ASKS else first >= 0
    some = present if ROWS == 1 else first >= 0
    accepted = present
    if some & usual:
        accepted = present & _guide(
            given,
            taken,
            limits,
            present,
            NUM_BITS,
            CODE_BITS,
            CODES,
            FORMAT,
            RULE,
            BLOCK,
            ROUNDED,
            PAIRS,
            ROW_OCTETS,
            LANES,
            LOOPS,
            TILES,
            T,
        )
    if ASKS:
        unusual = some & (usual == 0)
        if unusual:
            accepted = present & _guide(
                given,
                taken,
                limits,
                present,
                NUM_BITS,
                CODE_BITS,
                CODES,
                FORMAT,
                RULE,
                BLOCK,
                ROUNDED,
                False,
                ROW_OCTETS,
                LANES,
                LOOPS * TILES,
                1,
                T,
            )
    if ROWS == 1:
        tl.store(accepted_ptr + row, accepted)
        all_accepted = accepted
    else:
        tl.store(accepted_ptr + row, accepted, mask=there & (lane == 0))
        all_accepted = tl.min((accepted | (there == 0)).to(tl.int32), axis=0) != 0
    if all_accepted == 0:
        if rejected_ptr is not None:
            wrong = present & (accepted == 0)
            if ROWS > 1:
                wrong = tl.sum((wrong & (lane == 0)).to(tl.int32), axis=0)
            if wrong != 0:
                tl.atomic_add(rejected_ptr, wrong.to(tl.int64), sem="relaxed")
        # What was stored is stored anew, perhaps by other threads.
        tl.debug_barrier()
        others = there & (accepted == 0)
        for tile in range(LOOPS * TILES if STORES else 0):
            at = tile * LANES
            mask = others & (lane + at < ROW_OCTETS)
            x = tiles.load_octets(x_ptr, place + at, mask, PAIRS)
            y, word, byte = tiles.nearest(x, global_scale, CODE_BITS, FORMAT, RULE, 0, PAIRS, T)
            out = word if CODES else y
            _store(taken, out, byte, place + at, mask, CODE_BITS, CODES, BLOCK, ROUNDED, PAIRS)


@triton.jit
def _guide(
    given,
    taken,
    limits,
    mask,
    NUM_BITS: tl.constexpr,
    CODE_BITS: tl.constexpr,
    CODES: tl.constexpr,
    FORMAT: tl.constexpr,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDED: tl.constexpr,
    PAIRS: tl.constexpr,
    ROW_OCTETS: tl.constexpr,
    LANES: tl.constexpr,
    LOOPS: tl.constexpr,
    TILES: tl.constexpr,
    T: tl.constexpr,
):
    """Stores rows as they are guided, and gives whether the guard accepts them: bool, or bool [T].

    Given are pointers to values, words of the hint and its scale bytes; octets, from which on x and
    the hint are read, int32 and int64 [T]; octets of the row, int32 [T]; the global scale, a usual
    one for pairs of NVFP4 and 4over6. Taken are values, or codes and their scale bytes, by
    pointers, or nothing. The mask, bool or bool [T], says which rows are to be read and stored.
    """
    x_ptr, hint_ptr, scale_bytes_ptr, place, hint_place, lane, global_scale = given
    # Octets of whole tiles need not be compared with it.
    END: tl.constexpr = ROW_OCTETS if ROW_OCTETS < LANES * LOOPS * TILES else 1 << 30
    max_scale_steps, max_far_blocks, min_parity_agreement = limits
    blocks = tl.zeros((T,), tl.int32)
    bits = tl.zeros((T,), tl.int32)
    for loop in range(LOOPS):
        start = loop * (TILES * LANES)
        values = ()
        hints = ()
        for tile in tl.static_range(TILES):
            at = start + tile * LANES
            inside = mask & (lane + at < END)
            values += (tiles.load_octets(x_ptr, place + at, inside, PAIRS),)
            hints += (
                octets.load_hints(
                    hint_ptr, scale_bytes_ptr, hint_place + at, inside, NUM_BITS, BLOCK
                ),
            )
        for tile in tl.static_range(TILES):
            at = start + tile * LANES
            inside = mask & (lane + at < END)
            out, of_blocks, of_bits = judged(
                values[tile],
                hints[tile],
                global_scale,
                max_scale_steps,
                NUM_BITS,
                FORMAT,
                RULE,
                PAIRS,
                CODES,
                T,
            )
            blocks += tl.where(inside, of_blocks, 0)
            bits += tl.where(inside, of_bits, 0)
            _, byte = hints[tile]
            _store(taken, out, byte, place + at, inside, CODE_BITS, CODES, BLOCK, ROUNDED, PAIRS)
    return accepts(
        _sum_of_row(blocks, LANES, T),
        _sum_of_row(bits, LANES, T),
        max_far_blocks,
        min_parity_agreement,
    )


@triton.jit
def _store(
    taken,
    out,
    byte,
    place,
    mask,
    CODE_BITS: tl.constexpr,
    CODES: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDED: tl.constexpr,
    PAIRS: tl.constexpr,
):
    out_ptr, out_bytes_ptr = taken
    if CODES:
        octets.store_hints(out_ptr, out_bytes_ptr, out, byte, place, mask, CODE_BITS, BLOCK)
    elif out_ptr is not None:
        tiles.store_octets(out_ptr, out, place, mask, ROUNDED, PAIRS)


@triton.jit
def _as_words(ptr, NUM_BITS: tl.constexpr):
    """Gives a pointer to a hint's bytes as one to its octets; with 8 bits, to its values."""
    if NUM_BITS == 2:
        ptr = ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    elif NUM_BITS == 4:
        ptr = ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    return ptr


@triton.jit
def _sum_of_row(counts, LANES: tl.constexpr, T: tl.constexpr):
    """Gives the sum over the threads of a row, int32; or int32 [T] where there are several rows."""
    if LANES == T:
        total = tl.sum(counts, axis=0)
    else:
        rows = tl.reshape(counts, (T // LANES, LANES))
        total = tl.broadcast_to(tl.sum(rows, axis=1, keep_dims=True), (T // LANES, LANES))
        total = tl.reshape(total, (T,))
    return total
