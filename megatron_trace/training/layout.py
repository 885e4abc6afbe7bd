"""Which part of samples and layers a rank of a trainer model has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_trace.hints.sharding import padded_length, token_positions
from megatron_trace.hints.types import Site

if TYPE_CHECKING:  # What reads ahead in a process of its own imports no Megatron.
    from megatron.core.process_groups_config import ProcessGroupCollection

# Sequence parallelism splits the rows of these sites; K and V see all of their CP rank.
TOKEN_SITES = (Site.FC1, Site.FC2)


@dataclass(frozen=True)
class RankLayout:
    """Where a rank stands.

    Attributes:
        tp_size: Tensor-parallel ranks; sequence parallelism splits tokens over them.
        tp_rank: This one.
        cp_size: Context-parallel ranks.
        cp_rank: This one.
        etp_size: Ranks that split each expert.
        etp_rank: This one.
    """

    tp_size: int = 1
    tp_rank: int = 0
    cp_size: int = 1
    cp_rank: int = 0
    etp_size: int = 1
    etp_rank: int = 0

    def padded_length(self, longest: int) -> int:
        """Gives the positions S to which samples of up to `longest` are padded."""
        return padded_length(longest, tp_size=self.tp_size, cp_size=self.cp_size)

    def positions(self, site: Site, num_positions: int) -> tuple[range, ...]:
        """Gives the positions of the rows that a site of this rank sees, ascending.

        Args:
            site: Site.
            num_positions: S.
        """
        split = site in TOKEN_SITES
        return token_positions(
            num_positions,
            tp_size=self.tp_size if split else 1,
            tp_rank=self.tp_rank if split else 0,
            cp_size=self.cp_size,
            cp_rank=self.cp_rank,
        )


def rank_layout(groups: ProcessGroupCollection) -> RankLayout:
    """Gives where this rank stands in a model's process groups."""
    return RankLayout(
        tp_size=groups.tp.size(),
        tp_rank=groups.tp.rank(),
        cp_size=groups.cp.size(),
        cp_rank=groups.cp.rank(),
        etp_size=groups.expt_tp.size(),
        etp_rank=groups.expt_tp.rank(),
    )


def sum_over_columns(
    groups: ProcessGroupCollection, site: Site
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Gives what adds up counts of rows over the ranks that have other columns of them.

    Of K and V these have other KV heads. With fewer heads than ranks each head counts as often as
    any other, which leaves shares as they are.

    Args:
        groups: The model's process groups.
        site: Site.

    Returns:
        A collective, or None if this rank has all columns.
    """
    group = {Site.FC1: None, Site.FC2: groups.expt_tp}.get(site, groups.tp)
    if group is None or group.size() == 1:
        return None

    def add_up(counts: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(counts, group=group)
        return counts

    return add_up
