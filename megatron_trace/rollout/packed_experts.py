"""The routed experts of a layer, computed from their packed NVFP4 codes in steps of the engine.

Megatron's experts multiply BF16 weights of the same values. The numbers differ from theirs where
code * block scale * global scale is rounded to BF16: here the global scales multiply the sums. With
power-of-two global scales nothing is rounded there, and only the order of sums differs.

Legend: T tokens of a step, k expert slots of a token, E experts, H hidden size, F intermediate
size of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.models.hybrid.hybrid_model import HybridModel

from megatron_trace.config import PackedExpertKernels, TraceConfig
from megatron_trace.formats.packed_matrix import PackedMatrix
from megatron_trace.hints import Site
from megatron_trace.models.hybrid import DecoderLayer
from megatron_trace.models.moe import beside_products
from megatron_trace.rollout.expert_shapes import holds_weights
from megatron_trace.rollout.kernels import experts as kernel
from megatron_trace.rollout.kernels import experts_reference as reference
from megatron_trace.rollout.kernels.experts_reference import PackedExperts, RoutedOutput
from megatron_trace.rollout.moe import EngineMoELayer
from megatron_trace.rollout.sites import RolloutSites


class PackedRoutedExperts(torch.nn.Module):
    """The routed experts of one layer.

    What a push quantises is copied into buffers that stay where they are, so that captured graphs
    see it. The quantiser of fc1's input is part of the kernel.

    Args:
        config: Configuration of the model.
        sites: Sites of the engine.
        layer: Decoder layer.
        implementation: `torch` or `cuda`.
        device: Where the weights lie.
    """

    quantises_input = True

    def __init__(
        self,
        config: Any,
        sites: RolloutSites,
        layer: int,
        *,
        implementation: Literal["torch", "cuda"],
        device: torch.device,
    ) -> None:
        super().__init__()
        self._sites, self._layer, self.implementation = sites, layer, implementation
        hidden, width, num_experts = _sizes(config)
        for matrix, rows, columns in (("fc1", 2 * width, hidden), ("fc2", hidden, width)):
            for name, shape, dtype in (
                ("codes", (num_experts, rows, columns // 2), torch.uint8),
                ("scales", (num_experts, rows, columns // 16), torch.uint8),
                ("global_scales", (num_experts,), torch.float32),
            ):
                buffer = torch.zeros(shape, dtype=dtype, device=device)
                self.register_buffer(f"{matrix}_{name}", buffer, persistent=False)

    @torch.no_grad()
    def take(
        self,
        expert: int,
        matrix: str,
        packed_codes: torch.Tensor,
        scale_bytes: torch.Tensor,
        global_scale: torch.Tensor,
    ) -> None:
        """Takes a matrix of an expert.

        Args:
            expert: Expert.
            matrix: `fc1` (gate above up) or `fc2`.
            packed_codes: uint8 [O, K / 2].
            scale_bytes: uint8 [O, K / 16].
            global_scale: FP32 0-d.
        """
        parts = {"codes": packed_codes, "scales": scale_bytes, "global_scales": global_scale}
        for name, part in parts.items():
            getattr(self, f"{matrix}_{name}")[expert].copy_(part)

    @torch.no_grad()
    def take_several(self, first: int, matrix: str, matrices: PackedMatrix) -> None:
        """Takes a matrix of several experts that follow one another.

        Args:
            first: The first of them.
            matrix: `fc1` or `fc2`.
            matrices: What `take` takes, of N experts: [N, O, K / 2], [N, O, K / 16], [N].
        """
        several = slice(first, first + len(matrices.global_scale))
        getattr(self, f"{matrix}_codes")[several].copy_(matrices.packed_codes)
        getattr(self, f"{matrix}_scales")[several].copy_(matrices.scale_bytes)
        getattr(self, f"{matrix}_global_scales")[several].copy_(matrices.global_scale)

    def matrix(self, expert: int, matrix: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gives packed codes, scale bytes and global scale of a matrix, as `take` took them."""
        codes, scale_bytes, global_scales = (
            getattr(self, f"{matrix}_{name}")[expert]
            for name in ("codes", "scales", "global_scales")
        )
        return codes, scale_bytes, global_scales

    @property
    def weights(self) -> PackedExperts:
        """What serves, and the scales of the inputs."""
        scales = [self._sites.scale(self._layer, site) for site in (Site.FC1, Site.FC2)]
        buffers = [
            getattr(self, f"{matrix}_{name}")
            for matrix in ("fc1", "fc2")
            for name in ("codes", "scales", "global_scales")
        ]
        return PackedExperts(*buffers, *scales)

    def forward(
        self, x: torch.Tensor, chosen: torch.Tensor, probabilities: torch.Tensor
    ) -> torch.Tensor:
        """Gives the weighted sum of each token's experts, and records both quantised inputs.

        Args:
            x: BF16 [T, H], not quantised.
            chosen: int64 [T, k], experts.
            probabilities: float [T, k].

        Returns:
            BF16 [T, H]; 0 in rows of padding.
        """
        sites, layer, num_slots = self._sites, self._layer, chosen.shape[1]
        sites.begin(layer, Site.FC1, x)
        result = self._computed(x, self._without_padding(chosen), probabilities.float())
        assert result.activations is not None, "asked for"
        sites.recorder.put(layer, Site.FC1, result.fc1_codes, result.fc1_scales)
        sites.begin(layer, Site.FC2, result.activations.flatten(0, 1), rows_of_token=num_slots)
        sites.recorder.put(
            layer, Site.FC2, result.fc2_codes.flatten(1), result.fc2_scales.flatten(1)
        )
        return result.output

    def _computed(
        self, x: torch.Tensor, chosen: torch.Tensor, probabilities: torch.Tensor
    ) -> RoutedOutput:
        x, chosen, probabilities = x.contiguous(), chosen.contiguous(), probabilities.contiguous()
        if self.implementation == "cuda":
            return kernel.routed_experts(
                x, chosen, probabilities, self.weights, keep_activations=True
            )
        return reference.routed_experts(
            x,
            chosen,
            probabilities,
            self.weights,
            implementation=self._sites.trace.implementation,
        )

    def _without_padding(self, chosen: torch.Tensor) -> torch.Tensor:
        """Gives no experts to rows of padding."""
        tokens = torch.arange(len(chosen), device=chosen.device)[:, None]
        is_real = self._sites.watch.is_real(tokens)
        return chosen if is_real is None else torch.where(is_real, chosen, -1)


