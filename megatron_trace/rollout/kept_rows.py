"""Rows of a rollout in host memory, at the page and offset at which the cache keeps their tokens.

Legend: N rows of a step, R rows that are read, P pages of S tokens, W bytes of a row: codes and
scales of all places side by side.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from megatron_trace.hints import Site

Place = tuple[int, Site]
# Packed codes or hints, and scale bytes.
Rows = tuple[torch.Tensor, torch.Tensor]

# Rows are moved in words of so many bytes.
_WORD_BYTES = 8


class KeptRows:
    """Codes and scales of places that are not in the cache, and the policy version of each row.

    Args:
        num_pages: P, the page that padding goes to included.
        page_tokens: S.
    """

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self._num_rows, self._page_tokens = num_pages * page_tokens, page_tokens
        self._columns: dict[Place, tuple[slice, slice]] = {}
        # numpy's zeros take memory only where they are written.
        self._versions = torch.from_numpy(np.zeros(self._num_rows, dtype=np.int64))
        self._words = torch.empty(0, 0)

    # Within Megatron's inference mode tensors would be made that nobody else may change.
    @torch.inference_mode(False)
    def lay_out(self, places: Iterable[Place], widths: Sequence[int]) -> int:
        """Says what a row holds; memory is taken where rows are kept.

        Args:
            places: In the order of their columns.
            widths: Bytes of the codes and of the scales of each place, one after the other.

        Returns:
            W; more than the widths together where these are no multiple of 8.
        """
        edges = [0, *itertools.accumulate(widths)]
        columns = [slice(*edge) for edge in itertools.pairwise(edges)]
        self._columns = dict(
            zip(places, zip(columns[::2], columns[1::2], strict=True), strict=True)
        )
        row_bytes = edges[-1] + -edges[-1] % _WORD_BYTES
        shape = self._num_rows, row_bytes // _WORD_BYTES
        self._words = torch.from_numpy(np.zeros(shape, dtype=np.int64))
        return row_bytes

    def numbers(self, pages: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Gives the row at each page and offset, int64 [N]; both integer, in host memory."""
        return pages.long() * self._page_tokens + offsets.long()

    def keep(self, numbers: torch.Tensor, rows: torch.Tensor) -> None:
        """Keeps rows, uint8 [N, W] in host memory."""
        # Row by row, in a quarter of the time that `index_copy_` takes.
        self._words.numpy()[numbers.numpy()] = rows.view(torch.int64).numpy()

    def bytes_of(self, place: Place) -> tuple[int, int]:
        """Gives the bytes of codes and of scales of a place.

        Raises:
            KeyError: Rows do not hold it.
        """
        codes, scales = self._columns[place]
        return codes.stop - codes.start, scales.stop - scales.start

    def read(
        self, places: Iterable[Place], pages: torch.Tensor, offsets: torch.Tensor
    ) -> dict[Place, Rows]:
        """Gives codes uint8 [R, bytes] and scale bytes uint8 [R, B] of places.

        Raises:
            KeyError: Rows do not hold a place.
        """
        columns = {place: self._columns[place] for place in places}
        found = self._words[self.numbers(pages, offsets)].view(torch.uint8)
        return {
            place: (found[:, codes].contiguous(), found[:, scales].contiguous())
            for place, (codes, scales) in columns.items()
        }

    def put_back(
        self, place: Place, pages: torch.Tensor, offsets: torch.Tensor, rows: Rows
    ) -> None:
        """Puts what `read` gave of a place at other pages and offsets."""
        kept, numbers = self._words.view(torch.uint8), self.numbers(pages, offsets)
        for columns, values in zip(self._columns[place], rows, strict=True):
            kept[numbers, columns] = values

    def versions(self, numbers: torch.Tensor) -> torch.Tensor:
        """Gives the policy version of rows, int64 [R]."""
        return self._versions[numbers]

    def put_versions(self, numbers: torch.Tensor, versions: torch.Tensor | int) -> None:
        """Notes the policy version of rows: one, or int64 [R]."""
        self._versions[numbers] = versions
