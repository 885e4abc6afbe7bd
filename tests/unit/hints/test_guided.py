"""Guard and rounding in one call: the rows of a hint in place, and what is counted."""

from typing import Any

import pytest
import torch

from megatron_trace.formats import NUMBER_FORMATS, NumberFormat, ops
from megatron_trace.hints.guard import THRESHOLDS, guided_rows
from megatron_trace.hints.guided import guided_codes, guided_values
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.token_rows import rows_of, with_noise

TOKENS, SLOTS, LENGTH = 96, 4, 128


class Case:
    """Rows of expert slots in another order: of some tokens, and a fifth of another row."""

    def __init__(self, fmt: NumberFormat) -> None:
        x = rows_of(LENGTH)[: TOKENS * SLOTS]
        self.scale = fmt.global_scale_from_amax(x.abs().max())
        self.bits = 1
        _, self.hint, self.scale_bytes = ops.rtn_record(
            x, self.scale, num_bits=1, number_format=fmt
        )
        generator = torch.Generator().manual_seed(3)
        self.order = torch.randperm(len(x), generator=generator).int()
        self.x = with_noise(x, 0.01)[self.order]
        wrong = torch.arange(len(x)) % 5 == 0
        self.x[wrong] = self.x.roll(1, 0)[wrong]
        self.has_token = torch.arange(TOKENS) % 3 != 1
        self.how: dict[str, Any] = {
            "num_bits": 1,
            "thresholds": THRESHOLDS[fmt.name],
            "number_format": fmt,
        }
        # What is given where the rows are gathered first.
        rows = self.order.long()
        self.gathered = self.hint[rows], self.scale_bytes[rows], self.has_token[rows // SLOTS]

    @property
    def in_place(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.hint, self.scale_bytes, self.has_token


@pytest.fixture(params=NUMBER_FORMATS.values(), ids=list(NUMBER_FORMATS))
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def test_slots_in_place_are_judged_and_rounded_as_gathered_ones(case: Case) -> None:
    y, accepted = guided_values(case.x, *case.in_place, case.scale, order=case.order, **case.how)
    expected = guided_rows(case.x, *case.gathered, case.scale, **case.how)
    assert 0.4 < expected.float().mean() < 0.6
    assert_same_bytes(accepted, expected)
    fmt = case.how["number_format"]
    rounded = ops.guided(
        case.x,
        *case.gathered[:2],
        case.scale,
        num_bits=1,
        has_hint=expected,
        number_format=fmt,
    )
    assert_same_bytes(y, rounded)


def test_the_codes_are_those_of_the_values(case: Case) -> None:
    fmt = case.how["number_format"]
    y, accepted = guided_values(case.x, *case.gathered, case.scale, **case.how)
    codes, own_bytes, same = guided_codes(
        case.x, *case.in_place, case.scale, order=case.order, **case.how
    )
    assert_same_bytes(same, accepted)
    assert_same_bytes(ops.decode(codes, own_bytes, case.scale, number_format=fmt), y)


def test_rejected_rows_are_added_to_those_of_other_calls(case: Case) -> None:
    rejected = torch.tensor([7])
    _, accepted = guided_values(
        case.x, *case.in_place, case.scale, order=case.order, rejected=rejected, **case.how
    )
    found = int((case.gathered[2] & ~accepted).sum())
    assert found > 0
    assert rejected.tolist() == [7 + found]
    guided_codes(case.x, *case.gathered, case.scale, rejected=rejected, **case.how)
    assert rejected.tolist() == [7 + 2 * found]


def test_the_gradient_of_guided_values_is_the_identity(case: Case) -> None:
    x = case.x.requires_grad_()
    y, _ = guided_values(x, *case.in_place, case.scale, order=case.order, **case.how)
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    y.backward(grad)
    assert x.grad is not None
    assert_same_bytes(x.grad, grad)


def test_no_rows_have_no_values(case: Case) -> None:
    how = {"order": case.order[:0], "rejected": torch.tensor([3]), **case.how}
    y, accepted = guided_values(case.x[:0], *case.in_place, case.scale, **how)
    assert y.shape == (0, LENGTH)
    assert accepted.shape == (0,)
    assert how["rejected"].tolist() == [3]


def test_rows_that_are_no_multiple_of_the_flags_are_refused(case: Case) -> None:
    with pytest.raises(ValueError, match=r"a multiple of those of has_hint; got 384, 384 and 95"):
        guided_values(
            case.x,
            case.hint,
            case.scale_bytes,
            case.has_token[:95],
            case.scale,
            order=case.order,
            **case.how,
        )


@pytest.mark.parametrize("row", [-1, TOKENS * SLOTS, 2**31 - 1])
def test_an_order_that_names_a_row_that_is_not_there_is_refused(case: Case, row: int) -> None:
    case.order[7] = row
    for guided in (guided_values, guided_codes):
        with pytest.raises(ValueError, match=rf"order must name rows 0 to 383 .*; got .*{row}"):
            guided(case.x, *case.in_place, case.scale, order=case.order, **case.how)
