"""Hints and codes of samples, in the row order of a micro-batch.

Legend: N rows of a site on this rank, K values of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megatron_trace.formats import residue_bytes
from megatron_trace.hints.codec import placed_rows
from megatron_trace.hints.files import HintSource
from megatron_trace.hints.part import HintPart
from megatron_trace.hints.sharding import recorded_rows
from megatron_trace.hints.store import RecordKind
from megatron_trace.hints.types import (
    HintKey,
    RolloutSample,
    ScaleForm,
    Site,
    SiteHint,
    stored_bits,
)
from megatron_trace.training.hint_rows import HintRows
from megatron_trace.training.row_order import RowOrder
from megatron_trace.training.shape import Place
from megatron_trace.training.staging import StagingMemory
from megatron_trace.training.staging_plan import StagingPlan


def planned_records(
    samples: Sequence[RolloutSample],
    store: HintSource | None,
    plan: StagingPlan,
    order: RowOrder,
) -> Iterator[tuple[int, int, int]]:
    """Gives the bytes of payload, block scales and flags of each record of a micro-batch."""
    trace = plan.trace
    layouts = [(place, trace.hint_bits, trace.hint_scales) for place in plan.recorded_places]
    layouts += [(place, 4, "raw") for place in _code_places(samples, store, plan)]
    for (_, site), hint_bits, scale_form in layouts:
        columns, number_format = plan.shape.columns(site), plan.format_of(site)
        width = plan.shape.row_width(site) if columns is None else len(columns)
        num_blocks, num_rows = width // number_format.block_size, order.num_rows(site)
        scales = num_blocks if scale_form == "raw" else residue_bytes(num_blocks)
        payload = width * stored_bits(number_format, hint_bits) // 8
        yield num_rows * payload, num_rows * scales, num_rows


def read_hints(
    samples: Sequence[RolloutSample],
    store: HintSource | None,
    plan: StagingPlan,
    order: RowOrder,
    memory: StagingMemory,
) -> tuple[dict[Place, HintRows], dict[Place, int]]:
    """Gives the hints of this rank's rows and columns by place, and how many rows have one.

    There are none unless the method is trace.

    Args:
        samples: The samples.
        store: Where the hints are.
        plan: What is read for the model.
        order: Where the samples stand among the rows.
        memory: What their tensors are cut from.

    Raises:
        LookupError: A recorded place has no hint, and `missing_hints` is `error`.
        ValueError: There is no store, or a hint is of another policy version, other quantiser
            settings, or another shape.
    """
    if plan.trace.method != "trace":
        return {}, {}
    if store is None:
        raise ValueError("method trace needs the store with the rollout's hints; got None")
    tolerant = plan.trace.missing_hints == "rtn"
    rows: dict[Place, HintRows] = {}
    num_hinted: dict[Place, int] = {}
    parts = {site: _parts(site, order, plan) for site in {site for _, site in plan.recorded_places}}
    for place in plan.recorded_places:
        hints = [
            _get(sample, place, store, RecordKind.HINT, tolerant, part)
            for sample, part in zip(samples, parts[place[1]], strict=True)
        ]
        if any(hint is not None for hint in hints):
            form = plan.trace.hint_bits, plan.trace.hint_scales
            num_hinted[place] = sum(hint.num_rows for hint in hints if hint is not None)
            rows[place] = _stack(hints, place, plan, order, *form, memory)
    return rows, num_hinted


def read_codes(
    samples: Sequence[RolloutSample],
    store: HintSource | None,
    plan: StagingPlan,
    order: RowOrder,
    memory: StagingMemory,
) -> dict[Place, HintRows]:
    """Gives the full codes likewise, where the store has some and diagnostics are on.

    Args:
        samples: As of `read_hints`, like the next ones.
        store: Where the codes are.
        plan: What is read for the model.
        order: Where the samples stand among the rows.
        memory: What their tensors are cut from.

    Raises:
        ValueError: See `read_hints`.
    """
    rows: dict[Place, HintRows] = {}
    places = _code_places(samples, store, plan)
    parts = {site: _parts(site, order, plan) for site in {site for _, site in places}}
    # Most samples have no codes: only diagnostic ones do.
    coded = {
        sample.sample_id
        for sample in samples
        if places and store is not None and store.places(sample.sample_id, RecordKind.CODES)
    }
    for place in places:
        assert store is not None, "without a store there are no places"
        hints = [
            _get(sample, place, store, RecordKind.CODES, True, part)
            if sample.sample_id in coded
            else None
            for sample, part in zip(samples, parts[place[1]], strict=True)
        ]
        rows[place] = _stack(hints, place, plan, order, 4, "raw", memory)
    return rows


def _code_places(
    samples: Sequence[RolloutSample], store: HintSource | None, plan: StagingPlan
) -> list[Place]:
    if plan.settings is None or not plan.diagnostics or store is None:
        return []
    stored = (store.places(sample.sample_id, RecordKind.CODES) for sample in samples)
    return sorted(set().union(*stored) & set(plan.shape.places))


def _parts(site: Site, order: RowOrder, plan: StagingPlan) -> list[HintPart | None]:
    """Gives what this rank needs of the record of each sample; None if it is all of it."""
    columns, width = plan.shape.columns(site), plan.shape.row_width(site)
    parts: list[HintPart | None] = []
    for positions, num_rows in zip(order.parts(site), order.lengths, strict=True):
        rows = recorded_rows(positions, num_rows, order.sample_positions)
        whole = columns is None and sum(len(part) for part in rows) == num_rows
        parts.append(None if whole else HintPart(rows, columns, width))
    return parts


def _get(
    sample: RolloutSample,
    place: Place,
    store: HintSource,
    kind: RecordKind,
    tolerant: bool,
    part: HintPart | None,
) -> SiteHint | None:
    key = HintKey(sample.sample_id, *place, sample.policy_version, sample.settings_digest)
    try:
        return store.get(key, num_rows=sample.num_rows, kind=kind, part=part)
    except LookupError:
        if tolerant:
            return None
        raise


def _stack(
    hints: Sequence[SiteHint | None],
    place: Place,
    plan: StagingPlan,
    order: RowOrder,
    hint_bits: int,
    scale_form: ScaleForm,
    memory: StagingMemory,
) -> HintRows:
    columns, number_format = plan.shape.columns(place[1]), plan.format_of(place[1])
    width = plan.shape.row_width(place[1]) if columns is None else len(columns)
    num_bits = stored_bits(number_format, hint_bits)
    assert plan.settings is not None, "a method with hints quantises"
    scale = plan.settings.global_scale(*place)
    if scale is not None:
        scale = torch.tensor(scale).item()  # as hints keep it, in FP32
    for hint in hints:
        if hint is None:
            continue
        for name, got, expected in (
            ("number format", hint.number_format, number_format.name),
            ("values of a row", hint.num_values, width),
            ("bits per value", hint.num_bits, num_bits),
            ("form of block scales", hint.scale_form, scale_form),
            ("global scale", hint.global_scale, scale),
        ):
            if got != expected:
                raise ValueError(f"hint has {name} {got}, expected {expected} ({hint.key})")
    # Padding is on the right: the real rows of a sample are the first of its places.
    site = place[1]
    payload, scale_bytes, present = placed_rows(
        hints, order.places(site), order.num_rows(site), memory.zeros
    )
    form = "raw" if scale_form == "raw" else "packed"
    return HintRows(payload, scale_bytes, num_bits, present, form, number_format)
