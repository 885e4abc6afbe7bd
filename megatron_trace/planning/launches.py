"""Operations that training launches one by one, and the host's time for them.

A host hands every operation over by itself, and in each MoE layer waits for the GPU, as it asks how
many tokens every expert gets. So its time adds to that of the GPU, whatever the tokens: it is what
limits small models, short samples and many local experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_trace.planning.request import Request
from megatron_trace.planning.training_memory import Layout


@dataclass(frozen=True)
class Launches:
    """Operations of a decoder layer that are no views, forward and backward.

    Attributes:
        forward: Of all but local experts.
        backward: The same, backward.
        expert_forward: Of each local expert more, where experts are linears of their own.
        expert_backward: The same, backward.
    """

    forward: float = 101
    backward: float = 128
    expert_forward: float = 4.6
    expert_backward: float = 7.6

    def of_layer(self, *, num_experts: int, forwards: float, backwards: float) -> float:
        """Gives the operations of a layer.

        Args:
            num_experts: Experts of the rank that are linears of their own; 0 if they are grouped.
            forwards: Forward passes.
            backwards: Backward passes.
        """
        forward = self.forward + num_experts * self.expert_forward
        return forwards * forward + backwards * (self.backward + num_experts * self.expert_backward)


# Counted in the study's model (attention and MoE of 16 experts) on a CPU, with torch's dispatcher.
LAUNCHES = Launches()
# Of each parameter in the optimizer step, as torch's Adam was measured.
OPTIMIZER_LAUNCHES = 2
# Tensors of a decoder layer, without its experts: measured on both mixers, rounded up.
_LAYER_TENSORS = 14


def micro_batch_launch_s(
    request: Request, layout: Layout, *, forwards: float, backwards: float
) -> float:
    """Gives the host's time for a micro-batch on the pipeline stage with the most layers."""
    layers = -(-request.architecture.num_layers // layout.pp)
    operations = LAUNCHES.of_layer(
        num_experts=local_experts(request, layout), forwards=forwards, backwards=backwards
    )
    return layers * operations * request.hardware.launch_us * 1e-6


def optimizer_launch_s(request: Request, layout: Layout) -> float:
    """Gives the host's time for an optimizer step."""
    layers = -(-request.architecture.num_layers // layout.pp)
    tensors = layers * (_LAYER_TENSORS + 2 * local_experts(request, layout))
    return tensors * OPTIMIZER_LAUNCHES * request.hardware.launch_us * 1e-6


def local_experts(request: Request, layout: Layout) -> int:
    """Gives the experts of a rank that are linears of their own; 0 if they are grouped."""
    return 0 if request.grouped_experts else request.architecture.num_experts // layout.ep
