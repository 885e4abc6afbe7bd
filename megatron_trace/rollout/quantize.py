"""ModelOpt's quantisers in the engine's model: where they sit and what they call.

ModelOpt inserts and configures them; a registered backend makes the numbers, those of
`megatron_trace.formats`. A quantiser that has no place of ours cannot run. Their static scales are
of `calibration.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import modelopt.torch.quantization as mtq
import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from modelopt.torch.quantization.nn import QuantModule, QuantModuleRegistry, TensorQuantizer
from modelopt.torch.quantization.nn.modules.tensor_quantizer import register_quant_backend

from megatron_trace import compat
from megatron_trace.formats import FORMAT_SETS, NumberFormat
from megatron_trace.hints import Site
from megatron_trace.models.hybrid import DecoderLayer, named_expert_linears
from megatron_trace.rollout.attention import EngineCoreAttention
from megatron_trace.rollout.compensation import ResidualCompensation
from megatron_trace.rollout.expert_shapes import holds_weights
from megatron_trace.rollout.moe import EngineMoELayer
from megatron_trace.rollout.sites import RolloutSites

BACKEND = "megatron_trace"


@QuantModuleRegistry.register({EngineMoELayer: "megatron_trace.EngineMoELayer"})
class _QuantEngineMoELayer(QuantModule):
    def _setup(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.dispatch_input_quantizer = TensorQuantizer()


@QuantModuleRegistry.register({EngineCoreAttention: "megatron_trace.EngineCoreAttention"})
class _QuantEngineCoreAttention(QuantModule):
    def _setup(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.k_bmm_quantizer = TensorQuantizer()
        self.v_bmm_quantizer = TensorQuantizer()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        return super().forward(
            query, self.k_bmm_quantizer(key), self.v_bmm_quantizer(value), *args, **kwargs
        )


def _quantise(inputs: torch.Tensor, quantiser: TensorQuantizer) -> torch.Tensor:
    """ModelOpt's entry to our numbers."""
    action = compat.quantizer_action(quantiser)
    if action is None:
        raise RuntimeError(
            f"a ModelOpt quantiser with backend {BACKEND} ran outside the sites of TRACE, on an "
            f"input of shape {tuple(inputs.shape)}; only routed experts and K/V are quantised"
        )
    return action(inputs)


register_quant_backend(BACKEND, _quantise)


def quant_config(
    number_format: str = "nvfp4",
    *,
    experts: bool = True,
    kv: bool = True,
    before_dispatch: bool = True,
) -> dict[str, Any]:
    """Gives ModelOpt's configuration: routed experts, K/V, and fc1's input before dispatch.

    Args:
        number_format: Name of the formats of weights, activations and KV cache.
        experts: Whether experts are quantised; False where there are none, as ModelOpt refuses
            rules for weights that match none.
        kv: Whether keys and values are quantised.
        before_dispatch: Whether fc1's input is quantised once for a token, or by each of its
            experts, which then know what it was.
    """
    formats = FORMAT_SETS[number_format]
    config = copy.deepcopy(mtq.NVFP4_EXPERTS_ONLY_CFG)
    rules = [rule for rule in config["quant_cfg"] if experts or not rule.get("cfg")]
    for rule in rules:
        if rule.get("cfg"):
            is_weight = rule["quantizer_name"].endswith("weight_quantizer")
            rule["cfg"] = _attributes(formats.weights if is_weight else formats.activations)
    if kv:
        kv_attributes = _attributes(formats.kv_cache)
        rules.append({"quantizer_name": "*[kv]_bmm_quantizer", "cfg": kv_attributes})
    if experts and before_dispatch:
        rules += [
            {
                "quantizer_name": "*dispatch_input_quantizer",
                "cfg": _attributes(formats.activations),
            },
            {"quantizer_name": "*.experts.*linear_fc1.input_quantizer", "enable": False},
        ]
    return config | {"quant_cfg": rules}


def _attributes(number_format: NumberFormat) -> dict[str, Any]:
    """Gives what ModelOpt's own recipes say of a format; its 4over6 is for static weights only."""
    recipe, rule = {
        "nvfp4": (mtq.NVFP4_KV_CFG, 0),
        "nvfp4_4over6": (mtq.NVFP4_KV_CFG, 0),
        "mxfp4": (mtq.MXFP4_DEFAULT_CFG, 1),
        "mxfp8": (mtq.MXFP8_DEFAULT_CFG, 1),
    }[number_format.name]
    return {**copy.deepcopy(recipe["quant_cfg"][rule]["cfg"]), "backend": BACKEND}


