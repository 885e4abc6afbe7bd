"""What an engine serves: a model, its quantisers, the scales and weights that they have.

All of it is replaced whole or not at all.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping

import torch
from megatron.core.transformer import TransformerConfig

from megatron_trace.config import TraceConfig
from megatron_trace.formats import FormatSet
from megatron_trace.formats.packed_matrix import PackedMatrix
from megatron_trace.hints import QuantizerSettings, Site
from megatron_trace.models.hybrid import decoder_layers
from megatron_trace.rollout.calibration import calibrate
from megatron_trace.rollout.model import build_engine_model
from megatron_trace.rollout.moe import EngineMoELayer
from megatron_trace.rollout.packed_experts import use_packed_experts
from megatron_trace.rollout.places import hint_sites, make_recorder, quantised_places
from megatron_trace.rollout.quantize import insert_quantisers, require_only_ours
from megatron_trace.rollout.recorder import Place, Recorder
from megatron_trace.rollout.served_weights import ServedWeights
from megatron_trace.rollout.settings import log_recalibration, require_settings_like, settings_of
from megatron_trace.rollout.sites import RolloutSites
from megatron_trace.rollout.weights import MatrixPlace, WeightRule, require_fitting


class ServedPolicy:
    """A model in BF16 with quantisers, whose weights and static scales can be replaced.

    Args:
        model_config: Configuration of the trained model; the engine computes in BF16.
        pattern: Hybrid layer pattern, such as `*E*E`.
        vocab_size: Rows of the embedding.
        max_sequence_length: Longest prompt and response together, in tokens.
        trace: Settings of TRACE.
        keep_packed_weights: Whether codes and scales of the experts stay in host memory after a
            push, for `quantised_model`.
        keep_bf16_experts: Whether routed experts that packed codes compute are held in BF16 too.
            False saves that memory, and leaves nothing to calibrate on: `load_weights`,
            `calibrate` and `recalibrate` are refused, and the scales come from `use_settings`.
        model_id: Name of the model in the quantiser settings.
        rotary_percent: Share of the head dim that RoPE rotates.
        rotary_base: Base period of RoPE.

    Attributes:
        experts_without_calibration: By decoder layer, experts that got no calibration token.
        settings_version: How often the quantisers' settings were set.

    Raises:
        ValueError: The model is spread over ranks, a quantised width is not whole blocks, there
            are no packed weights to keep, or none that could compute without BF16 ones.
    """

    def __init__(
        self,
        model_config: TransformerConfig,
        *,
        pattern: str,
        vocab_size: int,
        max_sequence_length: int,
        trace: TraceConfig,
        keep_packed_weights: bool,
        model_id: str,
        rotary_percent: float,
        rotary_base: int,
        keep_bf16_experts: bool = True,
    ) -> None:
        self.model_id = model_id
        self.max_sequence_length = max_sequence_length
        self.quantised = trace.method != "bf16"
        self.model = build_engine_model(
            model_config,
            trace=trace,
            pattern=pattern,
            vocab_size=vocab_size,
            max_sequence_length=max_sequence_length,
            rotary_percent=rotary_percent,
            rotary_base=rotary_base,
            keep_bf16_experts=keep_bf16_experts,
        )
        self._keeps_bf16_experts = keep_bf16_experts
        self.layers = decoder_layers(self.model)
        self._has_experts = any(layer.moe is not None for layer in self.layers)
        self._weights = ServedWeights(
            self.model,
            self.layers,
            trace,
            keep_packed=keep_packed_weights,
            keep_bf16_experts=keep_bf16_experts,
        )
        self.sites = RolloutSites(trace, make_recorder(self.layers, trace))
        for layer in self.layers:
            if isinstance(layer.moe, EngineMoELayer):
                layer.moe.place = (self.sites, layer.index)
        if self.quantised:
            insert_quantisers(self.model, self.layers, self.sites)
        use_packed_experts(self.model, self.layers, self.sites)
        self.settings_version = 0
        self.seconds = {"rollout": 0.0, "record": 0.0, "push": 0.0}
        self.experts_without_calibration: dict[int, tuple[int, ...]] = {}
        self._settings: QuantizerSettings | None = None
        if self.quantised and not self._formats.weights.has_global_scale:
            self._take_settings(self._settings_of({}))

    @property
    def trace(self) -> TraceConfig:
        """Settings of TRACE."""
        return self.sites.trace

    @property
    def settings(self) -> QuantizerSettings | None:
        """Settings of the quantisers; None for method bf16, and before any needed calibration."""
        return self._settings

    def load_weights(self, named: Mapping[str, torch.Tensor]) -> None:
        """Copies weights of a trainer without quantising them, for calibration.

        Args:
            named: BF16 or FP32 parameters by name.

        Raises:
            RuntimeError: A session is open, or `generate` runs.
            ValueError: A parameter is missing, unknown or of another shape, or the engine holds no
                BF16 experts.
        """
        self._require_no_session("load_weights")
        self._require_bf16_experts("load_weights")
        require_fitting(self.model, named)
        with self._kept_on_failure():
            self._load(named)

    def calibrate(self, token_batches: Iterable[torch.Tensor]) -> None:
        """Fixes the global scales of all sites from what these tokens give.

        Args:
            token_batches: integer [B, S] each; not read if the formats have no global scales.

        Raises:
            RuntimeError: No unquantised weights are loaded, a site saw no data, or an activation
                is NaN or Inf.
            ValueError: The method quantises nothing, a token is outside the vocabulary, or the
                engine holds no BF16 experts.
        """
        self._require_no_session("calibrate")
        self._require_quantising("calibrate")
        self._require_bf16_experts("calibrate")
        if not self._weights.are_plain:
            raise RuntimeError("calibrate needs unquantised weights; call load_weights before it")
        if not self._formats.weights.has_global_scale:
            return
        # Only a calibration that succeeds replaces the settings.
        scales, self.experts_without_calibration = calibrate(
            self.model,
            self.layers,
            token_batches,
            self._formats,
            power_of_two=self.trace.power_of_two_scales,
        )
        self.use_settings(self._settings_of(scales))

    def use_settings(self, settings: QuantizerSettings) -> None:
        """Takes the settings of another engine of the same model, instead of calibrating.

        Raises:
            ValueError: The settings are not those of an engine like this one.
        """
        self._require_no_session("use_settings")
        self._require_quantising("use_settings")
        places = self._places() if self._formats.weights.has_global_scale else []
        require_settings_like(self._settings_of({}), places, settings)
        self._take_settings(settings)
        self._forget()

    def push_weights(
        self,
        named: Mapping[str, torch.Tensor],
        policy_version: int,
        *,
        rule: WeightRule | None = None,
    ) -> str:
        """Takes new weights of the trainer and quantises the routed experts.

        Either all are taken or none: after an error the engine serves what it served before.

        Args:
            named: BF16 or FP32 parameters by name; cast to BF16 before they are quantised.
            policy_version: Version of the weights, noted in samples and hints.
            rule: Chooses codes and scales of the experts, instead of rounding to nearest as a
                trainer does; for weights that are not trained on (`ptq`).

        Returns:
            Digest of the quantised expert weights. Where none is quantised (method bf16, KV cache
            only, or a model without routed experts), of all weights in BF16.

        Raises:
            RuntimeError: The engine is not calibrated.
            ValueError: A parameter is missing, unknown or of another shape, or an expert's weight
                is NaN or Inf, a session has seen a version as late, or a rule has no effect, as
                weights are not in NVFP4.
        """
        self._require_calibrated("push_weights")
        self._require_pushable(policy_version)
        if rule is not None:
            self._weights.require_rules()
        started = time.perf_counter()
        require_fitting(self.model, named)
        with self._kept_on_failure():
            self._load(named)
            digest = self._weights.serve(named, policy_version, rule)
        self._pushed(policy_version, digest)
        self.seconds["push"] += time.perf_counter() - started
        return digest

    def recalibrate(
        self,
        named: Mapping[str, torch.Tensor],
        token_batches: Iterable[torch.Tensor],
        policy_version: int,
    ) -> str:
        """Fixes the global scales anew and takes new weights, both or neither.

        Static scales drift away from the weights, see `report.saturation`. The settings, and with
        them their digest in samples and hints, are others afterwards: the trainer must get them
        too, and what was rolled out before must be trained on first.

        Args:
            named: Parameters as of `push_weights`.
            token_batches: Tokens as of `calibrate`.
            policy_version: Version of the weights.

        Returns:
            Digest as of `push_weights`.

        Raises:
            RuntimeError: As of `calibrate`.
            ValueError: As of `push_weights` and `calibrate`, or the formats have no global scales.
        """
        self._require_no_session("recalibrate")
        self._require_calibrated("recalibrate")
        if not self._formats.weights.has_global_scale:
            raise ValueError(
                f"recalibrate has no effect with number_format={self.trace.number_format}, which "
                "has no global scales; call push_weights"
            )
        self._require_bf16_experts("recalibrate")
        require_fitting(self.model, named)
        before = self._settings
        with self._kept_on_failure():
            self._load(named)
            self.calibrate(token_batches)
            digest = self._weights.serve(named, policy_version)
        assert before is not None, "checked above"
        assert self._settings is not None, "just calibrated"
        log_recalibration(before, self._settings, self.settings_version)
        return digest

    def quantised_model(
        self,
    ) -> tuple[
        dict[str, torch.Tensor], dict[MatrixPlace, PackedMatrix], dict[tuple[int, str], float]
    ]:
        """Gives what serves, as a checkpoint holds it (`conversion.modelopt_folder`).

        Returns:
            Parameters by name, without those of routed experts; the experts' matrices; the static
            scales of the sites.

        Raises:
            RuntimeError: No weights serve.
            ValueError: The engine does not keep packed weights of this method.
        """
        parameters, packed = self._weights.quantised()
        assert self._settings is not None, "an engine that quantises serves with settings only"
        scales = {
            (layer, str(site)): float(torch.tensor(scale, dtype=torch.float32))
            for (layer, site), scale in self._settings.global_scales.items()
        }
        return parameters, packed, scales

    @property
    def _policy_version(self) -> int | None:
        return self._weights.policy_version

    @property
    def _weights_digest(self) -> str:
        return self._weights.digest

    @property
    def _recorder(self) -> Recorder:
        return self.sites.recorder

    def _load(self, named: Mapping[str, torch.Tensor]) -> None:
        self._weights.load(named)
        self._forget()

    @contextlib.contextmanager
    def _kept_on_failure(self) -> Iterator[None]:
        """Puts weights, versions and settings back if what is done inside the context fails."""
        settings, settings_version = self._settings, self.settings_version
        unseen = self.experts_without_calibration
        lent = self._lent_memory()
        if lent is not None:
            self._forget()
        try:
            with self._weights.kept_on_failure(lent):
                yield
        except BaseException:
            self.experts_without_calibration = unseen
            if settings is not None and self.settings_version != settings_version:
                self.use_settings(settings)
                self.settings_version = settings_version
            raise

    def _take_settings(self, settings: QuantizerSettings) -> None:
        self._settings = settings
        self.settings_version += 1
        self.sites.use(settings)

    def _settings_of(self, scales: dict[Place, float]) -> QuantizerSettings:
        return settings_of(self.trace, self.model_id, scales)

    @property
    def _formats(self) -> FormatSet:
        return self.trace.formats

    def _places(self) -> list[Place]:
        return quantised_places(self.layers, self.trace)

    def _hint_sites(self) -> tuple[Site, ...]:
        return hint_sites(self.layers, self.trace)

    def _require_quantising(self, call: str) -> None:
        if not self.quantised:
            raise ValueError(f"{call} has no effect with method={self.trace.method}; leave it out")

    def _require_bf16_experts(self, call: str) -> None:
        if not self._keeps_bf16_experts:
            raise ValueError(
                f"{call} needs the routed experts in BF16, which an engine with "
                "keep_bf16_experts=False does not hold; calibrate another engine of the model, and "
                "give its settings to use_settings"
            )

    def _require_calibrated(self, call: str) -> None:
        if self.quantised and self._settings is None:
            raise RuntimeError(
                f"{call} needs the quantisers' global scales; call load_weights and calibrate, or "
                "use_settings, before it"
            )

    def _require_quantisers_ran(self) -> None:
        """Checks that every place of ours was quantised, and nothing else."""
        if not self.quantised:
            return
        require_only_ours(self.model)
        idle = [place for place in self._places() if not self.sites.calls[place]]
        if idle:
            named = ", ".join(f"layer {layer} site {site}" for layer, site in idle[:5])
            raise RuntimeError(
                f"the rollout called no quantiser at {len(idle)} of {len(self._places())} places: "
                f"{named}; what computes there bypasses the layer's quantiser"
            )

    def _require_no_session(self, call: str) -> None:
        """Raises RuntimeError while samples are in flight; here there never are any."""

    def _require_pushable(self, policy_version: int) -> None:
        """Raises ValueError if samples in flight have seen a version as late; here none have."""

    def _pushed(self, policy_version: int, digest: str) -> None:
        """Lets samples in flight go on with the weights; here there are none."""

    def _lent_memory(self) -> torch.Tensor | None:
        """Gives memory, uint8 [bytes], that nobody needs now; here there is none."""
        return None

    def _forget(self) -> None:
        """Drops what was computed with other weights or scales; here nothing is kept."""
