"""From what the engine served to samples, and to the report of a rollout."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_trace.hints import RolloutSample, version_spans
from megatron_trace.rollout.degeneration import DegenerationRule
from megatron_trace.rollout.report import RolloutReport, counts_of_samples
from megatron_trace.rollout.running import Served
from megatron_trace.rollout.sites import RolloutSites

# Share of values beyond a static scale above which a rollout warns.
SATURATION_WARNING = 1e-4

_logger = logging.getLogger(__name__)


def make_sample(
    sample_id: str,
    served: Served,
    *,
    has_experts: bool,
    policy_version: int,
    weights_digests: Mapping[int, str] | None = None,
    settings_digest: str,
    rule: DegenerationRule,
) -> RolloutSample:
    """Gives the sample that was served.

    Args:
        sample_id: Its name.
        served: What the engine served.
        has_experts: Whether the model has routed experts, whose choice is recorded.
        policy_version: Version of the weights, unless versions were noted.
        weights_digests: Digest of the weights of each version that may have been noted.
        settings_digest: Digest of the quantiser settings; empty for BF16.
        rule: When it is flagged as degenerate.

    Raises:
        RuntimeError: The choice of experts is missing.
    """
    sampled, routing = served.sampled, served.rows.routing
    if not has_experts:
        routing = torch.empty(len(served.tokens) - 1, 0, 0)
    if routing is None:
        raise RuntimeError(f"sample {sample_id}: Megatron's engine recorded no routing")
    response = served.tokens[served.num_prompt_tokens :]
    is_sampled = torch.ones(len(response)) if served.given is None else served.given == 0
    rows = is_sampled.nonzero()[:, 0]
    spans: dict[str, Any] = {}
    of_tokens, of_rows = sampled.versions, served.rows.versions
    if of_tokens is not None and of_rows is not None:
        versions = torch.cat([of_tokens, of_rows])
        policy_version = int(versions.min())
        if (versions > policy_version).any():
            assert weights_digests is not None, "where versions are noted, they have digests"
            spans["version_spans"] = version_spans(of_tokens, weights_digests)
            spans["record_spans"] = version_spans(of_rows, weights_digests)
    return RolloutSample(
        sample_id=sample_id,
        prompt_tokens=served.tokens[: served.num_prompt_tokens],
        response_tokens=response,
        logprobs=sampled.logprobs,
        routing=torch.as_tensor(routing, dtype=torch.int16),
        policy_version=policy_version,
        settings_digest=settings_digest,
        finish_reason=served.finish_reason,
        top_tokens=sampled.top_tokens,
        top_logprobs=sampled.top_logprobs,
        given=served.given,
        degeneration=rule.degeneration(
            [response[row] for row in rows.tolist()], sampled.logprobs[rows]
        ),
        **spans,
    )


def make_report(
    samples: Sequence[RolloutSample],
    *,
    num_asked: int,
    counts: Mapping[str, int],
    sites: RolloutSites,
    settings_version: int,
    policy_version: int,
) -> RolloutReport:
    """Counts a rollout, and warns of values beyond static scales.

    Args:
        samples: What is returned of it.
        num_asked: Samples that were asked for.
        counts: Of the engine's context: prefix_tokens, restored_tokens, evictions.
        sites: Sites of the engine.
        settings_version: How often its settings had been set.
        policy_version: Version of the weights.
    """
    kept = counts_of_samples(samples)
    report = RolloutReport(
        **kept,
        num_aborted=num_asked - len(samples) + kept["finish_reasons"].get("abort", 0),
        prefix_tokens=counts["prefix_tokens"],
        restored_tokens=counts["restored_tokens"],
        num_evictions=counts["evictions"],
        saturated_values=sites.saturated_values(),
        quantised_values=dict(sites.quantised_values),
        settings_version=settings_version,
        policy_version=policy_version,
    )
    share, place = report.largest_saturation
    if place is not None and share > SATURATION_WARNING:
        _logger.warning(
            "layer %d, site %s: a share of %.2g of the values is beyond the largest that the "
            "static scale of settings version %d has; recalibrate",
            *place,
            share,
            settings_version,
        )
    return report
