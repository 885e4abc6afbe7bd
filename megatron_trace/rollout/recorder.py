"""What the engine's quantisers did, kept in host memory in pages like those of the K/V cache.

A row lies at the page and offset at which the cache keeps the token's keys and values, so that it
lives as long as they do: requests that share a prefix share its rows, and a page that is handed on
is written anew. Padding is kept nowhere. The rows of a step, those of all places side by side, come
to the host through a `RowRing`, so that recording never waits for the device.

Legend: N rows of one engine step that belong to a request, M rows with padding, P pages of S
tokens, K values of a row, B blocks of a row, C bits of a code, k expert slots of a token, W bytes
of a row of all places. A row of fc2 is its k slots side by side.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from megatron_trace.hints import Site
from megatron_trace.rollout.kept_rows import KeptRows, Place, Rows
from megatron_trace.rollout.row_ring import RowRing


@dataclass
class _Step:
    """One forward of the engine: whose rows it computes, where they go, and what was put so far."""

    request_ids: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    num_padded: int
    times_put: Counter[Place] = field(default_factory=Counter)
    num_slots: dict[Place, int] = field(default_factory=dict)
    slots_put: dict[Place, torch.Tensor] = field(default_factory=dict)
    rows: dict[Place, Rows] = field(default_factory=dict)
    whole: set[Place] = field(default_factory=set)
    is_written: bool = False
    is_sent: bool = False


class Recorder:
    """Keeps packed codes and scale bytes as the quantisers give them; never quantises itself.

    Keys and values are not kept a second time: the cache holds their codes. Of them it is only
    checked that they were quantised.

    Args:
        places: (decoder layer, site) whose rows are kept.
        narrowed: What is kept of packed codes of a site, uint8 [rows, bytes]; None keeps them.

    Attributes:
        narrowed: See above.
        seconds: Time spent on keeping and reading rows since construction.
        policy_version: Version of the weights that compute, noted of each row; None where all rows
            of a rollout are of one version, and none is noted.
    """

    def __init__(
        self,
        places: Iterable[Place],
        narrowed: Callable[[Site, torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.places = frozenset(places)
        self._sorted_places = sorted(self.places)
        # Those whose rows are not in the cache, in the order of their columns.
        self._recorded_places = [place for place in self._sorted_places if not place[1].is_cached]
        self.narrowed = narrowed or (lambda site, packed_codes: packed_codes)
        self.seconds = 0.0
        self.policy_version: int | None = None
        self._kept = KeptRows(0, 0)
        self._ring_rows = self._largest_step = 0
        self._ring: RowRing | None = None
        self._padding: torch.Tensor | None = None
        self._wrong_slots: dict[Place, torch.Tensor] = {}
        self._sample_ids: dict[int, str] = {}
        self._keep = False
        self._step: _Step | None = None

    def reserve(
        self, num_pages: int, page_tokens: int, *, largest_step: int, ring_rows: int | None = None
    ) -> None:
        """Says how many pages the cache has; memory is taken when the first row comes.

        Args:
            num_pages: P, the page that padding goes to included.
            page_tokens: S.
            largest_step: Largest M.
            ring_rows: Rows that may be under way to the host; None for those of a largest step.
        """
        self._kept, self._ring = KeptRows(num_pages, page_tokens), None
        self._largest_step, self._ring_rows = largest_step, ring_rows or largest_step

    def add(self, sample_ids: Mapping[int, str]) -> None:
        """Adds samples to the running rollout, by the engine's ids of their requests."""
        self._sample_ids |= sample_ids

    def forget(self, request_ids: Iterable[int]) -> None:
        """Takes samples out of it that are over."""
        for request_id in request_ids:
            del self._sample_ids[request_id]

    def start(self, sample_ids: Mapping[int, str], *, keep: bool) -> None:
        """Begins a rollout.

        Args:
            sample_ids: Names of the samples by the engine's ids of their requests.
            keep: Whether rows are kept; otherwise only the samples of the rows are known.
        """
        self._sample_ids, self._keep = dict(sample_ids), keep
        self._step, self._wrong_slots, self.policy_version = None, {}, None

    def stop(self) -> None:
        """Ends the rollout."""
        self._sample_ids, self._step, self._keep = {}, None, False
        self.policy_version = None
        if self._ring is not None:
            self._ring.drop()

    @property
    def num_waits(self) -> int:
        """How often a step waited for rows of earlier ones to reach the host."""
        return 0 if self._ring is None else self._ring.num_waits

    @property
    def is_running(self) -> bool:
        """Whether a rollout is running."""
        return bool(self._sample_ids)

    @property
    def is_recording(self) -> bool:
        """Whether a rollout is running whose rows are kept."""
        return self.is_running and self._keep

    def begin_step(
        self,
        request_ids: torch.Tensor,
        positions: torch.Tensor,
        pages: torch.Tensor,
        offsets: torch.Tensor,
        *,
        num_padded: int | None = None,
    ) -> None:
        """Says to what the rows of the next forward belong.

        Args:
            request_ids: integer [N] in host memory; the engine's buffers, copied here.
            positions: integer [N], token positions, likewise.
            pages: integer [N], where rows are kept, likewise.
            offsets: integer [N], likewise, within the page.
            num_padded: M; None if there is no padding.

        Raises:
            RuntimeError: The step is larger than reserved.
        """
        places = self._kept.numbers(pages, offsets)
        step = self._step = _Step(
            request_ids.to(torch.int64, copy=True),
            positions.to(torch.int64, copy=True),
            places,
            len(places) if num_padded is None else num_padded,
        )
        if self.policy_version is not None:
            self._kept.put_versions(places, self.policy_version)
        if self._keep and self._ring is not None:
            self._ring.begin(places, step.num_padded)

    def gather(self) -> None:
        """Writes the rows of the running step to the ring, after its forward; may be captured.

        Nothing is written if a place is missing, which `send` reports.
        """
        step, places = self._step, self._recorded_places
        if step is None or not self._keep or not places or not step.rows.keys() >= set(places):
            return
        rows = step.rows | self._narrowed_rows(step)
        parts = [part for place in places for part in rows[place]]
        if self._ring is None:
            self._ring = self._new_ring(parts)
            self._ring.begin(step.places, step.num_padded)
        if self._padding is not None:
            parts.append(self._padding[: step.num_padded])
        self._ring.write(torch.cat(parts, dim=1))
        step.is_written = True

    def _narrowed_rows(self, step: _Step) -> dict[Place, Rows]:
        """Gives the rows of places whose codes are whole so far, narrowed by one call a site."""
        rows: dict[Place, Rows] = {}
        for site in {site for _, site in step.whole}:
            places = sorted(place for place in step.whole if place[1] == site)
            widths = [step.rows[place][0].shape[1] for place in places]
            hints = self.narrowed(site, torch.cat([step.rows[place][0] for place in places], 1))
            kept = [width * hints.shape[1] // sum(widths) for width in widths]
            for place, hint in zip(places, hints.split(kept, dim=1), strict=True):
                rows[place] = hint, step.rows[place][1]
        return rows

    def send(self) -> None:
        """Sends what `gather` wrote to the host, and takes what has arrived of earlier steps.

        Raises:
            RuntimeError: A place was not quantised once for every row of the running step.
        """
        step = self._step
        if step is None or not self._keep:
            return
        self._require_complete(step)
        step.is_sent = True
        if not step.is_written or self._ring is None:
            return
        started = time.perf_counter()
        self._ring.send()
        self._ring.take_arrived()
        self.seconds += time.perf_counter() - started

    def noted(self) -> Counter[Place]:
        """Gives how often each place was put in the running step, to be noted of a replay."""
        return Counter() if self._step is None else Counter(self._step.times_put)

    def note(self, times_put: Mapping[Place, int]) -> None:
        """Notes that a captured forward, with its `gather`, puts these places."""
        if self._step is not None:
            self._step.times_put = Counter(times_put)
            self._step.is_written = self._keep and self._ring is not None

    def end_step(self) -> None:
        """Ends the running step; gathers and sends its rows if nobody did.

        Raises:
            RuntimeError: See `send`.
        """
        if self._step is not None and not self._step.is_sent:
            self.gather()
            self.send()
        self._step = None

    def _require_complete(self, step: _Step) -> None:
        for layer, site in self._sorted_places:
            put = step.times_put[layer, site]
            slots = step.num_slots.get((layer, site), 0)
            expected = step.num_padded * slots if slots else 1
            if put != expected:
                how = "not quantised" if not put else f"quantised for {put} of {expected} slots"
                raise RuntimeError(
                    f"layer {layer}, site {site} was {how} in a step that computed "
                    f"{len(step.positions)} rows, the first of {self._name(step, 0)}; the engine "
                    "must call its quantiser once for every row"
                )
            if slots:
                wrong = (step.slots_put[layer, site][: len(step.positions) * slots] != 1).any()
                seen = self._wrong_slots.get((layer, site))
                self._wrong_slots[layer, site] = wrong if seen is None else seen | wrong

    @property
    def num_rows(self) -> int | None:
        """Rows of the running step that belong to a request; None outside a rollout."""
        return None if self._step is None else len(self._step.positions)

    def sample_of_row(self, row: int) -> str:
        """Names sample and position of a row of the running step, for error messages."""
        if self._step is None:
            return f"row {row} (no rollout is running)"
        return f"{self._name(self._step, row)}, position {int(self._step.positions[row])}"

    def keeps(self, layer: int, site: Site) -> bool:
        """Whether the rows of a place are kept in the running step."""
        return self._keep and self._step is not None and (layer, site) in self.places

    def put(
        self, layer: int, site: Site, packed_codes: torch.Tensor, scale_bytes: torch.Tensor
    ) -> None:
        """Keeps what a quantiser gave for the rows of the running step; both must stay as they are.

        The codes are narrowed by `gather`, those of a site together.

        Args:
            layer: Decoder layer.
            site: Site.
            packed_codes: uint8 [M, K * C / 8].
            scale_bytes: uint8 [M, B].

        Raises:
            RuntimeError: The place was recorded in this step already.
        """
        if not self.keeps(layer, site):
            return
        self.put_hint(layer, site, packed_codes, scale_bytes)
        if self._step is not None and not site.is_cached:
            self._step.whole.add((layer, site))

    def put_hint(
        self, layer: int, site: Site, hint: torch.Tensor, scale_bytes: torch.Tensor
    ) -> None:
        """Keeps what `put` would, of codes that are narrowed already; both must stay as they are.

        Args:
            layer: Decoder layer.
            site: Site.
            hint: uint8 [M, bytes].
            scale_bytes: uint8 [M, B].

        Raises:
            RuntimeError: The place was recorded in this step already.
        """
        if not self.keeps(layer, site):
            return
        step = self._note(layer, site)
        if not site.is_cached:
            step.rows[layer, site] = (hint, scale_bytes)

    def put_cached(self, layer: int, site: Site) -> None:
        """Notes that keys or values were quantised for the rows of the step; the cache keeps them.

        Args:
            layer: Decoder layer.
            site: k or v.

        Raises:
            RuntimeError: They were in this step already.
        """
        if self.keeps(layer, site):
            self._note(layer, site)

    def _note(self, layer: int, site: Site) -> _Step:
        step, place = self._step, (layer, site)
        assert step is not None, "keeps says so"
        if step.times_put[place]:
            raise RuntimeError(
                f"layer {layer}, site {site} was quantised twice in one step of the engine; its "
                "rows cannot be told apart"
            )
        step.times_put[place] = 1
        return step

    def put_slots(
        self,
        layer: int,
        site: Site,
        hint: torch.Tensor,
        scale_bytes: torch.Tensor,
        *,
        slots: tuple[torch.Tensor, torch.Tensor],
        num_slots: int,
    ) -> None:
        """Keeps what a quantiser gave for some (token, slot) of the running step.

        Args:
            layer: Decoder layer.
            site: Site.
            hint: uint8 [rows, bytes of a slot], narrowed already.
            scale_bytes: uint8 [rows, blocks of a slot].
            slots: Token and slot of every row, int64 [rows] each; tokens from N on are padding.
            num_slots: Slots k of a token.

        Raises:
            RuntimeError: There are more or fewer slots than rows.
        """
        if not self.keeps(layer, site):
            return
        step, place = self._step, (layer, site)
        assert step is not None, "keeps says so"
        tokens, slot = slots
        if len(tokens) != len(hint):
            raise RuntimeError(
                f"layer {layer}, site {site}: the quantiser got {len(hint)} rows, but the "
                f"routing record of the step says {len(tokens)}"
            )
        parts = hint, scale_bytes
        every = step.num_padded * num_slots
        if place not in step.slots_put:
            step.num_slots[place] = num_slots
            step.slots_put[place] = torch.zeros(every, dtype=torch.int32, device=hint.device)
            codes, scales = (part.new_empty(every, part.shape[1]) for part in parts)
            step.rows[place] = codes.view(step.num_padded, -1), scales.view(step.num_padded, -1)
        step.times_put[place] += len(tokens)
        index = tokens * num_slots + slot
        step.slots_put[place].index_add_(0, index, torch.ones_like(index, dtype=torch.int32))
        for kept, part in zip(step.rows[place], parts, strict=True):
            kept.view(every, -1)[index] = part

    def kept_bytes(self, place: Place) -> tuple[int, int]:
        """Gives the bytes of codes and of scales that are kept of a row, once one was recorded."""
        return self._kept.bytes_of(place)

    def rows(self, place: Place, pages: torch.Tensor, offsets: torch.Tensor) -> Rows:
        """Gives the rows of a place at some pages and offsets, see `rows_of_places`."""
        return self.rows_of_places([place], pages, offsets)[place]

    def rows_of_places(
        self, places: Iterable[Place], pages: torch.Tensor, offsets: torch.Tensor
    ) -> dict[Place, Rows]:
        """Gives the rows of places at some pages and offsets; waits for those that are under way.

        Args:
            places: Decoder layers and sites, not of keys or values.
            pages: int64 [R] in host memory.
            offsets: int64 [R] in host memory.

        Returns:
            By place: packed codes, narrowed, uint8 [R, bytes], and scale bytes uint8 [R, B], in
            host memory.

        Raises:
            KeyError: Of a place no row was recorded yet.
            RuntimeError: In a step of the rollout an expert slot was not quantised exactly once.
        """
        places = list(places)
        if not places:
            return {}
        if self._ring is not None:
            self._ring.take_all()
        for layer, site in places:
            if (layer, site) in self._wrong_slots and bool(self._wrong_slots[layer, site]):
                raise RuntimeError(
                    f"layer {layer}, site {site}: an expert slot was quantised twice, and another "
                    "one not, in a step of this rollout"
                )
        return self._kept.read(places, pages, offsets)

    def versions(self, pages: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor | None:
        """Gives the policy version of the rows at some pages and offsets, int64 [R].

        Args:
            pages: int64 [R] in host memory.
            offsets: int64 [R] in host memory.

        Returns:
            None if versions are not noted.
        """
        if self.policy_version is None:
            return None
        return self._kept.versions(self._kept.numbers(pages, offsets))

    def restore_versions(
        self, pages: torch.Tensor, offsets: torch.Tensor, versions: torch.Tensor
    ) -> None:
        """Puts versions that `versions` gave at other pages and offsets."""
        self._kept.put_versions(self._kept.numbers(pages, offsets), versions)

    def restore(self, place: Place, pages: torch.Tensor, offsets: torch.Tensor, rows: Rows) -> None:
        """Puts rows that `rows` gave at other pages and offsets."""
        if self._ring is not None:
            # Rows of an earlier owner of the page may be under way.
            self._ring.take_all()
        self._kept.put_back(place, pages, offsets, rows)

    @torch.inference_mode(False)
    def _new_ring(self, parts: list[torch.Tensor]) -> RowRing:
        """Allocates the ring, once the widths of the rows are known."""
        assert self._ring_rows, "reserve comes first"
        widths = [part.shape[1] for part in parts]
        device = parts[0].device
        row_bytes = self._kept.lay_out(self._recorded_places, widths)
        padding = row_bytes - sum(widths)
        self._padding = None
        if padding:
            shape = self._largest_step, padding
            self._padding = torch.zeros(shape, dtype=torch.uint8, device=device)
        return RowRing(self._ring_rows, self._largest_step, row_bytes, device, self._kept.keep)

    def _name(self, step: _Step, row: int) -> str:
        return f"sample {self._sample_ids[int(step.request_ids[row])]}"
