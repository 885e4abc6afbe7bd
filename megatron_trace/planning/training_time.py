"""Time and traffic of training on a step's samples, from a roofline.

A token is computed forward for the old policy's log-probabilities, forward and backward for the
new one's, and forward once more where activations are computed again.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_trace.models.parameter_counts import parameter_counts
from megatron_trace.planning.request import Request
from megatron_trace.planning.rollout import forward_flops
from megatron_trace.planning.sizes import BF16_BYTES, FP32_BYTES
from megatron_trace.planning.training_memory import Layout

# Backward is two forwards.
_BACKWARD = 2


@dataclass(frozen=True)
class TrainingTime:
    """Time of a step's training, and the bytes that a rank sends.

    Attributes:
        compute_s: Products, idle pipeline stages included.
        exchange_s: All exchanges, none hidden behind products.
        all_to_all_bytes: Tokens to experts and back.
        tensor_bytes: Sums and gathers of tensor and context parallelism.
        gradient_bytes: Gradients and weights of data parallelism.
        bubble: Share of the time that pipeline stages wait.
    """

    compute_s: float
    exchange_s: float
    all_to_all_bytes: float
    tensor_bytes: float
    gradient_bytes: float
    bubble: float

    @property
    def seconds(self) -> float:
        """Time of the whole."""
        return self.compute_s + self.exchange_s


def micro_batches(request: Request, layout: Layout) -> int:
    """Gives the micro-batches of a rank in a step, each of one sample."""
    return -(-request.num_samples // layout.dp)


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
    flops = sum(forward_flops(a, request.sequence_tokens / 2))
    # The stage with the most layers sets the pace.
    share = -(-a.num_layers // layout.pp) / a.num_layers
    compute = tokens * flops * (forwards + _BACKWARD) * share
    compute_s = compute / (gpu.bf16_tflops * 1e12 * peaks.compute) / (1 - bubble)

    passes = forwards + 1
    row = a.hidden_size * BF16_BYTES * a.num_layers * share
    all_to_all = 2 * a.router_topk * row * passes * tokens * (1 - 1 / layout.ep)
    tensor = 4 * row * passes * tokens * (layout.tp - 1)
    keys = 2 * a.num_kv_heads * a.head_dim * BF16_BYTES * a.num_attention_layers * share
    # Each rank's Gated DeltaNet heads go to one rank and come back.
    states = (2 * a.gdn_key_width + 3 * a.gdn_value_width) * BF16_BYTES * a.num_gdn_layers
    tensor += (keys * (layout.cp - 1) + states * share * (1 - 1 / layout.cp)) * passes * tokens
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
    return TrainingTime(compute_s, exchange_s, all_to_all, tensor, gradients, bubble)
