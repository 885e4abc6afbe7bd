"""The trainer of a cell: its quantisers, what they count for every sample, and noise.

Legend: S positions, B samples, N = S * B rows in [S, B] order, K values of a row.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

from megatron_trace.config import TraceConfig
from megatron_trace.formats import BLOCK_SIZE, own_scale_bytes, pack_codes, scales_e4m3
from megatron_trace.formats.blocks import fp32_blocks
from megatron_trace.formats.checks import as_row_scales
from megatron_trace.formats.minifloat import E2M1, nearest_codes
from megatron_trace.formats.packing import unpack_hint
from megatron_trace.hints.types import QuantizerSettings, Site
from megatron_trace.metrics import compare_rows
from megatron_trace.models.hybrid import decoder_layer_indices, decoder_layers
from megatron_trace.study.cells import Cell, EngineSetting, kept_layers
from megatron_trace.study.model import StudyModel
from megatron_trace.study.perturbation import perturb_layers
from megatron_trace.training.hint_rows import HintRows
from megatron_trace.training.model import build_trainer_model
from megatron_trace.training.rounding import Rounding
from megatron_trace.training.routing import install_keyed_replay
from megatron_trace.training.shape import ModelShape, Place
from megatron_trace.training.sites import TraceSites
from megatron_trace.training.slots import RowOrigin, SlotRows
from megatron_trace.training.weights import WeightRule

TRAINER_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Counts of a sample: by what they count and where, such as ("codes", "fc1", 3, "values").
Counts = dict[tuple[Any, ...], torch.Tensor]


class _AsItIs(Rounding):
    """Leaves an operand unquantised: the activations of W4A16."""

    def quantised(self, values: torch.Tensor) -> torch.Tensor:
        """Gives the values themselves."""
        return values.detach()


class StudySites(TraceSites):
    """TraceSites of a cell, which counts by sample and can round in ways that TRACE does not.

    Args:
        cell: The cell.
        trace: Configuration of the trainer.
        model: The model whose sites these are.
        shape: Sizes of the model.

    Attributes:
        counts: int64 [B] of the micro-batch in force, by what is counted and where.
    """

    def __init__(
        self, cell: Cell, trace: TraceConfig, model: HybridModel, shape: ModelShape
    ) -> None:
        super().__init__(trace, model, shape)
        self.cell = cell
        self.counts: Counts = {}
        self._dispatchers: dict[int, Any] = {
            layer.index: layer.moe.token_dispatcher
            for layer in decoder_layers(model)
            if layer.moe is not None
        }

    @property
    def weight_rule(self) -> WeightRule:
        """How the engine quantises expert weights, or their exact values."""
        rule = super().weight_rule
        if self.cell.scales == "accumulator":
            return dataclasses.replace(rule, operand_dtype=torch.float32)
        return rule

    def _operands(self, rounding: Rounding, place: Place) -> Rounding:
        exact = self.cell.scales == "accumulator" and not place[1].is_cached
        return dataclasses.replace(rounding, operand_dtype=torch.float32) if exact else rounding

    def quantise_rows(self, x: torch.Tensor, place: Place) -> torch.Tensor:
        """Fake-quantises as the cell says."""
        return x if self.cell.method == "w4a16" else super().quantise_rows(x, place)

    def rounding(self, layer: int, site: Site, values: torch.Tensor) -> Rounding:
        """Gives how fc1, k or v is rounded, and counts by sample."""
        rounding = super().rounding(layer, site, values).judged(values)
        micro_batch = self.micro_batch_in_force
        assert micro_batch is not None, "TraceSites.rounding demands one"
        rounding = dataclasses.replace(rounding, hint=self._varied(rounding, values))
        valid, place = micro_batch.valid, (layer, site)
        sample_of_row = torch.arange(valid.shape[1], device=values.device).repeat(valid.shape[0])
        stored, full = (known.get(place) for known in (micro_batch.hints, micro_batch.codes))
        self._count(place, values, rounding, sample_of_row, stored, full)
        return self._operands(rounding, place)

    def slot_rounding(
        self,
        x: torch.Tensor,
        place: Place,
        slots: SlotRows | None,
        origin: RowOrigin,
    ) -> Rounding:
        """Gives how the rows of all experts are rounded at fc2; counts by sample."""
        rounding = super().slot_rounding(x, place, slots, origin).judged(x.detach())
        if self.cell.method == "w4a16":
            return _AsItIs(**vars(rounding))
        micro_batch = self.micro_batch_in_force
        assert micro_batch is not None, "TraceSites.slot_rounding demands one"
        values = x.detach()
        rounding = dataclasses.replace(rounding, hint=self._varied(rounding, values))
        # One rank: the rows of an expert are its tokens in their order.
        rows = self._dispatchers[place[0]].routing_map.T.nonzero()[:, 1]
        sample_of_row = rows % len(micro_batch.sample_ids)
        stored = slots.hint.in_order() if slots is not None and slots.hint is not None else None
        codes = None if slots is None else slots.codes
        self._count(place, values, rounding, sample_of_row, stored, codes)
        return self._operands(rounding, place)

    def dispatched_slots(self, place: Place, dispatcher: MoETokenDispatcher) -> SlotRows | None:
        """Gives what is known of the rows at fc2; nothing where they are not quantised."""
        return None if self.cell.method == "w4a16" else super().dispatched_slots(place, dispatcher)

    def compare_routing(
        self, moe_layer: int, differs: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Counts the rows of every sample that go to another expert set than the rollout's."""
        super().compare_routing(moe_layer, differs)
        micro_batch = self.micro_batch_in_force
        if micro_batch is None:
            return
        different, real = differs(micro_batch.routing[moe_layer]), micro_batch.valid
        self._add(("routing", "compared"), real.sum(0))
        self._add(("routing", "different"), (different.view_as(real) & real).sum(0))

    def _varied(self, rounding: Rounding, values: torch.Tensor) -> HintRows | None:
        """Gives the hints that the cell rounds by."""
        hint, scale = rounding.hint, rounding.global_scale
        if hint is None or self.cell.scales in ("rollout", "accumulator"):
            return hint
        assert rounding.number_format.name == "nvfp4", "the cells with other scales are of NVFP4"
        assert scale is not None, "NVFP4 has one"
        if self.cell.scales == "own":
            return dataclasses.replace(hint, scale_bytes=own_scale_bytes(values, scale))
        effective = scales_e4m3.effective(hint.scale_bytes, as_row_scales(scale, values))
        codes = nearest_codes(E2M1, fp32_blocks(values, BLOCK_SIZE), effective).view(values.shape)
        return dataclasses.replace(hint, payload=pack_codes(codes), num_bits=4)

    def _count(
        self,
        place: Place,
        values: torch.Tensor,
        rounding: Rounding,
        sample_of_row: torch.Tensor,
        stored: HintRows | None,
        full: HintRows | None,
    ) -> None:
        layer, site = place
        hint = rounding.hint
        if hint is not None and stored is not None:
            for name, rows in (("present", stored.has_hint), ("guided", hint.has_hint)):
                self._add_rows(("rows", str(site), name), rows, sample_of_row)
        if self.cell.codes == "no" or full is None:
            return
        known = full.has_hint
        used = hint and hint.used_at(known)
        by_row = compare_rows(
            values[known],
            unpack_hint(full.payload[known], full.num_bits),
            full.scale_bytes[known],
            rounding.global_scale,
            used,
            rounding.number_format,
        )
        where = (str(site), layer) if self.cell.codes == "layer" else (str(site), None)
        for name, counts in by_row.items():
            self._add_rows(("codes", *where, name), counts, sample_of_row[known])

    def _add_rows(
        self, key: tuple[Any, ...], counts: torch.Tensor, sample_of_row: torch.Tensor
    ) -> None:
        assert self.micro_batch_in_force is not None, "checked by the callers"
        by_sample = torch.zeros(
            len(self.micro_batch_in_force.sample_ids), dtype=torch.int64, device=counts.device
        )
        self._add(key, by_sample.index_add_(0, sample_of_row, counts.to(torch.int64)))

    def _add(self, key: tuple[Any, ...], by_sample: torch.Tensor) -> None:
        self.counts[key] = self.counts[key] + by_sample if key in self.counts else by_sample


