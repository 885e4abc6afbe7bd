"""Routed experts on Transformer Engine's grouped linears, rounded by the rollout's hints.

    class                                what it adds to Megatron's
    TraceTEMoELayer                      asks for the rounding before dispatch, sends hints along
    TraceTEGroupedMLP                    applies the router's probability after fc2
    TraceTE{Column,Row}ParallelGroupedLinear  tell the quantiser (te_recipe) which call is running

Hints follow the rows. The default trainer rounds each token once before dispatch; here the recipe's
own quantiser rounds the dispatched rows inside TE, as a native FP4 product needs it. Rounding is
row by row, so both give the same bits; this way costs top-k times the rounding and, with expert
parallelism, a second all-to-all of 1.5 bit per value.

Legend: S positions, B sequences, H hidden size, N dispatched rows, E local experts.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelGroupedLinear,
    TERowParallelGroupedLinear,
)
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_trace.hints.types import Site
from megatron_trace.models.hybrid import HybridModules, decoder_layers
from megatron_trace.training import te_recipe
from megatron_trace.training.dispatch import dispatch_rows
from megatron_trace.training.rounding import Rounding
from megatron_trace.training.te_rows import (
    ExpertCall,
    LinearCall,
    RoundingSource,
    current_expert_call,
    expert_call,
    linear_call,
    moved,
    pad_rows,
)

FACTORIES = tuple(
    f"{te_recipe.__name__}.{factory.__name__}"
    for factory in (
        te_recipe.guided_fake_quantizer_factory,
        te_recipe.guided_nvfp4_quantizer_factory,
    )
)


# Megatron's class, which follows in the bases of the classes below.
_GroupedLinear: Any = object


class _TraceGroupedLinear(_GroupedLinear):
    """What both TE grouped linears add.

    Attributes:
        site: Site of the linear's input.
        name: Name in TE's quantiser roles; Megatron does not pass it on.
    """

    site: ClassVar[Site]

    def __init__(self, *args: Any, name: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, name=name, **kwargs)
        self.name = name or f"experts.linear_{self.site}"
        # Requantise at every forward; `attach` with cache_weights says otherwise.
        self.disable_parameter_transpose_cache = True

    def forward(
        self, x: torch.Tensor, m_splits: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gives the products of each expert's rows with its weight.

        Args:
            x: [sum(m_splits), K], with the padding rows of `Fp8Padding` where it is used.
            m_splits: Rows of each local expert, padding included.

        Raises:
            LookupError: No call of the experts is running, or a guided place has no hints.
            RuntimeError: TE did not quantise the input.
        """
        experts = current_expert_call()
        assert experts.splits is not None, "TraceTEGroupedMLP sets the splits"
        splits, padded_splits = experts.splits, [int(rows) for rows in m_splits]
        rounding = moved(
            experts.rounding(self.site), lambda rows: pad_rows(rows, splits, padded_splits)
        )
        x = x.contiguous()
        call = LinearCall(
            self.name,
            x,
            rounding,
            amax_group=self._tp_group,
            on_quantised=partial(experts.count_call, self.site),
        )
        with linear_call(call):
            output = super().forward(x, m_splits)
        if not call.was_quantised:
            raise RuntimeError(
                f"{self.name}: Transformer Engine did not call the guided quantiser; run the layer "
                f"inside Megatron's FP4 context with fp4_quantizer_factory one of {FACTORIES}"
            )
        return output

    def get_extra_state(self) -> torch.Tensor:
        """Gives no state: the recipe has none, and Megatron's unpickler refuses CustomRecipe."""
        return torch.empty(0, dtype=torch.uint8)


class TraceTEColumnParallelGroupedLinear(_TraceGroupedLinear, TEColumnParallelGroupedLinear):
    """fc1 of the routed experts: its input is guided by the hints of the rows' tokens."""

    site = Site.FC1


class TraceTERowParallelGroupedLinear(_TraceGroupedLinear, TERowParallelGroupedLinear):
    """fc2 of the routed experts: its input, the unweighted activation, is rounded to nearest."""

    site = Site.FC2


class TraceTEGroupedMLP(TEGroupedMLP):
    """Megatron's TE experts, with the router's probability applied after fc2.

    Raises:
        ValueError: The configuration would bypass the guided quantisers.
    """

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, *args: Any, **kwargs: Any
    ):
        _require_guided_recipe(config)
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
        splits = tuple(tokens_per_expert.tolist())
        with expert_call(replace(current_expert_call(), splits=splits)):
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


