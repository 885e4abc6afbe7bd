"""Memory of a training rank.

Weights and gradients are whole on a rank of their tensor-, expert- and pipeline-parallel share; the
optimizer's state is sharded over the data-parallel ranks, as with `--use-distributed-optimizer`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from megatron_trace.formats.number_format import FORMAT_SETS
from megatron_trace.models.architecture import Architecture
from megatron_trace.models.parameter_counts import parameter_counts
from megatron_trace.planning.request import Request
from megatron_trace.planning.sizes import (
    BF16_BYTES,
    FP32_BYTES,
    HintChoice,
    hint_bytes,
    packed_bytes,
)

Recomputation = Literal["none", "full"]
# FP32 weights and Adam's two moments.
OPTIMIZER_BYTES = 3 * FP32_BYTES
# Router logits, probabilities and maps of an expert: measured, see docs/measurements.md.
ROUTER_BYTES_PER_EXPERT = 15


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel groups of training.

    Attributes:
        tp: Tensor parallel.
        pp: Pipeline parallel.
        cp: Context parallel.
        ep: Expert parallel, among the ranks of a pipeline stage.
        dp: Data parallel.
        recomputation: What the backward pass computes again.
    """

    tp: int
    pp: int
    cp: int
    ep: int
    dp: int
    recomputation: Recomputation

    @property
    def stage_ranks(self) -> int:
        """Ranks of a pipeline stage."""
        return self.tp * self.cp * self.dp

    def __str__(self) -> str:
        """The layout in short."""
        return (
            f"TP {self.tp}, PP {self.pp}, CP {self.cp}, EP {self.ep}, DP {self.dp}, "
            f"recompute {self.recomputation}"
        )


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on the fullest training rank.

    Attributes:
        weights: BF16 weights.
        quantised_weights: Packed forms of the routed experts.
        gradients: FP32 gradients.
        optimizer: FP32 weights and moments.
        activations: What backward keeps, hints included.
        packed_saving: What `activations` would be more without packed inputs of experts.
    """

    weights: float
    quantised_weights: float
    gradients: float
    optimizer: float
    activations: float
    packed_saving: float

    @property
    def total(self) -> float:
        """All of it."""
        return (
            self.weights
            + self.quantised_weights
            + self.gradients
            + self.optimizer
            + self.activations
        )

    @property
    def states(self) -> float:
        """What waits in the host's memory while the same GPUs roll out."""
        return self.weights + self.gradients + self.optimizer


@functools.cache
def layer_activation_bytes(
    architecture: Architecture, mixer: str, number_format: str, *, packed: bool
) -> float:
    """Gives the bytes that backward keeps of a token in one decoder layer, in BF16.

    With flash attention and fused SwiGLU, and fc2's product computed again.

    Args:
        architecture: The model.
        mixer: `*` or `G`.
        number_format: Formats of the run.
        packed: Whether inputs of experts are kept as codes.
    """
    norms = 4 * architecture.hidden_size
    mixer_values = _attention_values if mixer == "*" else _gdn_values
    values = norms + mixer_values(architecture)
    return (
        BF16_BYTES * values
        + expert_activation_bytes(architecture, number_format, packed=packed)
        + moe_rest_activation_bytes(architecture)
    )


def expert_activation_bytes(
    architecture: Architecture, number_format: str, *, packed: bool
) -> float:
    """Gives the bytes that backward keeps of a token in a layer's routed experts."""
    a, activations = architecture, FORMAT_SETS[number_format].activations
    inputs = BF16_BYTES * (a.hidden_size + a.expert_hidden_size)
    if packed:
        inputs = packed_bytes(a.hidden_size, activations) + packed_bytes(
            a.expert_hidden_size, activations
        )
    # fc1's output, gate and up, and the probability of the slot.
    return a.router_topk * (inputs + BF16_BYTES * 2 * a.expert_hidden_size + FP32_BYTES)


def moe_rest_activation_bytes(architecture: Architecture) -> float:
    """Gives the bytes that backward keeps of a token in router and shared expert."""
    a = architecture
    shared = 3 * a.shared_expert_hidden_size + a.hidden_size
    return BF16_BYTES * (a.hidden_size + shared) + ROUTER_BYTES_PER_EXPERT * a.num_experts