def insert_quantisers(
    model: HybridModel, layers: Sequence[DecoderLayer], sites: RolloutSites
) -> None:
    """Lets ModelOpt attach its quantisers, and gives each its action.

    Experts without BF16 weights get none: packed ones quantise their inputs themselves.

    Args:
        model: Model of the engine; changed in place.
        layers: Its decoder layers.
        sites: What quantises there.
    """
    trace = sites.trace
    has_experts = any(layer.moe is not None and holds_weights(layer) for layer in layers)
    experts = has_experts and trace.quantises_experts
    if not experts and not trace.quantises_kv:
        return
    config = quant_config(
        trace.number_format,
        experts=experts,
        kv=trace.quantises_kv,
        before_dispatch=not trace.compensates_residual,
    )
    mtq.quantize(model, config)
    for layer in layers:
        if layer.attention is not None:
            compat.restore_attention_methods(layer.attention)
        # Weights are quantised at a push, not at every forward.
        for _, _, linear in named_expert_linears(layer) if holds_weights(layer) else ():
            cast("TensorQuantizer", cast("torch.nn.Module", linear).weight_quantizer).disable()
        for site, quantisers in site_quantisers(layer).items():
            for expert, quantiser in quantisers.items():
                compat.set_quantizer_action(quantiser, _action(layer, site, expert, sites))
        if trace.compensates_residual:
            _compensate(layer, sites)


def site_quantisers(layer: DecoderLayer) -> dict[Site, dict[int, TensorQuantizer]]:
    """Gives the activation quantisers of a layer by site and expert; 0 where there is one.

    Sites whose quantisers are disabled, because their part is not quantised, are left out.
    """
    quantisers: dict[Site, dict[int, TensorQuantizer]] = {}
    if layer.moe is not None and holds_weights(layer):
        moe: Any = layer.moe
        inputs: dict[str, dict[int, TensorQuantizer]] = {"fc1": {}, "fc2": {}}
        for expert, matrix, linear in named_expert_linears(layer):
            quantiser = cast("torch.nn.Module", linear).input_quantizer
            inputs[matrix][expert] = cast("TensorQuantizer", quantiser)
        once = {0: moe.dispatch_input_quantizer}
        quantisers[Site.FC1] = inputs["fc1"] if is_dispatched(layer, Site.FC1) else once
        quantisers[Site.FC2] = inputs["fc2"]
    if layer.attention is not None:
        core: Any = layer.attention.core_attention
        quantisers[Site.K] = {0: core.k_bmm_quantizer}
        quantisers[Site.V] = {0: core.v_bmm_quantizer}
    return {
        site: by_expert
        for site, by_expert in quantisers.items()
        if all(quantiser.is_enabled for quantiser in by_expert.values())
    }


def is_dispatched(layer: DecoderLayer, site: Site) -> bool:
    """Whether a quantiser of the site sees the rows of one expert instead of a step's tokens."""
    moe: Any = layer.moe
    return site == Site.FC2 or (site == Site.FC1 and not moe.dispatch_input_quantizer.is_enabled)


def require_only_ours(model: HybridModel) -> None:
    """Checks that every enabled quantiser of the model has an action of ours.

    Raises:
        RuntimeError: Another one is enabled.
    """
    foreign = [
        name
        for name, module in model.named_modules()
        if isinstance(module, TensorQuantizer)
        and module.is_enabled
        and compat.quantizer_action(module) is None
    ]
    if foreign:
        raise RuntimeError(
            f"ModelOpt quantisers outside the sites of TRACE are enabled: {', '.join(foreign)}"
        )


def _action(
    layer: DecoderLayer, site: Site, expert: int, sites: RolloutSites
) -> Callable[[torch.Tensor], torch.Tensor]:
    if is_dispatched(layer, site):
        moe = cast("EngineMoELayer", layer.moe)
        return partial(
            sites.quantise_slots,
            layer.index,
            site,
            tokens=partial(moe.tokens_of_expert, expert),
            slots=partial(moe.slots_of_expert, expert),
            num_slots=moe.config.moe_router_topk,
        )

    def record(x: torch.Tensor) -> torch.Tensor:
        """Quantises [S, B, H] or [S, B, G, D], in which a row is a token."""
        return sites.record(layer.index, site, x.flatten(0, 1).flatten(1)).view_as(x)

    return record


def _compensate(layer: DecoderLayer, sites: RolloutSites) -> None:
    """Adds the product of the inputs' residuals to the output of every expert linear."""
    for expert, matrix, linear in named_expert_linears(layer):
        module: Any = linear
        site, moe = Site(matrix), cast("EngineMoELayer", layer.moe)
        compensation = ResidualCompensation(
            sites,
            (layer.index, site),
            _action(layer, site, expert, sites),
            partial(moe.tokens_of_expert, expert),
        )
        compat.set_quantizer_action(module.input_quantizer, compensation.quantise)
        module.register_forward_hook(compensation.add)
