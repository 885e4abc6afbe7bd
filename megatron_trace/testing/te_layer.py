"""A MoE layer with the TE experts of TRACE, run beside the same layer in plain torch.

Needs Transformer Engine; running needs a CUDA device.

Legend: T tokens, H hidden size, E experts, N dispatched rows.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
from megatron.core.fp4_utils import get_fp4_context
from megatron.core.transformer import TransformerConfig

from megatron_trace.formats import global_scale_from_amax
from megatron_trace.hints.types import Site
from megatron_trace.testing.moe_reference import (
    TorchProduct,
    expert_activations,
    quantised_weight,
    routed_experts,
)
from megatron_trace.testing.roundings import RecordedRoundings, recorded_rounding
from megatron_trace.training.experts import GuidedMoELayer, bind_experts
from megatron_trace.training.rounding import Rounding
from megatron_trace.training.te_choice import FAKE_FACTORY, NVFP4_FACTORY, ExpertsKind
from megatron_trace.training.te_specs import trace_te_moe_spec

H, F_EXPERT = 256, 128
ALIGNMENT = 128
LAYER = 3
NOISE = 0.003
# Static decode-side global scale of fc2's input, as a calibration would give.
FC2_SCALE = 2.0**-12

# A GuidedMoELayer or TraceTEMoELayer; Megatron types its parts by protocols that lack what tests
# look at.
type Layer = Any


@dataclass(frozen=True)
class Case:
    """One configuration of the layer.

    Attributes:
        name: Shown in the table.
        experts: `te` or `te_recipe`.
        splits: Tokens of each expert with top-1 routing; None for random top-2 of 8 experts.
        num_bits: Bits per value of a hint of fc1 and of fc2; 0 rounds every row to nearest.
        hint_share: Share of the rows that have a hint.
        fused_wgrad: Whether weight gradients are accumulated into FP32 `main_grad`.
        recompute: Whether the MoE layer is recomputed in backward.
        dispatcher: Megatron's token dispatcher.
        permute_fusion: Whether TE's fused permutation dispatches.
        moe_act_recompute: Whether only the activation is recomputed in backward.
        native: Whether the products are native FP4.
    """

    name: str
    experts: ExpertsKind = "te_recipe"
    splits: tuple[int, ...] | None = None
    num_bits: int = 1
    hint_share: float = 1.0
    fused_wgrad: bool = False
    recompute: bool = False
    dispatcher: str = "alltoall"
    permute_fusion: bool = False
    moe_act_recompute: bool = False
    native: bool = False

    @property
    def num_experts(self) -> int:
        return len(self.splits) if self.splits else 8

    @property
    def topk(self) -> int:
        return 1 if self.splits else 2

    @property
    def num_tokens(self) -> int:
        return sum(self.splits) if self.splits else 192


class ScriptedRouter(torch.nn.Module):
    """Softmax router whose choice of experts is given."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.randn(config.num_moe_experts, config.hidden_size) * config.hidden_size**-0.5
        )
        self.routing_map: torch.Tensor | None = None

    def set_layer_number(self, layer_number: int) -> None:
        self.layer_number = layer_number

    def forward(self, hidden_states: torch.Tensor, padding_mask: Any = None) -> tuple:
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        assert self.routing_map is not None, "build_layer sets the choice"
        probs = torch.softmax(tokens.float() @ self.weight.float().T, dim=-1) * self.routing_map
        return probs, self.routing_map


def layer_config(case: Case) -> TransformerConfig:
    """Gives the configuration of a case's layer."""
    modules = ["moe"] * case.recompute + ["moe_act"] * case.moe_act_recompute
    recompute = (
        {"recompute_granularity": "selective", "recompute_modules": modules} if modules else {}
    )
    recipe = {
        "fp4": "e2m1",
        "fp4_recipe": "custom",
        "fp4_quantizer_factory": NVFP4_FACTORY if case.native else FAKE_FACTORY,
    }
    return moe_config(
        num_layers=1,
        num_moe_experts=case.num_experts,
        moe_router_topk=case.topk,
        moe_token_dispatcher_type=case.dispatcher,
        moe_permute_fusion=case.permute_fusion,
        gradient_accumulation_fusion=case.fused_wgrad,
        **recompute,
        **(recipe if case.experts == "te_recipe" else {}),
    )


