"""Index arithmetic: the parts of all ranks cover the whole exactly once, and match Megatron's."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron_trace.hints.sharding import (
    cp_positions,
    expert_columns,
    kv_heads,
    local_experts,
    packed_parts,
    padded_length,
    recorded_rows,
    token_positions,
)

SIZES = (1, 2, 3, 4, 8)


def flat(parts):
    return list(itertools.chain.from_iterable(parts))


def ranks(tp_size, cp_size):
    return list(itertools.product(range(cp_size), range(tp_size)))


@pytest.mark.parametrize("cp_size", SIZES)
@pytest.mark.parametrize("tp_size", SIZES)
def test_every_position_is_on_exactly_one_rank(tp_size, cp_size):
    for longest in range(1, 70):
        length = padded_length(longest, tp_size=tp_size, cp_size=cp_size)
        parts = [
            flat(token_positions(length, tp_size=tp_size, tp_rank=t, cp_size=cp_size, cp_rank=c))
            for c, t in ranks(tp_size, cp_size)
        ]
        assert sorted(flat(parts)) == list(range(length))
        assert {len(part) for part in parts} == {length // (tp_size * cp_size)}
        assert all(part == sorted(part) for part in parts)


@pytest.mark.parametrize("cp_size", SIZES)
@pytest.mark.parametrize("tp_size", SIZES)
def test_padding_is_the_least_that_can_be_split(tp_size, cp_size):
    multiple = tp_size * (2 * cp_size if cp_size > 1 else 1)
    for longest in range(1, 70):
        length = padded_length(longest, tp_size=tp_size, cp_size=cp_size)
        assert length % multiple == 0
        assert longest <= length < longest + multiple


@pytest.mark.parametrize("cp_size", [2, 3, 4])
def test_zig_zag_is_that_of_megatrons_rotary_embedding(cp_size):
    class Group:
        def __init__(self, rank):
            self.number = rank

        def rank(self):
            return self.number

        def size(self):
            return cp_size

    from megatron.core.models.common.embeddings.rope_utils import get_pos_emb_on_this_cp_rank

    positions = torch.arange(4 * cp_size, device=torch.cuda.current_device()).view(-1, 1)
    for rank in range(cp_size):
        theirs = get_pos_emb_on_this_cp_rank(positions, 0, Group(rank))
        assert flat(cp_positions(4 * cp_size, cp_size, rank)) == theirs.flatten().tolist()


def test_sequence_parallelism_splits_the_rows_of_a_context_parallel_rank_in_order():
    parts = [
        flat(token_positions(16, tp_size=2, tp_rank=t, cp_size=2, cp_rank=1)) for t in range(2)
    ]
    assert parts == [[4, 5, 6, 7], [8, 9, 10, 11]]
    parts = [
        flat(token_positions(24, tp_size=4, tp_rank=t, cp_size=2, cp_rank=0)) for t in range(4)
    ]
    assert parts == [[0, 1, 2], [3, 4, 5], [18, 19, 20], [21, 22, 23]]


def test_positions_that_cannot_be_split_are_refused():
    with pytest.raises(ValueError, match=r"10 positions .* into 4 chunks .* multiple of 4"):
        cp_positions(10, 2, 0)
    with pytest.raises(ValueError, match=r"6 positions .* over 4 sequence-parallel .* pad to 16"):
        token_positions(12, tp_size=4, cp_size=2)
    with pytest.raises(ValueError, match="tensor-parallel rank must be 0 to 1; got 2"):
        token_positions(4, tp_size=2, tp_rank=2)


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize(("tp_size", "cp_size"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (3, 3)])
def test_every_recorded_row_is_read_by_exactly_one_rank(tp_size, cp_size, padding):
    length = padded_length(40, tp_size=tp_size, cp_size=cp_size)
    for num_rows in range(length + 1):
        read = []
        for c, t in ranks(tp_size, cp_size):
            positions = token_positions(
                length, tp_size=tp_size, tp_rank=t, cp_size=cp_size, cp_rank=c
            )
            rows = flat(recorded_rows(positions, num_rows, length, padding=padding))
            first = 0 if padding == "right" else length - num_rows
            real = [p - first for p in flat(positions) if 0 <= p - first < num_rows]
            assert rows == real
            read += rows
        assert sorted(read) == list(range(num_rows))


def test_right_padding_leaves_the_real_rows_of_a_rank_first():
    positions = token_positions(16, cp_size=2, cp_rank=0)
    assert flat(positions) == [0, 1, 2, 3, 12, 13, 14, 15]
    assert recorded_rows(positions, 13, 16) == (range(4), range(12, 13))
    assert recorded_rows(positions, 3, 16) == (range(3),)
    assert recorded_rows(positions, 3, 16, padding="left") == (range(3),)
    with pytest.raises(ValueError, match="17 rows do not fit into 16"):
        recorded_rows(positions, 17, 16)


def packed_positions(lengths, **rank):
    """Gives the (sequence, position) of each row of a rank; None for padding."""
    return [
        (sequence, position) if position < length else None
        for sequence, (length, chunks) in enumerate(
            zip((*lengths, 0), packed_parts(lengths, **rank), strict=True)
        )
        for chunk in chunks
        for position in chunk
    ]


@pytest.mark.parametrize("cp_size", [1, 2, 3])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("lengths", [(5, 7, 3), (1,), (16, 1, 1), (2, 30)])
def test_every_position_of_packed_sequences_is_on_exactly_one_rank(lengths, tp_size, cp_size):
    parts = [
        packed_positions(lengths, tp_size=tp_size, tp_rank=t, cp_size=cp_size, cp_rank=c)
        for c, t in ranks(tp_size, cp_size)
    ]
    assert len({len(part) for part in parts}) == 1
    real = sorted(row for row in flat(parts) if row is not None)
    assert real == [(i, p) for i, length in enumerate(lengths) for p in range(length)]


def test_sequences_of_5_7_and_3_are_packed_into_16_rows_of_two_ranks():
    first, second = (packed_positions((5, 7, 3), tp_size=2, tp_rank=t) for t in range(2))
    assert first == [(0, p) for p in range(5)] + [(1, p) for p in range(3)]
    assert second == [(1, p) for p in range(3, 7)] + [(2, p) for p in range(3)] + [None]


def test_packed_sequences_are_split_in_zig_zag_one_by_one():
    assert packed_positions((5, 3), cp_size=2, cp_rank=0) == [
        *((0, 0), (0, 1), None, None),
        *((1, 0), None),
    ]
    assert packed_positions((5, 3), cp_size=2, cp_rank=1) == [
        *((0, 2), (0, 3), (0, 4), None),
        *((1, 1), (1, 2)),
    ]


@pytest.mark.parametrize("num_heads", SIZES)
@pytest.mark.parametrize("tp_size", SIZES)
def test_every_kv_head_is_on_as_many_ranks_as_it_has_to_be(num_heads, tp_size):
    if max(num_heads, tp_size) % min(num_heads, tp_size):
        with pytest.raises(ValueError, match="neither is a multiple of the other"):
            kv_heads(num_heads, tp_size, 0)
        return
    parts = [list(kv_heads(num_heads, tp_size, rank)) for rank in range(tp_size)]
    held = flat(parts)
    assert held == sorted(held)
    assert {held.count(head) for head in range(num_heads)} == {max(1, tp_size // num_heads)}
    assert {len(part) for part in parts} == {max(1, num_heads // tp_size)}


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("etp_size", SIZES)
def test_expert_columns_are_whole_blocks_or_refused(etp_size, block_size):
    for num_columns in range(block_size, 12 * block_size + 1, 8):
        if num_columns % (etp_size * block_size):
            with pytest.raises(ValueError, match="would split blocks"):
                expert_columns(num_columns, etp_size, 0, block_size=block_size)
            continue
        parts = [
            expert_columns(num_columns, etp_size, rank, block_size=block_size)
            for rank in range(etp_size)
        ]
        assert flat(parts) == list(range(num_columns))
        assert all(part.start % block_size == 0 for part in parts)


def test_a_shard_that_would_split_a_block_names_the_sizes_to_choose_from():
    message = r"expert_tensor_parallel_size=4 .* blocks of 32 .* 192 columns.*one of \[1, 2, 3, 6\]"
    with pytest.raises(ValueError, match=message):
        expert_columns(192, 4, 0, block_size=32)
    with pytest.raises(ValueError, match="no size is possible"):
        expert_columns(24, 2, 0, block_size=16)


@pytest.mark.parametrize("ep_size", [1, 2, 4, 8])
def test_every_expert_is_on_exactly_one_rank(ep_size):
    assert flat(local_experts(8, ep_size, rank) for rank in range(ep_size)) == list(range(8))


def test_experts_that_cannot_be_split_are_refused():
    with pytest.raises(ValueError, match="parallel_size=4 cannot split 6 experts"):
        local_experts(6, 4, 0)
