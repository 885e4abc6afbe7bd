"""What the quantisers of a trainer model did since the last reset: calls, coverage, saturation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from megatron_trace.formats import unpack_hint
from megatron_trace.hints.types import Site
from megatron_trace.metrics import CodeMismatch, Sums, compare_codes
from megatron_trace.training.rounding import HintRows, PackedRows, Rounding, saturated_blocks
from megatron_trace.training.shape import ExpertMatrix, Place
from megatron_trace.training.slots import SlotRows

if TYPE_CHECKING:
    from megatron_trace.training.micro_batch import MicroBatch


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


# Counts on the device that are added up at a time.
_SUMMED_TOGETHER = 32


class Tally:
    """Running counts by place, kept on the device until they are read."""

    def __init__(self) -> None:
        self.calls: Counter[Place] = Counter()
        self.weight_uses: Counter[ExpertMatrix] = Counter()
        self.weights_quantised = 0
        self.code_mismatch: dict[Place, CodeMismatch] = {}
        self.activation_difference: dict[Place, ActivationDifference] = {}
        self._rows: dict[Place, Counter[str]] = {}
        # By place and names: int64 [names] each, on the device; reading would stop the queue.
        self._device_rows: dict[tuple[Place, tuple[str, ...]], list[torch.Tensor]] = {}
        self._routing: list[tuple[int, torch.Tensor]] = []

    def _add_rows(
        self,
        place: Place,
        values: torch.Tensor,
        rounding: Rounding,
        known: Mapping[str, int],
        flags: Mapping[str, torch.Tensor],
    ) -> None:
        """Adds rows that were quantised.

        Args:
            place: Decoder layer and site.
            values: float [rows, K].
            rounding: How they are rounded.
            known: How many of which kind, of what `_site_report` takes, `rows` among them.
            flags: Which rows are of a kind, bool [rows] each; as many more of this kind.
        """
        number_format = rounding.number_format
        counts = self._rows.setdefault(place, Counter())
        counts.update(known, blocks=values.numel() // number_format.block_size)
        saturated = saturated_blocks(values, rounding.global_scale, number_format)
        self._add_on_device((place, ("saturated_blocks",)), saturated.view(1))
        if flags:
            each = list(flags.values())
            sums = each[0].sum().view(1) if len(each) == 1 else torch.stack(each).sum(1)
            self._add_on_device((place, tuple(flags)), sums)

    def _add_on_device(self, key: tuple[Place, tuple[str, ...]], counts: torch.Tensor) -> None:
        known = self._device_rows.setdefault(key, [])
        known.append(counts)
        if len(known) == _SUMMED_TOGETHER:  # Each time would be a kernel each time.
            known[:] = [torch.stack(known).sum(0)]

    def add_coverage(
        self,
        place: Place,
        values: torch.Tensor,
        rounding: Rounding,
        micro_batch: MicroBatch,
        *,
        recorded: bool,
    ) -> None:
        """Adds the rows of a micro-batch at fc1, k or v.

        Args:
            place: Decoder layer and site.
            values: float [N, K].
            rounding: How they are rounded.
            micro_batch: Where they belong.
            recorded: Whether the rollout records hints of the place.
        """
        rows = micro_batch.rows_at(place[1])
        num_real = rows.num_real
        known = {"rows": rows.real.numel(), "real": num_real}
        known["recorded" if recorded else "not_recorded"] = num_real
        flags = {}
        if place in micro_batch.hints and rounding.hint is not None:
            flags = {"guided": rounding.hint.has_hint}
            known["hinted"] = micro_batch.num_hinted[place]
        self._add_rows(place, values, rounding, known, flags)

    def add_slots(
        self,
        place: Place,
        values: torch.Tensor,
        rounding: Rounding,
        slots: SlotRows | None,
        micro_batch: MicroBatch,
    ) -> None:
        """Adds the rows of the local experts at fc2.

        Args:
            place: Decoder layer and fc2.
            values: float [rows, K].
            rounding: How they are rounded.
            slots: What is known of the rows.
            micro_batch: What is in force.
        """
        num_rows = values.shape[0]
        if slots is None or slots.hint is None or rounding.hint is None:
            known = {"rows": num_rows, "real": num_rows, "not_recorded": num_rows}
            self._add_rows(place, values, rounding, known, {})
        else:
            known, flags = {"rows": num_rows}, {"guided": rounding.hint.has_hint}
            if slots.real is None or slots.rerouted is None:
                tokens = micro_batch.token_rows
                of_token = num_rows // tokens.real.numel()
                known["recorded_slots"] = tokens.num_real * of_token
                known["hinted"] = micro_batch.num_hinted.get(place, 0) * of_token
            else:
                flags["hinted"] = slots.hint.has_hint
                flags |= {"recorded_slots": slots.real, "rerouted": slots.rerouted}
            self._add_rows(place, values, rounding, known, flags)
        if slots is not None and slots.codes is not None:
            self.add_mismatch(place, values, rounding, slots.codes)

    def add_routing(self, compared: int, different: torch.Tensor) -> None:
        """Adds one MoE layer's comparison of live and recorded routing."""
        self._routing.append((compared, different))

    def add_mismatch(
        self, place: Place, values: torch.Tensor, rounding: Rounding, full: HintRows
    ) -> None:
        """Adds a comparison of values [N, K] with the rollout's full codes."""
        # By number: every selection by a mask would wait for the device.
        known = full.has_hint.nonzero()[:, 0]
        used = rounding.hint and rounding.hint.used_at(known)
        mismatch = compare_codes(
            values[known],
            unpack_hint(full.payload[known], full.num_bits),
            full.scale_bytes[known],
            rounding.global_scale,
            used,
            rounding.number_format,
        )
        self.code_mismatch[place] = self.code_mismatch.get(place, CodeMismatch()) + mismatch
        difference = activation_difference(values[known], rounding, full, known)
        seen = self.activation_difference.get(place, ActivationDifference())
        self.activation_difference[place] = seen + difference

    def report(self) -> TraceReport:
        """Gives the counts so far."""
        sites: dict[Site, Counter[str]] = {}
        for (_, site), calls in self.calls.items():
            sites.setdefault(site, Counter())["calls"] += calls
        for (_, site), counts in self._rows.items():
            sites[site].update(counts)
        for ((_, site), names), sums in self._device_rows.items():
            total = torch.stack(sums).sum(0)
            sites[site].update(dict(zip(names, total.tolist(), strict=True)))
        mismatch: dict[Site, CodeMismatch] = {}
        for (_, site), counts in self.code_mismatch.items():
            mismatch[site] = mismatch.get(site, CodeMismatch()) + counts
        return TraceReport(
            sites={site: _site_report(sites[site]) for site in Site if site in sites},
            weight_uses=self.weight_uses.total(),
            weights_quantised=self.weights_quantised,
            routing_compared=sum(compared for compared, _ in self._routing),
            routing_different=sum(int(different) for _, different in self._routing),
            code_mismatch={site: mismatch[site] for site in Site if site in mismatch},
            activation_difference=dict(self.activation_difference),
        )


