"""What a step reports about the agreement of its two sides, see docs/metrics.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_trace.rollout.report import RolloutReport
from megatron_trace.training.report import SiteReport, TraceReport


def health_of(report: TraceReport, rollout: RolloutReport) -> dict[str, Any]:
    """Gives shares of a step, by site where sites differ; None or empty where there is nothing.

    Args:
        report: What the trainer's quantisers did.
        rollout: What the engine reports of the rollout.
    """
    saturation, _ = rollout.largest_saturation
    return training_health(report) | {
        "rollout_saturation": saturation,
        "degenerate": sum(rollout.degenerate.values()) / max(rollout.num_samples, 1),
    }


def training_health(report: TraceReport) -> dict[str, Any]:
    """Gives what `health_of` tells of the trainer alone."""
    mismatch = {str(site): counts for site, counts in report.code_mismatch.items()}
    differences = report.as_dict()["activation_difference"]
    hinted = [counts for counts in report.sites.values() if counts.guided + counts.rejected]
    return {
        "code_mismatch": {
            site: counts.guided_share if counts.guided_values else counts.rtn_share
            for site, counts in mismatch.items()
        },
        "nearest_mismatch": {site: counts.rtn_share for site, counts in mismatch.items()},
        "scale_mismatch": {site: counts.scale_byte_share for site, counts in mismatch.items()},
        "d_act": _by_layer(differences, "as_trained"),
        "d_act_nearest": _by_layer(differences, "nearest"),
        "coverage": _share(hinted, "guided"),
        "guard_rejections": _share(hinted, "rejected"),
        "saturation": {
            str(site): counts.saturated_blocks / counts.blocks
            for site, counts in report.sites.items()
            if counts.blocks
        },
        "router_disagreement": report.routing_mismatch,
    }


def _by_layer(
    differences: Mapping[str, Mapping[str, Mapping[str, float | None]]], kind: str
) -> dict[str, dict[str, float | None]]:
    return {
        site: {layer: shares[kind] for layer, shares in by_layer.items()}
        for site, by_layer in differences.items()
    }


def _share(sites: list[SiteReport], kind: str) -> float | None:
    """Gives the share of the real rows, of sites that have hints, that were rounded in some way."""
    real = sum(
        counts.guided + counts.rejected + counts.missing + counts.rerouted + counts.not_recorded
        for counts in sites
    )
    return sum(getattr(counts, kind) for counts in sites) / real if real else None


def nearest_growth(health: Mapping[str, Any], first: float | None) -> float | None:
    """Gives how many times larger the mismatch to nearest is than in the run's first step.

    Hints of an older policy pull the trainer to the codes of the rollout that made them. Then the
    log-probs agree, and the importance ratio looks better than the two policies are
    (docs/study/recommendation.md). What the trainer would round to by itself is not pulled: its
    mismatch with the rollout's codes grows with the distance of the weights.

    Args:
        health: What `health_of` gives.
        first: Largest mismatch to nearest of all sites in the first step that had diagnostics.
    """
    now = largest_nearest(health)
    return now / first if now is not None and first else None


def largest_nearest(health: Mapping[str, Any]) -> float | None:
    """Gives the largest mismatch to nearest of all sites; None without diagnostics."""
    return max(health["nearest_mismatch"].values(), default=None)
