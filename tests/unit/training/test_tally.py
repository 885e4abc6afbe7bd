"""What training tells of its distance to the rollout, by hand: D_act and the codes beside it."""

import torch

from megatron_trace.formats import pack_bits, pack_codes
from megatron_trace.metrics import compare_codes
from megatron_trace.training.hint_rows import HintRows
from megatron_trace.training.report import ActivationDifference
from megatron_trace.training.rounding import Rounding
from megatron_trace.training.tally import activation_difference

# The paper's example in a block of 16 beside a 6, with scales of 1: 2.51 rounds to 3 in the
# rollout, 2.49 to 2 in training. A row without codes stands before it.
VALUES = torch.zeros(1, 16)
VALUES[0, :2] = torch.tensor([6.0, 2.49])
CODES = torch.zeros(2, 16, dtype=torch.uint8)
CODES[1, :2] = torch.tensor([7, 5])
SCALES = torch.full((2, 1), 0x38, dtype=torch.uint8)
HAS_HINT = torch.tensor([False, True])
FULL = HintRows(pack_codes(CODES), SCALES, 4, HAS_HINT)
BITS = HintRows(pack_bits(CODES), SCALES, 1, HAS_HINT)
KNOWN = torch.tensor([1])


def test_d_act_to_nearest_is_the_step_over_the_rollouts_norm():
    # (2 - 3)**2, over 6**2 + 3**2.
    found = activation_difference(VALUES, Rounding(1.0), FULL, KNOWN)
    assert found == ActivationDifference(trained=1.0, nearest=1.0, rollout=45.0)


def test_d_act_as_guided_is_nothing_where_the_bit_gives_the_rollouts_code():
    found = activation_difference(VALUES, Rounding(1.0, BITS), FULL, KNOWN)
    assert found == ActivationDifference(trained=0.0, nearest=1.0, rollout=45.0)


def test_codes_that_differ_are_counted_to_nearest_and_as_guided():
    used = BITS.used_at(KNOWN)
    found = compare_codes(VALUES, CODES[1:], SCALES[1:], 1.0, used)
    assert (found.values, found.rtn_different, found.rtn_one_step) == (16, 1, 1)
    assert (found.blocks, found.scale_bytes_different) == (1, 0)
    assert (found.guided_values, found.guided_different) == (16, 0)
