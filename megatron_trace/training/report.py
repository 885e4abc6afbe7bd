"""What the quantisers of a trainer model did since the last reset: calls, coverage, saturation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from megatron_trace.hints.types import Site
from megatron_trace.metrics import CodeMismatch, Sums
from megatron_trace.training.shape import Place


@dataclass(frozen=True)
class SiteReport(Sums):
    """Counts of one site over all decoder layers.

    A row is a token; at fc2 it is a token's expert slot, counted where the expert is.
    Rows are counted once per micro-batch, however often it is forwarded (recomputation, a second
    pass); calls are counted each time. The row counts add up to the rows that were quantised.

    Attributes:
        calls: Calls of the quantiser.
        guided: Rows rounded by the rollout's hint.
        rejected: Rows whose hint the guard refused; rounded to nearest.
        missing: Rows without a hint where hints are recorded; rounded to nearest.
        rerouted: Rows of fc2 whose expert is not one that the rollout chose for the token, so that
            it has no hint; rounded to nearest. 0 while routing is replayed.
        not_recorded: Rows of places whose hints are not recorded, such as all of method qat; at fc2
            those of padding too.
        padding: Rows of padding; rounded to nearest.
        blocks: Blocks that were quantised.
        saturated_blocks: Blocks whose largest magnitude exceeds what the static global scale holds.
    """

    calls: int = 0
    guided: int = 0
    rejected: int = 0
    missing: int = 0
    rerouted: int = 0
    not_recorded: int = 0
    padding: int = 0
    blocks: int = 0
    saturated_blocks: int = 0

    @property
    def coverage(self) -> float:
        """Share of the real rows that were guided; 0 if there were none."""
        real = self.guided + self.rejected + self.missing + self.rerouted + self.not_recorded
        return self.guided / real if real else 0.0


def require_guided(
    sites: Mapping[Site, SiteReport], *, max_rejected_rows: float, when: str
) -> None:
    """Checks that hints guided what they were recorded for.

    A model that is not the rollout's is trained without an error otherwise, rounded to nearest.

    Args:
        sites: Counts since the start of a step; sites whose rows have no hints are passed over.
        max_rejected_rows: Share of the rows with hints that the guard may have rejected; with 1
            nothing is an error.
        when: What the counts are of, for the message, such as "step 0".

    Raises:
        RuntimeError: The guard rejected more, or no row was guided at all.
    """
    for site, counts in sites.items():
        hinted = counts.guided + counts.rejected
        recorded = hinted + counts.missing + counts.rerouted
        if max_rejected_rows == 1.0 or not recorded:
            continue
        if counts.guided and counts.rejected <= max_rejected_rows * hinted:
            continue
        share = counts.rejected / hinted if hinted else 0.0
        raise RuntimeError(
            f"{when}: hints guided {counts.guided} of {recorded} rows at site {site}: the guard "
            f"rejected {counts.rejected} ({share:.1%} of those with hints, at most "
            f"{max_rejected_rows:.1%} allowed), {counts.missing} have none, {counts.rerouted} went "
            "to other experts. Is this the model that rolled the samples out, of their policy "
            "version? Load its checkpoint, or roll out again; "
            "guard_max_rejected_rows=1 (--trace-guard-max-rejected-rows 1) rounds such rows to "
            "nearest and counts them"
        )


@dataclass(frozen=True)
class ActivationDifference(Sums):
    """How far an operand of training is from the rollout's, over the diagnostic rows of a place.

    Sums of squares, in FP64: of training's operand as it was rounded less the rollout's, of what
    rounding to nearest would have given less the rollout's, and of the rollout's itself.

    Attributes:
        trained: Of the operand that training used.
        nearest: Of the operand that rounding to nearest gives.
        rollout: Of the rollout's operand.
    """

    trained: float = 0.0
    nearest: float = 0.0
    rollout: float = 0.0

    def shares(self) -> dict[str, float | None]:
        """Gives the relative L2 differences; None where the rollout's operand is all 0."""
        if not self.rollout:
            return {"as_trained": None, "nearest": None}
        return {
            "as_trained": (self.trained / self.rollout) ** 0.5,
            "nearest": (self.nearest / self.rollout) ** 0.5,
        }


@dataclass(frozen=True)
class TraceReport:
    """Counts of one trainer model.

    Attributes:
        sites: Counts by site; only sites that were quantised.
        weight_uses: Forward passes that took a quantised expert weight.
        weights_quantised: Expert weights that had to be quantised for them.
        routing_compared: (token, MoE layer) pairs whose live routing was compared with the
            rollout's; 0 while routing is replayed, unless that is compared too.
        routing_different: Those whose expert sets differ.
        code_mismatch: Agreement with the rollout's full codes, by site; needs diagnostics.
        activation_difference: D_act, by place; of this rank, and needs diagnostics.
    """

    sites: Mapping[Site, SiteReport] = field(default_factory=dict)
    weight_uses: int = 0
    weights_quantised: int = 0
    routing_compared: int = 0
    routing_different: int = 0
    code_mismatch: Mapping[Site, CodeMismatch] = field(default_factory=dict)
    activation_difference: Mapping[Place, ActivationDifference] = field(default_factory=dict)

    def __add__(self, other: TraceReport) -> TraceReport:
        """Adds the counts of two models, or of two stages of one."""
        return TraceReport(
            sites=_added(self.sites, other.sites),
            weight_uses=self.weight_uses + other.weight_uses,
            weights_quantised=self.weights_quantised + other.weights_quantised,
            routing_compared=self.routing_compared + other.routing_compared,
            routing_different=self.routing_different + other.routing_different,
            code_mismatch=_added(self.code_mismatch, other.code_mismatch),
            activation_difference=_added(self.activation_difference, other.activation_difference),
        )

    @property
    def routing_mismatch(self) -> float | None:
        """Share of (token, layer) with another expert set; None if nothing was compared."""
        if not self.routing_compared:
            return None
        return self.routing_different / self.routing_compared

    def as_dict(self) -> dict[str, Any]:
        """Gives plain numbers for a JSON line."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("sites", "code_mismatch"):
            plain[name] = {str(site): asdict(counts) for site, counts in plain[name].items()}
        for site, counts in self.sites.items():
            plain["sites"][str(site)]["coverage"] = counts.coverage
        plain["routing_mismatch"] = self.routing_mismatch
        by_site: dict[str, dict[str, Any]] = {}
        for (layer, site), difference in sorted(self.activation_difference.items()):
            by_site.setdefault(str(site), {})[str(layer)] = difference.shares()
        plain["activation_difference"] = by_site
        return plain


def _added[K, V: (SiteReport, CodeMismatch, ActivationDifference)](
    first: Mapping[K, V], second: Mapping[K, V]
) -> dict[K, V]:
    """Gives the union of two mappings; what both have is added."""
    total = dict(first)
    for key, value in second.items():
        total[key] = total[key] + value if key in total else value
    return total
