"""Operations that training launches one by one, and the host's time for them.

A host hands every operation over by itself, and in each MoE layer waits for the GPU, as it asks how
many tokens every expert gets. So its time adds to that of the GPU, whatever the tokens: it is what
limits small models, short samples and many experts on a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_trace.planning.request import Request
from megatron_trace.planning.training_memory import Layout


@dataclass(frozen=True)
class Launches:
    """Operations of a decoder layer that are no views, forward and backward.

    Attributes:
        forward: Of all but experts.
        backward: The same, backward.
        expert_forward: Of each expert of the rank more.
        expert_backward: The same, backward.
    """

    forward: float = 101
    backward: float = 128
    expert_forward: float = 4.6
    expert_backward: float = 7.6

    def of_layer(self, *, num_experts: int, forwards: float, backwards: float) -> float:
        """Gives the operations of a layer.

        Args:
            num_experts: Experts of the rank; 0 for one product of all.
            forwards: Forward passes.
            backwards: Backward passes.
        """
        forward = self.forward + num_experts * self.expert_forward
        return forwards * forward + backwards * (self.backward + num_experts * self.expert_backward)


# By --trace-experts. Of local experts counted in the study's model on a CPU, with torch's
# dispatcher; Transformer Engine's are as many as the time of a layer of 256 says.
LAUNCHES = {"local": Launches(), "te": Launches(expert_forward=3.9, expert_backward=6.3)}
# Of each parameter in the optimizer step, as the study's was measured.
OPTIMIZER_LAUNCHES = 2
# Tensors of a decoder layer beside its experts: 12 with either mixer in the 35B model, rounded up.
_LAYER_TENSORS = 14


def micro_batch_launch_s(
    request: Request, layout: Layout, *, forwards: float, backwards: float
) -> float:
    """Gives the host's time for a micro-batch on the pipeline stage with the most layers."""
    layers = -(-request.architecture.num_layers // layout.pp)
    operations = LAUNCHES[request.experts].of_layer(
        num_experts=request.architecture.num_experts // layout.ep,
        forwards=forwards,
        backwards=backwards,
    )
    return layers * operations * request.hardware.launch_us * 1e-6


def optimizer_launch_s(request: Request, layout: Layout) -> float:
    """Gives the host's time for an optimizer step."""
    layers = -(-request.architecture.num_layers // layout.pp)
    tensors = layers * (_LAYER_TENSORS + 2 * request.architecture.num_experts // layout.ep)
    return tensors * OPTIMIZER_LAUNCHES * request.hardware.launch_us * 1e-6
