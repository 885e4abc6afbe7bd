"""The weights of an engine's model: a trainer's as they are, or quantised and served."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel

from megatron_trace.config import TraceConfig
from megatron_trace.formats.packed_matrix import PackedMatrix
from megatron_trace.models.hybrid import DecoderLayer, named_expert_linears
from megatron_trace.rollout.packing import pack_experts
from megatron_trace.rollout.rollback import kept_on_failure
from megatron_trace.rollout.weights import (
    MatrixPlace,
    WeightRule,
    copy_weights,
    plain_digest,
    quantise_experts,
)


@dataclass
class _State:
    """What the weights are.

    Attributes:
        policy_version: Version of the weights that serve; None where none do.
        digest: Of the last that were quantised.
        are_plain: Whether experts are loaded in BF16, and not quantised.
        packed: Codes and scales of the experts, where they are kept.
    """

    policy_version: int | None = None
    digest: str = ""
    are_plain: bool = False
    packed: dict[MatrixPlace, PackedMatrix] = field(default_factory=dict)


class ServedWeights:
    """Takes weights into a model and quantises its routed experts.

    Args:
        model: Model of the engine.
        layers: Its decoder layers.
        trace: Settings of TRACE.
        keep_packed: Whether codes and scales of the experts stay in host memory.
        keep_bf16_experts: Whether routed experts that packed codes compute are held in BF16 too.

    Attributes:
        quantises_experts: Whether there are routed experts, and they are quantised.

    Raises:
        ValueError: There are no packed weights to keep, or none that could compute without BF16
            ones.
    """

    def __init__(
        self,
        model: HybridModel,
        layers: Sequence[DecoderLayer],
        trace: TraceConfig,
        *,
        keep_packed: bool,
        keep_bf16_experts: bool,
    ) -> None:
        has_experts = any(layer.moe is not None for layer in layers)
        self.quantises_experts = has_experts and trace.quantises_experts
        if not keep_bf16_experts and not self.quantises_experts:
            raise ValueError(
                "keep_bf16_experts=False contradicts an engine that quantises no routed experts "
                f"(method={trace.method}, quantised_parts={trace.quantised_parts}, pattern "
                f"{model.hybrid_layer_pattern}); leave it out"
            )
        if keep_packed and not (self.quantises_experts and trace.formats.weights.has_global_scale):
            raise ValueError(
                "keep_packed_weights=True has no effect: no expert is quantised in a format with "
                f"global scales (method={trace.method}, number_format={trace.number_format})"
            )
        self._model, self._layers, self._trace = model, layers, trace
        self._keep_packed, self._keep_bf16_experts = keep_packed, keep_bf16_experts
        self._state = _State()

    @property
    def policy_version(self) -> int | None:
        """Version of the weights that serve; None where none do."""
        return self._state.policy_version

    @property
    def digest(self) -> str:
        """Digest of the weights that were quantised last."""
        return self._state.digest

    @property
    def are_plain(self) -> bool:
        """Whether experts are loaded in BF16, and not quantised."""
        return self._state.are_plain

    def load(self, named: Mapping[str, torch.Tensor]) -> None:
        """Copies weights without quantising them; none serve then.

        Args:
            named: BF16 or FP32 parameters by name, which fit (`weights.require_fitting`).
        """
        copy_weights(self._model, named)
        self._state.are_plain = self._keep_bf16_experts
        self._state.policy_version = None

    def serve(
        self,
        named: Mapping[str, torch.Tensor],
        policy_version: int,
        rule: WeightRule | None = None,
    ) -> str:
        """Quantises what was loaded.

        Args:
            named: What was loaded.
            policy_version: Version that serves from now on.
            rule: Chooses codes and scales, see `require_rules`.

        Returns:
            The digest: of the experts' codes and scales or, where none is quantised, of all
            weights in BF16.

        Raises:
            ValueError: An expert's weight is NaN or Inf.
        """
        state = self._state
        if self.quantises_experts:
            state.are_plain = False
            packed: dict[MatrixPlace, PackedMatrix] = {}
            state.digest = self._quantise(named, packed if self._keep_packed else None, rule)
            state.packed = packed
        else:
            state.digest = plain_digest(dict(self._model.named_parameters()))
        state.policy_version = policy_version
        return state.digest

    def _quantise(
        self,
        named: Mapping[str, torch.Tensor],
        keep: dict[MatrixPlace, PackedMatrix] | None,
        rule: WeightRule | None,
    ) -> str:
        trace = self._trace
        if self._keep_bf16_experts:
            return quantise_experts(
                self._layers,
                number_format=trace.formats.weights,
                power_of_two_scales=trace.power_of_two_scales,
                implementation=trace.implementation,
                keep=keep,
                rule=rule,
            )
        given = {
            id(parameter): named[name]
            for name, parameter in self._model.named_parameters()
            if parameter.is_meta
        }
        return pack_experts(
            self._layers,
            given,
            power_of_two_scales=trace.power_of_two_scales,
            implementation=trace.implementation,
            keep=keep,
            rule=rule,
        )

    def require_rules(self) -> None:
        """Raises ValueError if a rule would have no effect, as no weights are in plain NVFP4."""
        trace = self._trace
        if (
            trace.formats.weights.name != "nvfp4"
            or not self.quantises_experts
            or trace.power_of_two_scales
        ):
            raise ValueError(
                "a rule chooses NVFP4 codes and scales of experts; this engine has method="
                f"{trace.method}, number_format={trace.number_format}, quantised_parts="
                f"{trace.quantised_parts}, power_of_two_scales={trace.power_of_two_scales}"
            )

    def quantised(self) -> tuple[dict[str, torch.Tensor], dict[MatrixPlace, PackedMatrix]]:
        """Gives parameters by name, without those of routed experts, and the experts' matrices.

        Raises:
            RuntimeError: No weights serve.
            ValueError: None are kept packed.
        """
        if self.policy_version is None:
            raise RuntimeError("quantised_model needs weights; call push_weights before it")
        if not self._state.packed:
            raise ValueError(
                "quantised_model needs packed NVFP4 weights of routed experts; build the engine "
                "with keep_packed_weights=True and a method that quantises them"
            )
        experts = {
            id(cast("torch.nn.Module", linear).weight)
            for layer in self._layers
            for _, _, linear in named_expert_linears(layer)
        }
        parameters = {
            name: parameter.detach()
            for name, parameter in self._model.named_parameters()
            if id(parameter) not in experts
        }
        return parameters, dict(self._state.packed)

    @contextlib.contextmanager
    def kept_on_failure(self, lent: torch.Tensor | None) -> Iterator[None]:
        """Puts the weights back if what is done inside the context fails.

        Args:
            lent: Memory as of `rollback.kept_on_failure`.
        """
        before = dataclasses.replace(self._state)
        # Plain BF16 experts are not what packed ones hold.
        packed_layers = self._layers if self.policy_version is not None else ()
        try:
            with kept_on_failure(self._model, lent=lent, packed_layers=packed_layers):
                yield
        except BaseException:
            self._state = before
            raise