def _site_report(counts: Mapping[str, int]) -> SiteReport:
    """Gives a site's counts.

    Args:
        counts: Calls and blocks; `rows` that were quantised, `real` ones, those of `recorded`
            places and of others, `hinted` and `guided` ones; 0 where a name is missing. Of fc2,
            `recorded_slots` are the real ones.
    """
    recorded = counts["recorded"] + counts["recorded_slots"]
    return SiteReport(
        calls=counts["calls"],
        guided=counts["guided"],
        rejected=counts["hinted"] - counts["guided"],
        missing=recorded - counts["rerouted"] - counts["hinted"],
        rerouted=counts["rerouted"],
        not_recorded=counts["not_recorded"],
        padding=counts["rows"] - counts["real"] - counts["recorded_slots"],
        blocks=counts["blocks"],
        saturated_blocks=counts["saturated_blocks"],
    )


@torch.no_grad()
def activation_difference(
    values: torch.Tensor, rounding: Rounding, full: HintRows, known: torch.Tensor
) -> ActivationDifference:
    """Compares an operand of training with the rollout's, which its full codes tell.

    Args:
        values: float [rows, K]; the trainer's values in the rows that have full codes.
        rounding: How the rows of the micro-batch are rounded.
        full: The rollout's full codes of the rows of the micro-batch.
        known: int64 [rows]; the rows that have full codes.
    """
    rollout = PackedRows(
        full.payload[known],
        full.scale_bytes[known],
        rounding.global_scale,
        rounding.operand_dtype,
        rounding.number_format,
    ).values(torch.float32)
    nearest = replace(rounding, hint=None).quantised(values).float()
    trained = nearest
    if rounding.hint is not None:
        hint = rounding.hint.mapped(lambda rows: rows[known])
        trained = replace(rounding, hint=hint).quantised(values).float()
    squares = ((trained - rollout), (nearest - rollout), rollout)
    sums = torch.stack([of.double().square().sum() for of in squares]).tolist()
    return ActivationDifference(*sums)
