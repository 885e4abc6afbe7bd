"""Layouts of training that Megatron and TRACE accept, and the fastest of those that fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_trace.models.architecture import Architecture
from megatron_trace.planning.request import Request
from megatron_trace.planning.sizes import HintChoice
from megatron_trace.planning.training_memory import (
    Layout,
    Recomputation,
    TrainingMemory,
    training_memory,
)
from megatron_trace.planning.training_time import TrainingTime, micro_batches, training_time


@dataclass(frozen=True)
class Fitted:
    """A layout, and what it takes.

    Attributes:
        layout: Parallel groups.
        memory: Memory of the fullest rank.
        time: Time of a step.
    """

    layout: Layout
    memory: TrainingMemory
    time: TrainingTime


def layouts(request: Request) -> Iterator[Layout]:
    """Yields the layouts of a request's training GPUs, smaller groups first."""
    a, gpus = request.architecture, request.training_gpus
    for tp in (1, 2, 4, 8):
        # Key/value heads of a rank, and no padding of the vocabulary (`make-vocab-size-...` is 8).
        uneven_heads = max(a.num_kv_heads, tp) % min(a.num_kv_heads, tp)
        if uneven_heads or a.num_query_heads % tp or a.vocab_size % (8 * tp):
            continue
        for pp in range(1, a.num_layers + 1):
            for cp in (1, 2, 4, 8, 16):
                ranks = tp * pp * cp
                # Heads of Gated DeltaNet are divided among both; each rank needs a sample.
                if gpus % ranks or a.gdn_key_heads % (tp * cp) or a.gdn_value_heads % (tp * cp):
                    continue
                if request.num_samples >= gpus // ranks:
                    yield from _with_experts(a, tp, pp, cp, gpus // ranks)


def _with_experts(a: Architecture, tp: int, pp: int, cp: int, dp: int) -> Iterator[Layout]:
    ep = 1
    while ep <= a.num_experts:
        if (tp * cp * dp) % ep == 0 and a.num_experts % ep == 0:
            recomputations: tuple[Recomputation, ...] = ("none", "full")
            for recomputation in recomputations:
                yield Layout(tp, pp, cp, ep, dp, recomputation)
        ep *= 2


def fitted(request: Request, layout: Layout, hints: HintChoice) -> Fitted:
    """Gives what a layout takes."""
    memory = training_memory(request, layout, hints, micro_batches(request, layout))
    return Fitted(layout, memory, training_time(request, layout))


def fits(request: Request, memory: TrainingMemory) -> bool:
    """Whether a rank's memory and, where the GPUs also roll out, the host's suffice."""
    return memory.total <= request.usable_bytes and waiting_bytes(request, memory) <= (
        request.usable_host_bytes
    )


def waiting_bytes(request: Request, memory: TrainingMemory) -> float:
    """Gives what waits in a host's memory while its GPUs roll out."""
    return 0.0 if request.rollout_gpus else request.gpus_of_host * memory.states


def fastest_layout(request: Request, hints: HintChoice) -> Fitted | None:
    """Gives the fastest layout that fits; None if none does."""
    found = [fitted(request, layout, hints) for layout in layouts(request)]
    fitting = [each for each in found if fits(request, each.memory)]
    return min(fitting, key=lambda each: each.time.seconds, default=None)


def smallest_layout(request: Request, hints: HintChoice) -> Fitted | None:
    """Gives the layout that takes the least memory; None if there is no layout at all."""
    found = (fitted(request, layout, hints) for layout in layouts(request))
    return min(found, key=lambda each: each.memory.total, default=None)


def memory_parts(memory: TrainingMemory) -> dict[str, float]:
    """Gives the parts of `TrainingMemory.total` by name."""
    parts = {field.name: getattr(memory, field.name) for field in dataclasses.fields(memory)}
    del parts["packed_saving"]
    return parts
