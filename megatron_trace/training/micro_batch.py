"""MicroBatch: rollout samples in the row order of the trainer model, with hints and routing.

Samples stand side by side, padded on the right, or packed one after another (`row_order`). Under
tensor, sequence and context parallelism every rank of a data-parallel replica makes the micro-batch
of the same samples, and takes its own rows and columns of their hints and routing.

Legend: B samples, S positions (longest sample's tokens - 1, padded), P of them on this rank where a
site sees them, N rows of a site on this rank (P * B in [P, B] order, or those of a pack), T tokens
of a pack on this context-parallel rank, L MoE layers, E experts, k top-k, K values of a row.
"""

from __future__ import annotations

import bisect
import itertools
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

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
from megatron_trace.training.layout import TOKEN_SITES
from megatron_trace.training.rounding import HintRows
from megatron_trace.training.routing import even_experts
from megatron_trace.training.row_order import RowOrder, row_order
from megatron_trace.training.shape import Place
from megatron_trace.training.sites import TraceSites
from megatron_trace.training.staging import StagingMemory, aligned_bytes


@dataclass(frozen=True, eq=False)
class RankRows:
    """The rows of a micro-batch that a site of this rank sees.

    Attributes:
        positions: int64 [P], ascending, which all samples have in common; of a pack [N].
        real: bool [N]; rows of tokens, not of padding.
        samples: int64 [N]; of a pack, the sample at each row; None if they stand side by side.
        num_real: How many are real; counted once, on the host, where `real` is before it is moved.
    """

    positions: torch.Tensor
    real: torch.Tensor
    samples: torch.Tensor | None = None
    num_real: int = -1

    def __post_init__(self) -> None:
        """Counts the real rows."""
        if self.num_real < 0:
            object.__setattr__(self, "num_real", int(self.real.sum()))

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """Gives what values [B, S, ...] have at the rows: [B, P, ...], of a pack [1, N, ...]."""
        if self.samples is None:
            return values[:, self.positions]
        return values[self.samples, self.positions].unsqueeze(0)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Samples that are forwarded together, on the model's device.

    Attributes:
        made_for: `TraceSites` of the model that forwards it.
        order: Where the samples stand among the rows.
        sample_ids: [B] names.
        tokens: int64 [B, S + 1].
        loss_mask: bool [B, S]; True where token s + 1 was sampled as part of the response.
        rollout_logprobs: FP32 [B, S]; the rollout's log-probability of token s + 1, 0 elsewhere.
        valid: bool [S, B]; real tokens.
        token_rows: Rows of the router and the experts: those of this rank's tokens.
        attention_rows: Rows of K and V: those of this context-parallel rank's tokens.
        routing: int64 [L, N, k]; the rollout's experts of the token rows, and evenly spread ones
            for padding, in the L MoE layers of the model chunk.
        hints: Hints of this rank's rows and columns by (decoder layer, site), at fc2 of all its
            tokens' columns; empty unless the method is trace.
        codes: The rollout's full codes likewise, for metrics only.
        settings_digest: Digest of the quantiser settings of all samples.
        top_tokens: int64 [B, S, K]; the rollout's K most likely tokens after token s, 0 outside the
            response; None if the samples have none.
        top_logprobs: FP32 [B, S, K]; their log-probabilities in the rollout, -Inf where there is
            none.
        token_rows_of_samples: int64 [B, S]; of a pack, which of the rows of all context-parallel
            ranks, one after another, has a token; their number where no row has. None otherwise.
    """

    made_for: TraceSites
    order: RowOrder
    sample_ids: tuple[str, ...]
    tokens: torch.Tensor
    loss_mask: torch.Tensor
    rollout_logprobs: torch.Tensor
    valid: torch.Tensor
    token_rows: RankRows
    attention_rows: RankRows
    routing: torch.Tensor
    hints: Mapping[Place, HintRows]
    codes: Mapping[Place, HintRows]
    settings_digest: str
    top_tokens: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None
    token_rows_of_samples: torch.Tensor | None = None

    @property
    def hint_bytes(self) -> int:
        """Bytes of the tensors of its hints and codes."""
        return sum(rows.num_bytes for rows in (*self.hints.values(), *self.codes.values()))

    @property
    def num_positions(self) -> int:
        """Positions S of a padded sample."""
        return self.valid.shape[0]

    @property
    def forward_shape(self) -> tuple[int, int]:
        """Positions and sequences that the model forwards, over all ranks: (S, B) or (T, 1)."""
        sequences = 1 if self.order.packed else len(self.sample_ids)
        return self.order.num_positions, sequences

    @property
    def positions(self) -> torch.Tensor:
        """int64 [B, P], or [1, T]; positions that this context-parallel rank forwards."""
        positions = self.attention_rows.positions
        return positions.expand(self.forward_shape[1], -1)

    @property
    def inputs(self) -> torch.Tensor:
        """int64 [B, P], or [1, T]; the tokens that this context-parallel rank forwards."""
        return self.attention_rows.take(self.tokens)

    @property
    def targets(self) -> torch.Tensor:
        """int64 [B, P], or [1, T]; the token that follows each of `inputs`."""
        return self.attention_rows.take(self.tokens[:, 1:])

    @property
    def own_positions(self) -> torch.Tensor:
        """bool [B, S]; tokens that this context-parallel rank forwards."""
        own, rows = torch.zeros_like(self.loss_mask), self.attention_rows
        if rows.samples is None:
            own[:, rows.positions] = True
        else:
            own[rows.samples[rows.real], rows.positions[rows.real]] = True
        return own

    def rows_at(self, site: Site) -> RankRows:
        """Gives the rows that a site of this rank sees; of fc2 those of its tokens."""
        return self.token_rows if site in TOKEN_SITES else self.attention_rows

    def row_name(self, site: Site, row: int) -> str:
        """Names one of the N rows of a site for messages."""
        rows = self.rows_at(site)
        if rows.samples is None:
            local, column = divmod(row, len(self.sample_ids))
            position = int(rows.positions[local])
        else:
            column, position = int(rows.samples[row]), int(rows.positions[row])
        kind = "token" if rows.real[row] else "padding"
        return f"sample {self.sample_ids[column]}, {kind} {position}"


@dataclass(frozen=True, eq=False)
class StagedMicroBatch:
    """A micro-batch that was read, but is not on the model's device yet.

    Attributes:
        on_host: Its content where the hints were read to, residues of block scales still packed.
        memory: What all its tensors are parts of.
        device: The model's device.
    """

    on_host: MicroBatch
    memory: StagingMemory
    device: torch.device

    def on_device(self, *, non_blocking: bool = False) -> MicroBatch:
        """Gives the micro-batch to forward.

        Args:
            non_blocking: Whether copies from page-locked memory are left to the current stream.
        """
        moved = map_tensors(self.on_host, self.memory.moved(self.device, non_blocking=non_blocking))
        implementation = moved.made_for.trace.implementation
        hints, codes = (
            {place: rows.unpacked(implementation) for place, rows in records.items()}
            for records in (moved.hints, moved.codes)
        )
        return replace(moved, hints=hints, codes=codes)


def map_tensors(
    micro_batch: MicroBatch, move: Callable[[torch.Tensor], torch.Tensor]
) -> MicroBatch:
    """Gives a micro-batch in other tensors, such as copies; each is moved once."""
    rows = (
        RankRows(
            move(part.positions),
            move(part.real),
            None if part.samples is None else move(part.samples),
            part.num_real,
        )
        for part in (micro_batch.token_rows, micro_batch.attention_rows)
    )
    hints, codes = (
        {place: records.mapped(move) for place, records in by_place.items()}
        for by_place in (micro_batch.hints, micro_batch.codes)
    )
    names = ("tokens", "loss_mask", "rollout_logprobs", "valid", "routing")
    tensors = {name: move(getattr(micro_batch, name)) for name in names}
    if micro_batch.top_tokens is not None and micro_batch.top_logprobs is not None:
        tensors["top_tokens"] = move(micro_batch.top_tokens)
        tensors["top_logprobs"] = move(micro_batch.top_logprobs)
    if micro_batch.token_rows_of_samples is not None:
        tensors["token_rows_of_samples"] = move(micro_batch.token_rows_of_samples)
    token_rows, attention_rows = rows
    return replace(
        micro_batch,
        **tensors,
        token_rows=token_rows,
        attention_rows=attention_rows,
        hints=hints,
        codes=codes,
    )


def make_micro_batch(
    samples: Sequence[RolloutSample],
    store: HintSource | None,
    sites: TraceSites,
    *,
    padding_token: int = 0,
    num_positions: int | None = None,
    packed: bool = False,
) -> MicroBatch:
    """Assembles samples, their hints and their routing for one forward pass of a trainer model.

    With pipelining each chunk of the model gets its own, of the same samples: it has the hints and
    routing of the layers that the chunk holds, and no other hint is read.

    Args:
        samples: Finished rollouts; an empty response is allowed and contributes no loss.
        store: Where the hints are. Not read by the methods bf16 and qat, but for diagnostics.
        sites: `TraceSites` of the model that will forward the micro-batch.
        padding_token: Token id of padding.
        num_positions: S, where several micro-batches must have the same, or of a pack its T over
            all ranks; None takes the least.
        packed: Whether samples stand one after another in one sequence, instead of side by side.

    Raises:
        LookupError: A recorded place has no hint, and `missing_hints` is `error`.
        ValueError: The samples do not fit the model, S or T, or hints are of another policy
            version, other quantiser settings, or another shape; or the model cannot forward packs.
    """
    return stage_micro_batch(
        samples,
        store,
        sites,
        padding_token=padding_token,
        num_positions=num_positions,
        packed=packed,
    ).on_device()


def stage_micro_batch(
    samples: Sequence[RolloutSample],
    store: HintSource | None,
    sites: TraceSites,
    *,
    padding_token: int = 0,
    num_positions: int | None = None,
    packed: bool = False,
    pin_memory: bool = False,
) -> StagedMicroBatch:
    """Reads what `make_micro_batch` reads, and leaves it on the host.

    Args:
        samples: As of `make_micro_batch`, like the next ones.
        store: Where the hints are.
        sites: `TraceSites` of the model that will forward the micro-batch.
        padding_token: Token id of padding.
        num_positions: S or T, or None.
        packed: Whether samples stand one after another.
        pin_memory: Whether its memory is page-locked, from which a stream can copy while other
            work goes on.

    Raises:
        LookupError: See `make_micro_batch`.
        ValueError: See `make_micro_batch`.
    """
    _require_samples(samples, sites)
    order = _row_order(samples, sites, num_positions, packed=packed)
    length = order.sample_positions + 1
    tokens = torch.full((len(samples), length), padding_token, dtype=torch.int64)
    loss_mask = torch.zeros(len(samples), length - 1, dtype=torch.bool)
    rollout_logprobs = torch.zeros(len(samples), length - 1)
    valid = torch.zeros(length - 1, len(samples), dtype=torch.bool)
    for b, sample in enumerate(samples):
        response = slice(len(sample.prompt_tokens) - 1, sample.num_rows)
        own = _token_ids(sample)
        tokens[b, : len(own)] = own
        loss_mask[b, response] = True if sample.given is None else sample.given == 0
        rollout_logprobs[b, response] = sample.logprobs.float()
        valid[: sample.num_rows, b] = True
    rows = order.rows()
    small = MicroBatch(
        made_for=sites,
        order=order,
        sample_ids=tuple(sample.sample_id for sample in samples),
        tokens=tokens,
        loss_mask=loss_mask,
        rollout_logprobs=rollout_logprobs,
        valid=valid,
        token_rows=_rank_rows(Site.FC1, order, rows),
        attention_rows=_rank_rows(Site.K, order, rows),
        routing=_routing(samples, rows, sites)[:, order.own(Site.FC1)],
        hints={},
        codes={},
        settings_digest=samples[0].settings_digest,
        **_most_likely_tokens(samples, length - 1),
        token_rows_of_samples=_rows_of_samples(rows, valid) if packed else None,
    )
    sizes: list[int] = []
    map_tensors(small, lambda tensor: sizes.append(tensor.nbytes) or tensor)
    sizes += [size for part in _planned(samples, store, sites, order) for size in part]
    memory = StagingMemory(sum(map(aligned_bytes, sizes)), pin_memory=pin_memory)
    records = {
        "hints": _hints(samples, store, sites, order, memory),
        "codes": _codes(samples, store, sites, order, memory),
    }
    whole = replace(map_tensors(small, memory.copy_of), **records)
    return StagedMicroBatch(whole, memory, sites.device)


def _most_likely_tokens(
    samples: Sequence[RolloutSample], num_positions: int
) -> dict[str, torch.Tensor]:
    """Gives the fields `top_tokens` and `top_logprobs`; neither if no sample has them."""
    widths = {0 if of.top_tokens is None else of.top_tokens.shape[1] for of in samples}
    if len(widths) > 1:
        raise ValueError(
            f"samples {samples[0].sample_id} to {samples[-1].sample_id} must have equally many "
            f"top_tokens at a position; got {sorted(widths)}"
        )
    shape = (len(samples), num_positions, widths.pop())
    if shape[-1] == 0:
        return {}
    tokens = torch.zeros(shape, dtype=torch.int64)
    logprobs = torch.full(shape, -torch.inf)
    for b, sample in enumerate(samples):
        assert sample.top_tokens is not None, "all have the same width"
        assert sample.top_logprobs is not None, "both or none"
        response = slice(len(sample.prompt_tokens) - 1, sample.num_rows)
        tokens[b, response] = sample.top_tokens.to(torch.int64)
        logprobs[b, response] = sample.top_logprobs
    return {"top_tokens": tokens, "top_logprobs": logprobs}


def planned_hint_bytes(
    samples: Sequence[RolloutSample],
    store: HintSource | None,
    sites: TraceSites,
    *,
    num_positions: int | None = None,
    packed: bool = False,
) -> int:
    """Gives `hint_bytes` of the micro-batch that `stage_micro_batch` would give on the host.

    No hint is read for it, so it counts those of every recorded place, also where `missing_hints`
    allows that none is found.

    Raises:
        ValueError: The samples do not fit the model, S or T.
    """
    _require_samples(samples, sites)
    order = _row_order(samples, sites, num_positions, packed=packed)
    return sum(sum(part) for part in _planned(samples, store, sites, order))


def _planned(
    samples: Sequence[RolloutSample],
    store: HintSource | None,
    sites: TraceSites,
    order: RowOrder,
) -> Iterator[tuple[int, int, int]]:
    """Gives the bytes of payload, block scales and flags of each record of a micro-batch."""
    trace = sites.trace
    layouts = [(place, trace.hint_bits, trace.hint_scales) for place in sites.recorded_places]
    layouts += [(place, 4, "raw") for place in _code_places(samples, store, sites)]
    for (_, site), hint_bits, scale_form in layouts:
        columns, number_format = sites.shape.columns(site), sites.format_of(site)
        width = sites.shape.row_width(site) if columns is None else len(columns)
        num_blocks, num_rows = width // number_format.block_size, order.num_rows(site)
        scales = num_blocks if scale_form == "raw" else residue_bytes(num_blocks)
        payload = width * stored_bits(number_format, hint_bits) // 8
        yield num_rows * payload, num_rows * scales, num_rows


def _require_samples(samples: Sequence[RolloutSample], sites: TraceSites) -> None:
    if not samples:
        raise ValueError("a micro-batch needs at least one sample; got none")
    if max(sample.num_rows for sample in samples) < 1:
        raise ValueError(
            "a micro-batch needs a token to forward, but no sample has more than one: "
            + ", ".join(sample.sample_id for sample in samples)
        )
    model = sites.shape
    digest = sites.settings.digest() if sites.quantises else None
    for sample in samples:
        if not sample.prompt_tokens:
            raise ValueError(f"sample {sample.sample_id} has no prompt token to start from")
        if sample.num_rows > model.max_sequence_length:
            raise ValueError(
                f"sample {sample.sample_id} forwards {sample.num_rows} tokens (prompt "
                f"{len(sample.prompt_tokens)}, response {len(sample.response_tokens)}), more than "
                f"the model's context of {model.max_sequence_length}; shorten the prompt or the "
                "response"
            )
        least, most = (int(end) for end in _token_ids(sample).aminmax())
        if not 0 <= least <= most < model.vocab_size:
            raise ValueError(
                f"sample {sample.sample_id} has tokens {least} to {most}, but the model's "
                f"vocabulary is 0 to {model.vocab_size - 1}; it was rolled out by another model"
            )
        if digest is not None and sample.settings_digest != digest:
            raise ValueError(
                f"sample {sample.sample_id} was rolled out under quantiser settings "
                f"{sample.settings_digest or '(none: BF16)'}, but this trainer has {digest}; "
                "give TraceSites the settings of the engine that made the sample"
            )


def _token_ids(sample: RolloutSample) -> torch.Tensor:
    """Gives int64 [T], by way of an array: torch asks each Python number by itself.

    What reads ahead does this beside the training, and until it is done no other thread of Python
    has a turn.
    """
    return torch.frombuffer(array("q", sample.tokens), dtype=torch.int64)


def _row_order(
    samples: Sequence[RolloutSample], sites: TraceSites, num_positions: int | None, *, packed: bool
) -> RowOrder:
    if packed and not sites.forwards_packs:
        raise ValueError(
            "this model cannot forward packed samples: Megatron's DotProductAttention refuses "
            "them, and Gated DeltaNet under context parallelism; choose attention=sdpa, or do not "
            "pack"
        )
    lengths = tuple(sample.num_rows for sample in samples)
    return row_order(lengths, sites.shape.layout, num_positions=num_positions, packed=packed)


# Of the M rows of all ranks: samples and positions, int64 [M] each, and bool [M], whether real.
_Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _rank_rows(site: Site, order: RowOrder, rows: _Rows) -> RankRows:
    samples, positions, real = (part[order.own(site)] for part in rows)
    if order.packed:
        return RankRows(positions, real, samples)
    return RankRows(positions[:: len(order.lengths)], real)


def _rows_of_samples(rows: _Rows, valid: torch.Tensor) -> torch.Tensor:
    samples, positions, real = rows
    found = torch.full(valid.T.shape, len(real))
    found[samples[real], positions[real]] = real.nonzero()[:, 0]
    return found


def _routing(samples: Sequence[RolloutSample], rows: _Rows, sites: TraceSites) -> torch.Tensor:
    """Gives the experts of the M rows of all ranks, int64 [L, M, k]."""
    model = sites.shape
    expected = (len(model.model_moe_layers), model.top_k)
    for sample in samples:
        if tuple(sample.routing.shape[1:]) != expected:
            raise ValueError(
                f"sample {sample.sample_id} has routing of (MoE layers, top-k) "
                f"{tuple(sample.routing.shape[1:])}, but the model has {expected}; it was rolled "
                "out by another model"
            )
    records = torch.cat([sample.routing for sample in samples]).to(torch.int64)
    _require_experts(records, model.num_experts, samples)
    records = records[:, model.routing_records].transpose(0, 1)
    of_samples, positions, real = rows
    routing = torch.zeros(len(model.moe_layers), len(real), model.top_k, dtype=torch.int64)
    first_rows = torch.tensor([0] + [sample.num_rows for sample in samples]).cumsum(0)
    routing[:, real] = records[:, (first_rows[of_samples] + positions)[real]]
    padding = ~real
    num_padding = int(padding.sum())
    if num_padding:
        for layer in routing:
            loads = torch.bincount(layer[real].flatten(), minlength=model.num_experts)
            layer[padding] = even_experts(loads, num_padding, model.top_k)
    return routing


def _require_experts(
    rows: torch.Tensor, num_experts: int, samples: Sequence[RolloutSample]
) -> None:
    """Checks the records of samples, int64 [rows of one after those of another, layers, k]."""
    wrong = ((rows < 0) | (rows >= num_experts)).any(-1)
    ordered = rows.sort(-1).values
    repeated = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    for name, bad in ((f"not all of 0 to {num_experts - 1}", wrong), ("not distinct", repeated)):
        if bad.any():
            row, layer = bad.nonzero()[0].tolist()
            ends = [*itertools.accumulate(len(sample.routing) for sample in samples)]
            index = bisect.bisect_right(ends, row)
            own_row = row - (ends[index] - len(samples[index].routing))
            raise ValueError(
                f"sample {samples[index].sample_id}: the experts of row {own_row} in MoE layer "
                f"{layer} are {name}: {rows[row, layer].tolist()}"
            )


def _hints(
    samples: Sequence[RolloutSample],
    store: HintSource | None,
    sites: TraceSites,
    order: RowOrder,
    memory: StagingMemory,
) -> dict[Place, HintRows]:
    if not sites.guides:
        return {}
    if store is None:
        raise ValueError("method trace needs the store with the rollout's hints; got None")
    tolerant = sites.trace.missing_hints == "rtn"
    rows: dict[Place, HintRows] = {}
    parts = {
        site: _parts(site, order, sites) for site in {site for _, site in sites.recorded_places}
    }
    for place in sites.recorded_places:
        hints = [
            _get(sample, place, store, RecordKind.HINT, tolerant, part)
            for sample, part in zip(samples, parts[place[1]], strict=True)
        ]
        if any(hint is not None for hint in hints):
            form = sites.trace.hint_bits, sites.trace.hint_scales
            rows[place] = _stack(hints, place, sites, order, *form, memory)
    return rows


def _codes(
    samples: Sequence[RolloutSample],
    store: HintSource | None,
    sites: TraceSites,
    order: RowOrder,
    memory: StagingMemory,
) -> dict[Place, HintRows]:
    rows: dict[Place, HintRows] = {}
    places = _code_places(samples, store, sites)
    parts = {site: _parts(site, order, sites) for site in {site for _, site in places}}
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
        rows[place] = _stack(hints, place, sites, order, 4, "raw", memory)
    return rows


def _code_places(
    samples: Sequence[RolloutSample], store: HintSource | None, sites: TraceSites
) -> list[Place]:
    if not (sites.quantises and sites.diagnostics) or store is None:
        return []
    stored = (store.places(sample.sample_id, RecordKind.CODES) for sample in samples)
    return sorted(set().union(*stored) & set(sites.shape.places))


def _parts(site: Site, order: RowOrder, sites: TraceSites) -> list[HintPart | None]:
    """Gives what this rank needs of the record of each sample; None if it is all of it."""
    columns, width = sites.shape.columns(site), sites.shape.row_width(site)
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
    sites: TraceSites,
    order: RowOrder,
    hint_bits: int,
    scale_form: ScaleForm,
    memory: StagingMemory,
) -> HintRows:
    columns, number_format = sites.shape.columns(place[1]), sites.format_of(place[1])
    width = sites.shape.row_width(place[1]) if columns is None else len(columns)
    num_bits = stored_bits(number_format, hint_bits)
    scale = sites.settings.global_scale(*place)
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
