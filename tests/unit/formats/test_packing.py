"""Packed bytes: which bit is which column, round trips, views, empty tensors."""

from collections.abc import Callable

import pytest
import torch

from megatron_trace.formats import (
    narrowed,
    pack_bits,
    pack_codes,
    pack_hint,
    pack_pairs,
    pack_residues,
    residue_bytes,
    unpack_bits,
    unpack_codes,
    unpack_hint,
    unpack_pairs,
    unpack_residues,
)
from megatron_trace.testing.assertions import assert_same_bytes


def test_even_column_is_the_low_nibble() -> None:
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert pack_codes(codes).tolist() == [[0x21, 0x0F]]


def test_first_column_is_bit_0_of_the_mantissa_bits() -> None:
    codes = torch.tensor([1, 0, 14, 8, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 15], dtype=torch.uint8)
    assert pack_bits(codes).tolist() == [0b00010001, 0b10000000]


def test_first_column_is_bits_0_and_1_of_the_pairs() -> None:
    codes = torch.tensor([1, 2, 3, 12, 7, 8, 9, 14], dtype=torch.uint8)
    assert pack_pairs(codes).tolist() == [0b00111001, 0b10010011]


def test_residues_are_a_string_of_three_bits_each() -> None:
    residues = torch.tensor([1, 2, 3, 4, 5, 6, 7, 0, 5], dtype=torch.uint8)
    string = sum(int(residue) << (3 * block) for block, residue in enumerate(residues))
    assert pack_residues(residues).tolist() == list(string.to_bytes(4, "little"))


@pytest.mark.parametrize("num_bits", [1, 2, 4])
def test_every_byte_survives_unpacking_and_packing(num_bits: int) -> None:
    every_byte = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    assert_same_bytes(pack_hint(unpack_hint(every_byte, num_bits), num_bits), every_byte)


def test_every_column_keeps_its_place() -> None:
    for column in range(64):
        one_hot = torch.zeros(64, dtype=torch.uint8)
        one_hot[column] = 1
        for num_bits in (1, 2, 4):
            got = unpack_hint(pack_hint(one_hot, num_bits), num_bits)
            assert_same_bytes(got, one_hot, f"{num_bits} bits of column {column}")
        got = unpack_residues(pack_residues(one_hot), 64)
        assert_same_bytes(got, one_hot, f"residue of block {column}")


@pytest.mark.parametrize("shape", [(16,), (0, 32), (4, 0), (3, 5, 48), (1, 1, 16)])
def test_any_leading_shape_round_trips(shape: tuple[int, ...]) -> None:
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    for num_bits in (1, 2, 4):
        kept = codes & ((1 << num_bits) - 1)
        assert_same_bytes(unpack_hint(pack_hint(codes, num_bits), num_bits), kept)
        assert_same_bytes(narrowed(pack_codes(codes), num_bits), pack_hint(codes, num_bits))


@pytest.mark.parametrize("num_bits", [1, 2, 4])
def test_many_values_are_packed_and_unpacked_like_their_rows(num_bits: int) -> None:
    codes = torch.randint(0, 16, (70, 8208), dtype=torch.uint8)
    hint = pack_hint(codes, num_bits)
    for row in (0, 31, 69):
        assert_same_bytes(hint[row], pack_hint(codes[row], num_bits), f"row {row}")
    assert_same_bytes(unpack_hint(hint, num_bits), codes & ((1 << num_bits) - 1))
    assert_same_bytes(narrowed(pack_codes(codes), num_bits), hint)


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 4, 7, 8, 9, 16, 21, 128])
def test_residues_of_any_number_of_blocks_round_trip(num_blocks: int) -> None:
    residues = torch.randint(0, 8, (3, 2, num_blocks), dtype=torch.uint8)
    packed = pack_residues(residues)
    assert packed.shape == (3, 2, residue_bytes(num_blocks))
    assert packed.shape[-1] == -(-3 * num_blocks // 8)
    assert_same_bytes(unpack_residues(packed, num_blocks), residues)


def test_residues_of_no_rows_and_of_no_blocks() -> None:
    assert pack_residues(torch.zeros(0, 8, dtype=torch.uint8)).shape == (0, 3)
    assert pack_residues(torch.zeros(2, 0, dtype=torch.uint8)).shape == (2, 0)
    assert unpack_residues(torch.zeros(0, 3, dtype=torch.uint8), 8).shape == (0, 8)


@pytest.mark.parametrize(
    "function",
    [
        pack_bits,
        pack_pairs,
        pack_codes,
        pack_residues,
        unpack_bits,
        unpack_pairs,
        unpack_codes,
        lambda view: unpack_residues(view, 64),
        lambda view: narrowed(view, 1),
        lambda view: narrowed(view, 2),
    ],
)
def test_views_are_packed_and_unpacked_like_their_copies(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    buffer = torch.randint(0, 8, (24 * 16 + 1,), dtype=torch.uint8)
    transposed, unaligned = buffer[:-1].view(24, 16).T, buffer[1:].view(16, 24)
    for view in (transposed, unaligned):
        assert_same_bytes(function(view), function(view.contiguous().clone()))


def test_columns_that_do_not_fill_a_byte_are_refused() -> None:
    with pytest.raises(ValueError, match=r"multiple of 8.*\(2, 12\)"):
        pack_bits(torch.zeros(2, 12, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"multiple of 4.*\(2, 6\)"):
        pack_pairs(torch.zeros(2, 6, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"residues of 8 blocks take 3 bytes; got \(2, 4\)"):
        unpack_residues(torch.zeros(2, 4, dtype=torch.uint8), 8)
    with pytest.raises(ValueError, match=r"multiple of 2.*\(3,\)"):
        pack_codes(torch.zeros(3, dtype=torch.uint8))
