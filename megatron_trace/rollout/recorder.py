"""What the engine's quantisers did, by sample, token position, decoder layer and site.

Legend: N rows of one engine step that belong to a request, R rows of a sample, K values of a row,
B blocks of a row, C bits of a code, k expert slots of a token. A row of fc2 is its k slots side by
side.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from megatron_trace.hints import Site

Place = tuple[int, Site]


@dataclass(frozen=True)
class _Slots:
    """Some slots of the rows of one step."""

    tokens: torch.Tensor
    slots: torch.Tensor
    packed_codes: torch.Tensor
    scale_bytes: torch.Tensor
    num_slots: int


@dataclass
class _Step:
    """One forward of the engine: whose rows it computed, and what the quantisers gave."""

    request_ids: torch.Tensor
    positions: torch.Tensor
    rows: dict[Place, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    slots: dict[Place, list[_Slots]] = field(default_factory=dict)


class Recorder:
    """Collects packed codes and scale bytes as the quantisers give them; never quantises itself.

    Args:
        places: (decoder layer, site) whose rows are kept.

    Attributes:
        seconds: Time spent in `put` since construction.
    """

    def __init__(self, places: Iterable[Place]) -> None:
        self.places = frozenset(places)
        self.seconds = 0.0
        self._sample_ids: Sequence[str] = ()
        self._first_request_id = 0
        self._keep = False
        self._steps: list[_Step] = []

    def start(self, sample_ids: Sequence[str], first_request_id: int, *, keep: bool) -> None:
        """Begins a rollout whose requests have consecutive ids, in the order of the samples.

        Args:
            sample_ids: Names of the samples.
            first_request_id: The engine's id of the first of them.
            keep: Whether rows are kept; otherwise only the samples of the rows are known.
        """
        self._sample_ids, self._first_request_id = sample_ids, first_request_id
        self._keep = keep
        self._steps = []

    def stop(self) -> None:
        """Ends the rollout and forgets what was not taken."""
        self._sample_ids, self._steps, self._keep = (), [], False

    def begin_step(self, request_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Says to which request and token position the first N rows of the next forward belong.

        Args:
            request_ids: integer [N]; the engine's buffers, copied here.
            positions: integer [N].
        """
        if self._sample_ids:
            steps = self._steps if self._keep else []
            steps.append(_Step(request_ids.long().clone(), positions.long().clone()))
            self._steps = steps

    @property
    def num_rows(self) -> int | None:
        """Rows of the running step that belong to a request; None outside a rollout."""
        return len(self._steps[-1].positions) if self._steps else None

    def sample_of_row(self, row: int) -> str:
        """Names sample and position of a row of the running step, for error messages."""
        if self.num_rows is None:
            return f"row {row} (no rollout is running)"
        step = self._steps[-1]
        index = int(step.request_ids[row]) - self._first_request_id
        return f"sample {self._sample_ids[index]}, position {int(step.positions[row])}"

    def keeps(self, layer: int, site: Site) -> bool:
        """Whether the rows of a place are kept in the running step."""
        return bool(self._keep and self._steps) and (layer, site) in self.places

    def put(
        self, layer: int, site: Site, packed_codes: torch.Tensor, scale_bytes: torch.Tensor
    ) -> None:
        """Keeps what a quantiser gave for the rows of the running step.

        Args:
            layer: Decoder layer.
            site: Site.
            packed_codes: uint8 [>= N, K * C / 8]; rows beyond N are padding.
            scale_bytes: uint8 [>= N, B].

        Raises:
            RuntimeError: The place was recorded in this step already.
        """
        if not self.keeps(layer, site):
            return
        place = (layer, site)
        started = time.perf_counter()
        step = self._steps[-1]
        if place in step.rows:
            raise RuntimeError(
                f"layer {layer}, site {site} was quantised twice in one step of the engine; its "
                "rows cannot be told apart"
            )
        rows = len(step.positions)
        # A view would keep the padding alive.
        step.rows[place] = (packed_codes[:rows].clone(), scale_bytes[:rows].clone())
        self.seconds += time.perf_counter() - started

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
            packed_codes: uint8 [rows, bytes of a slot]; kept, not copied.
            scale_bytes: uint8 [rows, blocks of a slot]; likewise.
            slots: Token and slot of every row, int64 [rows] each; tokens from N on are padding.
            num_slots: Slots k of a token.

        Raises:
            RuntimeError: There are more or fewer slots than rows.
        """
        if not self.keeps(layer, site):
            return
        started = time.perf_counter()
        if len(slots[0]) != len(packed_codes):
            raise RuntimeError(
                f"layer {layer}, site {site}: the quantiser got {len(packed_codes)} rows, but the "
                f"routing record of the step says {len(slots[0])}"
            )
        part = _Slots(*slots, packed_codes, scale_bytes, num_slots)
        self._steps[-1].slots.setdefault((layer, site), []).append(part)
        self.seconds += time.perf_counter() - started

    def take(self, num_rows: Sequence[int]) -> dict[Place, tuple[torch.Tensor, torch.Tensor]]:
        """Gives the rows of one sample after those of another, each in the order of its positions.

        Args:
            num_rows: R of each sample, in the order of the samples.

        Returns:
            By place: packed codes uint8 [sum of R, K * C / 8], scale bytes uint8 [sum of R, B].

        Raises:
            RuntimeError: A position of a sample was not recorded exactly once.
        """
        order = self._row_order(num_rows)
        records = {}
        for place in sorted(self.places):
            rows = [self._rows(step, place) for step in self._steps]
            packed_codes, scale_bytes = (torch.cat(part) for part in zip(*rows, strict=True))
            records[place] = (packed_codes[order].cpu(), scale_bytes[order].cpu())
        self._steps = []
        return records

    def _rows(self, step: _Step, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
        if place in step.rows:
            return step.rows[place]
        if place in step.slots:
            return self._slots_side_by_side(step, place)
        raise self._not_once(step, place, "not quantised")

    def _slots_side_by_side(self, step: _Step, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
        parts = step.slots[place]
        num_rows, num_slots = len(step.positions), parts[0].num_slots
        index = torch.cat([part.tokens * num_slots + part.slots for part in parts])
        real = index < num_rows * num_slots
        index = index[real]
        times = torch.bincount(index, minlength=num_rows * num_slots)
        if (times != 1).any():
            how = "in a slot twice" if (times > 1).any() else "but not in every expert slot"
            raise self._not_once(step, place, f"quantised {how}")
        order = index.argsort()
        packed_codes = torch.cat([part.packed_codes for part in parts])[real][order]
        scale_bytes = torch.cat([part.scale_bytes for part in parts])[real][order]
        return packed_codes.view(num_rows, -1), scale_bytes.view(num_rows, -1)

    def _not_once(self, step: _Step, place: Place, what: str) -> RuntimeError:
        layer, site = place
        return RuntimeError(
            f"layer {layer}, site {site} was {what} in a step that computed {len(step.positions)} "
            f"rows, the first of {self._name(int(step.request_ids[0]))}; the engine must call its "
            "quantiser once for every row"
        )

    def _row_order(self, num_rows: Sequence[int]) -> torch.Tensor:
        """Gives the permutation that sorts the recorded rows by sample and position."""
        samples = torch.cat([step.request_ids for step in self._steps]) - self._first_request_id
        positions = torch.cat([step.positions for step in self._steps])
        expected_samples = torch.repeat_interleave(torch.tensor(num_rows))
        starts = torch.tensor(num_rows).cumsum(0) - torch.tensor(num_rows)
        expected_positions = torch.arange(len(expected_samples)) - starts[expected_samples]
        stride = 1 + max(int(positions.max()), max(num_rows))
        keys, order = (samples * stride + positions).sort()
        expected = expected_samples * stride + expected_positions
        if not torch.equal(keys.cpu(), expected):
            self._raise_wrong_coverage(keys.cpu(), expected, stride, num_rows)
        return order

    def _raise_wrong_coverage(
        self, keys: torch.Tensor, expected: torch.Tensor, stride: int, num_rows: Sequence[int]
    ) -> None:
        shared = min(len(keys), len(expected))
        differing = (keys[:shared] != expected[:shared]).nonzero()
        first = int(differing[0]) if len(differing) else shared
        key = min(int(part[first]) for part in (keys, expected) if first < len(part))
        index = key // stride
        recorded = int(((keys >= index * stride) & (keys < (index + 1) * stride)).sum())
        raise RuntimeError(
            f"{self._name(index + self._first_request_id)}: position {key % stride} was not "
            f"recorded exactly once; {recorded} rows were recorded for {num_rows[index]} positions "
            "(was the request evicted, or its prefix cached?)"
        )

    def _name(self, request_id: int) -> str:
        return f"sample {self._sample_ids[request_id - self._first_request_id]}"