def trace_config(cell: Cell, engine: EngineSetting, num_layers: int) -> TraceConfig:
    """Gives the trainer's configuration of a cell.

    Args:
        cell: The cell.
        engine: The engine setting whose samples it scores.
        num_layers: Decoder layers of the model.
    """
    if cell.method == "bf16":
        return TraceConfig(method="bf16")
    return TraceConfig(
        method="trace" if cell.method == "trace" else "qat",
        hint_bits=cell.bits,
        hint_scales=cell.scale_form,
        hint_layers=",".join(map(str, kept_layers(cell.layers, num_layers))),
        hint_sites=cell.sites,
        guard=cell.guard,
        power_of_two_scales=engine.power_of_two_scales,
        number_format=engine.number_format,
    )


def num_decoder_layers(model: StudyModel) -> int:
    """Gives the number of decoder layers of a model."""
    return 1 + decoder_layer_indices(model.pattern)[-1]


def build_trainer(
    model: StudyModel,
    cell: Cell,
    engine: EngineSetting,
    settings: QuantizerSettings | None,
    weights: Mapping[str, torch.Tensor],
) -> tuple[HybridModel, StudySites]:
    """Builds the trainer of a cell.

    Args:
        model: The model.
        cell: The cell.
        engine: The engine setting whose samples it scores.
        settings: Quantiser settings of that engine; not read by method bf16.
        weights: Parameters by name; noise on weights is added to them here.
    """
    config = copy.copy(model.config)
    config.perform_initialization = False  # Every parameter is copied below.
    trace = trace_config(cell, engine, num_decoder_layers(model))
    trainer, plain_sites = build_trainer_model(
        config,
        pattern=model.pattern,
        vocab_size=model.vocab_size,
        max_sequence_length=model.context,
        trace=trace,
        dtype=TRAINER_DTYPES[cell.dtype],
        attention=cell.attention,
        rotary_base=model.rotary_base,
    )
    sites = StudySites(cell, trace, trainer, plain_sites.shape)
    install_keyed_replay(trainer, sites)
    for module in trainer.modules():
        place: Any = getattr(module, "place", None)
        if place is not None:
            module.place = dataclasses.replace(place, sites=sites)
    if sites.quantises:
        assert settings is not None, "a cell that quantises scores a quantising engine"
        sites.settings = settings
    copy_with_noise(trainer, weights, cell)
    return trainer.eval(), sites


