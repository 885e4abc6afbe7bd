"""Hints derived from full codes are those that the engine itself stores."""

from __future__ import annotations

import pytest
import torch

from megatron_trace.config import HINT_SITES
from megatron_trace.study.cells import ENGINES, Cell
from megatron_trace.study.rollouts import (
    RolloutSet,
    build_engine,
    derived_store,
    load,
    rescored,
    roll_out,
    save,
)
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.rollouts import record_of, records_of
from megatron_trace.testing.tiny_rollout import random_prompts, tiny_engine, tiny_weights
from megatron_trace.testing.tiny_rollout import roll_out as engine_rollout


@pytest.mark.parametrize(
    ("bits", "form"), [(1, "raw"), (2, "raw"), (4, "raw"), (1, "residue")], ids=str
)
def test_derived_hints_have_the_bytes_of_the_engines_own(bits, form):
    engine = tiny_engine(
        tiny_weights(seed=1),
        hint_layers="all",
        hint_sites=HINT_SITES,
        hint_bits=bits,
        hint_scales=form,
        diagnostic_share=1.0,
    )
    samples, store = engine_rollout(engine, random_prompts(6))
    codes = {
        sample.sample_id: {
            (layer, site): record
            for (kind, layer, site), record in records_of(store, sample).items()
            if kind == "codes"
        }
        for sample in samples
    }
    cell = Cell("derived", bits=bits, scale_form=form)
    derived = derived_store(RolloutSet(samples, codes, engine.settings), cell)
    compared = 0
    for sample in samples:
        own = {key: hint for key, hint in records_of(store, sample).items() if key[0] == "hint"}
        for (_, layer, site), hint in own.items():
            ours = record_of(derived, sample, layer, site)
            for name in ("payload", "scale_bytes"):
                where = f"{sample.sample_id}, layer {layer}, {site}, {name}"
                assert_same_bytes(getattr(ours, name), getattr(hint, name), where)
            assert (ours.num_bits, ours.scale_form) == (hint.num_bits, hint.scale_form)
            compared += 1
    assert compared == 6 * 2 * 4


@pytest.fixture(scope="module")
def rollouts(study_model):
    return roll_out(study_model, ENGINES["fp4"], num_samples=8, max_new_tokens=4)


def test_every_place_of_every_sample_has_full_codes(rollouts):
    for sample in rollouts.samples:
        places = rollouts.codes[sample.sample_id]
        assert len(places) == 2 * 4
        assert all(hint.num_rows == sample.num_rows for hint in places.values())


def test_a_rollout_set_is_read_as_it_was_written(rollouts, tmp_path):
    path = tmp_path / "x.pt"
    save(rollouts, path, {"a": 1})
    again = load(path, {"a": 1})
    assert again.settings == rollouts.settings
    for one, other in zip(rollouts.samples, again.samples, strict=True):
        assert one.tokens == other.tokens
        assert torch.equal(one.logprobs, other.logprobs)
        for place, hint in rollouts.codes[one.sample_id].items():
            theirs = again.codes[one.sample_id][place]
            assert (theirs.key, theirs.global_scale) == (hint.key, hint.global_scale)
            assert_same_bytes(theirs.payload, hint.payload, str(hint.key))
    with pytest.raises(ValueError, match="remove it"):
        load(path, {"a": 2})


@pytest.mark.parametrize("damage", ["shuffled", "wrong_scales", "other_sample"])
def test_damage_changes_what_its_name_says(rollouts, damage):
    whole, broken = (derived_store(rollouts, Cell("x", damage=kind)) for kind in ("none", damage))
    sample = max(rollouts.samples, key=lambda sample: sample.num_rows)
    for place in rollouts.codes[sample.sample_id]:
        before, after = (record_of(store, sample, *place) for store in (whole, broken))
        assert torch.equal(before.payload, after.payload) == (damage == "wrong_scales")
        assert not torch.equal(before.scale_bytes, after.scale_bytes)


def test_an_engine_reads_its_own_samples_with_nearly_the_codes_it_wrote(study_model, rollouts):
    """Decoding and prefill multiply in other shapes; on this CPU measured 0 different values."""
    engine = build_engine(study_model, ENGINES["fp4"])
    samples, codes = rescored(engine, rollouts.samples, policy_version=0)
    different = total = 0
    for sample in samples:
        for place, hint in codes[sample.sample_id].items():
            known = rollouts.codes[sample.sample_id][place]
            different += int((known.payload != hint.payload).sum())
            total += hint.payload.numel()
    assert different < 0.01 * total
