"""What is watched of the quantisers' inputs on the device, read once a step: nobody waits for it.

Legend: N rows, K values of a row.
"""

from __future__ import annotations

import torch

# Places of a model, four of each layer at most.
_MOST_PLACES = 4096
_NO_ROW = 2**62


class Watch:
    """Counts by place: values beyond the largest of a static scale, and rows with NaN or Inf.

    Attributes:
        real_rows: int32 [1] on the device: rows of the running step that belong to a request, the
            rest being padding; None if all do.
    """

    def __init__(self) -> None:
        self.real_rows: torch.Tensor | None = None
        self._numbers: dict[tuple[int, str], int] = {}
        self._counts: torch.Tensor | None = None
        self._on_host: torch.Tensor | None = None
        self._is_on_its_way = False

    def is_real(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """Gives whether tokens of the running step belong to a request; None if all do.

        Args:
            tokens: integer, on the device.
        """
        return None if self.real_rows is None else tokens < self.real_rows

    def clear(self) -> None:
        """Begins to count anew, in the same memory, to which captured graphs add."""
        self._is_on_its_way = False
        if self._counts is not None:
            _reset(self._counts)

    def observe(
        self,
        place: tuple[int, str],
        x: torch.Tensor,
        *,
        largest: float | None,
        finite: bool,
        tokens: torch.Tensor | None = None,
        rows_of_token: int = 1,
    ) -> None:
        """Adds rows of a place.

        Args:
            place: Decoder layer and site; of places that are seen in a step the first is to be the
                one whose NaN the others follow from.
            x: float [N, K].
            largest: Largest value; None counts none.
            finite: Whether NaN and Inf are looked for.
            tokens: int64 [N], the token of each row; None if there are `rows_of_token` of each
                token, in order.
            rows_of_token: See `tokens`.
        """
        if not len(x) or (largest is None and not finite):
            return
        counts = self._of(place, x.device)
        if x.is_cuda:
            from megatron_trace.rollout.kernels import watch

            watch.observe(x, counts, self.real_rows, largest, finite, tokens, rows_of_token)
            return
        if tokens is None:
            tokens = torch.arange(len(x), device=x.device) // rows_of_token
        is_real = self.is_real(tokens)
        if is_real is None:
            is_real = torch.ones_like(tokens, dtype=torch.bool)
        if largest is not None:
            counts[0] += ((x.float().abs() > largest).sum(-1) * is_real).sum()
        if finite:
            is_bad = ~torch.isfinite(x).all(-1) & is_real
            counts[1] += is_bad.sum()
            counts[2] = torch.minimum(counts[2], tokens.masked_fill(~is_bad, _NO_ROW).amin())

    def beyond(self) -> dict[tuple[int, str], int]:
        """Gives by place the values beyond the largest."""
        return {place: counts[0] for place, counts in self._read().items()}

    def begin_reading(self) -> None:
        """Starts to copy what was counted so far to the host, where `first_bad` finds it then.

        Before that is called, the host must have waited for something that the device does later.
        """
        if self._counts is None or not self._counts.is_cuda:
            return
        used = slice(0, len(self._numbers))
        self._pinned()[used].copy_(self._counts[used], non_blocking=True)
        self._is_on_its_way = True

    def first_bad(self) -> tuple[tuple[int, str], int, int] | None:
        """Gives the first place with NaN or Inf, the first token there and the number of rows."""
        if self._counts is None:
            return None
        counts = self._pinned() if self._is_on_its_way else self._counts
        self._is_on_its_way = False
        rows = counts[: len(self._numbers)].cpu().numpy()
        bad = rows[:, 1].nonzero()[0]
        if not len(bad):
            return None
        _, count, token = rows[bad[0]].tolist()
        return list(self._numbers)[bad[0]], token, count

    def _read(self) -> dict[tuple[int, str], list[int]]:
        if self._counts is None:
            return {}
        rows = self._counts[: len(self._numbers)].tolist()
        return dict(zip(self._numbers, rows, strict=True))

    @torch.inference_mode(False)
    def _pinned(self) -> torch.Tensor:
        if self._on_host is None:
            self._on_host = torch.empty(_MOST_PLACES, 3, dtype=torch.int64, pin_memory=True)
        return self._on_host

    @torch.inference_mode(False)
    def _of(self, place: tuple[int, str], device: torch.device) -> torch.Tensor:
        if self._counts is None:
            self._counts = torch.zeros(_MOST_PLACES, 3, dtype=torch.int64, device=device)
            _reset(self._counts)
        number = self._numbers.setdefault(place, len(self._numbers))
        assert number < _MOST_PLACES, "four places of each layer"
        return self._counts[number]


def _reset(counts: torch.Tensor) -> None:
    counts[:, :2], counts[:, 2] = 0, _NO_ROW
