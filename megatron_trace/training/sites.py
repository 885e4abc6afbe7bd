"""TraceSites: what the quantisers of one trainer model know, and the micro-batch in force.

Legend: S positions, B samples, N = S * B rows in [S, B] order, K values of a row, E experts,
k top-k.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from megatron_trace.config import TraceConfig
from megatron_trace.formats import BLOCK_SIZE, E2M1_MAX, E4M3_MAX, ops, unpack_codes
from megatron_trace.hints.guard import accept_rows
from megatron_trace.hints.types import QuantizerSettings, Site
from megatron_trace.metrics import compare_codes
from megatron_trace.training.report import Place, Tally, TraceReport
from megatron_trace.training.weights import QuantisedWeight

if TYPE_CHECKING:
    from megatron_trace.training.micro_batch import HintRows, MicroBatch

OPERAND_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# What this trainer reproduces of the rollout's quantiser; anything else is refused.
REPRODUCED_SETTINGS = {
    "number_format": ("nvfp4",),
    "block_size": (BLOCK_SIZE,),
    "prefill_attends_to": ("quantized",),
    "operand_dtype": tuple(OPERAND_DTYPES),
}


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a trainer model that samples and hints must fit.

    Attributes:
        attention_layers: Decoder layers with full attention.
        moe_layers: Decoder layers with a MoE.
        num_layers: Decoder layers.
        num_experts: Routed experts of a MoE layer, over all ranks.
        top_k: Experts of a token.
        hidden_size: Values of an fc1 row.
        kv_values: Values of a k or v row: KV heads times head dim.
        max_sequence_length: Longest sequence in tokens.
    """

    attention_layers: tuple[int, ...]
    moe_layers: tuple[int, ...]
    num_layers: int
    num_experts: int
    top_k: int
    hidden_size: int
    kv_values: int
    max_sequence_length: int

    @property
    def num_moe_layers(self) -> int:
        """MoE layers."""
        return len(self.moe_layers)

    def row_width(self, site: Site) -> int:
        """Gives the values of a row at a guided site."""
        return self.hidden_size if site is Site.FC1 else self.kv_values

    def places(self) -> tuple[Place, ...]:
        """Gives every (decoder layer, site) that the methods qat and trace quantise."""
        moe = [(layer, site) for layer in self.moe_layers for site in (Site.FC1, Site.FC2)]
        attention = [(layer, site) for layer in self.attention_layers for site in (Site.K, Site.V)]
        return tuple(sorted(moe + attention))


@dataclass
class _Scope:
    micro_batch: MicroBatch
    replay_routing: bool
    counted: set[Place] = field(default_factory=set)
    routing_counted: set[int] = field(default_factory=set)


