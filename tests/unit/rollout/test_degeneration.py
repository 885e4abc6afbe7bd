"""Which samples count as loops, which as garbled; that a rollout counts them."""

from __future__ import annotations

import pytest
import torch

from megatron_trace.hints import Site
from megatron_trace.rollout.degeneration import DegenerationRule
from megatron_trace.rollout.report import RolloutReport, counts_of_samples
from megatron_trace.testing.tiny_rollout import random_prompts, roll_out, tiny_engine

RULE = DegenerationRule(loop_tokens=4, tail_tokens=3, garbled_logprob=-2.0)


@pytest.mark.parametrize(
    ("tokens", "logprobs", "expected"),
    [
        ([1, 2, 2, 2, 3], [-0.1] * 5, None),
        ([1, 2, 2, 2, 2, 3], [-0.1] * 6, "loop"),
        ([5, 5, 5, 5], [-3.0] * 4, "loop"),
        ([1, 2, 3, 4], [-0.1, -2.5, -2.0, -1.6], "garbled"),
        ([1, 2, 3, 4], [-9.0, -2.0, -2.0, -1.9], None),
        ([1, 2], [-9.0, -9.0], None),
        ([], [], None),
    ],
    ids=["three", "four", "loop before garbled", "garbled", "early", "short", "none"],
)
def test_the_rule_at_its_edges(tokens, logprobs, expected):
    assert RULE.degeneration(tokens, torch.tensor(logprobs)) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loop_tokens": 1}, "loop_tokens must be >= 2; got 1"),
        ({"tail_tokens": 0}, "tail_tokens must be >= 1; got 0"),
        ({"garbled_logprob": 0.0}, "garbled_logprob must be < 0; got 0.0"),
    ],
)
def test_a_rule_that_always_or_never_holds_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        DegenerationRule(**change)


def test_a_rollout_flags_and_counts_degenerate_samples_and_keeps_them(weights):
    rule = DegenerationRule(loop_tokens=3, tail_tokens=4, garbled_logprob=-2.7)
    engine = tiny_engine(weights, limits={"degeneration": rule})
    samples, store = roll_out(engine, random_prompts(60), max_new_tokens=12, temperature=1.3)
    found = [rule.degeneration(s.response_tokens, s.logprobs) for s in samples]
    assert [sample.degeneration for sample in samples] == found
    assert {"loop", "garbled", None} == set(found)
    counts = {kind: found.count(kind) for kind in ("loop", "garbled")}
    assert engine.report.degenerate == counts
    assert set(store.sample_ids()) == {sample.sample_id for sample in samples}
    plain = counts_of_samples(samples)
    assert plain["num_samples"] == 60
    assert plain["response_tokens"] == sum(len(s.response_tokens) for s in samples)


def test_a_report_names_the_place_of_the_largest_saturation():
    places = {(0, Site.K): 5, (1, Site.FC1): 3, (1, Site.V): 0}
    report = RolloutReport(
        saturated_values=places, quantised_values={(0, Site.K): 1000, (1, Site.FC1): 100}
    )
    assert report.largest_saturation == (0.03, (1, Site.FC1))
    plain = report.as_dict()
    assert plain["saturation"] == {"0/k": 0.005, "1/fc1": 0.03, "1/v": 0.0}
    assert plain["largest_saturation_at"] == "1/fc1"
    assert RolloutReport().as_dict()["largest_saturation_at"] is None
