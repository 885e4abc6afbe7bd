"""Packed bytes: which bit is which column, round trips, views, empty tensors."""

import pytest
import torch

from megatron_trace.formats import pack_bits, pack_codes, unpack_bits, unpack_codes
from megatron_trace.testing.assertions import assert_same_bytes


def test_even_column_is_the_low_nibble() -> None:
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert pack_codes(codes).tolist() == [[0x21, 0x0F]]


def test_first_column_is_bit_0_of_the_mantissa_bits() -> None:
    codes = torch.tensor([1, 0, 14, 8, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 15], dtype=torch.uint8)
    assert pack_bits(codes).tolist() == [0b00010001, 0b10000000]


def test_every_byte_survives_unpacking_and_packing() -> None:
    every_byte = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    assert_same_bytes(pack_bits(unpack_bits(every_byte)), every_byte, "bits")
    assert_same_bytes(pack_codes(unpack_codes(every_byte)), every_byte, "codes")


def test_every_column_keeps_its_place() -> None:
    for column in range(64):
        one_hot = torch.zeros(64, dtype=torch.uint8)
        one_hot[column] = 1
        assert_same_bytes(unpack_bits(pack_bits(one_hot)), one_hot, f"bit of column {column}")
        assert_same_bytes(unpack_codes(pack_codes(one_hot)), one_hot, f"code of column {column}")


@pytest.mark.parametrize("shape", [(16,), (0, 32), (4, 0), (3, 5, 48), (1, 1, 16)])
def test_any_leading_shape_round_trips(shape: tuple[int, ...]) -> None:
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    assert_same_bytes(unpack_codes(pack_codes(codes)), codes)
    assert_same_bytes(unpack_bits(pack_bits(codes)), codes & 1)


def test_views_pack_and_unpack_like_their_copies() -> None:
    view = torch.randint(0, 16, (32, 6), dtype=torch.uint8).T
    assert_same_bytes(pack_bits(view), pack_bits(view.contiguous()))
    assert_same_bytes(pack_codes(view), pack_codes(view.contiguous()))
    assert_same_bytes(unpack_bits(view), unpack_bits(view.contiguous()))
    assert_same_bytes(unpack_codes(view), unpack_codes(view.contiguous()))


def test_columns_that_do_not_fill_a_byte_are_refused() -> None:
    with pytest.raises(ValueError, match=r"multiple of 8.*\(2, 12\)"):
        pack_bits(torch.zeros(2, 12, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"multiple of 2.*\(3,\)"):
        pack_codes(torch.zeros(3, dtype=torch.uint8))
