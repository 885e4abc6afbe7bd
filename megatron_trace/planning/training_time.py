"""Time and traffic of training on a step's samples: products, activations, launches, exchanges.

A token is computed forward for the old policy's log-probabilities, forward and backward for the
new one's, and forward once more where activations are computed again. What backward keeps is
written and read once forward, and read once backward, as its gradient is written and read.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_trace.models.architecture import Architecture
from megatron_trace.models.parameter_counts import parameter_counts
from megatron_trace.planning.hardware import Efficiency, Hardware
from megatron_trace.planning.launches import micro_batch_launch_s, optimizer_launch_s
from megatron_trace.planning.request import Request
from megatron_trace.planning.rollout import forward_flops
from megatron_trace.planning.sizes import BF16_BYTES, FP32_BYTES
from megatron_trace.planning.training_memory import Layout, mean_layer_activation_bytes

# Backward is two forwards of products.
_BACKWARD = 2
# How often the bytes that backward keeps are moved.
_FORWARD_MOVES, _BACKWARD_MOVES = 2, 3


@dataclass(frozen=True)
class TrainingTime:
    """Time of a step's training, and the bytes that a rank sends.

    Attributes:
        compute_s: Products, idle pipeline stages included.
        activations_s: Activations written and read, idle pipeline stages included.
        launch_s: The host's time for launching operations, idle stages and optimizer included.
        exchange_s: All exchanges, none hidden behind products.
        all_to_all_bytes: Tokens to experts and back.
        tensor_bytes: Sums and gathers of tensor and context parallelism.
        gradient_bytes: Gradients and weights of data parallelism.
        bubble: Share of the time that pipeline stages wait.
    """

    compute_s: float
    activations_s: float
    launch_s: float
    exchange_s: float
    all_to_all_bytes: float
    tensor_bytes: float
    gradient_bytes: float
    bubble: float

    @property
    def seconds(self) -> float:
        """Time of the whole."""
        return self.compute_s + self.activations_s + self.launch_s + self.exchange_s


def micro_batches(request: Request, layout: Layout) -> int:
    """Gives the micro-batches of a rank in a step, each of one sample."""
    return -(-request.num_samples // layout.dp)


def products_s(
    architecture: Architecture,
    hardware: Hardware,
    efficiency: Efficiency,
    *,
    tokens: float,
    length: int,
    forwards: float,
    backwards: float,
) -> float:
    """Gives the time of the products of all layers, in BF16.

    Args:
        architecture: The model.
        hardware: The GPU.
        efficiency: What share of its peak is reached.
        tokens: Tokens.
        length: Tokens of a sample; each attends to half of them.
        forwards: Forward passes.
        backwards: Backward passes.
    """
    flops = sum(forward_flops(architecture, length / 2)) * tokens
    rate = hardware.bf16_tflops * 1e12 * efficiency.compute
    return flops * (forwards + _BACKWARD * backwards) / rate


def activations_s(
    architecture: Architecture,
    hardware: Hardware,
    efficiency: Efficiency,
    *,
    tokens: float,
    forwards: float,
    backwards: float,
    number_format: str = "nvfp4",
    packed: bool = False,
) -> float:
    """Gives the time in which the activations of all layers are written and read.

    Args:
        architecture: The model.
        hardware: The GPU.
        efficiency: What share of its memory bandwidth is reached.
        tokens: Tokens.
        forwards: Forward passes.
        backwards: Backward passes.
        number_format: Formats of the run.
        packed: Whether inputs of experts are kept as codes.
    """
    kept = mean_layer_activation_bytes(architecture, number_format, packed=packed)
    moved = tokens * kept * architecture.num_layers
    moved *= forwards * _FORWARD_MOVES + backwards * _BACKWARD_MOVES
    return moved / (hardware.memory_tb_s * 1e12 * efficiency.memory)


def training_time(request: Request, layout: Layout) -> TrainingTime:
    """Gives the time of training on a step's samples.

    Args:
        request: The run.
        layout: Its parallel groups.
    """
    a, gpu, peaks = request.architecture, request.hardware, request.efficiency
    counts = parameter_counts(a)
    again = layout.recomputation == "full"
    forwards = 2 + again
    num_micro = micro_batches(request, layout)
    bubble = (layout.pp - 1) / (num_micro + layout.pp - 1)
    # Ranks that share a sample; padding of the last micro-batch is computed too.
    tokens = num_micro * request.sequence_tokens / (layout.tp * layout.cp)
    # The stage with the most layers sets the pace.
    share = -(-a.num_layers // layout.pp) / a.num_layers
    passes: dict[str, float] = {"forwards": forwards, "backwards": 1}
    busy = share / (1 - bubble)
    length = request.sequence_tokens
    compute = products_s(a, gpu, peaks, tokens=tokens, length=length, **passes) * busy
    activations = busy * activations_s(
        a,
        gpu,
        peaks,
        tokens=tokens,
        number_format=request.number_format,
        packed=request.packed_activations,
        **passes,
    )
    launch = num_micro * micro_batch_launch_s(request, layout, **passes) / (1 - bubble)
    launch += optimizer_launch_s(request, layout)

    sent = (forwards + 1) * tokens
    row = a.hidden_size * BF16_BYTES * a.num_layers * share
    all_to_all = 2 * a.router_topk * row * sent * (1 - 1 / layout.ep)
    tensor = 4 * row * sent * (layout.tp - 1)
    keys = 2 * a.num_kv_heads * a.head_dim * BF16_BYTES * a.num_attention_layers * share
    # Each rank's Gated DeltaNet heads go to one rank and come back.
    states = (2 * a.gdn_key_width + 3 * a.gdn_value_width) * BF16_BYTES * a.num_gdn_layers
    tensor += (keys * (layout.cp - 1) + states * share * (1 - 1 / layout.cp)) * sent
    dense = (counts.total - counts.routed_experts) * share / layout.tp
    experts = counts.routed_experts * share / layout.ep
    of_weight = FP32_BYTES + BF16_BYTES
    replicas = layout.stage_ranks / layout.ep
    gradients = of_weight * dense * (1 - 1 / (layout.dp * layout.cp))
    gradients += of_weight * experts * (1 - 1 / max(1, replicas))
    inner, outer = (rate * 1e9 * peaks.network for rate in (gpu.scale_up_gb_s, gpu.scale_out_gb_s))
    expert_rate = inner if layout.ep <= gpu.scale_up_gpus else outer
    sequence_rate = inner if layout.tp * layout.cp <= gpu.scale_up_gpus else outer
    gradient_rate = inner if layout.stage_ranks <= gpu.scale_up_gpus else outer
    exchange_s = all_to_all / expert_rate + tensor / sequence_rate + gradients / gradient_rate
    return TrainingTime(
        compute, activations, launch, exchange_s, all_to_all, tensor, gradients, bubble
    )
