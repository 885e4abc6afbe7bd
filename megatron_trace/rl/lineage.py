"""Which process did which steps of a run in Megatron's loop, as its checkpoints and metrics say.

A process has a random name, which stands in each line of metrics that it writes. Those that did the
steps before a checkpoint are among the flags that Megatron saves in it. So a line of metrics is of
the run that goes on from a checkpoint, if the checkpoint names the same process for its step.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron_trace.training.over_ranks import device_of

# Field of a line of metrics: name of the process that did the step.
PROCESS = "process"
# Name among Megatron's flags.
_FLAG = "trace_lineage"


@dataclass(frozen=True)
class Lineage:
    """The processes that did a run's steps, one after another.

    Attributes:
        parts: First step and name of each, in the order of steps.
    """

    parts: tuple[tuple[int, str], ...] = ()

    @classmethod
    def among(cls, flags: Any) -> Lineage:
        """Gives what flags of Megatron tell; an empty one, if whoever had them did not know it."""
        return cls(tuple((step, name) for step, name in getattr(flags, _FLAG, ())))

    def leave_among(self, flags: Any) -> None:
        """Puts it among flags of Megatron, which its checkpoints then hold."""
        setattr(flags, _FLAG, [list(part) for part in self.parts])

    def process_of(self, step: int) -> str | None:
        """Gives the process that did a step; None if that is not known."""
        names = [name for first_step, name in self.parts if first_step <= step]
        return names[-1] if names else None

    def before(self, step: int) -> Lineage:
        """Gives the part of it that did the steps before this one."""
        return Lineage(tuple(part for part in self.parts if part[0] < step))

    def followed_by(self, name: str, *, first_step: int) -> Lineage:
        """Gives that of a process that goes on with a step."""
        return Lineage((*self.before(first_step).parts, (first_step, name)))

    def first_foreign(self, records: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """Gives the first line of metrics whose step another process did; None if there is none."""
        return next((of for of in records if of.get(PROCESS) != self.process_of(of["step"])), None)


def new_name(group: dist.ProcessGroup) -> str:
    """Gives a name that no process had before, the same on all ranks; a collective."""
    names = [uuid.uuid4().hex[:12]]
    first = dist.get_global_rank(group, 0)
    dist.broadcast_object_list(names, src=first, group=group, device=device_of(group))
    return names[0]
