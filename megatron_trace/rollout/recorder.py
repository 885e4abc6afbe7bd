"""What the engine's quantisers did, kept in pages beside those of the K/V cache.

A row lies at the page and offset at which the cache keeps the token's keys and values, so that it
lives as long as they do: requests that share a prefix share its rows, a page that is handed on is
written anew, and padding goes where the cache puts it, to a page of no request.

Legend: N rows of one engine step that belong to a request, M rows with padding, P pages of S
tokens, K values of a row, B blocks of a row, C bits of a code, k expert slots of a token. A row of
fc2 is its k slots side by side.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from megatron_trace.hints import Site

Place = tuple[int, Site]


@dataclass
class _Step:
    """One forward of the engine: whose rows it computes, and where they go."""

    request_ids: torch.Tensor
    positions: torch.Tensor
    pages: torch.Tensor
    offsets: torch.Tensor
    times_put: Counter[Place] = field(default_factory=Counter)
    num_slots: dict[Place, int] = field(default_factory=dict)
    slots_put: dict[Place, torch.Tensor] = field(default_factory=dict)


class Recorder:
    """Keeps packed codes and scale bytes as the quantisers give them; never quantises itself.

    Keys and values are not kept a second time: the cache holds their codes. Of them it is only
    checked that they were quantised.

    Args:
        places: (decoder layer, site) whose rows are kept.
        narrowed: What is kept of packed codes of a site, uint8 [rows, bytes]; None keeps them.

    Attributes:
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
        self._narrowed = narrowed or (lambda site, packed_codes: packed_codes)
        self.seconds = 0.0
        self.policy_version: int | None = None
        self._versions: torch.Tensor | None = None
        self._num_pages = self._page_tokens = 0
        self._pages: dict[Place, tuple[torch.Tensor, torch.Tensor]] = {}
        self._wrong_slots: dict[Place, torch.Tensor] = {}
        self._sample_ids: dict[int, str] = {}
        self._keep = False
        self._step: _Step | None = None

    def reserve(self, num_pages: int, page_tokens: int) -> None:
        """Says how many pages the cache has; memory is taken when the first row comes.

        Args:
            num_pages: P, the page that padding goes to included.
            page_tokens: S.
        """
        self._num_pages, self._page_tokens = num_pages, page_tokens
        self._pages, self._versions = {}, None

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
    ) -> None:
        """Says to what the rows of the next forward belong.

        Args:
            request_ids: integer [N]; the engine's buffers, copied here.
            positions: integer [N], token positions.
            pages: int64 [M], where rows are kept, on the device that computes; padding last.
            offsets: int64 [M], likewise, within the page.
        """
        self._step = _Step(request_ids.long().clone(), positions.long().clone(), pages, offsets)
        if self.policy_version is not None:
            self._version_pages(pages.device)[pages, offsets] = self.policy_version

    def end_step(self) -> None:
        """Checks that every place was quantised once for every row of the running step.

        Raises:
            RuntimeError: A place was not.
        """
        step, self._step = self._step, None
        if step is None or not self._keep:
            return
        for layer, site in sorted(self.places):
            put = step.times_put[layer, site]
            slots = step.num_slots.get((layer, site), 0)
            expected = len(step.pages) * slots if slots else 1
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
        """Keeps what a quantiser gave for the rows of the running step.

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
        started = time.perf_counter()
        step = self._note(layer, site)
        if not site.is_cached:
            kept = self._narrowed(site, packed_codes), scale_bytes
            for pages, rows in zip(self._pages_of((layer, site), *kept), kept, strict=True):
                pages[step.pages, step.offsets] = rows
        self.seconds += time.perf_counter() - started

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
        packed_codes: torch.Tensor,
        scale_bytes: torch.Tensor,
        *,
        slots: tuple[torch.Tensor, torch.Tensor],
        num_slots: int,
    ) -> None:
        """Keeps what a quantiser gave for some (token, slot) of the running step.

        Args:
            layer: Decoder layer.
            site: Site.
            packed_codes: uint8 [rows, bytes of a slot].
            scale_bytes: uint8 [rows, blocks of a slot].
            slots: Token and slot of every row, int64 [rows] each; tokens from N on are padding.
            num_slots: Slots k of a token.

        Raises:
            RuntimeError: There are more or fewer slots than rows.
        """
        if not self.keeps(layer, site):
            return
        started = time.perf_counter()
        step, place = self._step, (layer, site)
        assert step is not None, "keeps says so"
        tokens, slot = slots
        if len(tokens) != len(packed_codes):
            raise RuntimeError(
                f"layer {layer}, site {site}: the quantiser got {len(packed_codes)} rows, but the "
                f"routing record of the step says {len(tokens)}"
            )
        if place not in step.slots_put:
            step.num_slots[place] = num_slots
            step.slots_put[place] = torch.zeros(
                len(step.pages) * num_slots, dtype=torch.int32, device=packed_codes.device
            )
        step.times_put[place] += len(tokens)
        step.slots_put[place].index_add_(
            0, tokens * num_slots + slot, torch.ones_like(tokens, dtype=torch.int32)
        )
        kept = self._narrowed(site, packed_codes), scale_bytes
        for pages, rows in zip(self._pages_of(place, *kept, num_slots), kept, strict=True):
            pages[step.pages[tokens], step.offsets[tokens], slot] = rows
        self.seconds += time.perf_counter() - started

    def rows(
        self, place: Place, pages: torch.Tensor, offsets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gives the rows of a place at some pages and offsets.

        Args:
            place: Decoder layer and site, not of keys or values.
            pages: int64 [R].
            offsets: int64 [R].

        Returns:
            packed codes, narrowed, uint8 [R, bytes], and scale bytes uint8 [R, B], on the device.

        Raises:
            RuntimeError: In a step of the rollout an expert slot was not quantised exactly once.
        """
        layer, site = place
        if place in self._wrong_slots and bool(self._wrong_slots[place]):
            raise RuntimeError(
                f"layer {layer}, site {site}: an expert slot was quantised twice, and another one "
                "not, in a step of this rollout"
            )
        codes, scale_bytes = (kept[pages, offsets].flatten(1) for kept in self._pages[place])
        return codes, scale_bytes

    def versions(self, pages: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor | None:
        """Gives the policy version of the rows at some pages and offsets, int64 [R] on the device.

        Args:
            pages: int64 [R].
            offsets: int64 [R].

        Returns:
            None if versions are not noted.
        """
        if self.policy_version is None:
            return None
        return self._version_pages(pages.device)[pages, offsets]

    def restore_versions(
        self, pages: torch.Tensor, offsets: torch.Tensor, versions: torch.Tensor
    ) -> None:
        """Puts versions that `versions` gave at other pages and offsets."""
        self._version_pages(pages.device)[pages, offsets] = versions.to(pages.device)

    def _version_pages(self, device: torch.device) -> torch.Tensor:
        if self._versions is None:
            assert self._num_pages, "reserve comes first"
            self._versions = torch.zeros(
                self._num_pages, self._page_tokens, dtype=torch.int64, device=device
            )
        return self._versions

    def restore(
        self,
        place: Place,
        pages: torch.Tensor,
        offsets: torch.Tensor,
        rows: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Puts rows that `rows` gave at other pages and offsets."""
        for kept, values in zip(self._pages[place], rows, strict=True):
            kept[pages, offsets] = values.to(kept.device).view(len(pages), *kept.shape[2:])

    def _pages_of(
        self,
        place: Place,
        packed_codes: torch.Tensor,
        scale_bytes: torch.Tensor,
        num_slots: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if place not in self._pages:
            assert self._num_pages, "reserve comes first"
            slots = () if num_slots is None else (num_slots,)
            shape = (self._num_pages, self._page_tokens, *slots)
            codes, scales = (
                torch.zeros(*shape, part.shape[1], dtype=torch.uint8, device=part.device)
                for part in (packed_codes, scale_bytes)
            )
            self._pages[place] = (codes, scales)
        return self._pages[place]

    def _name(self, step: _Step, row: int) -> str:
        return f"sample {self._sample_ids[int(step.request_ids[row])]}"
