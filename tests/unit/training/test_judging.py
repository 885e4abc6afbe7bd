"""Hints that are judged while rows are rounded do what hints do that were judged before."""

from __future__ import annotations

import pytest
import torch

from megatron_trace.config import HINT_SITES
from megatron_trace.formats import NUMBER_FORMATS, ops
from megatron_trace.formats.residues import to_residues
from megatron_trace.hints.guard import THRESHOLDS
from megatron_trace.hints.types import ScaleForm, Site
from megatron_trace.testing.assertions import assert_same_bytes, tolerance
from megatron_trace.testing.token_rows import rows_of, with_noise
from megatron_trace.training import rounding as rounding_module
from megatron_trace.training.hint_rows import HintRows
from megatron_trace.training.micro_batch import make_micro_batch
from megatron_trace.training.model import token_logprobs
from megatron_trace.training.rounding import Guard, Rounding
from megatron_trace.training.te_rows import LinearCall, moved, pad_rows

TOKENS, SLOTS, LENGTH = 48, 4, 128


class Case:
    """Rows of slots by hints that are judged as they are rounded, and by the same rows gathered.

    A fifth of the values are another row's, and a third of the tokens have no hint.
    """

    def __init__(self, name: str, form: ScaleForm, *, ordered: bool) -> None:
        fmt = NUMBER_FORMATS[name]
        x = rows_of(LENGTH)[: TOKENS * SLOTS]
        scale = fmt.global_scale_from_amax(x.abs().max())
        _, payload, scale_bytes = ops.rtn_record(x, scale, num_bits=1, number_format=fmt)
        if form == "residue":
            payload, scale_bytes = to_residues(payload, scale_bytes, num_bits=1)
        order = torch.arange(len(x))
        if ordered:
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(3))
        has_token = torch.arange(TOKENS) % 3 != 1
        rows = payload[order], scale_bytes[order], 1, has_token[order // SLOTS]
        self.gathered = HintRows(*rows, form, fmt)
        self.hint = self.gathered
        if ordered:
            self.hint = HintRows(payload, scale_bytes, 1, has_token, form, fmt, order.int())
        self.values = with_noise(x, 0.01)[order]
        wrong = torch.arange(len(x)) % 5 == 0
        self.values[wrong] = self.values.roll(1, 0)[wrong]
        self.thresholds = THRESHOLDS[name]
        self.nearest = Rounding(None if scale is None else float(scale), number_format=fmt)

    def guarded(self, hint: HintRows) -> tuple[Rounding, torch.Tensor]:
        """Gives the rounding by hints that are judged, and what counts from 7 those rejected."""
        rejected = torch.tensor([7])
        return self.nearest.guided_by(hint, Guard(self.thresholds, rejected)), rejected


@pytest.mark.parametrize(
    ("name", "form"), [*((name, "raw") for name in NUMBER_FORMATS), ("nvfp4", "residue")]
)
@pytest.mark.parametrize("ordered", [False, True])
def test_values_codes_and_counts_are_those_of_hints_judged_before(name, form, ordered):
    case = Case(name, form, ordered=ordered)
    values, dtype = case.values, case.values.dtype
    first, rejected = case.guarded(case.gathered)
    judged = first.judged(values)
    assert judged.guard is None
    assert judged.hint is not None
    found = int((case.gathered.has_hint & ~judged.hint.has_hint).sum())
    assert 0 < found < TOKENS * SLOTS / 3
    assert rejected.tolist() == [7 + found]
    expected = judged.quantised(values)
    for what, rounded in (
        ("values", lambda rounding: rounding.quantised(values)),
        ("codes", lambda rounding: rounding.packed(values).values(dtype)),
        ("values once judged", lambda rounding: rounding.judged(values).quantised(values)),
    ):
        rounding, rejected = case.guarded(case.hint)
        assert_same_bytes(rounded(rounding), expected, what)
        assert rejected.tolist() == [7 + found], what


@pytest.mark.parametrize("form", ["raw", "residue"])
def test_without_a_guard_every_hint_is_used_also_where_rows_lie_in_another_order(form):
    case = Case("nvfp4", form, ordered=True)
    values, dtype = case.values, case.values.dtype
    expected = case.nearest.guided_by(case.gathered, None).quantised(values)
    rounding = case.nearest.guided_by(case.hint, None)
    assert_same_bytes(rounding.quantised(values), expected, "values")
    assert_same_bytes(rounding.packed(values).values(dtype), expected, "codes")
    assert_same_bytes(rounding.judged(values).quantised(values), expected, "values once judged")


def test_rows_in_another_order_move_only_once_they_are_in_order():
    case = Case("nvfp4", "raw", ordered=True)
    in_order = case.hint.in_order()
    assert in_order.order is None
    for name in ("payload", "scale_bytes", "has_hint"):
        assert_same_bytes(getattr(in_order, name), getattr(case.gathered, name), name)
    with pytest.raises(AssertionError, match="order of the operand"):
        case.hint.moved(lambda rows: rows)


@pytest.mark.parametrize("form", ["raw", "residue"])
def test_rows_that_are_padded_before_they_are_judged_count_and_round_as_before(form):
    """As Transformer Engine's recipe has them: rows of padding have no hint to reject."""
    case = Case("nvfp4", form, ordered=True)
    splits, padded = (100, 0, len(case.values) - 100), (128, 32, 128)
    rounding, rejected = case.guarded(case.hint)
    expected, found = rounding.quantised(case.values), rejected.tolist()
    rounding, rejected = case.guarded(case.hint)
    call = LinearCall(
        "fc2",
        pad_rows(case.values, splits, padded),
        moved(rounding, lambda rows: pad_rows(rows, splits, padded)),
    )
    got = torch.cat([call.quantised(part) for part in call.values.split(padded)])
    assert_same_bytes(got, pad_rows(expected, splits, padded), "padded rows")
    assert rejected.tolist() == found != [7]


def _trained(build, rolled, *, diagnostics: bool, replay_routing: bool = True, **options):
    """Gives log-probs, counts and gradients of a micro-batch."""
    model, sites = build("trace", hint_sites=HINT_SITES, settings=rolled.settings, **options)
    sites.diagnostics = diagnostics
    micro_batch = make_micro_batch(rolled.samples, rolled.store, sites)
    with sites.micro_batch(micro_batch, replay_routing=replay_routing):
        logprobs = token_logprobs(model, sites, micro_batch)
        logprobs[micro_batch.loss_mask].sum().backward()
    return logprobs, sites.report().sites, [p.grad for p in model.parameters()]


@pytest.mark.parametrize(
    ("recorded", "options"),
    [
        ({}, {}),
        ({}, {"save_packed_activations": True}),
        ({}, {"guard": False}),
        ({}, {"replay_routing": False}),
        ({}, {"guard_min_parity_agreement": 0.97}),
        ({"scale_form": "residue"}, {"hint_scales": "residue"}),
        (
            {"scale_form": "residue", "num_bits": 2},
            {"hint_scales": "residue", "hint_bits": 2, "save_packed_activations": True},
        ),
    ],
)
def test_training_is_the_same_with_diagnostics_which_judge_before_rounding(
    build, rollout, recorded, options
):
    rolled = rollout(sites=HINT_SITES, codes=True, **recorded)
    together, apart = (
        _trained(build, rolled, diagnostics=diagnostics, **options) for diagnostics in (False, True)
    )
    # A GPU adds up the rows of a token, and of an embedding, in no fixed order.
    most = tolerance(cpu=0, gpu=1e-4)
    torch.testing.assert_close(together[0], apart[0], rtol=most, atol=most)
    assert together[1] == apart[1]
    assert all(counts.guided > 0 for counts in together[1].values())
    if "guard_min_parity_agreement" in options:
        assert all(counts.rejected > 0 for counts in together[1].values())
    for ours, theirs in zip(together[2], apart[2], strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=most, atol=most)


def test_a_place_asks_for_one_call_that_judges_and_rounds(build, rollout, monkeypatch):
    """fc1, fc2, K and V of two layers; nothing is judged, gathered or rounded beside."""
    rolled, called = rollout(sites=HINT_SITES), []
    guided_values = rounding_module.guided_values

    def counted(*args, **kwargs):
        called.append(kwargs["order"] is not None)
        return guided_values(*args, **kwargs)

    def refused(*_, **__):
        raise AssertionError("judged apart from rounding, or gathered first")

    monkeypatch.setattr(rounding_module, "guided_values", counted)
    monkeypatch.setattr(rounding_module, "guided_rows", refused)
    monkeypatch.setattr(HintRows, "in_order", refused)
    _, counts, _ = _trained(build, rolled, diagnostics=False)
    assert len(called) == 2 * 4
    assert sum(called) == 2
    assert counts[Site.FC2].guided > 0
