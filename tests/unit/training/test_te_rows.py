"""Which hint rows belong to which expert's rows, through padding and splits, without TE."""

from __future__ import annotations

import threading

import pytest
import torch

from megatron_trace.formats import decode, reference, unpack_codes
from megatron_trace.testing.moe_reference import quantised
from megatron_trace.testing.roundings import recorded_rounding
from megatron_trace.training.hint_rows import HintRows
from megatron_trace.training.rounding import Rounding
from megatron_trace.training.te_rows import (
    ExpertCall,
    LinearCall,
    current_expert_call,
    current_linear_call,
    expert_call,
    linear_call,
    moved,
    pad_rows,
    padded_positions,
    rows_of_part,
)
from megatron_trace.training.weights import WeightRule, quantise_weight

SPLITS = (40, 0, 17, 71)
PADDED = (128, 0, 128, 128)
K = 32
SCALE = 2.0**-9


def _values(rows: int = sum(SPLITS), seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, K, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _rounding(values: torch.Tensor, *, num_bits: int = 1, has_hint=None) -> Rounding:
    noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(9))
    return recorded_rounding(
        values + 0.01 * noise, SCALE, num_bits=num_bits, has_hint=has_hint, implementation="torch"
    )


def _numbered(rows: int) -> torch.Tensor:
    """Gives uint8 [rows, 4] that hold each row's number."""
    return torch.arange(rows, dtype=torch.int32).unsqueeze(-1).view(torch.uint8)


def _numbers(rows: torch.Tensor) -> list[int]:
    return rows.contiguous().view(torch.int32).flatten().tolist()


def test_padding_puts_every_row_after_its_experts_start() -> None:
    expected = [*range(40), *range(128, 128 + 17), *range(256, 256 + 71)]
    assert padded_positions(SPLITS, PADDED).tolist() == expected


@pytest.mark.parametrize(
    ("splits", "padded"),
    [
        (SPLITS, PADDED),
        ((0, 0, 5), (0, 0, 16)),
        ((0, 0, 0), (0, 0, 0)),
        ((0, 3), (16, 16)),
        ((16, 32), (16, 32)),
    ],
)
def test_padded_rows_hold_each_row_once_and_zeros(splits, padded) -> None:
    rows = _numbered(sum(splits)) + torch.tensor([1, 0, 0, 0], dtype=torch.uint8)
    result = pad_rows(rows, splits, padded)
    parts = zip(torch.split(rows, splits), torch.split(result, padded), strict=True)
    for given, got in parts:
        assert torch.equal(got[: len(given)], given)
        assert not got[len(given) :].any()


@pytest.mark.parametrize(
    ("splits", "padded", "message"),
    [((40, 10), (32, 16), "do not fit"), ((4,), (16, 16), "do not fit"), ((7, 1), (8, 8), "sum")],
)
def test_padding_that_would_lose_rows_is_refused(splits, padded, message) -> None:
    with pytest.raises(ValueError, match=message):
        pad_rows(_numbered(50 if splits == (40, 10) else 4), splits, padded)


@pytest.mark.parametrize("first_row", [0, 3])
@pytest.mark.parametrize("splits", [SPLITS, (0, 5, 0), (0, 0)])
def test_each_experts_part_gets_its_own_rows(splits, first_row: int) -> None:
    total = sum(splits)
    # The input may itself be rows of a larger buffer.
    values = _values(total + 8)[first_row : first_row + total]
    call = LinearCall("fc1", values, Rounding(SCALE))
    offset = 0
    for part in torch.split(values, splits):
        assert call.rows_of(part) == slice(offset, offset + len(part))
        offset += len(part)


@pytest.mark.parametrize(
    ("offset", "part", "total"),
    [
        (8, (1, 16), (4, 16)),
        (0, (2, 8), (4, 16)),
        (48, (2, 16), (4, 16)),
        (-16, (1, 16), (4, 16)),
    ],
)
def test_a_part_that_is_no_row_range_is_refused(offset, part, total) -> None:
    with pytest.raises(ValueError, match="not a range of rows"):
        rows_of_part(offset, part, total=total)


@pytest.mark.parametrize("change", [torch.clone, torch.Tensor.float])
def test_a_copied_or_cast_part_is_refused(change) -> None:
    values = _values()
    call = LinearCall("fc1", values, Rounding(SCALE))
    with pytest.raises(RuntimeError, match="must not cast or copy"):
        call.quantised(change(values[:3]))


def test_a_strided_input_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        LinearCall("fc1", _values()[:, ::2], Rounding(SCALE))


