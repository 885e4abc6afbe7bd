"""ModelSites: what of one trainer model is quantised, by which settings, for which micro-batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_trace.config import TraceConfig
from megatron_trace.formats import NumberFormat
from megatron_trace.hints.types import QuantizerSettings, Site, site_format
from megatron_trace.models.attention import SDPACoreAttention
from megatron_trace.models.hybrid import DecoderModel, decoder_layers
from megatron_trace.training.non_finite import NonFiniteNotes
from megatron_trace.training.quantised_place import QuantisedPlace, quantised_place
from megatron_trace.training.reproduced import OPERAND_DTYPES, require_reproduced
from megatron_trace.training.rounding import NonFiniteError
from megatron_trace.training.scope import Scope, Scopes
from megatron_trace.training.shape import ModelShape, Place
from megatron_trace.training.staging_plan import StagingPlan
from megatron_trace.training.weights import WeightRule

if TYPE_CHECKING:
    from megatron_trace.training.micro_batch import MicroBatch


class ModelSites:
    """Quantised places of one trainer model, quantiser settings, and the micro-batch in force.

    Args:
        trace: The run's configuration.
        model: The model whose sites these are.
        shape: Sizes of the model.

    Attributes:
        on_non_finite: Gets the error of the first NaN or Inf at a site of a pass, and training goes
            on with it; None lets the error be raised, where the pass ends.
        diagnostics: Whether codes are compared with the rollout's full codes. Set it before
            micro-batches are made: they carry the codes.
        recorded_places: Places whose hints the method uses, as the configuration says.
    """

    def __init__(self, trace: TraceConfig, model: DecoderModel, shape: ModelShape) -> None:
        self.trace = trace
        self.shape = shape
        self.on_non_finite: Callable[[NonFiniteError], None] | None = None
        self.diagnostics = False
        self._model = model
        self._settings: QuantizerSettings | None = None
        self._settings_digest = ""
        self._weight_rule: WeightRule | None = None
        self._quantised: dict[Place, QuantisedPlace] = {}
        self._notes = NonFiniteNotes(shape.places, lambda: self.on_non_finite)
        self._scopes = Scopes(model, self._notes)
        layers = set(trace.recorded_layers(shape.num_layers))
        guided = trace.sites_in(shape.model_sites)
        # Places of the configuration's hints, whether or not the method uses them.
        self._hint_places = tuple(
            place for place in shape.places if place[0] in layers and str(place[1]) in guided
        )
        self.recorded_places: tuple[Place, ...] = self._hint_places if self.guides else ()

    @property
    def device(self) -> torch.device:
        """Device of the model's parameters."""
        return next(self._model.parameters()).device

    @property
    def forwards_packs(self) -> bool:
        """Whether every layer here can forward packed sequences."""
        pattern = getattr(self._model, "hybrid_layer_pattern", None) or ""
        if self.shape.layout.cp_size > 1 and Symbols.GDN in pattern:
            return False
        return not self.needs_mask

    @property
    def needs_mask(self) -> bool:
        """Whether an attention here has to be told what it may attend to.

        torch's is causal by itself, and a mask of S x S for each micro-batch takes the host
        milliseconds and, of long contexts, gigabytes.
        """
        return not all(
            isinstance(layer.attention.core_attention, SDPACoreAttention)
            for layer in decoder_layers(self._model)
            if layer.attention is not None
        )

    @property
    def groups(self) -> ProcessGroupCollection:
        """Process groups of the model."""
        return self._model.pg_collection

    @property
    def quantises(self) -> bool:
        """Whether the method fake-quantises at all."""
        return self.trace.method != "bf16"

    @property
    def quantises_experts(self) -> bool:
        """Whether weights of routed experts are fake-quantised, and but for quads their inputs."""
        return self.trace.quantises_experts and bool(self.shape.moe_layers)

    @property
    def quantised_places(self) -> tuple[Place, ...]:
        """Places that are fake-quantised."""
        sites = self.trace.trained_sites
        return tuple(place for place in self.shape.places if str(place[1]) in sites)

    @property
    def quantises_expert_inputs(self) -> bool:
        """Whether inputs of routed experts are fake-quantised; not under quads, which is W4A16."""
        return Site.FC1 in self.trace.trained_sites

    def format_of(self, site: Site) -> NumberFormat:
        """Gives the number format of a site."""
        return site_format(self.trace.formats, site)

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
            LookupError: A place of the model was not calibrated.
            RuntimeError: A micro-batch is in force.
        """
        if not self.quantises:
            raise ValueError("method bf16 quantises nothing, so quantiser settings have no effect")
        if self._scopes.current is not None:
            raise RuntimeError("quantiser settings cannot change while a micro-batch is in force")
        require_reproduced(settings, self.trace, self.quantised_places)
        self._settings, self._settings_digest = settings, settings.digest()
        self._weight_rule = None
        self._quantised.clear()

    def staging_plan(self) -> StagingPlan:
        """Gives what is read for micro-batches of this model, as it is set now.

        Raises:
            RuntimeError: The rollout's quantiser settings were not given yet.
        """
        return StagingPlan(
            trace=self.trace,
            shape=self.shape,
            settings=self.settings if self.quantises else None,
            recorded_places=self.recorded_places,
            diagnostics=self.diagnostics,
            forwards_packs=self.forwards_packs,
        )

    @property
    def operand_dtype(self) -> torch.dtype:
        """dtype in which dequantised operands are rounded, also when the trainer runs in FP32."""
        return OPERAND_DTYPES[self.settings.operand_dtype]

    @property
    def weight_rule(self) -> WeightRule:
        """How the engine quantises expert weights."""
        if self._weight_rule is None:
            settings = self.settings
            scales = settings.power_of_two_scales
            self._weight_rule = WeightRule(self.operand_dtype, scales, settings.formats.weights)
        return self._weight_rule

    def _at(self, place: Place) -> QuantisedPlace:
        known = self._quantised.get(place)
        if known is None:
            of_model = self.trace, self.settings, self.groups, self.device
            known = self._quantised[place] = quantised_place(place, *of_model)
        return known

    # The micro-batch in force.

    @property
    def micro_batch_in_force(self) -> MicroBatch | None:
        """The micro-batch whose forward or backward runs now."""
        scope = self._scopes.current
        return None if scope is None else scope.micro_batch

    @contextlib.contextmanager
    def micro_batch(
        self, micro_batch: MicroBatch, *, replay_routing: bool = True
    ) -> Iterator[MicroBatch]:
        """Puts a micro-batch in force for a forward pass, and for the backward of its output.

        Backward may run inside or after the scope, and several micro-batches may be in flight.
        Hints and routing are looked up by (decoder layer, site), and reading changes nothing, so
        recomputation and a second forward pass within the scope get the same.

        Args:
            micro_batch: Made by `make_micro_batch` for this `TraceSites`.
            replay_routing: Whether tokens go to the rollout's experts. If not, the share of
                (token, layer) with another expert set is counted instead. Without effect in a
                model without MoE layers.

        Raises:
            RuntimeError: Another micro-batch is in force, or replay is impossible.
            ValueError: The micro-batch was made for another model or other quantiser settings.
            NonFiniteError: A value at a site is NaN or Inf; raised where the model's forward ends,
                where the backward pass ends that recomputed it, or here.
        """
        if micro_batch.made_for is not self:
            raise ValueError(
                f"the micro-batch of sample {micro_batch.sample_ids[0]} was made for another "
                "model; make it again with these TraceSites"
            )
        if self.quantises and micro_batch.settings_digest != self._settings_digest:
            raise ValueError(
                f"the micro-batch was made under quantiser settings {micro_batch.settings_digest}, "
                f"but this model has {self._settings_digest} now; make it again"
            )
        replayable = self._model.config.moe_enable_routing_replay or not self.shape.moe_layers
        if replay_routing and not replayable:
            raise RuntimeError(
                "routing cannot be replayed: the model was built with "
                "moe_enable_routing_replay=False; set it, or pass replay_routing=False"
            )
        with self._scopes.entered(Scope(micro_batch, replay_routing)):
            yield micro_batch