def moe_config(**fields: Any) -> TransformerConfig:
    """Gives a BF16 MoE configuration."""
    defaults: dict[str, Any] = {
        "hidden_size": H,
        "ffn_hidden_size": F_EXPERT,
        "moe_ffn_hidden_size": F_EXPERT,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 64,
        "moe_grouped_gemm": True,
        "moe_router_dtype": "fp32",
        "moe_router_pre_softmax": True,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "bias_activation_fusion": False,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "bf16": True,
        "params_dtype": torch.bfloat16,
    }
    return TransformerConfig(**(defaults | fields))


def build_layer(case: Case, device: torch.device, source: RecordedRoundings | None = None) -> Layer:
    """Builds a case's layer with a scripted router, asking the source for its roundings."""
    config = layer_config(case)
    spec = trace_te_moe_spec(num_experts=case.num_experts)
    submodules = dataclasses.replace(spec.keywords["submodules"], router=ScriptedRouter)
    kind = GuidedMoELayer if case.experts == "te" else spec.func
    layer: Layer = kind(config=config, submodules=submodules, layer_number=1).to(device)
    if source is not None:
        bind_experts(layer, LAYER, cast("Any", source))
    layer.train()
    layer.router.weight.data = layer.router.weight.data.bfloat16()
    layer.router.routing_map = routing_map(case, device)
    if case.fused_wgrad:
        for weight in expert_weights(layer):
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
            weight.grad_added_to_main_grad = False
    return layer


def routing_map(case: Case, device: torch.device) -> torch.Tensor:
    """Gives bool [T, E]."""
    if case.splits is None:
        chosen = torch.rand(case.num_tokens, case.num_experts).topk(case.topk).indices
    else:
        of_expert = torch.repeat_interleave(
            torch.arange(case.num_experts), torch.tensor(case.splits)
        )
        chosen = of_expert[torch.randperm(case.num_tokens)].unsqueeze(-1)
    empty = torch.zeros(case.num_tokens, case.num_experts, dtype=torch.bool)
    return empty.scatter(1, chosen, True).to(device)


def expert_weights(layer: Layer) -> list[Any]:
    """Gives fc1's weights of all local experts, then fc2's."""
    linears = (layer.experts.linear_fc1, layer.experts.linear_fc2)
    return [getattr(linear, f"weight{i}") for linear in linears for i in range(linear.num_gemms)]


def weight_gradient(weight: Any) -> torch.Tensor:
    """Gives the gradient where it was put."""
    main_grad = getattr(weight, "main_grad", None)
    return gradient(weight) if main_grad is None else main_grad.clone()


def gradient(tensor: torch.Tensor) -> torch.Tensor:
    """Gives a copy of the gradient that backward left."""
    assert tensor.grad is not None, "backward reaches every tensor that is compared"
    return tensor.grad.clone()


class SameProduct(torch.nn.Module):
    """TE's BF16 grouped product of given weights, rows padded where the recipe pads them."""

    def __init__(self, weights: Sequence[torch.Tensor], *, fused_wgrad: bool, padded: bool) -> None:
        super().__init__()
        out_features, in_features = weights[0].shape
        self.linear = te.GroupedLinear(
            len(weights),
            in_features,
            out_features,
            bias=False,
            params_dtype=weights[0].dtype,
            fuse_wgrad_accumulation=fused_wgrad,
            device=weights[0].device,
        )
        self.weights = [getattr(self.linear, f"weight{i}") for i in range(len(weights))]
        for own, given in zip(self.weights, weights, strict=True):
            own.data.copy_(given)
            if fused_wgrad:
                own.main_grad = torch.zeros_like(own, dtype=torch.float32)
        self.padded = padded
        self.padding = te.Fp8Padding(len(weights), align_size=ALIGNMENT)
        self.unpadding = te.Fp8Unpadding(len(weights), align_size=ALIGNMENT)

    def forward(self, rows: torch.Tensor, splits: list[int]) -> torch.Tensor:
        if not self.padded:
            return self.linear(rows, splits)
        padded, padded_splits = self.padding(rows, splits)
        return self.unpadding(self.linear(padded, padded_splits), splits)


