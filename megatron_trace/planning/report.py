"""A plan as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_trace.models.parameter_counts import parameter_counts
from megatron_trace.planning.hardware import GIB
from megatron_trace.planning.layouts import memory_parts, waiting_bytes
from megatron_trace.planning.plan import TIB, Plan
from megatron_trace.planning.rollout import Rollout
from megatron_trace.planning.sizes import hint_bytes_by_site, kv_bytes, routing_bytes, state_bytes


def report(plan: Plan) -> str:
    """Gives all of a plan, section by section."""
    sections = (_run, _layout, _memory, _rollouts, _hints, _traffic, _time)
    return "\n".join(line for section in sections for line in section(plan))


def summary(plan: Plan) -> str:
    """Gives a plan in one line."""
    speedup = _speedup(plan.bf16_rollout, plan.rollout)
    return (
        f"{plan.request.num_gpus:5d} {plan.request.hardware.name}: {plan.training.layout}; "
        f"{plan.training.memory.total / GIB:.0f} GiB; step {plan.step_s:.0f} s, rollout "
        f"{plan.rollout.seconds:.0f}, training {plan.training.time.seconds:.0f}; FP4 / BF16 "
        f"{speedup}; longest: {plan.bottleneck}; hints {' '.join(plan.hints.choice.sites)}, "
        f"{plan.hints.choice.layers}"
    )


def _run(plan: Plan) -> Iterator[str]:
    request, counts = plan.request, parameter_counts(plan.request.architecture)
    yield (
        f"{request.architecture.name}: {counts.total / 1e9:.1f}B parameters, "
        f"{counts.active / 1e9:.1f}B active, without multi-token prediction"
    )
    for part in request.architecture.left_out:
        yield f"  left out: {part}"
    share = f"{request.rollout_gpus} of them roll out" if request.rollout_gpus else "by turns"
    yield (
        f"{request.num_gpus} {request.hardware.name}, {share}; {request.num_samples} samples of "
        f"{request.prompt_tokens} + {request.response_tokens} tokens a step; "
        f"{request.number_format}"
    )
    yield (
        f"  assumed: {_pairs(vars(request.efficiency))} of the peaks; "
        f"{request.hardware.launch_us:g} us for launching an operation, "
        f"{request.hardware.decode_layer_us:g} for small kernels in a decoded layer"
    )


def _layout(plan: Plan) -> Iterator[str]:
    layout, request = plan.training.layout, plan.request
    yield f"Training: {layout}; a micro-batch is a sample"
    flags = {
        "tensor-model-parallel-size": layout.tp,
        "pipeline-model-parallel-size": layout.pp,
        "context-parallel-size": layout.cp,
        "expert-model-parallel-size": layout.ep,
    }
    more = ["--expert-tensor-parallel-size=1", "--use-distributed-optimizer"]
    if layout.tp > 1:
        more.append("--sequence-parallel")
    if layout.cp > 1:
        more.append("--trace-attention=sdpa")
    if layout.recomputation == "full":
        more += [
            "--recompute-granularity=full",
            "--recompute-method=uniform",
            "--recompute-num-layers=1",
        ]
    if request.packed_activations:
        more.append("--trace-save-packed-activations")
    more.append(f"--trace-experts={request.experts}")
    yield "  " + " ".join([f"--{name}={size}" for name, size in flags.items()] + more)
    if layout.pp > 1:
        yield f"  --hybrid-layer-pattern={request.architecture.pattern(num_stages=layout.pp)}"


def _memory(plan: Plan) -> Iterator[str]:
    memory, request = plan.training.memory, plan.request
    yield (
        f"Memory of the fullest training GPU: {memory.total / GIB:.1f} of "
        f"{request.usable_bytes / GIB:.0f} usable GiB"
    )
    yield "  " + _gib(memory_parts(memory))
    kind = "with" if request.packed_activations else "without"
    yield (
        f"  activations are {kind} packed inputs of experts, which are "
        f"{memory.packed_saving / GIB:.1f} GiB smaller than BF16's"
    )
    waiting = waiting_bytes(request, memory)
    if waiting:
        yield f"  {waiting / GIB:.0f} GiB wait in a host's memory during rollouts"


def _rollouts(plan: Plan) -> Iterator[str]:
    a = plan.request.architecture
    yield "Rollout"
    for name, rollout in (
        (plan.request.number_format, plan.rollout),
        ("the same at BF16's batch", plan.equal_batch_rollout),
        ("bf16", plan.bf16_rollout),
    ):
        if rollout is None:
            yield f"  {name}: no engine holds the weights and a sequence"
            continue
        gpus = rollout.engine_gpus
        yield (
            f"  {name}: engines of {gpus} GPUs, {rollout.batch} sequences at a time (room for "
            f"{rollout.capacity}); a GPU holds {rollout.weight_bytes / gpus / GIB:.1f} GiB of "
            f"weights, {rollout.cache_bytes / gpus / GIB:.1f} of caches and states; "
            f"{rollout.seconds:.0f} s, bound by {rollout.bound}"
        )
    yield (
        f"  a token in the cache: {kv_bytes(a, plan.request.number_format)} bytes, "
        f"{kv_bytes(a, None)} in BF16; states of a sequence: {state_bytes(a) / 1e6:.1f} MB"
    )
    yield (
        f"  FP4 / BF16: {_speedup(plan.bf16_rollout, plan.rollout)} with each at its largest "
        f"batch, {_speedup(plan.bf16_rollout, plan.equal_batch_rollout)} with equal batches"
    )


def _hints(plan: Plan) -> Iterator[str]:
    request, hints = plan.request, plan.hints
    a = request.architecture
    by_site = hint_bytes_by_site(a, hints.choice, request.number_format)
    yield f"Hints: {hints.choice}"
    yield (
        f"  of a token: {_pairs(by_site)} bytes, and {routing_bytes(a)} of expert ids; of a step: "
        f"{hints.step_bytes / TIB:.2f} TiB, in {hints.place} with room for "
        f"{hints.room_bytes / TIB:.1f}"
    )
    if hints.choice.layers != "all":
        yield (
            "  half the layers close much less of the gap than all (docs/study.md): prefer faster "
            "storage"
        )


def _traffic(plan: Plan) -> Iterator[str]:
    time, request = plan.training.time, plan.request
    sent = {
        "tokens to experts": time.all_to_all_bytes,
        "tensor and context parallelism": time.tensor_bytes,
        "gradients and weights": time.gradient_bytes,
        "hints": 2 * plan.hints.step_bytes / request.num_gpus,
        "weight push": plan.push_bytes / request.generating_gpus,
    }
    yield f"Traffic of a step, GiB a GPU: {_pairs({n: size / GIB for n, size in sent.items()})}"


def _time(plan: Plan) -> Iterator[str]:
    yield f"A step takes {plan.step_s:.0f} s"
    yield "  " + _pairs(plan.parts)
    yield (
        f"  longest: {plan.bottleneck}; stages wait {plan.training.time.bubble:.0%} of training's "
        "products"
    )


def _speedup(slow: Rollout | None, fast: Rollout | None) -> str:
    return "-" if slow is None or fast is None else f"{slow.seconds / fast.seconds:.2f}x"


def _pairs(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {_number(n)}" for name, n in values.items())


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _gib(values: Mapping[str, float]) -> str:
    return _pairs({name: value / GIB for name, value in values.items()}) + " GiB"
