"""A model that is not the rollout's is not trained on rows rounded to nearest unnoticed."""

from __future__ import annotations

import pytest
import torch

from megatron_trace.hints.types import Site
from megatron_trace.training.micro_batch import make_micro_batch
from megatron_trace.training.model import token_logprobs
from megatron_trace.training.report import SiteReport, require_guided
from megatron_trace.training.rounding import Rounding
from megatron_trace.training.tally import Tally


def _forward(model, sites, rolled):
    micro_batch = make_micro_batch(rolled.samples, rolled.store, sites)
    with torch.no_grad(), sites.micro_batch(micro_batch):
        token_logprobs(model, sites, micro_batch)


def test_the_rollouts_own_model_is_guided(build, rollout):
    rolled = rollout()
    model, sites = build("trace", settings=rolled.settings)
    _forward(model, sites, rolled)
    sites.assert_guided("step 0")


def test_another_model_of_the_same_shape_is_refused_after_its_first_step(build, rollout):
    rolled = rollout()
    model, sites = build("trace", settings=rolled.settings, seed=1)
    _forward(model, sites, rolled)
    with pytest.raises(RuntimeError, match=r"step 0: hints guided 0 of 52 rows at site fc1.*100"):
        sites.assert_guided("step 0")


def test_a_bound_of_1_trains_on_and_counts(build, rollout):
    rolled = rollout()
    model, sites = build("trace", settings=rolled.settings, seed=1, guard_max_rejected_rows=1.0)
    _forward(model, sites, rolled)
    sites.assert_guided("step 0")
    assert sites.report().sites[Site.FC1].rejected == 52


def test_a_method_without_hints_has_nothing_to_guide(build, rollout):
    rolled = rollout()
    model, sites = build("qat", settings=rolled.settings, seed=1)
    _forward(model, sites, rolled)
    sites.assert_guided("step 0")


@pytest.mark.parametrize(
    "counts",
    [
        {},
        {"not_recorded": 50, "padding": 3},
        {"guided": 1, "rejected": 1},
        {"guided": 1, "missing": 50},
        {"guided": 1, "rerouted": 50},
    ],
)
def test_sites_without_hints_or_guided_enough_are_accepted(counts):
    require_guided({Site.K: SiteReport(**counts)}, max_rejected_rows=0.5, when="step 3")


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        ({"rejected": 1}, "rejected 1 (100.0%"),
        ({"guided": 1, "rejected": 2}, "rejected 2 (66.7%"),
        ({"missing": 7}, "7 have none"),
        ({"rerouted": 9}, "9 went to other experts"),
    ],
)
def test_one_site_that_is_hardly_guided_is_an_error_that_says_why(counts, told):
    sites = {Site.K: SiteReport(guided=100), Site.FC2: SiteReport(**counts)}
    with pytest.raises(RuntimeError, match=r"step 3: .* at site fc2") as error:
        require_guided(sites, max_rejected_rows=0.5, when="step 3")
    assert told in str(error.value)
    assert "--trace-guard-max-rejected-rows 1" in str(error.value)
    require_guided(sites, max_rejected_rows=1.0, when="step 3")


def test_counts_of_many_micro_batches_add_up():
    place = (0, Site.K)
    tally = Tally([(0, Site.FC1), place])
    rounding, values = Rounding(1e-4), torch.ones(3, 32)
    for _ in range(70):
        tally.calls[place] += 1
        known = {"rows": 3, "real": 3, "hinted": 3, "recorded": 3}
        tally._add_rows(place, values, rounding, known)
        tally.rejected(place, values.device).add_(1)
        tally.saturated(place, values.device).add_(6)
    report = tally.report().sites[Site.K]
    assert (report.guided, report.rejected, report.missing) == (140, 70, 0)
    assert (report.blocks, report.saturated_blocks) == (420, 420)
    tally.reset()
    tally.calls[place] += 1
    tally._add_rows(place, values[:1], rounding, {"rows": 1, "real": 1, "recorded": 1})
    tally.saturated(place, values.device).add_(2)
    assert tally.report().sites[Site.K] == SiteReport(
        calls=1, missing=1, blocks=2, saturated_blocks=2
    )
