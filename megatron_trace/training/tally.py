"""What the quantisers of a trainer model did, counted where it is known: on the host or the device.

Legend: N rows, K values of a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from megatron_trace.formats import unpack_hint
from megatron_trace.hints.types import Site
from megatron_trace.metrics import CodeMismatch, compare_codes
from megatron_trace.training.hint_rows import HintRows
from megatron_trace.training.report import ActivationDifference, SiteReport, TraceReport
from megatron_trace.training.rounding import PackedRows, Rounding
from megatron_trace.training.shape import ExpertMatrix, Place
from megatron_trace.training.slots import SlotRows

if TYPE_CHECKING:
    from megatron_trace.training.micro_batch import MicroBatch

# What is counted on the device, in this order: by kernels of the quantisers, ...
_BY_KERNELS = ("rejected", "saturated_blocks")
# ... and of rows of fc2 that come from other ranks.
_BY_FLAGS = ("hinted", "recorded_slots", "rerouted")


class _DeviceCounts:
    """Counts of every place in one tensor, which is read once.

    Args:
        places: The places.
        device: Where their values are.
    """

    # Others could not be counted up outside of inference mode.
    @torch.inference_mode(False)
    def __init__(self, places: Sequence[Place], device: torch.device) -> None:
        names = _BY_KERNELS + _BY_FLAGS
        self._counts = torch.zeros((len(places), len(names)), dtype=torch.int64, device=device)
        # Views, made once: int64 [1] of each name, [flags] of those of flags.
        self.of = {
            (place, name): self._counts[row, column : column + 1]
            for row, place in enumerate(places)
            for column, name in enumerate(names)
        }
        self.of_flags = {
            place: self._counts[row, len(_BY_KERNELS) :] for row, place in enumerate(places)
        }

    def reset(self) -> None:
        """Sets all to zero."""
        self._counts.zero_()

    def by_place(self) -> dict[Place, dict[str, int]]:
        """Gives the counts; waits for the device."""
        names = _BY_KERNELS + _BY_FLAGS
        rows = zip(self.of_flags, self._counts.tolist(), strict=True)
        return {place: dict(zip(names, counts, strict=True)) for place, counts in rows}


class Tally:
    """Running counts by place, kept on the device until they are read.

    Args:
        places: Every place that may be quantised.

    Attributes:
        calls: Calls of the quantiser, by place.
        weight_uses: Forward passes that took a quantised weight, by expert's matrix.
        weights_quantised: Weights that had to be quantised for them.
        code_mismatch: Agreement with the rollout's full codes, by place.
        activation_difference: D_act, by place.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = tuple(places)
        # With the first values: a model may move to its device after it was built.
        self._device_counts: _DeviceCounts | None = None
        self.reset()

    def reset(self) -> None:
        """Sets all counts to zero."""
        self.calls: Counter[Place] = Counter()
        self.weight_uses: Counter[ExpertMatrix] = Counter()
        self.weights_quantised = 0
        self.code_mismatch: dict[Place, CodeMismatch] = {}
        self.activation_difference: dict[Place, ActivationDifference] = {}
        self._rows: dict[Place, Counter[str]] = {}
        self._routing: list[tuple[int, torch.Tensor]] = []
        if self._device_counts is not None:
            self._device_counts.reset()

    def rejected(self, place: Place, device: torch.device) -> torch.Tensor:
        """Gives the count, int64 [1], to which rows are added whose hint is not accepted."""
        return self._on(device).of[place, "rejected"]

    def saturated(self, place: Place, device: torch.device) -> torch.Tensor:
        """Gives the count, int64 [1], to which blocks are added that the global scale cannot hold.

        All blocks, of which these are a part, are those that `add_coverage` or `add_slots` counts.
        """
        return self._on(device).of[place, "saturated_blocks"]

    def _on(self, device: torch.device) -> _DeviceCounts:
        if self._device_counts is None:
            self._device_counts = _DeviceCounts(self._places, device)
        return self._device_counts

    def _add_rows(
        self, place: Place, values: torch.Tensor, rounding: Rounding, known: Mapping[str, int]
    ) -> None:
        """Adds rows that are quantised.

        Args:
            place: Decoder layer and site.
            values: float [rows, K].
            rounding: How they are rounded.
            known: How many of which kind, of what `_site_report` takes, `rows` among them.
        """
        number_format = rounding.number_format
        counts = self._rows.get(place)
        if counts is None:
            counts = self._rows[place] = Counter()
        counts["blocks"] += values.numel() // number_format.block_size
        for name, number in known.items():
            counts[name] += number

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
            rounding: How they are rounded; its guard counts what it rejects.
            micro_batch: Where they belong.
            recorded: Whether the rollout records hints of the place.
        """
        rows = micro_batch.rows_at(place[1])
        num_real = rows.num_real
        known = {"rows": rows.real.numel(), "real": num_real}
        known["recorded" if recorded else "not_recorded"] = num_real
        if rounding.hint is not None:
            known["hinted"] = micro_batch.num_hinted[place]
        self._add_rows(place, values, rounding, known)

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
            rounding: How they are rounded; its guard counts what it rejects.
            slots: What is known of the rows.
            micro_batch: What is in force.
        """
        num_rows = values.shape[0]
        known = {"rows": num_rows}
        if slots is None or slots.hint is None or rounding.hint is None:
            known |= {"real": num_rows, "not_recorded": num_rows}
        elif slots.real is None or slots.rerouted is None:
            tokens = micro_batch.token_rows
            of_token = num_rows // tokens.real.numel()
            known["recorded_slots"] = tokens.num_real * of_token
            known["hinted"] = micro_batch.num_hinted.get(place, 0) * of_token
        else:
            flags = torch.stack([slots.hint.has_hint, slots.real, slots.rerouted])
            self._on(values.device).of_flags[place].add_(flags.sum(1))
        self._add_rows(place, values, rounding, known)
        if slots is not None and slots.codes is not None:
            self.add_mismatch(place, values, rounding, slots.codes)

    def add_routing(self, compared: int, different: torch.Tensor) -> None:
        """Adds one MoE layer's comparison of live and recorded routing."""
        self._routing.append((compared, different))

    def add_mismatch(
        self, place: Place, values: torch.Tensor, rounding: Rounding, full: HintRows
    ) -> None:
        """Adds a comparison of values [N, K] with the rollout's full codes.

        Args:
            place: Decoder layer and site.
            values: float [N, K].
            rounding: How they are rounded, judged.
            full: The codes.
        """
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
        on_device = {} if self._device_counts is None else self._device_counts.by_place()
        for place, counts in self._rows.items():
            sites[place[1]].update(counts)
            # Of formats without a global scale, and without hints, nothing is counted there.
            sites[place[1]].update(on_device.get(place, {}))
        mismatch: dict[Site, CodeMismatch] = {}
        for (_, site), counts in self.code_mismatch.items():
            mismatch[site] = mismatch.get(site, CodeMismatch()) + counts
        different = [of_layer for _, of_layer in self._routing]
        return TraceReport(
            sites={site: _site_report(sites[site]) for site in Site if site in sites},
            weight_uses=self.weight_uses.total(),
            weights_quantised=self.weights_quantised,
            routing_compared=sum(compared for compared, _ in self._routing),
            # Read at once: each would wait for the device.
            routing_different=int(torch.stack(different).sum()) if different else 0,
            code_mismatch={site: mismatch[site] for site in Site if site in mismatch},
            activation_difference=dict(self.activation_difference),
        )


def _site_report(counts: Mapping[str, int]) -> SiteReport:
    """Gives a site's counts.

    Args:
        counts: Calls and blocks; `rows` that were quantised, `real` ones, those of `recorded`
            places and of others, `hinted` ones and those of them that were `rejected`; 0 where a
            name is missing. Of fc2, `recorded_slots` are the real ones.
    """
    recorded = counts["recorded"] + counts["recorded_slots"]
    return SiteReport(
        calls=counts["calls"],
        guided=counts["hinted"] - counts["rejected"],
        rejected=counts["rejected"],
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
