"""Rows of hints that are moved, and what counts as saturated."""

import pytest
import torch

from megatron_trace.formats.bad_values import note_bad_values
from megatron_trace.formats.number_format import FORMAT_SETS
from megatron_trace.training.hint_rows import HintRows
from megatron_trace.training.rounding import Rounding

NVFP4 = FORMAT_SETS["nvfp4"].kv_cache
MXFP4 = FORMAT_SETS["mxfp4"].kv_cache


def test_a_row_of_zeros_that_a_move_adds_has_no_hint():
    rows = HintRows(
        payload=torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.uint8),
        scale_bytes=torch.tensor([[7], [8], [9]], dtype=torch.uint8),
        num_bits=1,
        has_hint=torch.tensor([True, False, True]),
    )

    def reversed_and_padded(matrix):
        return torch.cat([matrix.flip(0), matrix.new_zeros(2, matrix.shape[1])])

    moved = rows.moved(reversed_and_padded)
    assert moved.has_hint.tolist() == [True, False, True, False, False]
    assert moved.payload.tolist() == [[5, 6], [3, 4], [1, 2], [0, 0], [0, 0]]
    assert moved.scale_bytes.tolist() == [[9], [8], [7], [0], [0]]


@pytest.mark.parametrize(("factor", "saturated"), [(1.0, 0), (1.0 + 2.0**-20, 1)])
def test_a_block_saturates_beyond_the_largest_product_of_code_and_scales(factor, saturated):
    values = torch.zeros(2, 32)
    # 6 * 448 * 1/4; the sign does not matter.
    values[1, 20] = -672.0 * factor
    count = torch.tensor([5])
    largest = Rounding(0.25).largest
    assert largest is not None
    note_bad_values(values, None, count, largest, NVFP4.block_size)
    assert count.tolist() == [5 + saturated]