class TraceTEMoELayer(MoELayer):
    """MoE layer whose routed experts are a `TraceTEGroupedMLP`; `attach` it before its use.

    Raises:
        ValueError: A feature is configured through which hints cannot follow tokens.
    """

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
        self._source: RoundingSource | None = None
        self._decoder_layer = -1
        self._token_rounding: Rounding | None = None

    def attach(
        self, source: RoundingSource, decoder_layer: int, *, cache_weights: bool = False
    ) -> None:
        """Sets where this layer asks for its rounding.

        Args:
            source: Gives the rounding of the current micro-batch.
            decoder_layer: Decoder layer of the checkpoint, from 0.
            cache_weights: Whether quantised weights are kept until `set_is_first_microbatch` is
                called on the model, as Megatron's schedules do before each step's first
                micro-batch. A loop that does not call it would train on stale weights.
        """
        self._source = source
        self._decoder_layer = decoder_layer
        experts: Any = self.experts
        for linear in (experts.linear_fc1, experts.linear_fc2):
            linear.disable_parameter_transpose_cache = not cache_weights
            linear.name = f"decoder.layers.{decoder_layer}.experts.linear_{linear.site}"

    def preprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Prepares the dispatch, and asks how the tokens [S, B, H] are rounded."""
        tokens = hidden_states.detach().reshape(-1, hidden_states.shape[-1])
        source = self._attached_source()
        self._token_rounding = source.rounding(self._decoder_layer, Site.FC1, tokens)
        return super().preprocess(hidden_states, probs, routing_map)

    def routed_experts_compute(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Computes the routed experts, each row rounded by its token's hint."""
        source = self._attached_source()
        call = ExpertCall(
            self._dispatched_rounding, partial(source.count_call, self._decoder_layer)
        )
        with expert_call(call):
            output = super().routed_experts_compute(hidden_states, probs)
        self._token_rounding = None
        return output

    def _dispatched_rounding(self, site: Site) -> Rounding:
        if site is Site.FC2:
            return self._attached_source().rounding(self._decoder_layer, Site.FC2, None)
        assert self._token_rounding is not None, "preprocess asks for the tokens' rounding"
        assert self.token_dispatcher is not None, "MoELayer builds it"
        return moved(self._token_rounding, partial(dispatch_rows, self.token_dispatcher))

    def _attached_source(self) -> RoundingSource:
        if self._source is None:
            raise LookupError(
                f"MoE layer {self.layer_number} has no source of hints; call attach, or "
                "attach_rounding_source on its model"
            )
        return self._source


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


# The same modules for `models.hybrid.build_hybrid_model`.
TE_HYBRID_MODULES = HybridModules(
    moe_layer=TraceTEMoELayer,
    experts=TraceTEGroupedMLP,
    expert_fc1=TraceTEColumnParallelGroupedLinear,
    expert_fc2=TraceTERowParallelGroupedLinear,
)


def trace_te_moe_spec(*, num_experts: int) -> partial[TraceTEMoELayer]:
    """Gives the builder of a MoE layer for the `mlp` of a layer spec.

    Args:
        num_experts: Routed experts of the layer.
    """
    spec: Any = get_moe_module_spec_for_backend(
        TraceTESpecProvider(), num_experts=num_experts, moe_grouped_gemm=True
    )
    return partial(TraceTEMoELayer, **spec.keywords)


def attach_rounding_source(
    model: HybridModel, source: RoundingSource, *, cache_weights: bool = False
) -> None:
    """Attaches every `TraceTEMoELayer` of a model, by its decoder layer.

    Args:
        model: Model built from `TE_HYBRID_MODULES`.
        source: Gives the rounding of the current micro-batch.
        cache_weights: As in `TraceTEMoELayer.attach`.
    """
    for layer in decoder_layers(model):
        if layer.moe is not None:
            assert isinstance(layer.moe, TraceTEMoELayer), "the model has MoE layers of its own"
            layer.moe.attach(source, layer.index, cache_weights=cache_weights)


def _require_guided_recipe(config: TransformerConfig) -> None:
    factory = config.fp4_quantizer_factory
    if not config.fp4 or config.fp4_recipe != "custom" or factory not in FACTORIES:
        raise ValueError(
            "the TE experts of TRACE need fp4='e2m1', fp4_recipe='custom' and "
            f"fp4_quantizer_factory one of {FACTORIES}; got fp4={config.fp4!r}, "
            f"fp4_recipe={config.fp4_recipe!r}, fp4_quantizer_factory={factory!r}"
        )
    for name, present in {
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
