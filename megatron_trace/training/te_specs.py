"""Routed experts on Transformer Engine's grouped linears, rounded by the rollout's hints.

    experts=te         GuidedMoELayer rounds each token once before dispatch, and the linears round
                       fc2's input before TE multiplies it; TE's recipe only quantises weights
    experts=te_recipe  TraceTEMoELayer sends the tokens' hints after them, and TE's own quantisers
                       round what each linear gets, as a native FP4 product needs it

Rounding is row by row, so both give the same bits; the second way costs top-k times the rounding,
padding to multiples of 128 rows, and with expert parallelism a second all-to-all of 1.5 bit per
value. In both the router's probability is applied after fc2 (`TraceTEGroupedMLP`), and each weight
is quantised once per change (`training.weights`), never by TE's own weight cache.

Legend: S positions, B sequences, H hidden size, N dispatched rows, P of them after padding, E local
experts, K values of a row.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelGroupedLinear,
    TERowParallelGroupedLinear,
)
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from transformer_engine.common.recipe import CustomRecipe
from transformer_engine.pytorch import autocast

from megatron_trace.formats import ops
from megatron_trace.hints.types import Site
from megatron_trace.models.hybrid import HybridModules
from megatron_trace.models.moe import DispatchInputMoELayer, use_host_splits
from megatron_trace.training import te_recipe
from megatron_trace.training.dispatch import dispatch_rows, rows_of_experts
from megatron_trace.training.experts import (
    ExpertPlace,
    ExpertsPlace,
    GuidedMoELayer,
    MoEPlace,
    count_weights,
    row_origin,
)
from megatron_trace.training.rounding import Rounding
from megatron_trace.training.te_choice import FACTORIES
from megatron_trace.training.te_rows import (
    ExpertCall,
    LinearCall,
    current_expert_call,
    expert_call,
    linear_call,
    moved,
    pad_rows,
    padded_positions,
)
from megatron_trace.training.weights import QuantisedWeight, current_weights, shared_amax

_WEIGHTS_ONLY = CustomRecipe(qfactory=te_recipe.weight_fake_quantizer_factory)

# Megatron's class, which follows in the bases of the classes below.
_GroupedLinear: Any = object


class _TraceGroupedLinear(_GroupedLinear):
    """What both TE grouped linears add.

    Attributes:
        site: Site of the linear's input.
        places: Where each local expert stands; None in a layer that stays plain.
        name: Name in TE's quantiser roles and in messages; Megatron does not pass it on.
    """

    site: ClassVar[Site]

    def __init__(self, *args: Any, name: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, name=name, **kwargs)
        self.name = name or f"experts.linear_{self.site}"
        # TE's cache trusts `is_first_microbatch`; ours compares the bits (`training.weights`).
        self.disable_parameter_transpose_cache = True
        self.places: list[ExpertPlace | None] = [None] * self.num_gemms

    def forward(
        self, x: torch.Tensor, m_splits: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gives the products of each expert's rows with its weight.

        Args:
            x: [sum(m_splits), K], with the padding rows of `Fp8Padding` where it is used.
            m_splits: Rows of each local expert, padding included.

        Raises:
            LookupError: No call of the experts is running.
            RuntimeError: TE did not quantise the input.
        """
        places = [place for place in self.places if place is not None]
        if not places:
            return super().forward(x, m_splits)
        x = x.contiguous()
        call = current_expert_call()
        if self.config.fp4 is None:
            return self._rounded_before(x, m_splits, call, places)
        return self._rounded_inside(x, m_splits, call, places)

    def _rounded_before(
        self, x: torch.Tensor, m_splits: Sequence[int], call: ExpertCall, places: list[ExpertPlace]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.site is Site.FC2:
            rounding = _slot_rounding(x, call, places)
            x = ops.straight_through(x, rounding.quantised(x).to(x.dtype))
        linear = LinearCall(self.name, x, None, self._quantised_weights(places))
        with linear_call(linear), autocast(enabled=True, recipe=_WEIGHTS_ONLY):
            return super().forward(x, m_splits)

    def _rounded_inside(
        self, x: torch.Tensor, m_splits: Sequence[int], call: ExpertCall, places: list[ExpertPlace]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        splits = call.splits, [int(rows) for rows in m_splits]
        if self.site is Site.FC2:
            rows = padded_positions(*splits).to(x.device)
            rounding = _slot_rounding(x.detach()[rows], call, places)
        else:
            assert call.fc1 is not None, "TraceTEMoELayer asks for the tokens' rounding"
            rounding = call.fc1
            places[0].sites.count_call(places[0].layer, self.site)
        rounding = moved(rounding, lambda rows: pad_rows(rows, *splits))
        linear = LinearCall(self.name, x, rounding, self._quantised_weights(places))
        with linear_call(linear):
            output = super().forward(x, m_splits)
        if not linear.was_quantised:
            raise RuntimeError(
                f"{self.name}: Transformer Engine did not call the guided quantiser; run the layer "
                f"inside Megatron's FP4 context with fp4_quantizer_factory one of {FACTORIES}"
            )
        return output

    def _quantised_weights(
        self, places: list[ExpertPlace]
    ) -> list[tuple[torch.Tensor, QuantisedWeight]]:
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        sites = places[0].sites
        amax = shared_amax(weights, self._tp_group)
        forms = [place.weight for place in places]
        known = current_weights(forms, weights, sites.weight_rule, amax)
        count_weights(places, known)
        return [(weight, form) for weight, (form, _) in zip(weights, known, strict=True)]

    def get_extra_state(self) -> torch.Tensor:
        """Gives no state: the recipe has none, and Megatron's unpickler refuses CustomRecipe."""
        return torch.empty(0, dtype=torch.uint8)


class TraceTEColumnParallelGroupedLinear(_TraceGroupedLinear, TEColumnParallelGroupedLinear):
    """fc1 of the routed experts: its input is guided by the hints of the rows' tokens."""

    site = Site.FC1


class TraceTERowParallelGroupedLinear(_TraceGroupedLinear, TERowParallelGroupedLinear):
    """fc2 of the routed experts: its input, the unweighted activation, is guided by slot hints."""

    site = Site.FC2


def _slot_rounding(x: torch.Tensor, call: ExpertCall, places: list[ExpertPlace]) -> Rounding:
    """Gives the rounding of fc2's unpadded input [N, K]."""
    moe: Any = places[0].moe
    tokens = rows_of_experts(moe.token_dispatcher)
    origin = partial(row_origin, places, call.splits, tokens=tokens)
    sites, layer = places[0].sites, places[0].layer
    return sites.slot_rounding(x.detach(), (layer, Site.FC2), call.slots, origin)


class UnweightedTEGroupedMLP(TEGroupedMLP):
    """Megatron's TE experts, with the router's probability applied after fc2.

    Args:
        num_local_experts: E.
        config: Model configuration.
        fuse_wgrad: Whether the experts' weight gradients are added to `main_grad` by the product
            itself, also where Megatron's own linears cannot for want of Apex.
        *args: As Megatron's class.
        **kwargs: As Megatron's class.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        *args: Any,
        fuse_wgrad: bool = False,
        **kwargs: Any,
    ) -> None:
        if fuse_wgrad:
            config = copy.copy(config)
            config.gradient_accumulation_fusion = True
        super().__init__(num_local_experts, config, *args, **kwargs)

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
        output_buffer: torch.Tensor | None = None,
        grad_input_buffer: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Gives the weighted outputs of the local experts.

        Args:
            permuted_local_hidden_states: [N, H], rows of one expert after those of another.
            tokens_per_expert: integer [E].
            permuted_probs: [N], router probability of each row.
            output_buffer: As in Megatron's class, which refuses it without its op fuser.
            grad_input_buffer: Likewise.

        Returns:
            [N, H] in the input's dtype, and no bias.
        """
        # Megatron multiplies fc2's input by what it is given: by one, which is exact.
        output, bias = super().forward(
            permuted_local_hidden_states,
            tokens_per_expert,
            torch.ones_like(permuted_probs),
            output_buffer,
            grad_input_buffer,
        )
        assert bias is None, "TEGroupedMLP adds fc2's bias itself"
        return (output * permuted_probs.unsqueeze(-1)).to(output.dtype), None


class TraceTEGroupedMLP(UnweightedTEGroupedMLP):
    """TE experts that tell their linears which hints their rows have.

    Raises:
        ValueError: The configuration would bypass the guided quantisers.
    """

    place: ExpertsPlace | None = None

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, *args: Any, **kwargs: Any
    ) -> None:
        _require_guidable(config)
        super().__init__(num_local_experts, config, *args, **kwargs)

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
        output_buffer: torch.Tensor | None = None,
        grad_input_buffer: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Gives the weighted outputs of the local experts, see `UnweightedTEGroupedMLP`.

        Raises:
            LookupError: The recipe quantises, and the layer has no source of hints.
        """
        buffers = output_buffer, grad_input_buffer
        inputs = permuted_local_hidden_states, tokens_per_expert, permuted_probs, *buffers
        if self.place is None:
            if self.config.fp4 is not None:
                raise LookupError(_UNBOUND)
            return super().forward(*inputs)
        with expert_call(self._call(tokens_per_expert, self.place)):
            return super().forward(*inputs)

    def _call(self, tokens_per_expert: torch.Tensor, place: ExpertsPlace) -> ExpertCall:
        moe: Any = place.moe
        dispatcher = moe.token_dispatcher
        fc1 = None
        if isinstance(moe, TraceTEMoELayer):
            assert moe.token_rounding is not None, "preprocess asks for the tokens' rounding"
            fc1 = moved(moe.token_rounding, partial(dispatch_rows, dispatcher))
        slots = place.sites.dispatched_slots((place.layer, Site.FC2), dispatcher)
        return ExpertCall(tuple(tokens_per_expert.tolist()), fc1, slots)


_UNBOUND = (
    "a MoE layer whose FP4 recipe is TRACE's has no source of hints; build the model by "
    "build_trainer_model, or call bind_experts (training/experts.py) on the layer. The prediction "
    "layers of MTP cannot have one: use experts=te with them"
)


class TraceTEMoELayer(MoELayer):
    """MoE layer whose routed input is rounded inside TE, as its recipe's quantisers do.

    Raises:
        ValueError: A feature is configured through which hints cannot follow tokens.
    """

    place: MoEPlace | None = None
    token_rounding: Rounding | None = None

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        for name, present in {
            "moe_latent_size": config.moe_latent_size is not None,
            "moe_token_dispatcher_type=flex": config.moe_token_dispatcher_type == "flex",
            "moe_pad_expert_input_to_capacity": config.moe_pad_expert_input_to_capacity,
            "transformer_impl=inference_optimized": config.transformer_impl
            == "inference_optimized",
        }.items():
            if present:
                raise ValueError(
                    f"{name} is not supported by TraceTEMoELayer: hints could not follow tokens to "
                    "their experts; switch it off"
                )
        super().__init__(config, *args, **kwargs)
        use_host_splits(self, kwargs.get("pg_collection"))

    def preprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Prepares the dispatch, and asks how the tokens [S, B, H] are rounded."""
        if self.place is None:
            raise LookupError(_UNBOUND)
        tokens = hidden_states.detach().reshape(-1, hidden_states.shape[-1])
        rounding = self.place.sites.rounding(self.place.layer, Site.FC1, tokens)
        # Each token is judged once, not each copy of it.
        self.token_rounding = rounding.judged(tokens)
        return super().preprocess(hidden_states, probs, routing_map)

    def routed_experts_compute(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Computes the routed experts, each row rounded by its token's hint."""
        try:
            return super().routed_experts_compute(hidden_states, probs)
        finally:
            self.token_rounding = None


class TraceTESpecProvider(TESpecProvider):
    """Megatron's TE modules, with the routed experts of TRACE."""

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        """Gives the builder of the routed experts.

        Raises:
            ValueError: The grouped product is off.
        """
        if not moe_use_grouped_gemm:
            raise ValueError("the TE recipe of TRACE needs moe_grouped_gemm; switch it on")
        return partial(
            TraceTEGroupedMLP,
            submodules=GroupedMLPSubmodules(
                linear_fc1=TraceTEColumnParallelGroupedLinear,
                linear_fc2=TraceTERowParallelGroupedLinear,
                activation_func=self.activation_func(),
            ),
        )


# The modules of `models.hybrid.build_hybrid_model`: experts=te, te_recipe, and te of method bf16.
TE_MODULES = HybridModules(
    moe_layer=GuidedMoELayer,
    experts=TraceTEGroupedMLP,
    expert_fc1=TraceTEColumnParallelGroupedLinear,
    expert_fc2=TraceTERowParallelGroupedLinear,
)
TE_RECIPE_MODULES = HybridModules(
    moe_layer=TraceTEMoELayer,
    experts=TraceTEGroupedMLP,
    expert_fc1=TraceTEColumnParallelGroupedLinear,
    expert_fc2=TraceTERowParallelGroupedLinear,
)
PLAIN_TE_MODULES = HybridModules(
    moe_layer=DispatchInputMoELayer,
    experts=UnweightedTEGroupedMLP,
    expert_fc1=TEColumnParallelGroupedLinear,
    expert_fc2=TERowParallelGroupedLinear,
)


def trace_te_moe_spec(*, num_experts: int) -> partial[TraceTEMoELayer]:
    """Gives the builder of a MoE layer for the `mlp` of a layer spec (experts=te_recipe).

    Args:
        num_experts: Routed experts of the layer.
    """
    spec: Any = get_moe_module_spec_for_backend(
        TraceTESpecProvider(), num_experts=num_experts, moe_grouped_gemm=True
    )
    return partial(TraceTEMoELayer, **spec.keywords)


def _require_guidable(config: TransformerConfig) -> None:
    factory = config.fp4_quantizer_factory
    if config.fp4 is not None and (config.fp4_recipe != "custom" or factory not in FACTORIES):
        raise ValueError(
            "the TE experts of TRACE need fp4=None, or fp4='e2m1', fp4_recipe='custom' and "
            f"fp4_quantizer_factory one of {FACTORIES}; got fp4={config.fp4!r}, "
            f"fp4_recipe={config.fp4_recipe!r}, fp4_quantizer_factory={factory!r}"
        )
    for name, present in {
        "fp8": config.fp8 is not None,
        "use_transformer_engine_op_fuser": config.use_transformer_engine_op_fuser,
        "moe_apply_probs_on_input": config.moe_apply_probs_on_input,
        "fp4_param": config.fp4_param,
        "first_last_layers_bf16": config.first_last_layers_bf16,
    }.items():
        if present:
            raise ValueError(
                f"{name} is not supported by the TE experts of TRACE: it bypasses the guided "
                "quantisers; switch it off"
            )
