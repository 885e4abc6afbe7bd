"""Rows on their way from the device that computes them to host memory, in the order of the steps.

A step writes its rows to a ring on the device. While the device computes the next step, a side
stream copies them to a ring of the same shape in pinned memory, and the host takes what has arrived
from there one more step later. Nobody waits, unless the ring is full: neither the host nor the side
stream, which as it waits for the device to compute the rows would cost time between the kernels of
a captured graph. On a CPU there is one ring, and rows arrive at once.

Legend: N rows of a step that belong to a request, M rows with padding, R rows of the ring, W bytes
of a row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass
class _Step:
    """Rows of a step that are under way.

    Attributes:
        start: Rows that were written to the ring before.
        places: int64 [N], where the host puts them.
        computed: When the rows are written; None once their copies were started, and on a CPU.
        arrived: When the copies are done; None before they are started, and on a CPU.
    """

    start: int
    places: torch.Tensor
    computed: torch.cuda.Event | None
    arrived: torch.cuda.Event | None = None


class RowRing:
    """A ring of rows on the device, and its copy in host memory.

    Args:
        num_rows: R, at least those of the largest step.
        largest_step: Largest M.
        row_bytes: W.
        device: Where rows are computed.
        sink: Takes places int64 [N] and rows uint8 [N, W] in host memory, in the order in which
            they were written; the rows are overwritten after the call.

    Attributes:
        index: int64 [largest M] on the device: the ring's row of each row of the next step. Those
            of its padding are rows that the step after it writes. The address stays, so that a
            captured graph writes where its rows belong.
        num_waits: How often the host waited for a copy because the ring was full.
    """

    # Within Megatron's inference mode tensors would be made that nobody else may change.
    @torch.inference_mode(False)
    def __init__(
        self,
        num_rows: int,
        largest_step: int,
        row_bytes: int,
        device: torch.device,
        sink: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> None:
        self.num_rows, self.row_bytes = num_rows, row_bytes
        self._sink = sink
        self._rows = torch.zeros(num_rows, row_bytes, dtype=torch.uint8, device=device)
        self._order = torch.arange(num_rows + largest_step, device=device) % num_rows
        self.index = self._order[:largest_step].clone()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._arrived = self._rows
        if self._stream is not None:
            self._arrived = torch.empty(num_rows, row_bytes, dtype=torch.uint8, pin_memory=True)
        self._written = self._taken = 0
        self._running: torch.Tensor | None = None
        self._under_way: deque[_Step] = deque()
        self.num_waits = 0

    @property
    def num_under_way(self) -> int:
        """Steps whose rows the host has not taken."""
        return len(self._under_way)

    def begin(self, places: torch.Tensor, num_padded: int) -> None:
        """Finds room for the rows of a step; takes older ones, and waits for them, if need be.

        Args:
            places: int64 [N] in host memory, handed to the sink with the rows.
            num_padded: M.

        Raises:
            RuntimeError: The ring is smaller than the step.
        """
        count = len(places)
        if num_padded > min(self.num_rows, len(self.index)):
            raise RuntimeError(
                f"a step of {count} rows, {num_padded} with padding, does not fit into a ring of "
                f"{self.num_rows} rows for steps of {len(self.index)}"
            )
        while self._written + num_padded - self._taken > self.num_rows:
            self.num_waits += not self._has_arrived(self._under_way[0])
            self._take_oldest()
        self._running = places

    def write(self, rows: torch.Tensor) -> None:
        """Writes the rows of the running step, uint8 [M, W] on the device; may be captured."""
        wide = torch.int64 if self.row_bytes % 8 == 0 else torch.uint8
        self._rows.view(wide).index_copy_(0, self.index[: len(rows)], rows.view(wide))

    def send(self) -> None:
        """Hands over the running step's rows, says where more go, and has earlier ones copied."""
        places, self._running = self._running, None
        assert places is not None, "begin comes first"
        self._start_copies()
        computed = None
        if self._stream is not None:
            computed = torch.cuda.Event()
            computed.record()
        self._under_way.append(_Step(self._written, places, computed))
        self._written += len(places)
        start = self._written % self.num_rows
        self.index.copy_(self._order[start : start + len(self.index)])

    def take_arrived(self) -> None:
        """Hands rows that have arrived to the sink, without waiting."""
        while self._under_way and self._has_arrived(self._under_way[0]):
            self._take_oldest()

    def take_all(self) -> None:
        """Hands all rows that were sent to the sink."""
        while self._under_way:
            self._take_oldest()

    def drop(self) -> None:
        """Forgets rows under way. Their copies come before those of later rows, in one stream."""
        self._under_way.clear()
        self._running, self._taken = None, self._written

    def _start_copies(self) -> None:
        """Starts the copies of the rows that were handed over last, if it was not done."""
        step = self._under_way[-1] if self._under_way else None
        if step is None or step.computed is None or self._stream is None:
            return
        arrived = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(step.computed)
            for part in self._parts(step.start, len(step.places)):
                self._arrived[part].copy_(self._rows[part], non_blocking=True)
            arrived.record()
        step.computed, step.arrived = None, arrived

    def _parts(self, start: int, count: int) -> list[slice]:
        """Gives the one or two pieces of the ring in which rows lie."""
        first = start % self.num_rows
        end = min(first + count, self.num_rows)
        rest = first + count - end
        return [slice(first, end), slice(0, rest)] if rest else [slice(first, end)]

    @staticmethod
    def _has_arrived(step: _Step) -> bool:
        return step.computed is None and (step.arrived is None or step.arrived.query())

    def _take_oldest(self) -> None:
        if self._under_way[0].computed is not None:
            self._start_copies()
        step = self._under_way.popleft()
        if step.arrived is not None:
            step.arrived.synchronize()
        done = 0
        for part in self._parts(step.start, len(step.places)):
            count = part.stop - part.start
            self._sink(step.places[done : done + count], self._arrived[part])
            done += count
        self._taken = step.start + done
