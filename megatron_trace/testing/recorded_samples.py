"""Samples with hints for trainer tests, recorded from a forward pass instead of an engine.

A second trainer model plays the rollout: what its quantisers see is recorded, as an engine's would
be. With the other dtype, or slightly different weights, its values differ as a rollout's do.

Legend: T tokens of a sample, R = T - 1 rows, L MoE layers, k top-k, K values of a row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel

from megatron_trace.formats import ops
from megatron_trace.hints.codec import encode_packed_hint
from megatron_trace.hints.store import HintStore, RecordKind
from megatron_trace.hints.types import (
    HintKey,
    QuantizerSettings,
    RolloutSample,
    ScaleForm,
    Site,
    stored_bits,
)
from megatron_trace.training import tally
from megatron_trace.training.micro_batch import MicroBatch, make_micro_batch
from megatron_trace.training.model import token_logprobs
from megatron_trace.training.report import ActivationDifference
from megatron_trace.training.rounding import PackedRows, Rounding
from megatron_trace.training.shape import ModelShape, Place
from megatron_trace.training.sites import TraceSites


def random_samples(
    lengths: Sequence[tuple[int, int]],
    shape: ModelShape,
    *,
    vocab_size: int,
    settings_digest: str = "",
    seed: int = 0,
    num_experts: int | None = None,
) -> list[RolloutSample]:
    """Gives samples with random tokens and random routing, and log-probs of 0.

    Args:
        lengths: (prompt, response) tokens of each sample.
        shape: Sizes of the model.
        vocab_size: Token ids are below it.
        settings_digest: Digest of the quantiser settings.
        seed: Seed of tokens and routing.
        num_experts: Experts below which routing stays; None uses all.
    """
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for index, (prompt, response) in enumerate(lengths):
        tokens = torch.randint(vocab_size, (prompt + response,), generator=generator).tolist()
        scores = torch.rand(
            prompt + response - 1,
            len(shape.moe_layers),
            num_experts or shape.num_experts,
            generator=generator,
        )
        samples.append(
            RolloutSample(
                sample_id=f"sample-{index}",
                prompt_tokens=tuple(tokens[:prompt]),
                response_tokens=tuple(tokens[prompt:]),
                logprobs=torch.zeros(response),
                routing=scores.topk(shape.top_k, -1).indices.to(torch.int16),
                policy_version=0,
                settings_digest=settings_digest,
                finish_reason="length",
            )
        )
    return samples


def calibrate(model: HybridModel, sites: TraceSites, samples: Sequence[RolloutSample]) -> None:
    """Gives `sites` settings whose global scales hold what the samples make its quantisers see.

    Args:
        model: Trainer model of method qat or trace.
        sites: Its `TraceSites`.
        samples: Tokens and routing to calibrate with.
    """
    trace = sites.trace
    settings = QuantizerSettings(
        {}, number_format=trace.number_format, quantised_parts=trace.quantised_parts
    )
    if settings.has_global_scales:
        places = sites.quantised_places
        sites.settings = replace(settings, global_scales=dict.fromkeys(places, 1.0))
        _, seen, _ = _forward_recorded(model, sites, samples)
        scales = {}
        for place, values in seen.items():
            amax = torch.cat(values.inputs).abs().amax()
            scale = sites.format_of(place[1]).global_scale_from_amax(amax)
            assert scale is not None, "all formats of a set have global scales, or none"
            scales[place] = scale.item()
        settings = replace(settings, global_scales=scales)
    sites.settings = settings
    sites.reset_report()


def record(
    model: HybridModel,
    sites: TraceSites,
    samples: Sequence[RolloutSample],
    store: HintStore,
    *,
    num_bits: int = 1,
    scale_form: ScaleForm = "raw",
    places: Sequence[Place] | None = None,
    codes: bool = False,
) -> list[RolloutSample]:
    """Forwards samples, records hints into the store, and gives the samples with their log-probs.

    Args:
        model: Trainer model of method qat that plays the rollout.
        sites: Its `TraceSites`, calibrated.
        samples: Tokens and routing.
        store: Gets the hints.
        num_bits: Bits of a hint.
        scale_form: How a hint keeps block scales.
        places: Places to record; None records fc1, k and v of every layer; fc2 on one rank only.
        codes: Whether to store full codes for diagnostics too.
    """
    samples = [replace(s, settings_digest=sites.settings.digest()) for s in samples]
    micro_batch, seen, logprobs = _forward_recorded(model, sites, samples)
    guided = [place for place in sites.shape.places if place[1] is not Site.FC2]
    for place in guided if places is None else places:
        scale = sites.settings.global_scale(*place)
        if place[1] is Site.FC2:
            routing = micro_batch.routing[sites.shape.moe_layers.index(place[0])]
            values = slots_side_by_side(seen[place].inputs, routing)
        else:
            values = torch.cat(seen[place].inputs)
        number_format = sites.format_of(place[1])
        encoded = ops.encode(values, scale, number_format=number_format)
        packed_codes, scale_bytes = (part.cpu() for part in encoded)  # As an engine's hints.
        for column, sample in enumerate(samples):
            rows = torch.arange(sample.num_rows) * len(samples) + column
            key = HintKey(sample.sample_id, *place, sample.policy_version, sample.settings_digest)
            own = (key, packed_codes[rows], scale_bytes[rows], scale)
            bits, all_bits = (stored_bits(number_format, asked) for asked in (num_bits, 4))
            store.put(encode_packed_hint(*own, bits, scale_form, number_format))
            if codes:
                whole = encode_packed_hint(*own, all_bits, "raw", number_format)
                store.put(whole, RecordKind.CODES)
    return [
        replace(sample, logprobs=logprobs[b][micro_batch.loss_mask[b]])
        for b, sample in enumerate(samples)
    ]


def _forward_recorded(
    model: HybridModel, sites: TraceSites, samples: Sequence[RolloutSample]
) -> tuple[MicroBatch, dict[Place, SeenValues], torch.Tensor]:
    samples = [replace(s, settings_digest=sites.settings.digest()) for s in samples]
    micro_batch = make_micro_batch(samples, None, sites)
    with torch.no_grad(), seen_values(sites) as seen, sites.micro_batch(micro_batch):
        logprobs = token_logprobs(model, sites, micro_batch)
    return micro_batch, seen, logprobs


def slots_side_by_side(
    rows_of_experts: Sequence[torch.Tensor], experts: torch.Tensor
) -> torch.Tensor:
    """Gives a row per token, its expert slots side by side, from the rows of expert after expert.

    Args:
        rows_of_experts: [rows, K] of each expert, tokens ascending.
        experts: int64 [T, k]; the routing record.

    Returns:
        [T, k * K].
    """
    rows = torch.cat(list(rows_of_experts))
    slots = rows.new_full((*experts.shape, rows.shape[1]), torch.nan)
    _, order = experts.flatten().sort(stable=True)
    slots.view(-1, rows.shape[1])[order] = rows
    return slots.flatten(1)


@dataclass
class SeenValues:
    """What the quantiser of a place got and gave, call by call; of slots, expert by expert.

    Attributes:
        inputs: float [rows, K] of each call.
        outputs: The same, quantised.
        sample_ids: Samples of the micro-batch that was in force at each call.
    """

    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    sample_ids: list[tuple[str, ...]] = field(default_factory=list)


@contextlib.contextmanager
def seen_values(*chunks: TraceSites) -> Iterator[dict[Place, SeenValues]]:
    """Collects what the activation quantisers of a model (or its chunks) get and give, by place."""
    seen: dict[Place, SeenValues] = {}
    quantised, packed = Rounding.quantised, Rounding.packed
    last: list[tuple[Place, TraceSites, list[int] | None]] = []
    compare = tally.activation_difference
    comparing: list[bool] = []

    def noting_place(
        sites: TraceSites, rounding: Any, layer: int, site: Site, rows: Any
    ) -> Rounding:
        last[:] = [((layer, site), sites, None)]
        return rounding(layer, site, rows)

    def noting_slots(
        sites: TraceSites,
        slot_rounding: Any,
        rows: Any,
        place: Place,
        slots: Any,
        origin: Any,
        **kwargs: Any,
    ) -> Rounding:
        # It knows how many rows each expert has.
        _, rows_per_expert = origin.args
        last[:] = [(place, sites, rows_per_expert)]
        return slot_rounding(rows, place, slots, origin, **kwargs)

    def noting_values(self: Rounding, rows: torch.Tensor) -> torch.Tensor:
        values = quantised(self, rows)
        note(rows, values)
        return values

    def noting_codes(self: Rounding, rows: torch.Tensor) -> PackedRows:
        codes = packed(self, rows)
        note(rows, codes.values(rows.dtype))
        return codes

    def compared_unnoticed(*args: Any) -> ActivationDifference:
        """Rounds again, for diagnostics only."""
        comparing.append(True)
        try:
            return compare(*args)
        finally:
            comparing.pop()

    def note(rows: torch.Tensor, values: torch.Tensor) -> None:
        if comparing:
            return
        (place, sites, rows_per_part), *_ = last
        assert sites.micro_batch_in_force is not None, "the quantiser has just asked for it"
        # With experts=te_recipe each expert's rows are padded, so that their number is another.
        if rows_per_part is None or sum(rows_per_part) != len(rows):
            rows_per_part = [len(rows)]
        of_place = seen.setdefault(place, SeenValues())
        of_place.inputs.extend(rows.split(rows_per_part))
        of_place.outputs.extend(values.split(rows_per_part))
        of_place.sample_ids.extend([sites.micro_batch_in_force.sample_ids] * len(rows_per_part))

    with contextlib.ExitStack() as stack:
        for sites in chunks:
            for name, noting in (("rounding", noting_place), ("slot_rounding", noting_slots)):
                patched = partial(noting, sites, getattr(sites, name))
                stack.enter_context(mock.patch.object(sites, name, patched))
        stack.enter_context(mock.patch.object(tally, "activation_difference", compared_unnoticed))
        stack.enter_context(mock.patch.object(Rounding, "quantised", noting_values))
        stack.enter_context(mock.patch.object(Rounding, "packed", noting_codes))
        yield seen