class TraceSites:
    """Quantiser settings, current micro-batch and counters of one trainer model.

    A second model (a reference, a teacher) has its own and shares nothing with this one.

    Attributes:
        trace: The run's configuration.
        model_shape: Sizes of the model.
        diagnostics: Whether codes are compared with the rollout's full codes, where a micro-batch
            has them.
    """

    def __init__(self, trace: TraceConfig, model_shape: ModelShape, *, replays: bool) -> None:
        self.trace = trace
        self.model_shape = model_shape
        self.diagnostics = False
        self._replays = replays
        self._settings: QuantizerSettings | None = None
        self._scope: _Scope | None = None
        self._tally = Tally()
        self._checkpointed_in_scope = False
        recorded = set(trace.recorded_layers(model_shape.num_layers))
        self.recorded_places: tuple[Place, ...] = tuple(
            place
            for place in model_shape.places()
            if self.guides and place[0] in recorded and str(place[1]) in trace.hint_sites
        )

    @property
    def quantises(self) -> bool:
        """Whether the method fake-quantises at all."""
        return self.trace.method != "bf16"

    @property
    def guides(self) -> bool:
        """Whether the method uses the rollout's hints."""
        return self.trace.method == "trace"

    @property
    def settings(self) -> QuantizerSettings:
        """Quantiser settings of the rollout engine.

        Raises:
            RuntimeError: They were not given yet.
        """
        if self._settings is None:
            raise RuntimeError(
                f"method {self.trace.method} needs the rollout's quantiser settings before the "
                "trainer runs; set `sites.settings = engine.settings` after calibration"
            )
        return self._settings

    @settings.setter
    def settings(self, settings: QuantizerSettings) -> None:
        """Takes the settings of the engine.

        Raises:
            ValueError: The method quantises nothing, or the trainer cannot reproduce a setting.
            RuntimeError: A micro-batch is in force.
        """
        if not self.quantises:
            raise ValueError("method bf16 quantises nothing, so quantiser settings have no effect")
        if self._scope is not None:
            raise RuntimeError("quantiser settings cannot change while a micro-batch is in force")
        for name, reproduced in REPRODUCED_SETTINGS.items():
            if getattr(settings, name) not in reproduced:
                raise ValueError(
                    f"the trainer reproduces {name} {' or '.join(map(str, reproduced))}; the "
                    f"rollout's settings say {getattr(settings, name)}"
                )
        for place in self.model_shape.places():
            settings.global_scale(*place)
        self._settings = settings

    @property
    def operand_dtype(self) -> torch.dtype:
        """dtype in which dequantised operands are rounded, also when the trainer runs in FP32."""
        return OPERAND_DTYPES[self.settings.operand_dtype]

    # --- micro-batch in force

    @property
    def micro_batch_in_force(self) -> MicroBatch | None:
        """The micro-batch whose forward or backward runs now."""
        return self._scope.micro_batch if self._scope else None

    @contextlib.contextmanager
    def micro_batch(
        self, micro_batch: MicroBatch, *, replay_routing: bool = True
    ) -> Iterator[MicroBatch]:
        """Puts a micro-batch in force for a forward pass and its backward pass.

        Hints and routing are looked up by (decoder layer, site), and reading changes nothing, so
        recomputation and a second forward pass within the scope get the same.

        Args:
            micro_batch: Made by `make_micro_batch` for this `TraceSites`.
            replay_routing: Whether tokens go to the rollout's experts. If not, the share of
                (token, layer) with another expert set is counted instead.

        Raises:
            RuntimeError: Another micro-batch is in force, or replay is impossible.
            ValueError: The micro-batch was made under other quantiser settings.
        """
        if self._scope is not None:
            raise RuntimeError(
                f"a micro-batch of {len(self._scope.micro_batch.sample_ids)} samples is in force "
                f"already (first: {self._scope.micro_batch.sample_ids[0]}); scopes do not nest: "
                "leave one before entering the next"
            )
        if replay_routing and not self._replays:
            raise RuntimeError(
                "routing cannot be replayed: the model was built with "
                "moe_enable_routing_replay=False; set it, or pass replay_routing=False"
            )
        if self.quantises and micro_batch.settings_digest != self.settings.digest():
            raise ValueError(
                f"the micro-batch was made under quantiser settings {micro_batch.settings_digest}, "
                f"but this model has {self.settings.digest()}; make it again from these TraceSites"
            )
        self._scope = _Scope(micro_batch, replay_routing)
        try:
            yield micro_batch
        except BaseException:
            self._checkpointed_in_scope = False
            raise
        finally:
            self._scope = None

    def _scope_at(self, place: Place) -> _Scope:
        if self._scope is None:
            raise RuntimeError(
                f"no micro-batch is in force at layer {place[0]}, site {place[1]}; run forward "
                "and backward (which recomputes) inside `with sites.micro_batch(...)`"
            )
        return self._scope

    # --- routing

    def replayed_experts(
        self, moe_layer: int, num_rows: int, recomputing: bool
    ) -> torch.Tensor | None:
        """Gives the experts of the rows of one MoE layer; None if the router is to choose.

        Args:
            moe_layer: Ordinal of the MoE layer in the model.
            num_rows: Rows N that the router scores.
            recomputing: Whether this pass recomputes an earlier one for its gradients.

        Returns:
            int64 [N, k] or None.

        Raises:
            RuntimeError: A pass of a micro-batch is recomputed after its scope ended.
            ValueError: The rows are not those of the micro-batch in force.
        """
        if self._scope is None:
            if recomputing and self._checkpointed_in_scope:
                raise RuntimeError(
                    f"MoE layer {moe_layer} recomputes a micro-batch whose scope has ended, so its "
                    "routing is unknown; run backward inside `with sites.micro_batch(...)`"
                )
            self._checkpointed_in_scope = False
            return None
        self._checkpointed_in_scope = True
        if not self._scope.replay_routing:
            return None
        routing = self._scope.micro_batch.routing[moe_layer]
        if routing.shape[0] != num_rows:
            raise ValueError(
                f"MoE layer {moe_layer} routes {num_rows} rows, but the micro-batch in force has "
                f"{routing.shape[0]} ({tuple(self._scope.micro_batch.valid.shape)} [S, B]); "
                "forward the tokens of the micro-batch"
            )
        return routing

    def compare_routing(self, moe_layer: int, experts: torch.Tensor) -> None:
        """Counts the real rows that the router sends to another expert set than the rollout's.

        Args:
            moe_layer: Ordinal of the MoE layer in the model.
            experts: int64 [N, k]; the router's choice.
        """
        scope = self._scope
        if scope is None or moe_layer in scope.routing_counted:
            return
        scope.routing_counted.add(moe_layer)
        real = scope.micro_batch.valid.flatten().to(experts.device)
        recorded = scope.micro_batch.routing[moe_layer].to(experts.device)
        different = (experts.sort(-1).values != recorded.sort(-1).values).any(-1) & real
        self._tally.add_routing(int(real.sum()), different.sum())

    # --- quantisers

    def quantise_rows(self, x: torch.Tensor, place: Place) -> torch.Tensor:
        """Fake-quantises the values of every token at a guided site.

        A row is rounded by the rollout's hint if it has one that the guard accepts, and to nearest
        otherwise; the gradient is the identity.

        Args:
            x: float [S, B, ...]; the trailing dims are the K values of a row.
            place: Decoder layer and site.

        Returns:
            Like x.

        Raises:
            RuntimeError: No micro-batch is in force, or the settings are not known.
            ValueError: The rows are not those of the micro-batch, or a value is NaN or Inf.
        """
        scope = self._scope_at(place)
        if x.shape[:2] != scope.micro_batch.valid.shape:
            raise ValueError(
                f"layer {place[0]}, site {place[1]} got rows {tuple(x.shape[:2])} [S, B], but the "
                f"micro-batch in force has {tuple(scope.micro_batch.valid.shape)}; forward the "
                "tokens of the micro-batch"
            )
        rows = x.detach().flatten(2)
        self._require_finite(
            rows, place, lambda index: _row_name(scope.micro_batch, index[0], index[1])
        )
        first = self._count_call(scope, place)
        hint = scope.micro_batch.hints.get(place)
        if hint is None:
            guided = torch.zeros_like(scope.micro_batch.valid)
            values = self._rtn(rows, place)
        else:
            guided = self._accepted(rows, hint, place)
            values = self._guided(rows, hint, guided, place)
        if first:
            self._count_rows(scope.micro_batch, rows, hint, guided, place)
            self._compare_with_codes(scope.micro_batch, rows, guided, place)
        return ops.straight_through(x, values.view(x.shape))

    def quantise_fc2(
        self,
        x: torch.Tensor,
        place: Place,
        expert: int,
        token_rows: Callable[[], torch.Tensor | None],
    ) -> torch.Tensor:
        """Fake-quantises the unweighted activations of one expert by rounding to nearest.

        Args:
            x: float [rows, K].
            place: Decoder layer and `Site.FC2`.
            expert: Global index of the expert, for messages.
            token_rows: Gives which of the micro-batch's N rows the rows of x are, or None if that
                is not known; only called for an error message.
        """
        scope = self._scope_at(place)
        rows = x.detach()

        def name(index: list[int]) -> str:
            known = token_rows()
            if known is None:
                return f"expert {expert}, row {index[0]} (a sample of the expert-parallel group)"
            s, b = divmod(int(known[index[0]]), len(scope.micro_batch.sample_ids))
            return f"expert {expert}, {_row_name(scope.micro_batch, s, b)}"

        self._require_finite(rows, place, name)
        self._tally.calls[place] += 1
        if (expert, place) not in scope.counted:
            scope.counted.add((expert, place))
            self._tally.add_rows(place, not_recorded=rows.shape[0], **self._saturation(rows, place))
        return ops.straight_through(x, self._rtn(rows, place))

    def expert_weight(self, linear: torch.nn.Module) -> QuantisedWeight:
        """Gives the quantised weight of an expert linear of this model."""
        quantised, fresh = linear.place.weight.current(linear.weight, self.operand_dtype)
        self._tally.weights_quantised += fresh
        return quantised

    def count_weight_use(self, layer: int, expert: int, matrix: str) -> None:
        """Counts one forward pass that takes a quantised expert weight."""
        self._tally.weight_uses[layer, expert, matrix] += 1

    def _rtn(self, rows: torch.Tensor, place: Place) -> torch.Tensor:
        return ops.rtn(
            rows,
            self.settings.global_scale(*place),
            dtype=self.operand_dtype,
            implementation=self.trace.implementation,
        )

    def _accepted(self, rows: torch.Tensor, hint: HintRows, place: Place) -> torch.Tensor:
        present = hint.present.to(rows.device)
        if not self.trace.guard:
            return present
        health = accept_rows(
            rows,
            hint.payload.to(rows.device),
            hint.scale_bytes.to(rows.device),
            self.settings.global_scale(*place),
            num_bits=hint.num_bits,
            max_far_blocks=self.trace.guard_max_far_blocks,
            max_scale_steps=self.trace.guard_max_scale_steps,
            min_parity_agreement=self.trace.guard_min_parity_agreement,
        )
        return present & health.accepted

    def _guided(
        self, rows: torch.Tensor, hint: HintRows, guided: torch.Tensor, place: Place
    ) -> torch.Tensor:
        values = ops.guided(
            rows,
            hint.payload.to(rows.device),
            hint.scale_bytes.to(rows.device),
            self.settings.global_scale(*place),
            num_bits=hint.num_bits,
            dtype=self.operand_dtype,
            implementation=self.trace.implementation,
        )
        rest = ~guided
        if rest.any():
            values[rest] = self._rtn(rows[rest], place)
        return values

    def _require_finite(
        self, rows: torch.Tensor, place: Place, name: Callable[[list[int]], str]
    ) -> None:
        if not self.trace.check_finite or bool(rows.isfinite().all()):
            return
        index = (~rows.isfinite()).nonzero()[0].tolist()
        raise ValueError(
            f"value {rows[tuple(index)].item()} at layer {place[0]}, site {place[1]}, "
            f"{name(index)}, column {index[-1]}: quantisers need finite values; look at the loss "
            "and the gradients of the steps before"
        )

    # --- counters

    def _count_call(self, scope: _Scope, place: Place) -> bool:
        self._tally.calls[place] += 1
        first = place not in scope.counted
        scope.counted.add(place)
        return first

    def _count_rows(
        self,
        micro_batch: MicroBatch,
        rows: torch.Tensor,
        hint: HintRows | None,
        guided: torch.Tensor,
        place: Place,
    ) -> None:
        real = int(micro_batch.valid.sum())
        present = 0 if hint is None else int(hint.present.sum())
        num_guided = guided.sum()
        recorded = place in self.recorded_places
        self._tally.add_rows(
            place,
            guided=num_guided,
            rejected=present - num_guided,
            missing=real - present if recorded else 0,
            not_recorded=0 if recorded else real,
            padding=micro_batch.valid.numel() - real,
            **self._saturation(rows, place),
        )

    def _saturation(self, rows: torch.Tensor, place: Place) -> dict[str, int | torch.Tensor]:
        largest = E2M1_MAX * E4M3_MAX * self.settings.global_scale(*place)
        amax = rows.unflatten(-1, (-1, BLOCK_SIZE)).abs().amax(-1)
        return {"blocks": amax.numel(), "saturated_blocks": (amax > largest).sum()}

    def _compare_with_codes(
        self, micro_batch: MicroBatch, rows: torch.Tensor, guided: torch.Tensor, place: Place
    ) -> None:
        full = micro_batch.codes.get(place) if self.diagnostics else None
        if full is None:
            return
        present = full.present.to(rows.device)
        mismatch = compare_codes(
            rows[present],
            unpack_codes(full.payload.to(rows.device)[present]),
            full.scale_bytes.to(rows.device)[present],
            self.settings.global_scale(*place),
            guided_rows=guided[present],
            num_bits=self.trace.hint_bits,
        )
        self._tally.add_mismatch(place, mismatch)

    def report(self) -> TraceReport:
        """Gives the counts since the last reset."""
        return self._tally.report()

    def reset_report(self) -> None:
        """Sets all counters to zero, at the start of a step."""
        self._tally = Tally()


def _row_name(micro_batch: MicroBatch, position: int, column: int) -> str:
    kind = "token" if micro_batch.valid[position, column] else "padding"
    return f"sample {micro_batch.sample_ids[column]}, {kind} {position}"