def implementation_of(
    config: Any, trace: TraceConfig, device: torch.device
) -> Literal["torch", "cuda"] | None:
    """Gives what computes packed experts; None if Megatron's experts are to compute.

    Args:
        config: Configuration of the model.
        trace: Settings of TRACE.
        device: Where the weights lie.

    Raises:
        ValueError: An explicit choice cannot run; says why.
    """
    setting: PackedExpertKernels = trace.packed_experts
    if setting == "off":
        return None
    reason = _why_not_packed(config, trace)
    if reason is None and setting != "torch":
        reason = kernel.why_not(*_sizes(config), device)
    if reason is None:
        return "torch" if setting == "torch" else "cuda"
    if setting == "auto":
        return None
    raise ValueError(f"packed_experts={setting} cannot run: {reason}; use off or auto")


def use_packed_experts(
    model: HybridModel, layers: Sequence[DecoderLayer], sites: RolloutSites
) -> None:
    """Lets the routed experts of a model be computed from packed codes, if the settings say so.

    Args:
        model: Model of the engine, on its device.
        layers: Its decoder layers; changed in place.
        sites: Sites of the engine.

    Raises:
        ValueError: They cannot be, or are not while experts hold no BF16 weights; says why.
    """
    device = next(model.parameters()).device
    implementation = implementation_of(model.config, sites.trace, device)
    if implementation is None:
        if not all(holds_weights(layer) for layer in layers):
            setting = sites.trace.packed_experts
            reason = _why_not_packed(model.config, sites.trace)
            if setting != "off" and reason is None:
                reason = kernel.why_not(*_sizes(model.config), device)
            raise ValueError(
                "keep_bf16_experts=False leaves no routed experts that could compute, as packed "
                f"ones do not (packed_experts={setting}{f': {reason}' if reason else ''}); keep "
                "the BF16 experts, or choose packed_experts=cuda"
            )
        return
    for layer in layers:
        if isinstance(layer.moe, EngineMoELayer):
            layer.moe.routed_experts = PackedRoutedExperts(
                model.config, sites, layer.index, implementation=implementation, device=device
            )


def _why_not_packed(config: Any, trace: TraceConfig) -> str | None:
    if config.num_moe_experts is None:
        return "the model has no routed experts"
    if not trace.quantises_experts:
        return f"method={trace.method} with quantised_parts={trace.quantised_parts} quantises none"
    if trace.number_format != "nvfp4":
        return f"it computes in nvfp4, not {trace.number_format}"
    if trace.compensates_residual:
        return f"method={trace.method} adds a second product of each expert"
    if not config.gated_linear_unit or config.activation_func is not F.silu:
        return "it computes SwiGLU between the products"
    of_swiglu = ("activation_func_clamp_value", "glu_linear_offset")
    unknown = [name for name in of_swiglu if getattr(config, name)] + beside_products(config)
    if unknown:
        return f"it does not know {unknown[0]}={getattr(config, unknown[0])}"
    return None


def _sizes(config: Any) -> tuple[int, int, int]:
    """Gives H, F and E."""
    return config.hidden_size, config.moe_ffn_hidden_size, config.num_moe_experts
