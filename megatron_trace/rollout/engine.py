"""RolloutEngine: rollouts on Megatron's dynamic inference engine, in FP4 and with hints."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer import TransformerConfig

from megatron_trace.config import DEFAULT_HINT_SITES, TraceConfig
from megatron_trace.formats import FORMAT_SETS, FormatSet
from megatron_trace.formats.packed_matrix import PackedMatrix
from megatron_trace.hints import HintSink, QuantizerSettings, RolloutSample, Site
from megatron_trace.models.hybrid import (
    causal_mask,
    decoder_layers,
    named_expert_linears,
    pattern_sites,
)
from megatron_trace.rollout.callbacks import NextTurn, OnTokens
from megatron_trace.rollout.context import Records
from megatron_trace.rollout.degeneration import DegenerationRule
from megatron_trace.rollout.kv_cache import kv_bytes_per_token
from megatron_trace.rollout.model import build_engine_model
from megatron_trace.rollout.moe import EngineMoELayer
from megatron_trace.rollout.prompts import require_tokens, require_usable
from megatron_trace.rollout.quantize import (
    calibrated_scales,
    collect_amax,
    insert_quantisers,
    require_only_ours,
)
from megatron_trace.rollout.recorder import Place, Recorder
from megatron_trace.rollout.report import RolloutReport
from megatron_trace.rollout.samples import make_report, make_sample
from megatron_trace.rollout.sampling import SamplingSettings, sample_seed
from megatron_trace.rollout.serving import EngineLimits, Server
from megatron_trace.rollout.sites import RolloutSites
from megatron_trace.rollout.storing import store_records
from megatron_trace.rollout.weights import (
    MatrixPlace,
    copy_weights,
    kept_on_failure,
    plain_digest,
    quantise_experts,
)

_logger = logging.getLogger(__name__)


class RolloutEngine:
    """Generates samples in BF16 or FP4 and records what its quantisers did.

    Order of calls: `load_weights`, `calibrate` (or `use_settings`), then `push_weights` and
    `generate` in turn. Method bf16 needs no calibration, nor do formats without global scales,
    for which `calibrate` may be called and changes nothing.

    Args:
        model_config: Configuration of the trained model; the engine computes in BF16.
        pattern: Hybrid layer pattern, such as `*E*E`.
        vocab_size: Rows of the embedding.
        max_sequence_length: Longest prompt and response together, in tokens.
        trace: Settings of TRACE.
        eod_token: Token that ends a response.
        max_requests: Requests that run at a time.
        block_size_tokens: Tokens of a page of the K/V cache.
        max_step_tokens: Tokens of a step, see `EngineLimits`; None for no limit.
        cache_tokens: Tokens that the K/V cache holds; None for room for all requests.
        prefix_caching: Whether prompts share the pages that they begin with alike.
        degeneration: When a sample is flagged as degenerate.
        keep_packed_weights: Whether codes and scales of the experts stay in host memory after a
            push, for `quantised_model`.
        model_id: Name of the model in the quantiser settings.
        rotary_percent: Share of the head dim that RoPE rotates.
        rotary_base: Base period of RoPE.

    Attributes:
        seconds: Seconds since construction: `rollout` (record included), `record`, `push`.
        experts_without_calibration: By decoder layer, experts that got no calibration token.
        settings_version: How often the quantisers' settings were set.
        report: Counts of the last rollout.

    Raises:
        ValueError: The model is spread over ranks, or a quantised width is not whole blocks.
    """

    def __init__(
        self,
        model_config: TransformerConfig,
        *,
        pattern: str,
        vocab_size: int,
        max_sequence_length: int,
        trace: TraceConfig,
        eod_token: int,
        max_requests: int = 64,
        block_size_tokens: int = 32,
        max_step_tokens: int | None = None,
        cache_tokens: int | None = None,
        prefix_caching: bool = False,
        degeneration: DegenerationRule | None = None,
        keep_packed_weights: bool = False,
        model_id: str = "",
        rotary_percent: float = 1.0,
        rotary_base: int = 10_000,
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
        )
        self.layers = decoder_layers(self.model)
        self._has_experts = any(layer.moe is not None for layer in self.layers)
        self._quantises_experts = self._has_experts and trace.quantises_experts
        self._guided_sites = tuple(Site(site) for site in trace.sites_in(pattern_sites(pattern)))
        self._recorder = Recorder(self._recorded_places())
        self.sites = RolloutSites(trace, self._recorder)
        for layer in self.layers:
            if isinstance(layer.moe, EngineMoELayer):
                layer.moe.place = (self.sites, layer.index)
        if self.quantised:
            insert_quantisers(self.model, self.layers, self.sites)
        self._server = Server(
            self.model,
            self.sites,
            packed=trace.quantises_kv,
            eod_token=eod_token,
            limits=EngineLimits(
                max_sequence_length,
                max_requests=max_requests,
                block_size_tokens=block_size_tokens,
                max_step_tokens=max_step_tokens,
                cache_tokens=cache_tokens,
                prefix_caching=prefix_caching,
            ),
        )
        self._degeneration = degeneration or DegenerationRule()
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
        self.report = RolloutReport()
        self.seconds = {"rollout": 0.0, "record": 0.0, "push": 0.0}
        self.experts_without_calibration: dict[int, tuple[int, ...]] = {}
        self._settings: QuantizerSettings | None = None
        self._has_plain_weights = False
        self._policy_version: int | None = None
        if self.quantised and not self._formats.weights.has_global_scale:
            self.use_settings(self._settings_of({}))

    @property
    def settings(self) -> QuantizerSettings | None:
        """Settings of the quantisers; None for method bf16, and before any needed calibration."""
        return self._settings

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that a token's keys and values take in this engine's cache."""
        return self._kv_bytes(packed=self.trace.quantises_kv)

    @property
    def kv_bytes_per_token_bf16(self) -> int:
        """Bytes that they would take in BF16."""
        return self._kv_bytes(packed=False)

    def load_weights(self, named: Mapping[str, torch.Tensor]) -> None:
        """Copies weights of a trainer without quantising them, for calibration.

        Args:
            named: BF16 or FP32 parameters by name.

        Raises:
            ValueError: A parameter is missing, unknown or of another shape.
        """
        copy_weights(self.model, named)
        self._server.forget_prefixes()
        self._has_plain_weights = True
        self._policy_version = None

    def calibrate(self, token_batches: Iterable[torch.Tensor]) -> None:
        """Fixes the global scales of all sites from what these tokens give.

        Args:
            token_batches: integer [B, S] each; not read if the formats have no global scales.

        Raises:
            RuntimeError: No unquantised weights are loaded, a site saw no data, or an activation
                is NaN or Inf.
            ValueError: The method quantises nothing, or a token is outside the vocabulary.
        """
        self._require_quantising("calibrate")
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
        self._settings = settings
        self.settings_version += 1
        self.sites.use(settings)
        self._server.forget_prefixes()

    def push_weights(self, named: Mapping[str, torch.Tensor], policy_version: int) -> str:
        """Takes new weights of the trainer and quantises the routed experts.

        Either all are taken or none: after an error the engine serves what it served before.

        Args:
            named: BF16 or FP32 parameters by name; cast to BF16 before they are quantised.
            policy_version: Version of the weights, noted in samples and hints.

        Returns:
            Digest of the quantised expert weights. Where none is quantised (method bf16, KV cache
            only, or a model without routed experts), of all weights in BF16.

        Raises:
            RuntimeError: The engine is not calibrated.
            ValueError: A parameter is missing, unknown or of another shape, or an expert's weight
                is NaN or Inf.
        """
        self._require_calibrated("push_weights")
        started = time.perf_counter()
        with self._kept_on_failure():
            self.load_weights(named)
            digest = self._quantise_weights()
            self._policy_version = policy_version
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
        self._require_calibrated("recalibrate")
        if not self._formats.weights.has_global_scale:
            raise ValueError(
                f"recalibrate has no effect with number_format={self.trace.number_format}, which "
                "has no global scales; call push_weights"
            )
        before = self._settings
        with self._kept_on_failure():
            self.load_weights(named)
            self.calibrate(token_batches)
            digest = self._quantise_weights()
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

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sample_ids: Sequence[str],
        *,
        store: HintSink | None,
        sampling: SamplingSettings,
        seed: int,
        seeds: Sequence[int] | None = None,
        on_tokens: OnTokens | None = None,
        next_turn: NextTurn | None = None,
    ) -> list[RolloutSample]:
        """Samples responses to every prompt.

        Args:
            prompts: Token ids of each prompt.
            sample_ids: Name of each sample, unique; `sampling.samples_per_prompt` of the first
                prompt, then of the second, and so on.
            store: Gets the hints (method trace) and the full codes of diagnostic samples; None
                records nothing.
            sampling: How tokens are sampled.
            seed: Seed of the sampling. A sample's random numbers follow from it, the sample's name
                and the token's position, so that they are the same in any other company.
            seeds: Seed of each sample, instead of one from `seed` and its name.
            on_tokens: Called after every step with the tokens that it sampled; may call `abort`.
            next_turn: Called when a sample ends its turn; gives the tokens that it goes on with.

        Returns:
            The samples in the order of their names, without those that were aborted and dropped.
            `report` counts what happened.

        Raises:
            RuntimeError: The engine is not ready, an activation is NaN or Inf, or a site's
                quantiser did not run; the engine is usable again afterwards.
            ValueError: Prompts, sample ids or seeds cannot be used.
        """
        self._require_calibrated("generate")
        if self._policy_version is None:
            raise RuntimeError("generate needs weights; call push_weights before it")
        prompts = [prompt for prompt in prompts for _ in range(sampling.samples_per_prompt)]
        require_usable(
            prompts,
            sample_ids,
            sampling,
            max_sequence_length=self.max_sequence_length,
            vocab_size=self.model.vocab_size,
            stored=() if store is None else store.sample_ids(),
        )
        if seeds is None:
            seeds = [sample_seed(seed, sample_id) for sample_id in sample_ids]
        if len(seeds) != len(sample_ids):
            raise ValueError(f"{len(seeds)} seeds, but {len(sample_ids)} sample ids")
        self.report = RolloutReport(settings_version=self.settings_version)
        if not prompts:
            return []
        started, put_before = time.perf_counter(), self._recorder.seconds
        self.sites.begin_rollout()
        keep = store is not None and bool(self._recorder.places)
        try:
            served = self._server.run(
                prompts,
                sample_ids,
                sampling=sampling,
                seeds=seeds,
                keep=keep,
                on_tokens=on_tokens,
                next_turn=next_turn,
            )
            self._require_quantisers_ran()
            named = [
                (sample_id, one)
                for sample_id, one in zip(sample_ids, served, strict=True)
                if one is not None
            ]
            samples = [
                make_sample(
                    sample_id,
                    one,
                    has_experts=self._has_experts,
                    policy_version=self._policy_version,
                    settings_digest=self._settings.digest() if self._settings is not None else "",
                    rule=self._degeneration,
                )
                for sample_id, one in named
            ]
            storing = time.perf_counter()
            if store is not None and keep:
                self._store(store, samples, [one.rows.records for _, one in named])
            self.seconds["record"] += time.perf_counter() - storing
        finally:
            self._recorder.stop()
        self.report = make_report(
            samples,
            num_asked=len(served),
            counts=self._server.context.counts,
            sites=self.sites,
            settings_version=self.settings_version,
            policy_version=self._policy_version,
        )
        self.seconds["record"] += self._recorder.seconds - put_before
        self.seconds["rollout"] += time.perf_counter() - started
        return samples

    def abort(self, sample_ids: Iterable[str], *, keep: bool = False) -> None:
        """Ends samples of the running rollout; to be called from `on_tokens` or `next_turn`.

        Args:
            sample_ids: Their names.
            keep: Whether a sample stays, with what it has and finish reason `abort`; if not, it
                leaves neither sample nor hints. One that has no token yet never stays.

        Raises:
            RuntimeError: No rollout is running.
            ValueError: A sample is not of it.
        """
        self._server.abort(sample_ids, keep=keep)

    def _quantise_weights(self) -> str:
        """Quantises what was loaded and gives the digest."""
        if not self._quantises_experts:
            return plain_digest(dict(self.model.named_parameters()))
        self._has_plain_weights = False
        packed: dict[MatrixPlace, PackedMatrix] = {}
        digest = quantise_experts(
            self.layers,
            number_format=self._formats.weights,
            power_of_two_scales=self.trace.power_of_two_scales,
            implementation=self.trace.implementation,
            keep=packed if self._keeps_packed else None,
        )
        self._packed = packed
        return digest

    @contextlib.contextmanager
    def _kept_on_failure(self) -> Iterator[None]:
        """Puts weights, versions and settings back if what is done inside the context fails."""
        names = (
            "_policy_version",
            "_has_plain_weights",
            "_packed",
            "experts_without_calibration",
        )
        state = {name: getattr(self, name) for name in names}
        settings, settings_version = self._settings, self.settings_version
        try:
            with kept_on_failure(self.model):
                yield
        except BaseException:
            for name, value in state.items():
                setattr(self, name, value)
            if settings is not None and self.settings_version != settings_version:
                self.use_settings(settings)
                self.settings_version = settings_version
            raise

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

    def _store(self, store: HintSink, samples: list[RolloutSample], records: list[Records]) -> None:
        assert self._settings is not None, "only a quantising engine records"
        try:
            store_records(
                store,
                samples,
                records,
                self._settings,
                hint_bits=self.trace.hint_bits,
                hint_scales=self.trace.hint_scales,
                hint_sites=self._hint_sites(),
                diagnostic_share=self.trace.diagnostic_share,
            )
        except BaseException:
            for sample in samples:
                store.drop_sample(sample.sample_id)
            raise

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

    def _hint_sites(self) -> tuple[Site, ...]:
        return self._guided_sites if self.trace.method == "trace" else ()

    def _kv_bytes(self, *, packed: bool) -> int:
        num_layers = sum(layer.attention is not None for layer in self.layers)
        number_format = self._formats.kv_cache if packed else None
        return kv_bytes_per_token(self.model.config, num_layers, number_format)

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
