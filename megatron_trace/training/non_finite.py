"""NaN and Inf at the quantised places of a model: noted on the device, asked for once a pass.

Whoever asks at each place waits for the device there, four times a block, and lets it idle until
the next kernel arrives. So a kernel notes the first NaN or Inf of each place, and the host reads
the notes of all places at the end of the pass: before a loss or a gradient is made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron_trace.formats.bad_values import ALL_FINITE, first_bad_value
from megatron_trace.training.rounding import NonFiniteError
from megatron_trace.training.shape import Place, place_name

# Gives the name of a row.
RowName = Callable[[int], str]


class NonFiniteNotes:
    """What of NaN and Inf is noted at the places of one model, until it is asked for.

    Args:
        places: Every place that may be quantised.
        taker: Gives who takes the error of the earliest place with NaN or Inf; None raises it.
    """

    def __init__(
        self, places: Sequence[Place], taker: Callable[[], Callable[[NonFiniteError], None] | None]
    ) -> None:
        self._places = tuple(places)
        self._taker = taker
        # With the first values: a model may move to its device after it was built.
        self._notes: torch.Tensor | None = None
        self._of: dict[Place, torch.Tensor] = {}
        # In the order of execution: columns and names of rows, as the values are gone when somebody
        # asks.
        self._seen: dict[Place, tuple[int, RowName]] = {}

    def of(self, place: Place, values: torch.Tensor, row_name: RowName) -> torch.Tensor:
        """Gives where `note_bad_values` notes what it sees at a place.

        Args:
            place: Decoder layer and site.
            values: float [N, K]; what is about to be quantised.
            row_name: Called when somebody asks, if a value of the row is bad.

        Returns:
            int64 [1] where the values are.

        Raises:
            NonFiniteError: See `ask`: a place that comes again in a pass is asked for before.
        """
        if place in self._seen:
            self.ask()
        if self._notes is None:
            self._notes = self._new_notes(values.device)
            self._of = dict(zip(self._places, self._notes.unbind(), strict=True))
        self._seen[place] = values.shape[1], row_name
        return self._of[place]

    def ask(self) -> None:
        """Tells of the earliest place with NaN or Inf; waits for the device if any place was seen.

        Raises:
            NonFiniteError: There is one, and no one else takes it.
        """
        if not self._seen:
            return
        seen, self._seen = self._seen, {}
        notes = self._read()
        for place, (num_columns, row_name) in seen.items():
            bad = first_bad_value(notes[place])
            if bad is not None:
                self._clear()
                (row, column), value = divmod(bad[0], num_columns), bad[1]
                told = place, row_name(row), column, value
                take = self._taker()
                if take is None:
                    raise NonFiniteError(_message(*told))
                take(NonFiniteError(_message(*told)))
                return

    def forget(self) -> None:
        """Lets go of what a pass noted that ended otherwise."""
        if self._seen:
            self._seen = {}
            self._clear()

    # Others could not be written outside of inference mode.
    @torch.inference_mode(False)
    def _new_notes(self, device: torch.device) -> torch.Tensor:
        shape = len(self._places), 1
        return torch.full(shape, ALL_FINITE, dtype=torch.int64, device=device)

    def _read(self) -> dict[Place, int]:
        assert self._notes is not None, "a place was seen"
        return dict(zip(self._places, self._notes.flatten().tolist(), strict=True))

    def _clear(self) -> None:
        assert self._notes is not None, "a place was seen"
        self._notes.fill_(ALL_FINITE)


def _message(place: Place, row: str, column: int, value: float) -> str:
    return (
        f"{value} at {place_name(place)}, {row}, column {column}: quantisers need finite values; "
        "look at the loss and the gradient norm of the steps before"
    )