@pytest.mark.parametrize("num_bits", [1, 2, 4])
def test_padded_parts_are_rounded_by_their_own_hints(num_bits: int) -> None:
    values = _values()
    rounding = _rounding(values, num_bits=num_bits)
    padded = pad_rows(values, SPLITS, PADDED)
    call = LinearCall("fc1", padded, moved(rounding, lambda rows: pad_rows(rows, SPLITS, PADDED)))
    expected = pad_rows(quantised(rounding, values), SPLITS, PADDED)
    got = torch.cat([call.quantised(part) for part in torch.split(padded, PADDED)])
    assert torch.equal(got, expected)
    assert not torch.equal(expected, pad_rows(quantised(Rounding(SCALE), values), SPLITS, PADDED))


def test_codes_decode_to_the_quantised_values() -> None:
    values = _values()
    has_hint = torch.arange(len(values)) % 3 != 0
    rounding = _rounding(values, has_hint=has_hint)
    packed = rounding.packed(values)
    decoded = decode(unpack_codes(packed.packed_codes), packed.scale_bytes, SCALE, torch.bfloat16)
    assert torch.equal(decoded, rounding.quantised(values))
    assert torch.equal(packed.values(torch.bfloat16), decoded)


def test_rows_without_hint_are_rounded_to_nearest() -> None:
    values = _values()
    has_hint = torch.arange(len(values)) % 2 == 0
    result = _rounding(values, has_hint=has_hint).quantised(values)
    nearest = reference.rtn(values, SCALE, dtype=torch.bfloat16)
    assert torch.equal(result[~has_hint], nearest[~has_hint])
    assert not torch.equal(result[has_hint], nearest[has_hint])


def test_moved_hints_keep_their_rows() -> None:
    values = _values()
    has_hint = torch.arange(len(values)) % 5 != 0
    rounding = _rounding(values, has_hint=has_hint)
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(1))
    result = moved(rounding, lambda rows: rows[order])
    assert isinstance(result.hint, HintRows)
    assert torch.equal(result.quantised(values[order]), rounding.quantised(values)[order])
    assert torch.equal(result.hint.has_hint, has_hint[order])


def test_an_operand_without_hints_moves_nothing() -> None:
    def fail(rows: torch.Tensor) -> torch.Tensor:
        raise AssertionError("rows were moved")

    assert moved(Rounding(SCALE), fail) == Rounding(SCALE)


def test_asking_again_gives_the_same_bits() -> None:
    values = _values()
    call = LinearCall("fc1", values, _rounding(values))
    assert not call.was_quantised
    first = call.quantised(values[:40]).clone()
    assert torch.equal(call.quantised(values[:40]), first)
    assert call.was_quantised


def test_scopes_end_also_by_an_exception_and_nest() -> None:
    outer = LinearCall("outer", _values(), Rounding(SCALE))
    inner = LinearCall("inner", _values(), Rounding(SCALE))

    def fail_inside() -> None:
        with linear_call(inner):
            assert current_linear_call() is inner
            raise KeyError

    with linear_call(outer):
        with pytest.raises(KeyError):
            fail_inside()
        assert current_linear_call() is outer
    with pytest.raises(LookupError, match="outside of a TRACE grouped linear"):
        current_linear_call()


def test_experts_without_a_call_are_refused() -> None:
    call = ExpertCall((3, 0), Rounding(SCALE), None)
    with expert_call(call):
        assert current_expert_call() is call
    with pytest.raises(LookupError, match="must be called by its TraceTEGroupedMLP"):
        current_expert_call()


def test_a_weight_is_known_by_its_storage_and_another_is_refused() -> None:
    weights = [_values(16, seed) for seed in (1, 2)]
    rule = WeightRule(torch.bfloat16, power_of_two_scales=False)
    forms = [quantise_weight(weight, rule) for weight in weights]
    call = LinearCall("fc1", _values(), None, zip(weights, forms, strict=True))
    assert [call.weight(weight) for weight in weights] == forms
    assert call.weight(weights[1].detach()) is forms[1]
    with pytest.raises(RuntimeError, match="none of the linear's"):
        call.weight(weights[0].clone())


def test_an_input_that_is_rounded_already_is_not_rounded_again() -> None:
    values = _values()
    call = LinearCall("fc1", values, None)
    with pytest.raises(RuntimeError, match="rounded already"):
        call.quantised(values[:3])


def test_a_call_is_seen_by_its_own_thread_only() -> None:
    seen: list[str] = []

    def look() -> None:
        try:
            current_linear_call()
        except LookupError as error:
            seen.append(str(error))

    with linear_call(LinearCall("fc1", _values(), Rounding(SCALE))):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert len(seen) == 1
