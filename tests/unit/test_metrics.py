"""Log-prob gap and code mismatch, each class by an input made for it."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_trace.formats import encode, pack_hint, residues
from megatron_trace.metrics import (
    CodeMismatch,
    UsedHints,
    compare_codes,
    compare_rows,
    logprob_gap,
)


def test_gap_counts_masked_tokens_only():
    rollout = torch.tensor([[-1.0, -2.0, -3.0]])
    train = torch.tensor([[-1.5, -9.0, -2.0]])
    gap = logprob_gap(rollout, train, torch.tensor([[True, False, True]]))
    assert gap.num_tokens == 2
    assert gap.mean == pytest.approx(0.75)
    assert gap.max == pytest.approx(1.0)
    assert gap.kl_naive == pytest.approx(-0.25)
    assert gap.ratio_mean == pytest.approx((math.exp(-0.5) + math.e) / 2)
    assert (gap.ratio_min, gap.ratio_max) == pytest.approx((math.exp(-0.5), math.e))


def test_kl_estimates_the_divergence_of_the_rollout_from_training():
    generator = torch.Generator().manual_seed(0)
    q, p = (torch.randn(8, generator=generator).log_softmax(-1) for _ in range(2))
    exact = (q.exp() * (q - p)).sum().item()
    tokens = torch.multinomial(q.exp(), 200_000, replacement=True, generator=generator)
    gap = logprob_gap(q[tokens], p[tokens], torch.ones(200_000, dtype=torch.bool))
    assert gap.kl == pytest.approx(exact, rel=0.03)
    assert gap.kl_naive == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize("num_tokens", [1, 2, 99, 1000])
def test_p99_is_the_interpolated_quantile(num_tokens):
    train = torch.randn(1, num_tokens, generator=torch.Generator().manual_seed(0)).double()
    mask = torch.ones(1, num_tokens, dtype=torch.bool)
    gap = logprob_gap(torch.zeros_like(train), train, mask)
    assert gap.p99 == pytest.approx(train.abs().quantile(0.99).item(), rel=1e-12)


def test_a_step_of_more_tokens_than_torchs_quantile_takes_has_a_p99():
    num_tokens = 2**24 + 1
    train = torch.arange(num_tokens, dtype=torch.float32)[None]
    gap = logprob_gap(torch.zeros_like(train), train, train >= 0)
    assert gap.p99 == pytest.approx(0.99 * 2**24)


def test_equal_logprobs_have_no_gap():
    x = torch.randn(3, 4)
    gap = logprob_gap(x, x, torch.ones(3, 4, dtype=torch.bool))
    assert (gap.mean, gap.p99, gap.max, gap.kl, gap.ratio_max) == (0, 0, 0, 0, 1)


def test_no_tokens_give_nan_and_not_zero():
    gap = logprob_gap(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool))
    assert gap.num_tokens == 0
    assert math.isnan(gap.mean)


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match="one shape"):
        logprob_gap(torch.zeros(2, 3), torch.zeros(2, 2), torch.ones(2, 3, dtype=torch.bool))


# Scale byte 0x38 is 1.0, so with global scale 1 a code's value is its ladder value.
ONE = 0x38


def _compare(values, codes, *, num_bits=1, scale_byte=ONE, guided=True):
    x = torch.zeros(1, 16)
    full = torch.zeros(1, 16, dtype=torch.uint8)
    x[0, : len(values)] = torch.tensor(values)
    full[0, : len(codes)] = torch.tensor(codes, dtype=torch.uint8)
    scale_bytes = torch.tensor([[scale_byte]], dtype=torch.uint8)
    used = _hints(full, scale_bytes, num_bits, torch.tensor([guided]))
    return compare_codes(x, full, scale_bytes, 1.0, used)


def _hints(codes, scale_bytes, num_bits, rows=None):
    payload = pack_hint(codes, num_bits)
    if rows is None:
        rows = torch.ones(len(codes), dtype=torch.bool)
    return UsedHints(rows, payload, scale_bytes, num_bits)


# The largest value is 6, so that training's own scale is 1 too.
LARGEST = ([6.0], [7])


@pytest.mark.parametrize("num_bits", [1, 2, 4])
def test_codes_within_the_bracket_are_reached(num_bits):
    # 2.49 rounds to 2 (code 4) and 2.51 to 3 (code 5); the rollout had it the other way round.
    counts = _compare([6.0, 2.49, -2.51], [7, 5, 8 | 4], num_bits=num_bits)
    assert (counts.rtn_different, counts.rtn_one_step) == (2, 2)
    assert counts.guided_different == 0


@pytest.mark.parametrize("num_bits", [1, 2, 4])
def test_a_magnitude_outside_of_the_bracket_is_named_so(num_bits):
    # 1.2 lies between codes 2 and 3; the rollout had 2 (code 4).
    counts = _compare([6.0, 1.2], [7, 4], num_bits=num_bits)
    assert counts.guided_different == counts.out_of_bracket == 1
    assert (counts.sign_flip, counts.unexplained) == (0, 0)
    assert (counts.rtn_different, counts.rtn_one_step) == (1, 0)


def test_another_sign_is_named_so():
    # .1 lies between codes 0 and 1; the rollout had -.5.
    counts = _compare([6.0, 0.1], [7, 8 | 1])
    assert counts.guided_different == counts.sign_flip == 1
    assert (counts.out_of_bracket, counts.unexplained) == (0, 0)


def test_minus_zero_equals_zero():
    counts = _compare([6.0, 0.1, -0.1], [7, 8, 0])
    assert (counts.rtn_different, counts.guided_different) == (0, 0)


def test_a_saturated_value_may_be_either_of_the_two_largest():
    counts = _compare([60.0, 60.0], [7, 6])
    assert counts.guided_different == 0
    outside = _compare([60.0, 60.0], [7, 5])
    assert outside.guided_different == outside.out_of_bracket == 1


def test_other_scale_bytes_are_counted_per_block():
    counts = _compare(*LARGEST, scale_byte=ONE + 1)
    assert (counts.blocks, counts.scale_bytes_different) == (1, 1)


def test_rows_that_were_not_guided_count_for_rounding_to_nearest_only():
    counts = _compare([6.0, 2.49], [7, 5], guided=False)
    assert (counts.values, counts.rtn_different) == (16, 1)
    assert (counts.guided_values, counts.guided_different) == (0, 0)


@pytest.mark.parametrize("noise", [0.0, 0.003, 0.03, 0.5])
@pytest.mark.parametrize("num_bits", [1, 2, 4])
def test_every_mismatch_under_noise_has_a_class(noise, num_bits):
    generator = torch.Generator().manual_seed(0)
    rolled = torch.randn(256, 128, generator=generator)
    trained = rolled * (1 + noise * torch.randn(256, 128, generator=generator))
    trained += 0.1 * noise * torch.randn(256, 128, generator=generator)
    codes, scale_bytes = encode(rolled, 2.0**-8)
    used = _hints(codes, scale_bytes, num_bits)
    counts = compare_codes(trained, codes, scale_bytes, 2.0**-8, used)
    assert counts.unexplained == 0
    assert counts.guided_different == counts.out_of_bracket + counts.sign_flip
    assert (counts.guided_different > 0) == (noise == 0.5)
    assert counts.guided_different <= counts.rtn_different


@pytest.mark.parametrize("noise", [0.03, 0.3])
def test_block_scales_that_residues_cannot_restore_are_named_so(noise):
    generator = torch.Generator().manual_seed(0)
    rolled = torch.randn(256, 128, generator=generator)
    trained = rolled + noise * torch.randn(256, 128, generator=generator)
    codes, scale_bytes = encode(rolled, 2.0**-8)
    hint, of_scales = residues.to_residues(pack_hint(codes, 1), scale_bytes, num_bits=1)
    restored = residues.restored(trained, hint, of_scales, 2.0**-8, num_bits=1)
    used = UsedHints(torch.ones(256, dtype=torch.bool), hint, restored, 1, restored=True)
    counts = compare_codes(trained, codes, scale_bytes, 2.0**-8, used)
    assert counts.misread_scale == 16 * int((restored != scale_bytes).sum())
    assert (counts.misread_scale > 0) == (noise == 0.3)
    assert counts.unexplained == 0


@pytest.mark.parametrize("num_bits", [1, 2, 4])
def test_hints_of_other_rows_are_unexplained(num_bits):
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    codes, scale_bytes = encode(x, 2.0**-8)
    used = _hints(codes.roll(1, 0), scale_bytes.roll(1, 0), num_bits)
    assert compare_codes(x, codes, scale_bytes, 2.0**-8, used).unexplained > 0.1 * codes.numel()


def test_without_hints_only_rounding_to_nearest_is_compared():
    x = torch.randn(4, 32)
    counts = compare_codes(x, *encode(x, 2.0**-8), 2.0**-8, None)
    assert (counts.values, counts.rtn_different, counts.guided_values) == (128, 0, 0)


def test_counts_add_up_and_shares_of_nothing_are_nan():
    a = CodeMismatch(values=10, rtn_different=2, rtn_one_step=1)
    total = a + CodeMismatch(values=30, rtn_different=2, rtn_one_step=2)
    assert (total.rtn_share, total.one_step_share) == (0.1, 0.75)
    assert math.isnan(CodeMismatch().rtn_share)
    assert math.isnan(CodeMismatch().guided_share)


def test_counts_of_a_row_are_those_of_the_row_alone():
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    codes, scale_bytes = encode(x + 0.2 * x.flip(0), 0.01)
    rows = torch.tensor([True, False, True, True, False, True])
    used = UsedHints(rows, pack_hint(codes, 1), scale_bytes, 1)
    by_row = compare_rows(x, codes, scale_bytes, 0.01, used)
    for row in range(6):
        one = slice(row, row + 1)
        hint = UsedHints(rows[one], used.payload[one], scale_bytes[one], 1)
        alone = compare_codes(x[one], codes[one], scale_bytes[one], 0.01, hint)
        assert {name: int(counts[row]) for name, counts in by_row.items()} == vars(alone)
