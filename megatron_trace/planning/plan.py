"""A plan: the layout that fits and is fastest, the hints that it can afford, a step's time."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron_trace.planning.hardware import GIB, HARDWARE
from megatron_trace.planning.layouts import (
    Fitted,
    fastest_layout,
    fits,
    fitted,
    memory_parts,
    smallest_layout,
    waiting_bytes,
)
from megatron_trace.planning.request import Request
from megatron_trace.planning.rollout import Rollout, plan_rollout
from megatron_trace.planning.sizes import (
    HintChoice,
    hint_bytes,
    hint_choices,
    rollout_weight_bytes,
    routing_bytes,
)

# Beyond this no one plans, and a search for what would fit ends.
MAX_GPUS = 16_384
TIB = 1 << 40


class DoesNotFit(ValueError):
    """No layout of the request fits; the message says what is short and what would do."""


@dataclass(frozen=True)
class HintStorage:
    """Where the hints of a step go, and how long that takes.

    Attributes:
        choice: Which hints.
        step_bytes: Hints and expert ids of a step.
        place: `host memory`, or `disk` if that is too small.
        room_bytes: What all hosts have there.
        seconds: Time to write and read them.
    """

    choice: HintChoice
    step_bytes: float
    place: str
    room_bytes: float
    seconds: float


@dataclass(frozen=True)
class Plan:
    """What a run takes.

    Attributes:
        request: What was asked for.
        training: Layout of training, its memory and time.
        rollout: Rollout in the run's number format.
        bf16_rollout: The same in BF16; None if no engine holds it.
        equal_batch_rollout: The run's rollout with engines and batch of `bf16_rollout`.
        hints: Recorded hints.
        offload_s: Time in which what training holds goes to the host and comes back.
        push_bytes: BF16 weights to every engine.
        push_s: Time of it.
    """

    request: Request
    training: Fitted
    rollout: Rollout
    bf16_rollout: Rollout | None
    equal_batch_rollout: Rollout | None
    hints: HintStorage
    offload_s: float
    push_bytes: float
    push_s: float

    @property
    def step_s(self) -> float:
        """Time of a step: by turns on the same GPUs, at once on different ones."""
        busy = (self.rollout.seconds, self.training.time.seconds)
        whole = (max(busy) if self.request.rollout_gpus else sum(busy)) + self.push_s
        # Written behind the rollout and read behind the training.
        return max(whole + self.offload_s, self.hints.seconds)

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of every part of a step."""
        return {
            "decoding": self.rollout.decode_s - self.rollout.small_kernels_s,
            "decoding, small kernels": self.rollout.small_kernels_s,
            "prefill": self.rollout.prefill_s,
            "training, products": self.training.time.compute_s,
            "training, activations": self.training.time.activations_s,
            "training, launching": self.training.time.launch_s,
            "training, exchange": self.training.time.exchange_s,
            "hints, behind the others": self.hints.seconds,
            "offload and return": self.offload_s,
            "weight push": self.push_s,
        }

    @property
    def bottleneck(self) -> str:
        """The longest part."""
        return max(self.parts, key=lambda name: self.parts[name])


def make_plan(request: Request) -> Plan:
    """Gives the fastest plan that fits, with the best hints that it can afford.

    Args:
        request: The run.

    Raises:
        DoesNotFit: None does; the message says what is short and what would do.
    """
    rollout = plan_rollout(request, request.number_format)
    if rollout is None:
        raise DoesNotFit(_rollout_shortage(request))
    training = fastest_layout(request, request.hints or HintChoice())
    if training is None:
        raise DoesNotFit(_training_shortage(request))
    refused = []
    for choice in (request.hints,) if request.hints else hint_choices():
        with_hints = fitted(request, training.layout, choice)
        plan = _finished(request, with_hints, rollout, choice)
        reason = _unaffordable(plan)
        if reason is None:
            return plan
        refused.append(f"{choice}: {reason}")
    raise DoesNotFit(
        f"{refused[-1]}; record fewer layers by number (--trace-hint-layers), take fewer samples "
        "a step, faster or more storage, or more hosts"
    )


def _finished(request: Request, training: Fitted, rollout: Rollout, choice: HintChoice) -> Plan:
    a, gpu = request.architecture, request.hardware
    plain = plan_rollout(request, None)
    equal = None
    if plain is not None:
        equal = plan_rollout(
            request, request.number_format, batch=plain.batch, engine_gpus=plain.engine_gpus
        )
    weights = rollout_weight_bytes(a, None)
    of_link = gpu.scale_out_gb_s * 1e9 * request.efficiency.network
    of_host = gpu.host_gb_s * 1e9 * request.efficiency.disk
    waiting = 0.0 if request.rollout_gpus else training.memory.states
    return Plan(
        request,
        training,
        rollout,
        plain,
        equal,
        _hint_storage(request, training, choice),
        offload_s=2 * waiting / of_host,
        push_bytes=request.generating_gpus // rollout.engine_gpus * weights,
        push_s=weights / rollout.engine_gpus / of_link,
    )


