"""What ranks settle together: that all could build something, sums and order of their numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist

from megatron_trace.hints.types import Site
from megatron_trace.metrics import CodeMismatch
from megatron_trace.training.report import ActivationDifference, SiteReport, TraceReport
from megatron_trace.training.shape import Place

# What making a micro-batch raises: a hint is missing, wrong, damaged, or its file unreadable.
BUILD_ERRORS = (LookupError, ValueError, RuntimeError, OSError)
# The bits of +Inf in FP32.
_INFINITY = 0x7F800000
_COUNTS = ("weight_uses", "weights_quantised", "routing_compared", "routing_different")


def agreed[T](build: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Gives what `build` gives, or raises on every rank if it raised on any; a collective.

    Without it, a rank with a bad hint would leave the others waiting in the next collective. Build
    all micro-batches of a step within one call, before a pipeline's schedule starts: its stages
    forward the same micro-batch at different times.

    Args:
        build: Makes this rank's micro-batches; communicates with nobody.
        group: All ranks that will communicate while they train on them.

    Raises:
        RuntimeError: Another rank failed; the message says which and why.
        LookupError, ValueError, OSError: This rank failed.
    """
    result, error = None, None
    try:
        result = build()
    except BUILD_ERRORS as raised:
        error = raised
    failed = torch.tensor(int(error is not None), device=device_of(group))
    dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
    if failed:
        messages: list[Any] = [None] * group.size()
        mine = None if error is None else f"{type(error).__name__}: {error}"
        dist.all_gather_object(messages, mine, group=group)
        if error is not None:
            raise error
        rank, message = next(pair for pair in enumerate(messages) if pair[1] is not None)
        raise RuntimeError(
            f"rank {dist.get_global_rank(group, rank)} could not build its part, so no rank goes "
            f"on: {message}"
        )
    return result  # pyright: ignore[reportReturnType]


def summed_report(report: TraceReport, group: dist.ProcessGroup) -> TraceReport:
    """Gives the sums of the counts of all ranks of a group; a collective.

    Rows of fc1 are on one rank each. A row of K or V counts once for every tensor-parallel rank,
    one of fc2 for every expert-tensor-parallel rank: each quantises some columns of it. Shares,
    such as the coverage, are those of one rank.

    Args:
        report: This rank's counts.
        group: The ranks, such as all of a model's.
    """
    parts: list[Any] = [report.sites.get(site, SiteReport()) for site in Site]
    parts += [report.code_mismatch.get(site, CodeMismatch()) for site in Site]
    counts = [getattr(part, f.name) for part in parts for f in fields(part)]
    counts += [getattr(report, name) for name in _COUNTS]
    total = torch.tensor(counts, dtype=torch.int64, device=device_of(group))
    dist.all_reduce(total, group=group)
    numbers = iter(total.tolist())
    sites = {site: _filled(SiteReport, numbers) for site in Site}
    mismatch = {site: _filled(CodeMismatch, numbers) for site in Site}
    return TraceReport(
        sites={site: found for site, found in sites.items() if found.calls},
        code_mismatch={site: found for site, found in mismatch.items() if found.values},
        **dict(zip(_COUNTS, numbers, strict=True)),
    )


def summed_differences(
    report: TraceReport, group: dist.ProcessGroup
) -> dict[Place, ActivationDifference]:
    """Gives the sums of D_act of all ranks of a group, by place; a collective.

    Ranks of a pipeline have other places, and ranks that share a row by columns add their parts up.

    Args:
        report: This rank's.
        group: The ranks.
    """
    parts: list[Any] = [None] * group.size()
    dist.all_gather_object(parts, dict(report.activation_difference), group=group)
    found: dict[Place, ActivationDifference] = {}
    for part in parts:
        for place, difference in part.items():
            found[place] = found.get(place, ActivationDifference()) + difference
    return found


def summed(values: Sequence[float], group: dist.ProcessGroup) -> list[float]:
    """Gives the sums of the numbers of all ranks of a group, in FP64; a collective."""
    total = torch.tensor(values, dtype=torch.float64, device=device_of(group))
    dist.all_reduce(total, group=group)
    return total.tolist()


def largest(values: Sequence[float], group: dist.ProcessGroup) -> list[float]:
    """Gives the largest of each of the numbers of all ranks of a group, in FP64; a collective."""
    found = torch.tensor(values, dtype=torch.float64, device=device_of(group))
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return found.tolist()


def quantile(values: torch.Tensor, share: float, group: dist.ProcessGroup) -> float:
    """Gives a quantile of the values of all ranks, as `torch.quantile` does; a collective.

    Bits of non-negative FP32 numbers are in the order of the numbers, so that 31 counts find the
    value of a place exactly, and no rank needs those of the others.

    Args:
        values: FP32 [n] of this rank, >= 0; n may be 0 and differ from rank to rank.
        share: The quantile, in [0, 1].
        group: The ranks.

    Returns:
        The quantile; NaN if no rank has a value.
    """
    bits = values.detach().float().contiguous().view(torch.int32).to(device_of(group))

    def settled(number: torch.Tensor, op: dist.ReduceOp.RedOpType) -> int:
        dist.all_reduce(number, op=op, group=group)
        return int(number)

    def num_up_to(bound: int) -> int:
        return settled((bits <= bound).sum(), dist.ReduceOp.SUM)

    total = num_up_to(_INFINITY)
    if not total:
        return math.nan
    below, rest = divmod(share * (total - 1), 1)
    low, high = 0, _INFINITY
    while low < high:  # The smallest value that at least below + 1 of them do not exceed.
        middle = (low + high) // 2
        low, high = (low, middle) if num_up_to(middle) > below else (middle + 1, high)
    upper = low
    if rest and num_up_to(low) < below + 2:
        larger = bits[bits > low]
        own = larger.amin() if larger.numel() else bits.new_tensor(_INFINITY)
        upper = settled(own, dist.ReduceOp.MIN)
    found, following = torch.tensor([low, upper], dtype=torch.int32).view(torch.float32).tolist()
    return found if found == following else found + rest * (following - found)


def all_ranks() -> dist.ProcessGroup:
    """Gives the group of all ranks; torch.distributed is initialised."""
    group = dist.group.WORLD
    assert group is not None, "torch.distributed is initialised before a rank asks for the others"
    return group


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Gives where tensors must be for collectives of a group."""
    if dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _filled[T](kind: type[T], numbers: Iterable[int]) -> T:
    names = [f.name for f in fields(kind)]  # pyright: ignore[reportArgumentType]
    return kind(**dict(zip(names, numbers, strict=False)))