@torch.no_grad()
def copy_with_noise(
    trainer: torch.nn.Module, weights: Mapping[str, torch.Tensor], cell: Cell
) -> None:
    """Copies weights into a trainer, times 1 + size * noise if the cell says so.

    Raises:
        ValueError: A parameter of the trainer is not among the weights.
    """
    kind, size = cell.noise
    generator = torch.Generator().manual_seed(0)
    for name, parameter in trainer.named_parameters():
        if name not in weights:
            raise ValueError(f"parameter {name} is missing in the weights of the study's model")
        value = weights[name].float()
        if kind == "weights" and size > 0:
            value = value.cpu() * (1 + size * torch.randn(value.shape, generator=generator))
        parameter.copy_(value)


@contextlib.contextmanager
def activation_noise(trainer: HybridModel, cell: Cell) -> Iterator[None]:
    """Multiplies the output of every layer by 1 + size * noise, the same noise each time."""
    kind, size = cell.noise
    if kind != "activations" or size == 0:
        yield
        return
    hooks = perturb_layers(trainer, size)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def counts_of_sample(sites: StudySites, column: int) -> dict[str, Any]:
    """Gives the counts of one sample as nested plain numbers."""
    plain: dict[str, Any] = {}
    for key, by_sample in sites.counts.items():
        *path, name = (str(part) for part in key if part is not None)
        at = plain
        for part in path:
            at = at.setdefault(part, {})
        at[name] = int(by_sample[column])
    return plain