def _hint_storage(request: Request, training: Fitted, choice: HintChoice) -> HintStorage:
    a, gpu = request.architecture, request.hardware
    of_token = hint_bytes(a, choice, request.number_format) + routing_bytes(a)
    size = float(request.step_tokens * of_token)
    free = request.usable_host_bytes - waiting_bytes(request, training.memory)
    place, room = "host memory", request.num_hosts * free
    # Through the GPUs' links in memory, through the hosts' disks otherwise.
    rate = request.num_gpus * gpu.host_gb_s
    if size > room:
        place, room = "disk", request.num_hosts * gpu.disk_tib * TIB
        rate = request.num_hosts * gpu.disk_gb_s
    seconds = 2 * size / (rate * 1e9 * request.efficiency.disk)
    return HintStorage(choice, size, place, room, seconds)


def _unaffordable(plan: Plan) -> str | None:
    """Gives why a plan's hints cannot be recorded; None if they can."""
    request, hints = plan.request, plan.hints
    if not fits(request, plan.training.memory):
        return f"a rank of {plan.training.layout} has no room for them"
    if hints.step_bytes > hints.room_bytes:
        return (
            f"a step has {hints.step_bytes / TIB:.1f} TiB of them, the disks of "
            f"{request.num_hosts} hosts {hints.room_bytes / TIB:.1f}"
        )
    if hints.seconds > request.max_hint_share * plan.step_s:
        return (
            f"{hints.step_bytes / TIB:.1f} TiB take {hints.seconds:.0f} s on {hints.place}, more "
            f"than {request.max_hint_share:.0%} of a step of {plan.step_s:.0f} s"
        )
    return None


def _rollout_shortage(request: Request) -> str:
    a = request.architecture
    weights = rollout_weight_bytes(a, request.number_format)
    return (
        f"no rollout engine of {request.generating_gpus} {request.hardware.name} holds {a.name}: "
        f"weights of {weights / GIB:.0f} GiB in {request.number_format} and one sequence of "
        f"{request.sequence_tokens} tokens, of {request.usable_bytes / GIB:.0f} usable GiB a GPU"
        f"{_what_would(request)}"
    )


def _training_shortage(request: Request) -> str:
    smallest = smallest_layout(request, request.hints or HintChoice())
    if smallest is None:
        return (
            f"no layout has a sample for each data-parallel rank of {request.training_gpus} GPUs "
            f"with {request.num_samples} samples a step; give more samples, or GPUs in a number "
            "that heads and layers divide"
        )
    memory, layout = smallest.memory, smallest.layout
    parts = memory_parts(memory)
    largest = max(parts, key=lambda name: parts[name])
    where = (
        f"{memory.total / GIB:.0f} of {request.usable_bytes / GIB:.0f} usable GiB, most of it "
        f"{largest} ({parts[largest] / GIB:.0f} GiB)"
    )
    if memory.total <= request.usable_bytes:
        waiting = waiting_bytes(request, memory)
        where = (
            f"{waiting / GIB:.0f} of {request.usable_host_bytes / GIB:.0f} usable GiB of a host "
            "while the same GPUs roll out (or give rollouts GPUs of their own)"
        )
    return (
        f"{request.architecture.name} does not fit {request.training_gpus} "
        f"{request.hardware.name} for training: the smallest layout ({layout}) takes {where}"
        f"{_what_would(request)}"
    )


def _what_would(request: Request) -> str:
    """Gives the fewest GPUs, of this kind and of others, with which the run fits."""
    kinds = {gpu.name: gpu for gpu in (*HARDWARE.values(), request.hardware)}
    counts = {
        name: _fewest_gpus(dataclasses.replace(request, hardware=gpu))
        for name, gpu in kinds.items()
    }
    found = [f"{count} {name}" for name, count in counts.items() if count is not None]
    if not found:
        return f"; nothing up to {MAX_GPUS} GPUs would do: shorten the samples"
    return f"; would do: {', '.join(found)}"


def _fewest_gpus(request: Request) -> int | None:
    """Gives the smallest number of GPUs, doubling from one host, with which the run fits."""
    count = max(request.hardware.gpus_per_node, 2 if request.rollout_gpus else 1)
    while count <= MAX_GPUS:
        larger = request.with_gpus(count)
        rolls_out = plan_rollout(larger, request.number_format) is not None
        if rolls_out and fastest_layout(larger, request.hints or HintChoice()) is not None:
            return count
        count *= 2
    return None