@dataclass
class Outcome:
    """What a forward and backward gave.

    Attributes:
        output: [T, H].
        input_gradient: [T, H].
        probs_gradient: [T, E].
        router_gradient: [E, H].
        weight_gradients: fc1 of every expert, then fc2.
    """

    output: torch.Tensor
    input_gradient: torch.Tensor
    probs_gradient: torch.Tensor
    router_gradient: torch.Tensor
    weight_gradients: list[torch.Tensor]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Gives the compared tensors by name."""
        half = len(self.weight_gradients) // 2
        return {
            "output": self.output,
            "dgrad": self.input_gradient,
            "wgrad fc1": torch.stack(self.weight_gradients[:half]),
            "wgrad fc2": torch.stack(self.weight_gradients[half:]),
            "dprobs": self.probs_gradient,
            "wgrad router": self.router_gradient,
        }


def run_layer(layer: Layer, tokens: torch.Tensor, output_gradient: torch.Tensor) -> Outcome:
    """Runs the layer inside Megatron's FP4 context."""
    tokens = tokens.clone().requires_grad_()
    seen: list[torch.Tensor] = []

    def keep(_module: Any, _inputs: Any, outputs: tuple) -> None:
        if outputs[0].requires_grad:
            outputs[0].retain_grad()
            seen.append(outputs[0])

    layer.router.weight.grad = None
    handle = layer.router.register_forward_hook(keep)
    with get_fp4_context(layer.config):
        output, _ = layer(tokens.unsqueeze(1))
    output = output.squeeze(1)
    output.backward(output_gradient)
    handle.remove()
    return Outcome(
        output.detach(),
        gradient(tokens),
        gradient(seen[-1]),
        gradient(layer.router.weight),
        [weight_gradient(weight) for weight in expert_weights(layer)],
    )


def run_reference(
    layer: Layer,
    tokens: torch.Tensor,
    output_gradient: torch.Tensor,
    roundings: RecordedRoundings,
    product: Callable[[Sequence[torch.Tensor]], Any],
) -> Outcome:
    """Runs the same layer in plain torch, its operands quantised by the specification.

    Args:
        layer: The layer whose weights and routing are used.
        tokens: BF16 [T, H].
        output_gradient: BF16 [T, H].
        roundings: Roundings of fc1's tokens and of fc2's rows.
        product: From quantised weights to a grouped product that holds them in `weights`.
    """
    weights = [quantised_weight(weight) for weight in expert_weights(layer)]
    half = len(weights) // 2
    products = product(weights[:half]), product(weights[half:])
    tokens = tokens.clone().requires_grad_()
    router_weight = layer.router.weight.detach().clone().requires_grad_()
    probs, chosen = torch.func.functional_call(layer.router, {"weight": router_weight}, (tokens,))
    probs.retain_grad()
    of_sites = roundings.rounding(LAYER, Site.FC1), roundings.rounding(LAYER, Site.FC2)
    output = routed_experts(tokens, probs, chosen, products, of_sites)
    output.backward(output_gradient)
    return Outcome(
        output.detach(),
        gradient(tokens),
        gradient(probs),
        gradient(router_weight),
        [weight_gradient(weight) for linear in products for weight in linear.weights],
    )


def case_roundings(case: Case, layer: Layer, tokens: torch.Tensor) -> RecordedRoundings:
    """Gives the roundings of a case, by the hints of noisy copies of fc1's and fc2's input."""
    source = RecordedRoundings()
    scale = static_scale(tokens)

    def recorded(values: torch.Tensor, scale: float) -> Rounding:
        if not case.num_bits:
            return Rounding(scale)
        has_hint = None
        if case.hint_share < 1:
            has_hint = torch.rand(len(values), device=values.device) < case.hint_share
        return recorded_rounding(noisy(values), scale, num_bits=case.num_bits, has_hint=has_hint)

    source.roundings[LAYER, Site.FC1] = recorded(tokens, scale)
    weights = [quantised_weight(weight) for weight in expert_weights(layer)]
    activation = expert_activations(
        tokens,
        layer.router.routing_map,
        TorchProduct(weights[: len(weights) // 2]),
        source.rounding(LAYER, Site.FC1),
    )
    source.roundings[LAYER, Site.FC2] = recorded(activation.detach(), FC2_SCALE)
    return source


def noisy(values: torch.Tensor) -> torch.Tensor:
    """Gives the values as a rollout with other arithmetic would have them."""
    return values + NOISE * values.float().std() * torch.randn_like(values)


def static_scale(values: torch.Tensor) -> float:
    """Gives a global scale with a quarter of headroom over the values' amax."""
    return float(global_scale_from_amax(values.abs().amax().float() * 1.25))
