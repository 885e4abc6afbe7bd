"""Where the tokens of samples stand among the rows of a model: side by side, or packed.

    side by side    [S, B]: position after position, all samples at each; padded on the right
    packed          [T, 1]: sample after sample, in one sequence, whose bounds attention knows

Legend: B samples, S positions of a padded sample, T positions of a pack, M rows of all ranks, N
rows of this rank where a site sees them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from megatron_trace.hints.sharding import packed_length, packed_parts, padded_length
from megatron_trace.hints.types import Site
from megatron_trace.training.layout import TOKEN_SITES, RankLayout


@dataclass(frozen=True)
class RowOrder:
    """The rows of some samples.

    Attributes:
        lengths: Tokens that each sample forwards.
        num_positions: S, or of a pack T.
        packed: Whether samples stand one after another.
        layout: Where this rank stands.
    """

    lengths: tuple[int, ...]
    num_positions: int
    packed: bool
    layout: RankLayout

    @property
    def sample_positions(self) -> int:
        """Positions S that hold each sample."""
        if not self.packed:
            return self.num_positions
        return padded_length(max(self.lengths), tp_size=1, cp_size=self.layout.cp_size)

    @property
    def bounds(self) -> tuple[int, ...]:
        """Where the sequences of a pack begin, over all ranks, and T; padding is the last one."""
        padded = [
            padded_length(length, tp_size=1, cp_size=self.layout.cp_size) for length in self.lengths
        ]
        bounds = [*itertools.accumulate(padded, initial=0)]
        return tuple(bounds if bounds[-1] == self.num_positions else [*bounds, self.num_positions])

    def parts(self, site: Site) -> list[tuple[range, ...]]:
        """Gives the positions of each sample that a site of this rank sees, in the rows' order."""
        if not self.packed:
            return [self.layout.positions(site, self.num_positions)] * len(self.lengths)
        return self._packed_parts(site)[:-1]

    def num_rows(self, site: Site) -> int:
        """Gives the rows N that a site of this rank sees."""
        if not self.packed:
            positions = self.layout.positions(site, self.num_positions)
            return sum(len(part) for part in positions) * len(self.lengths)
        return sum(len(part) for parts in self._packed_parts(site) for part in parts)

    def places(self, site: Site) -> list[range]:
        """Gives for each sample which of the N rows are its own, ascending in position."""
        counts = [sum(len(part) for part in parts) for parts in self.parts(site)]
        if not self.packed:
            size = len(counts)
            return [range(b, counts[b] * size, size) for b in range(size)]
        return [
            range(stop - count, stop)
            for count, stop in zip(counts, itertools.accumulate(counts), strict=True)
        ]

    def rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gives what stands at the rows of all ranks; packed, CP rank after CP rank.

        Returns:
            samples: int64 [M]; 0 for padding of a pack that belongs to no sample.
            positions: int64 [M]; 0 likewise.
            real: bool [M]; rows of tokens, not of padding.
        """
        lengths = torch.tensor(self.lengths)
        if not self.packed:
            shape = (self.num_positions, len(self.lengths))
            positions = torch.arange(self.num_positions).unsqueeze(1).expand(shape).flatten()
            samples = torch.arange(len(self.lengths)).expand(shape).flatten()
            return samples, positions, positions < lengths[samples]
        samples, positions, real = [], [], []
        for cp_rank in range(self.layout.cp_size):
            parts = packed_parts(
                self.lengths, self.num_positions, cp_size=self.layout.cp_size, cp_rank=cp_rank
            )
            for sample, chunks in enumerate(parts):
                known = sample < len(self.lengths)
                for chunk in chunks:
                    at = torch.arange(chunk.start, chunk.stop)
                    samples.append(torch.full_like(at, sample if known else 0))
                    positions.append(at if known else torch.zeros_like(at))
                    real.append(at < (self.lengths[sample] if known else 0))
        return torch.cat(samples), torch.cat(positions), torch.cat(real)

    def own(self, site: Site) -> torch.Tensor:
        """Gives which of the M rows a site of this rank sees, int64 [N]."""
        if not self.packed:
            columns = torch.arange(len(self.lengths))
            parts = self.layout.positions(site, self.num_positions)
            positions = torch.cat([torch.arange(part.start, part.stop) for part in parts])
            return (positions.unsqueeze(1) * len(self.lengths) + columns).flatten()
        layout = self.layout
        size = self.num_positions // layout.cp_size
        start = layout.cp_rank * size
        if site in TOKEN_SITES:
            size //= layout.tp_size
            start += layout.tp_rank * size
        return torch.arange(start, start + size)

    def _packed_parts(self, site: Site) -> list[tuple[range, ...]]:
        layout, split = self.layout, site in TOKEN_SITES
        return packed_parts(
            self.lengths,
            self.num_positions,
            tp_size=layout.tp_size if split else 1,
            tp_rank=layout.tp_rank if split else 0,
            cp_size=layout.cp_size,
            cp_rank=layout.cp_rank,
        )


def row_order(
    lengths: tuple[int, ...], layout: RankLayout, *, num_positions: int | None, packed: bool
) -> RowOrder:
    """Gives the order of samples on a rank.

    Args:
        lengths: Tokens that each sample forwards.
        layout: Where the rank stands.
        num_positions: S, or of a pack T; None takes the least.
        packed: Whether they stand one after another.

    Raises:
        ValueError: The samples do not fit, or cannot be split over the ranks.
    """
    if packed:
        least = packed_length(lengths, tp_size=layout.tp_size, cp_size=layout.cp_size)
    else:
        least = layout.padded_length(max(lengths))
    wanted = least if num_positions is None else num_positions
    if wanted < least or wanted != layout.padded_length(wanted):
        what = f"packed samples of {list(lengths)}" if packed else f"samples of {max(lengths)}"
        raise ValueError(
            f"num_positions={wanted} does not hold {what} positions, or cannot be split over "
            f"{layout}; {least} is the least that can"
        )
    return RowOrder(lengths, wanted, packed, layout)
