"""Hints of 1, 2 and 4 bits, with raw scales or residues: what the trainer makes of each form."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from megatron_trace.config import HINT_SITES
from megatron_trace.formats import reference
from megatron_trace.hints.types import Site
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.recorded_samples import seen_values
from megatron_trace.training.micro_batch import make_micro_batch
from megatron_trace.training.model import token_logprobs

FC1, FC2 = (0, Site.FC1), (0, Site.FC2)
FORMS = list(itertools.product((1, 2, 4), ("raw", "residue")))
# Values of a row at fc1, fc2 (4 slots of 64), k and v; of 2 layers.
WIDTHS = (128, 4 * 64, 64, 64)


def _ready(build, rollout, num_bits, scale_form, **options):
    rolled = rollout(num_bits=num_bits, scale_form=scale_form, sites=HINT_SITES, codes=True)
    model, sites = build(
        "trace",
        hint_bits=num_bits,
        hint_scales=scale_form,
        hint_sites=HINT_SITES,
        **options,
    )
    sites.settings = rolled.settings
    sites.diagnostics = True
    return model, sites, make_micro_batch(rolled.samples, rolled.store, sites)


def _forward(model, sites, micro_batch):
    with torch.no_grad(), sites.micro_batch(micro_batch), seen_values(sites) as seen:
        return token_logprobs(model, sites, micro_batch), seen


@pytest.mark.parametrize(("num_bits", "scale_form"), FORMS)
def test_every_form_gives_the_rollouts_codes_and_scales(build, rollout, num_bits, scale_form):
    """An FP32 trainer beside a BF16 rollout: measured no other code at any site."""
    model, sites, micro_batch = _ready(build, rollout, num_bits, scale_form)
    logprobs, _ = _forward(model, sites, micro_batch)
    reference_model, raw_sites, raw = _ready(build, rollout, 4, "raw")
    expected, _ = _forward(reference_model, raw_sites, raw)
    assert_same_bytes(logprobs, expected, "log-probs")
    for site, counts in sites.report().code_mismatch.items():
        assert counts.guided_values == counts.values > 0, site
        assert (counts.guided_different, counts.misread_scale) == (0, 0), site
        assert sites.report().sites[site].rejected == 0


@pytest.mark.parametrize("packed", [False, True])
def test_residues_are_restored_from_the_trainers_own_values(build, rollout, packed):
    model, sites, micro_batch = _ready(
        build, rollout, 2, "residue", guard=False, save_packed_activations=packed
    )
    _, seen = _forward(model, sites, micro_batch)
    hint, full = micro_batch.hints[FC1], micro_batch.codes[FC1]
    assert (hint.scale_form, hint.scale_bytes.max().item()) == ("residue", 7)
    real = hint.has_hint
    assert_same_bytes(hint.scale_bytes[real], full.scale_bytes[real] & 7, "residues")
    expected = reference.guided(
        seen[FC1].inputs[0],
        full.payload,
        full.scale_bytes,
        sites.settings.global_scale(*FC1),
        num_bits=4,
        dtype=torch.bfloat16,
    )
    assert_same_bytes(seen[FC1].outputs[0][real], expected[real], "fc1")


@pytest.mark.parametrize(("num_bits", "scale_form"), FORMS)
def test_stored_bytes_are_those_of_the_store(build, rollout, num_bits, scale_form):
    rolled = rollout(num_bits=num_bits, scale_form=scale_form, sites=HINT_SITES)
    _, sites, micro_batch = _ready(build, rollout, num_bits, scale_form)
    per_token = sum(rows.stored_bytes for rows in micro_batch.hints.values())
    assert per_token * sum(sample.num_rows for sample in rolled.samples) == rolled.store.num_bytes
    scales = [width // 16 if scale_form == "raw" else -(-3 * width // 128) for width in WIDTHS]
    assert per_token == 2 * (sum(WIDTHS) * num_bits // 8 + sum(scales))
    assert sites.recorded_places == tuple(sorted(micro_batch.hints))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hint_bits": 2}, "hint has bits per value 1, expected 2"),
        ({"hint_scales": "residue"}, "hint has form of block scales raw, expected residue"),
    ],
)
def test_hints_of_another_form_than_the_settings_are_refused(build, rollout, options, message):
    rolled = rollout()
    _, sites = build("trace", **options)
    sites.settings = rolled.settings
    with pytest.raises(ValueError, match=message):
        make_micro_batch(rolled.samples, rolled.store, sites)


def test_misplaced_residues_are_refused_by_the_guard(build, rollout):
    """Measured: all of them, with either form."""
    rejected = {}
    for scale_form in ("raw", "residue"):
        model, sites, micro_batch = _ready(build, rollout, 1, scale_form)
        rows = micro_batch.hints[FC1]
        order = torch.roll(rows.has_hint.nonzero()[:, 0], 1)
        payload, scale_bytes = rows.payload.clone(), rows.scale_bytes.clone()
        payload[rows.has_hint], scale_bytes[rows.has_hint] = payload[order], scale_bytes[order]
        hints = {**micro_batch.hints, FC1: replace(rows, payload=payload, scale_bytes=scale_bytes)}
        _forward(model, sites, replace(micro_batch, hints=hints))
        counts = sites.report().sites[Site.FC1]
        # The second layer's hints are where they belong.
        rejected[scale_form] = counts.rejected / (counts.rejected + counts.guided)
    assert rejected["raw"] > 0.49
    assert rejected["residue"] > 0.45


def test_no_ranks_own_hints_have_the_form_of_the_others(build, rollout):
    """With experts on other ranks, rows of zeros are sent along where a rank has no hints."""
    _, sites, micro_batch = _ready(build, rollout, 2, "residue")
    rows = sites._no_hints(FC2, micro_batch, 2, "residue")
    hint = micro_batch.hints[FC2]
    assert rows.scale_form == hint.scale_form
    assert (rows.payload.shape, rows.scale_bytes.shape) == (
        hint.payload.shape,
        hint.scale_bytes.shape,
    )
