"""A rollout engine: how many sequences fit, and how long a token takes, from a roofline.

A step of decoding takes the longer of reading (`decode_bytes`) and computing, the exchange between
the engine's GPUs, and in every layer the kernels that do neither, as they were measured. Scheduling
is not in it, and steps are taken to be captured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_trace.models.architecture import Architecture
from megatron_trace.models.parameter_counts import parameter_counts
from megatron_trace.planning.decode_bytes import decode_bytes, sequence_bytes
from megatron_trace.planning.request import Request
from megatron_trace.planning.sizes import BF16_BYTES, rollout_weight_bytes


@dataclass(frozen=True)
class Rollout:
    """A rollout of a step's samples.

    Attributes:
        number_format: Formats of the engine; None in BF16.
        engine_gpus: GPUs of an engine.
        capacity: Sequences of full length whose caches and states fit an engine.
        batch: Sequences that an engine decodes at a time.
        weight_bytes: Weights of an engine.
        cache_bytes: Caches and states of the batch at full length.
        decode_s: Time of decoding.
        small_kernels_s: What of it are kernels that neither read weights nor caches.
        prefill_s: Time of reading the prompts.
        bound: What limits decoding: memory, compute, exchange or small kernels.
    """

    number_format: str | None
    engine_gpus: int
    capacity: int
    batch: int
    weight_bytes: float
    cache_bytes: float
    decode_s: float
    small_kernels_s: float
    prefill_s: float
    bound: str

    @property
    def seconds(self) -> float:
        """Time of the whole rollout."""
        return self.decode_s + self.prefill_s


def capacity(request: Request, number_format: str | None, engine_gpus: int) -> int:
    """Gives how many sequences of full length fit an engine.

    Args:
        request: The run.
        number_format: Formats of the engine; None in BF16.
        engine_gpus: GPUs of the engine.
    """
    a = request.architecture
    room = engine_gpus * request.usable_bytes
    room -= rollout_weight_bytes(a, number_format)
    return max(0, math.floor(room / _sequence_bytes(request, number_format)))


def _sequence_bytes(request: Request, number_format: str | None) -> float:
    return sequence_bytes(
        request.architecture, tokens=request.sequence_tokens, kv_format=number_format
    )


def decode_step_s(
    request: Request, number_format: str | None, engine_gpus: int, batch: int
) -> tuple[float, str]:
    """Gives the time of one token of every sequence of a batch, and what limits it.

    Args:
        request: The run; caches are as long as they are halfway through the response.
        number_format: Formats of the engine; None in BF16.
        engine_gpus: GPUs of the engine.
        batch: Sequences.
    """
    a, gpu, share = request.architecture, request.hardware, request.efficiency
    context = request.prompt_tokens + request.response_tokens / 2
    read = decode_bytes(
        a, batch=batch, context=context, expert_format=number_format, kv_format=number_format
    )
    busy = {
        "memory": read.total / (engine_gpus * gpu.memory_tb_s * 1e12 * share.memory),
        "compute": batch * token_seconds(request, number_format, context) / engine_gpus,
    }
    longer = max(busy, key=lambda name: busy[name])
    exchange = 0.0
    if engine_gpus > 1:
        # Tokens to their experts and back, and the sums of the other matrices.
        values = a.num_layers * a.hidden_size * (2 * a.router_topk + 4)
        rate = gpu.scale_up_gb_s if engine_gpus <= gpu.scale_up_gpus else gpu.scale_out_gb_s
        exchange = batch * BF16_BYTES * values / (engine_gpus * rate * 1e9 * share.network)
    times = {
        longer: busy[longer],
        "exchange": exchange,
        "small kernels": small_kernels_s(request),
    }
    return sum(times.values()), max(times, key=lambda name: times[name])


def small_kernels_s(request: Request) -> float:
    """Gives the time of a step's kernels that neither read weights nor caches, as measured."""
    return request.architecture.num_layers * request.hardware.decode_layer_us * 1e-6


def token_seconds(request: Request, number_format: str | None, context: float) -> float:
    """Gives the time of a token's forward products on one GPU."""
    a, gpu = request.architecture, request.hardware
    experts, others = forward_flops(a, context)
    expert_rate = gpu.bf16_tflops if number_format is None else gpu.fp4_tflops
    seconds = experts / expert_rate + others / gpu.bf16_tflops
    return seconds / (1e12 * request.efficiency.compute)


def forward_flops(architecture: Architecture, context: float) -> tuple[float, float]:
    """Gives the operations of a token's forward pass: routed experts, and all else.

    Args:
        architecture: The model.
        context: Positions that the token attends to.
    """
    a, counts = architecture, parameter_counts(architecture)
    experts = 2.0 * (counts.routed_experts - counts.inactive_experts)
    others = 2.0 * (counts.active - counts.embedding) - experts
    others += 4 * a.num_attention_layers * a.num_query_heads * a.head_dim * context
    state = a.gdn_value_heads * a.gdn_key_head_dim * a.gdn_value_head_dim
    return experts, others + 6 * a.num_gdn_layers * state


def plan_rollout(
    request: Request,
    number_format: str | None,
    *,
    batch: int | None = None,
    engine_gpus: int | None = None,
) -> Rollout | None:
    """Gives the fastest rollout over the sizes of engines; None if no engine fits.

    Args:
        request: The run.
        number_format: Formats of the engines; None in BF16.
        batch: Sequences an engine decodes at a time; None takes the most that fit.
        engine_gpus: GPUs of an engine; None takes the best number.
    """
    largest = min(request.generating_gpus, 4 * request.hardware.scale_up_gpus)
    sizes = [engine_gpus] if engine_gpus else [1 << n for n in range(largest.bit_length())]
    found = (_rollout(request, number_format, size, batch) for size in sizes)
    return min(
        (rollout for rollout in found if rollout is not None),
        key=lambda rollout: rollout.seconds,
        default=None,
    )


def _rollout(
    request: Request, number_format: str | None, engine_gpus: int, batch: int | None
) -> Rollout | None:
    room = capacity(request, number_format, engine_gpus)
    if room < 1 or request.generating_gpus % engine_gpus:
        return None
    engines = request.generating_gpus // engine_gpus
    samples = -(-request.num_samples // engines)
    waves = -(-samples // min(room, samples, batch or room))
    size = -(-samples // waves)
    step_s, bound = decode_step_s(request, number_format, engine_gpus, size)
    prefill = token_seconds(request, number_format, request.prompt_tokens / 2)
    return Rollout(
        number_format,
        engine_gpus,
        room,
        size,
        rollout_weight_bytes(request.architecture, number_format),
        size * _sequence_bytes(request, number_format),
        waves * request.response_tokens * step_s,
        waves * request.response_tokens * small_kernels_s(request),
        samples * request.prompt_tokens * prefill / engine_gpus,
        bound,
    )
