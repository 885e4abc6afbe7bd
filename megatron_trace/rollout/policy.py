"""What an engine serves: a model, its quantisers, the scales and weights that they have.

All of it is replaced whole or not at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import cast

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer import TransformerConfig

from megatron_trace.config import DEFAULT_HINT_SITES, TraceConfig
from megatron_trace.formats import FORMAT_SETS, FormatSet, ops
from megatron_trace.formats.packed_matrix import PackedMatrix
from megatron_trace.hints import QuantizerSettings, Site, site_format, stored_bits
from megatron_trace.models.hybrid import (
    causal_mask,
    decoder_layers,
    named_expert_linears,
    pattern_sites,
)
from megatron_trace.rollout.model import build_engine_model
from megatron_trace.rollout.moe import EngineMoELayer
from megatron_trace.rollout.packed_experts import use_packed_experts
from megatron_trace.rollout.packing import pack_experts
from megatron_trace.rollout.prompts import require_tokens
from megatron_trace.rollout.quantize import (
    calibrated_scales,
    collect_amax,
    insert_quantisers,
    require_only_ours,
)
from megatron_trace.rollout.recorder import Place, Recorder
from megatron_trace.rollout.rollback import kept_on_failure
from megatron_trace.rollout.sites import RolloutSites
from megatron_trace.rollout.weights import (
    MatrixPlace,
    WeightRule,
    copy_weights,
    plain_digest,
    quantise_experts,
    require_fitting,
)

_logger = logging.getLogger(__name__)


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
        self.trace = trace
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
        self._quantises_experts = self._has_experts and trace.quantises_experts
        if not keep_bf16_experts and not self._quantises_experts:
            raise ValueError(
                "keep_bf16_experts=False contradicts an engine that quantises no routed experts "
                f"(method={trace.method}, quantised_parts={trace.quantised_parts}, pattern "
                f"{pattern}); leave it out"
            )
        self._guided_sites = tuple(Site(site) for site in trace.sites_in(pattern_sites(pattern)))
        self._recorder = Recorder(self._recorded_places(), self._narrowed)
        self.sites = RolloutSites(trace, self._recorder)
        for layer in self.layers:
            if isinstance(layer.moe, EngineMoELayer):
                layer.moe.place = (self.sites, layer.index)
        if self.quantised:
            insert_quantisers(self.model, self.layers, self.sites)
        use_packed_experts(self.model, self.layers, self.sites)
        self._packed: dict[MatrixPlace, PackedMatrix] = {}
        self._keeps_packed = keep_packed_weights
        if keep_packed_weights and not (
            self._quantises_experts and self._formats.weights.has_global_scale
        ):
            raise ValueError(
                "keep_packed_weights=True has no effect: no expert is quantised in a format with "
                f"global scales (method={trace.method}, number_format={trace.number_format})"
            )
        self.settings_version = 0
        self.seconds = {"rollout": 0.0, "record": 0.0, "push": 0.0}
        self.experts_without_calibration: dict[int, tuple[int, ...]] = {}
        self._settings: QuantizerSettings | None = None
        self._has_plain_weights = False
        self._policy_version: int | None = None
        self._weights_digest = ""
        if self.quantised and not self._formats.weights.has_global_scale:
            self._take_settings(self._settings_of({}))

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
        if not self._has_plain_weights:
            raise RuntimeError("calibrate needs unquantised weights; call load_weights before it")
        if not self._formats.weights.has_global_scale:
            return
        batches = list(token_batches)
        require_tokens(batches, self.model.vocab_size)

        @torch.no_grad()
        def forward_loop(model: HybridModel) -> None:
            for batch in batches:
                tokens = batch.to(torch.cuda.current_device())
                positions = torch.arange(tokens.shape[1], device=tokens.device)
                mask = causal_mask(tokens.shape[1]).to(tokens.device)
                model(tokens, positions.expand_as(tokens), mask)

        # Only a calibration that succeeds replaces the settings.
        collect_amax(self.model, self.layers, forward_loop)
        scales, self.experts_without_calibration = calibrated_scales(
            self.layers, self._formats, power_of_two=self.trace.power_of_two_scales
        )
        self._warn_of_unseen_experts()
        self.use_settings(self._settings_of(scales))

    def use_settings(self, settings: QuantizerSettings) -> None:
        """Takes the settings of another engine of the same model, instead of calibrating.

        Raises:
            ValueError: The settings are not those of an engine like this one.
        """
        self._require_no_session("use_settings")
        self._require_quantising("use_settings")
        own = self._settings_of({})
        # Which places have global scales depends on the other settings.
        fields = dataclasses.fields(QuantizerSettings)
        for field in sorted(fields, key=lambda field: field.name == "global_scales"):
            theirs, ours = getattr(settings, field.name), getattr(own, field.name)
            if field.name == "global_scales":
                ours = sorted(self._places()) if self._formats.weights.has_global_scale else []
                theirs = sorted(theirs)
            if theirs != ours:
                raise ValueError(
                    f"settings with {field.name} {theirs} do not fit an engine with {ours}"
                )
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
        if rule is not None and (
            self._formats.weights.name != "nvfp4"
            or not self._quantises_experts
            or self.trace.power_of_two_scales
        ):
            raise ValueError(
                "a rule chooses NVFP4 codes and scales of experts; this engine has method="
                f"{self.trace.method}, number_format={self.trace.number_format}, quantised_parts="
                f"{self.trace.quantised_parts}, power_of_two_scales="
                f"{self.trace.power_of_two_scales}"
            )
        started = time.perf_counter()
        require_fitting(self.model, named)
        with self._kept_on_failure():
            self._load(named)
            digest = self._weights_digest = self._quantise_weights(named, rule)
            self._policy_version = policy_version
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
            digest = self._weights_digest = self._quantise_weights(named)
            self._policy_version = policy_version
        assert before is not None, "checked above"
        assert self._settings is not None, "just calibrated"
        ratios = [
            scale / before.global_scales[place]
            for place, scale in self._settings.global_scales.items()
        ]
        _logger.warning(
            "recalibrated: settings version %d (digest %s instead of %s); global scales changed by "
            "factors of %.3g to %.3g",
            self.settings_version,
            self._settings.digest(),
            before.digest(),
            min(ratios),
            max(ratios),
        )
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
        if self._policy_version is None:
            raise RuntimeError("quantised_model needs weights; call push_weights before it")
        if not self._packed or self._settings is None:
            raise ValueError(
                "quantised_model needs packed NVFP4 weights of routed experts; build the engine "
                "with keep_packed_weights=True and a method that quantises them"
            )
        experts = {
            id(cast("torch.nn.Module", linear).weight)
            for layer in self.layers
            for _, _, linear in named_expert_linears(layer)
        }
        parameters = {
            name: parameter.detach()
            for name, parameter in self.model.named_parameters()
            if id(parameter) not in experts
        }
        scales = {
            (layer, str(site)): float(torch.tensor(scale, dtype=torch.float32))
            for (layer, site), scale in self._settings.global_scales.items()
        }
        return parameters, dict(self._packed), scales

    def _load(self, named: Mapping[str, torch.Tensor]) -> None:
        copy_weights(self.model, named)
        self._forget()
        self._has_plain_weights = self._keeps_bf16_experts
        self._policy_version = None

    def _quantise_weights(
        self, named: Mapping[str, torch.Tensor], rule: WeightRule | None = None
    ) -> str:
        """Quantises what was loaded and gives the digest."""
        if not self._quantises_experts:
            return plain_digest(dict(self.model.named_parameters()))
        self._has_plain_weights = False
        packed: dict[MatrixPlace, PackedMatrix] = {}
        keep = packed if self._keeps_packed else None
        if self._keeps_bf16_experts:
            digest = quantise_experts(
                self.layers,
                number_format=self._formats.weights,
                power_of_two_scales=self.trace.power_of_two_scales,
                implementation=self.trace.implementation,
                keep=keep,
                rule=rule,
            )
        else:
            digest = pack_experts(
                self.layers,
                {
                    id(parameter): named[name]
                    for name, parameter in self.model.named_parameters()
                    if parameter.is_meta
                },
                power_of_two_scales=self.trace.power_of_two_scales,
                implementation=self.trace.implementation,
                keep=keep,
                rule=rule,
            )
        self._packed = packed
        return digest

    @contextlib.contextmanager
    def _kept_on_failure(self) -> Iterator[None]:
        """Puts weights, versions and settings back if what is done inside the context fails."""
        names = (
            "_policy_version",
            "_weights_digest",
            "_has_plain_weights",
            "_packed",
            "experts_without_calibration",
        )
        state = {name: getattr(self, name) for name in names}
        settings, settings_version = self._settings, self.settings_version
        lent = self._lent_memory()
        if lent is not None:
            self._forget()
        # Plain BF16 experts are not what packed ones hold.
        packed_layers = self.layers if self._policy_version is not None else ()
        try:
            with kept_on_failure(self.model, lent=lent, packed_layers=packed_layers):
                yield
        except BaseException:
            for name, value in state.items():
                setattr(self, name, value)
            if settings is not None and self.settings_version != settings_version:
                self.use_settings(settings)
                self.settings_version = settings_version
            raise

    def _take_settings(self, settings: QuantizerSettings) -> None:
        self._settings = settings
        self.settings_version += 1
        self.sites.use(settings)

    def _settings_of(self, scales: dict[Place, float]) -> QuantizerSettings:
        return QuantizerSettings(
            scales,
            number_format=self.trace.number_format,
            quantised_parts=self.trace.quantised_parts,
            power_of_two_scales=self.trace.power_of_two_scales,
            model_id=self.model_id,
            residual_share=self.trace.residual_share,
        )

    @property
    def _formats(self) -> FormatSet:
        return FORMAT_SETS[self.trace.number_format]

    def _places(self) -> list[Place]:
        places: list[Place] = []
        for layer in self.layers:
            if layer.moe is not None:
                places += [(layer.index, Site.FC1), (layer.index, Site.FC2)]
            if layer.attention is not None:
                places += [(layer.index, Site.K), (layer.index, Site.V)]
        return [place for place in places if place[1] in self.trace.quantised_sites]

    def _recorded_places(self) -> list[Place]:
        if not self.quantised:
            return []
        sites = set(self._hint_sites())
        if self.trace.diagnostic_share > 0:
            sites |= {*DEFAULT_HINT_SITES, *self.trace.hint_sites}
        layers = self.trace.recorded_layers(1 + max(layer.index for layer in self.layers))
        return [
            (layer, site) for layer, site in self._places() if layer in layers and site in sites
        ]

    def _narrowed(self, site: Site, packed_codes: torch.Tensor) -> torch.Tensor:
        number_format = site_format(self._formats, site)
        bits = stored_bits(number_format, self.trace.recorded_bits)
        return ops.narrowed(packed_codes, bits, number_format=number_format)

    def _hint_sites(self) -> tuple[Site, ...]:
        return self._guided_sites if self.trace.method == "trace" else ()

    def _warn_of_unseen_experts(self) -> None:
        for layer, experts in self.experts_without_calibration.items():
            if experts:
                _logger.warning(
                    "layer %d: no calibration token reached %d experts (%s); they take the fc2 "
                    "scale of the layer's other experts",
                    layer,
                    len(experts),
                    ", ".join(map(str, experts)),
                )

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
