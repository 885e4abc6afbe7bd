"""TraceSites: what the layers of one trainer model ask, how to round and route, and its counters.

Legend: S positions, B samples, N = S * B rows in [S, B] order, K values of a row, E experts,
k top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

from megatron_trace.config import TraceConfig
from megatron_trace.formats import ops
from megatron_trace.formats.bad_values import note_bad_values
from megatron_trace.hints.types import ScaleForm, Site, stored_bits
from megatron_trace.models.hybrid import DecoderModel
from megatron_trace.training.audit import foreign_quantisers, unexpected_quantising
from megatron_trace.training.hint_rows import HintRows
from megatron_trace.training.model_sites import ModelSites
from megatron_trace.training.quantised_place import QuantisedPlace
from megatron_trace.training.report import TraceReport, require_guided
from megatron_trace.training.rounding import PackedRows, Rounding
from megatron_trace.training.scope import Scope
from megatron_trace.training.shape import ExpertMatrix, ModelShape, Place, place_name
from megatron_trace.training.slots import RowOrigin, SlotRows, dispatched_slots, no_slot_hints
from megatron_trace.training.tally import Tally

if TYPE_CHECKING:
    from megatron_trace.training.micro_batch import MicroBatch


class TraceSites(ModelSites):
    """Quantisers and routers of one trainer model, and their counters.

    A second model (a reference, a teacher) has its own and shares nothing with this one.

    Args:
        trace: The run's configuration.
        model: The model whose sites these are.
        shape: Sizes of the model.

    Attributes:
        compares_replayed_routing: Whether the experts that a router would choose are compared with
            the rollout's also while the rollout's are replayed.
    """

    def __init__(self, trace: TraceConfig, model: DecoderModel, shape: ModelShape) -> None:
        super().__init__(trace, model, shape)
        self.compares_replayed_routing = False
        self._tally = Tally(shape.places)
        self._recorded = frozenset(self.recorded_places)

    def _scope_at(self, place: Place) -> Scope:
        scope = self._scopes.current
        if scope is None:
            raise RuntimeError(
                f"no micro-batch is in force at {place_name(place)}; run forward inside `with "
                "sites.micro_batch(...)`, and backward from the model's output"
            )
        return scope

    # Routing, asked for by the routers.

    def replayed_experts(self, moe_layer: int, num_rows: int) -> torch.Tensor | None:
        """Gives the experts of the rows of one MoE layer; None if the router is to choose.

        Args:
            moe_layer: Ordinal of the MoE layer in this model chunk.
            num_rows: Rows N that the router scores.

        Returns:
            int64 [N, k] or None.

        Raises:
            RuntimeError: A pass is recomputed and its micro-batch is not known.
            ValueError: The rows are not those of the micro-batch in force.
        """
        scope = self._scopes.current
        if scope is None:
            if self._scopes.is_lost:
                raise RuntimeError(
                    f"MoE layer {moe_layer} of this chunk recomputes a pass whose backward did not "
                    "begin at the model's output, so its routing is unknown; run such a backward "
                    "inside `with sites.micro_batch(...)`"
                )
            return None
        _require_rows(num_rows, scope.micro_batch, Site.FC1, f"MoE layer {moe_layer}")
        return scope.micro_batch.routing[moe_layer] if scope.replay_routing else None

    def compare_routing(
        self, moe_layer: int, differs: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Counts the real rows that the router sends to another expert set than the rollout's.

        Args:
            moe_layer: Ordinal of the MoE layer in this model chunk.
            differs: Says which rows those are, bool [N], of the rollout's experts, int64 [N, k];
                not asked where a pass is repeated.
        """
        scope = self._scopes.current
        if scope is None or not scope.first_time(("routing", moe_layer)):
            return
        rows = scope.micro_batch.token_rows
        different = differs(scope.micro_batch.routing[moe_layer]) & rows.real
        self._tally.add_routing(rows.num_real, different.sum())

    # Quantisers, asked by the layers.

    def quantise_rows(self, x: torch.Tensor, place: Place) -> torch.Tensor:
        """Fake-quantises every token's values at fc1, k or v; the gradient is the identity.

        Args:
            x: float [S, B, ...]; the trailing dims are the K values of a row.
            place: Decoder layer and site.

        Returns:
            Like x.
        """
        rows = x.detach().flatten(2).flatten(0, 1)
        rounding = self.rounding(*place, rows)
        self.count_call(*place)
        return ops.straight_through(x, rounding.quantised(rows).view(x.shape))

    def quantise_and_pack(self, x: torch.Tensor, place: Place) -> tuple[torch.Tensor, PackedRows]:
        """Gives what `quantise_rows` gives, and the codes of the N rows.

        Args:
            x: float [S, B, ...].
            place: Decoder layer and site: fc1, k or v.
        """
        rows = x.detach().flatten(2).flatten(0, 1)
        packed = self.rounding(*place, rows).packed(rows)
        self.count_call(*place)
        return ops.straight_through(x, packed.values(x.dtype).view(x.shape)), packed

    def dispatched_slots(self, place: Place, dispatcher: MoETokenDispatcher) -> SlotRows | None:
        """Gives what is known of the rows that the local experts got; None if nothing is.

        Whether it communicates depends on the configuration only, so that all ranks do it or none.

        Args:
            place: Decoder layer and fc2.
            dispatcher: The layer's dispatcher, which has just dispatched the micro-batch.
        """
        scope = self._scope_at(place)
        micro_batch = scope.micro_batch
        hint, codes = (known.get(place) for known in (micro_batch.hints, micro_batch.codes))
        if place in self._recorded:
            bits, form = self.trace.hint_bits, self.trace.hint_scales
            hint = hint or self._no_hints(place, micro_batch, bits, form)
        if not self.diagnostics:
            codes = None
        elif place in self._hint_places:
            codes = codes or self._no_hints(place, micro_batch, 4, "raw")
        elif dispatcher.ep_size > 1 or dispatcher.tp_size > 1:
            codes = None
        experts = micro_batch.routing[self.shape.moe_layers.index(place[0])]
        slots = dispatched_slots(
            dispatcher,
            experts,
            micro_batch.token_rows.real,
            hint,
            codes,
            replayed=scope.replay_routing,
            order=micro_batch.slot_orders.get(place[0]),
        )
        return slots if slots is None else slots.cut(self.shape.slot_columns)

    def _no_hints(
        self, place: Place, micro_batch: MicroBatch, hint_bits: int, scale_form: ScaleForm
    ) -> HintRows:
        width, number_format = self.shape.row_width(place[1]), self.format_of(place[1])
        num_bits = stored_bits(number_format, hint_bits)
        form = num_bits, scale_form, number_format
        num_tokens = micro_batch.token_rows.real.numel()
        return no_slot_hints(num_tokens, width, *form, self.device)

    def slot_rounding(
        self,
        x: torch.Tensor,
        place: Place,
        slots: SlotRows | None,
        origin: RowOrigin,
    ) -> Rounding:
        """Gives how the unweighted activations of all local experts are rounded; counts the call.

        A row is rounded by the hint of its token and expert slot if it has one that the guard
        accepts, and to nearest otherwise.

        Args:
            x: float [rows, K].
            place: Decoder layer and `Site.FC2`.
            slots: What `dispatched_slots` knows of these rows.
            origin: Gives where a row of x is from; only called for an error message.
        """
        scope = self._scope_at(place)
        rows = x.detach()

        def name(row: int) -> str:
            of_expert, token_row = origin(row)
            if token_row is None:
                return f"expert {of_expert}, row {row} (of some rank of the expert-parallel group)"
            return f"expert {of_expert}, {scope.micro_batch.row_name(Site.FC2, token_row)}"

        known = self._at(place)
        first = scope.first_time(place)
        self._check(known, rows, name, counted=first)
        judged = first and slots is not None and slots.codes is not None
        hint = None if slots is None else slots.hint
        rounding = self._guided(known, hint, rows, counted=first, judged=judged)
        self.count_call(*place)
        if first:
            self._tally.add_slots(place, rows, rounding, slots, scope.micro_batch)
        return rounding

    def rounding(self, layer: int, site: Site, values: torch.Tensor) -> Rounding:
        """Gives how the operand of a place is rounded; the same when asked again.

        A row is rounded by the rollout's hint if it has one that the guard accepts, and to nearest
        otherwise.

        Args:
            layer: Decoder layer of the checkpoint.
            site: Site.
            values: float [N, K], the values of every token.

        Raises:
            RuntimeError: No micro-batch is in force, or the settings are not known.
            ValueError: The rows are not those of the micro-batch.
        """
        place = (layer, site)
        scope, known = self._scope_at(place), self._at(place)
        micro_batch = scope.micro_batch
        _require_rows(values.shape[0], micro_batch, site, known.name)
        first, hint = scope.first_time(place), micro_batch.hints.get(place)
        self._check(known, values, partial(micro_batch.row_name, site), counted=first)
        codes = micro_batch.codes.get(place) if first and self.diagnostics else None
        rounding = self._guided(known, hint, values, counted=first, judged=codes is not None)
        if first:
            recorded = place in self._recorded
            self._tally.add_coverage(place, values, rounding, micro_batch, recorded=recorded)
            if codes is not None:
                self._tally.add_mismatch(place, values, rounding, codes)
        return rounding

    def _guided(
        self,
        known: QuantisedPlace,
        hint: HintRows | None,
        values: torch.Tensor,
        *,
        counted: bool,
        judged: bool,
    ) -> Rounding:
        counts = counted and hint is not None
        rejected = self._tally.rejected(known.place, values.device) if counts else None
        return known.rounding(hint, values, rejected, judged=judged)

    def _check(
        self,
        known: QuantisedPlace,
        values: torch.Tensor,
        row_name: Callable[[int], str],
        *,
        counted: bool,
    ) -> None:
        """Looks for NaN and Inf, which the end of the pass acts on, and counts saturated blocks.

        Args:
            known: The place.
            values: float [N, K].
            row_name: Gives the name of a row.
            counted: Whether saturated blocks are counted.
        """
        place, largest = known.place, known.largest
        note = self._notes.of(place, values, row_name) if self.trace.check_finite else None
        count = None
        if counted and largest is not None:
            count = self._tally.saturated(place, values.device)
        block_size = known.nearest.number_format.block_size
        note_bad_values(values, note, count, largest or 0.0, block_size)

    # Counters.

    def count_call(self, layer: int, site: Site) -> None:
        """Counts one call of the quantiser of a place."""
        self._tally.calls[layer, site] += 1

    def count_weights(self, matrices: Sequence[ExpertMatrix], *, num_fresh: int) -> None:
        """Counts one forward pass that takes quantised expert weights.

        Args:
            matrices: Layer, global expert, `fc1` or `fc2` of each.
            num_fresh: How many of them had to be quantised for it.
        """
        self._tally.weight_uses.update(matrices)
        self._tally.weights_quantised += num_fresh

    def report(self) -> TraceReport:
        """Gives the counts since the last reset."""
        return self._tally.report()

    def reset_report(self) -> None:
        """Sets all counters to zero, at the start of a step."""
        self._tally.reset()

    def assert_ran(self) -> None:
        """Checks that since the last reset the method's quantisers ran everywhere, and no others.

        Raises:
            RuntimeError: A place or an expert weight was not quantised; with method bf16, one was;
                or something else in the model quantises.
        """
        problems = [
            *unexpected_quantising(
                self._tally,
                self.shape,
                places=self.quantised_places,
                weights=self.quantises_experts,
            ),
            *(f"{name} quantises" for name in foreign_quantisers(self._model)),
        ]
        if problems:
            raise RuntimeError(
                f"method {self.trace.method}: {len(problems)} quantisers did not run as they "
                f"should, or others did: {'; '.join(problems[:5])}"
            )

    def assert_guided(self, when: str) -> None:
        """Checks that since the last reset hints guided what they were recorded for.

        Args:
            when: What happened since, for the message, such as "step 0".

        Raises:
            RuntimeError: No row of a site was guided, or the guard rejected more of them than
                `guard_max_rejected_rows` allows.
        """
        if self.guides:
            share = self.trace.guard_max_rejected_rows
            require_guided(self.report().sites, max_rejected_rows=share, when=when)


def _require_rows(num_rows: int, micro_batch: MicroBatch, site: Site, where: str) -> None:
    expected = micro_batch.rows_at(site).real.numel()
    if num_rows != expected:
        raise ValueError(
            f"{where} got {num_rows} rows, but this rank has {expected} of the micro-batch in force"
            f" ({tuple(micro_batch.valid.shape)} [S, B]); forward the inputs of the micro-batch"
        )