def _attention_values(a: Architecture) -> int:
    query, kv = a.num_query_heads * a.head_dim, a.num_kv_heads * a.head_dim
    # Projected, normalised and rotated; the output, gated and not.
    return (2 * query + 2 * kv) + 2 * (query + kv) + 2 * query


def _gdn_values(a: Architecture) -> int:
    qkv = 2 * a.gdn_key_width + a.gdn_value_width
    # Query and key of every value head, normalised, and a chunk's triangle of 64.
    repeated = 2 * a.gdn_value_heads * a.gdn_key_head_dim + 64 * a.gdn_value_heads
    return 2 * qkv + 2 * a.gdn_value_width + repeated + 2 * a.gdn_value_width


def training_memory(
    request: Request, layout: Layout, hints: HintChoice, num_micro_batches: int
) -> TrainingMemory:
    """Gives the memory of the fullest training rank: the first pipeline stage, or the last.

    Args:
        request: The run.
        layout: Its parallel groups; a micro-batch is one sample.
        hints: Recorded hints.
        num_micro_batches: Micro-batches of a rank in a step.
    """
    a, counts = request.architecture, parameter_counts(request.architecture)
    layers = -(-a.num_layers // layout.pp)
    share = layers / a.num_layers
    dense = share * (counts.attention + counts.gdn + counts.moe_rest) / layout.tp
    # The first stage has the embedding, the last the output layer; they are of one size.
    dense += counts.output / layout.tp * (2 if layout.pp == 1 else 1)
    experts = share * counts.routed_experts / layout.ep
    weights = dense + experts
    optimizer = OPTIMIZER_BYTES * (
        dense / (layout.dp * layout.cp) + experts * layout.ep / layout.stage_ranks
    )
    tokens = request.sequence_tokens / layout.cp
    kept, working = _kept_bytes(request, layout, layers, packed=request.packed_activations)
    plain, _ = _kept_bytes(request, layout, layers, packed=False)
    hint_share = hint_bytes(a, hints, request.number_format) * share / layout.tp
    # Logits in BF16 and their softmax in FP32; of one micro-batch, on the last stage.
    logits = a.vocab_size * (BF16_BYTES + FP32_BYTES) / layout.tp
    in_flight = min(layout.pp, num_micro_batches)
    first = in_flight * (kept + hint_share) + (logits if layout.pp == 1 else 0)
    last = kept + hint_share + logits
    return TrainingMemory(
        weights=BF16_BYTES * weights,
        quantised_weights=packed_bytes(int(experts), FORMAT_SETS[request.number_format].weights),
        gradients=FP32_BYTES * weights,
        optimizer=optimizer,
        activations=tokens * (max(first, last) + working),
        packed_saving=tokens * in_flight * (plain - kept),
    )


def _kept_bytes(
    request: Request, layout: Layout, num_layers: int, *, packed: bool
) -> tuple[float, float]:
    """Gives what a tensor-parallel rank keeps of a token on its stage, and needs on top of it."""
    a, number_format = request.architecture, request.number_format
    if layout.recomputation == "full":
        # The inputs of all layers; all of the one that is computed again.
        kept = BF16_BYTES * a.hidden_size * num_layers
        largest = max(layer_activation_bytes(a, m, number_format, packed=packed) for m in "G*")
        return kept / layout.tp, largest / layout.tp
    mean = mean_layer_activation_bytes(a, number_format, packed=packed)
    return mean * num_layers / layout.tp, 0.0


def mean_layer_activation_bytes(
    architecture: Architecture, number_format: str, *, packed: bool
) -> float:
    """Gives the bytes that backward keeps of a token in a layer, the mean of all layers.

    Args:
        architecture: The model.
        number_format: Formats of the run.
        packed: Whether inputs of experts are kept as codes.
    """
    mixers = architecture.mixers()
    return sum(
        mixers.count(mixer)
        * layer_activation_bytes(architecture, mixer, number_format, packed=packed)
        for mixer in "G*"
    ) / len(mixers)
