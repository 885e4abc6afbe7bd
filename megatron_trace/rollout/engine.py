"""RolloutEngine: rollouts on Megatron's dynamic inference engine, in FP4 and with hints."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import torch
from megatron.core.transformer import TransformerConfig

from megatron_trace.config import TraceConfig
from megatron_trace.hints import HintSink, RolloutSample
from megatron_trace.rollout.callbacks import NextTurn, OnTokens
from megatron_trace.rollout.decode_graphs import DecodeGraphs
from megatron_trace.rollout.degeneration import DegenerationRule
from megatron_trace.rollout.kv_cache import kv_bytes_per_token
from megatron_trace.rollout.policy import ServedPolicy
from megatron_trace.rollout.prompts import Prompt, require_usable, token_lists
from megatron_trace.rollout.report import RolloutReport
from megatron_trace.rollout.running import Served
from megatron_trace.rollout.samples import make_report, make_sample
from megatron_trace.rollout.sampling import SamplingSettings, sample_seed
from megatron_trace.rollout.saved_rows import Records
from megatron_trace.rollout.serving import EngineLimits, Server
from megatron_trace.rollout.session import OnPush, RolloutSession
from megatron_trace.rollout.storing import store_records


class RolloutEngine(ServedPolicy):
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
        cuda_graphs: Whether decode steps are captured in CUDA graphs; or the batch sizes to which
            they are padded then, see `decode_graphs.DecodeGraphs`.
        degeneration: When a sample is flagged as degenerate.
        keep_packed_weights: Whether codes and scales of the experts stay in host memory after a
            push, for `quantised_model`.
        keep_bf16_experts: Whether routed experts that packed codes compute are held in BF16 too;
            False refuses calibration, see `ServedPolicy`.
        model_id: Name of the model in the quantiser settings.
        rotary_percent: Share of the head dim that RoPE rotates.
        rotary_base: Base period of RoPE.

    Attributes:
        seconds: Seconds since construction: `rollout` (record included), `record`, `push`.
        experts_without_calibration: By decoder layer, experts that got no calibration token.
        settings_version: How often the quantisers' settings were set.
        report: Counts of the last rollout.

    Raises:
        ValueError: The model is spread over ranks, a quantised width is not whole blocks, or decode
            steps are to be captured and cannot be.
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
        cuda_graphs: bool | Sequence[int] | DecodeGraphs = False,
        degeneration: DegenerationRule | None = None,
        keep_packed_weights: bool = False,
        keep_bf16_experts: bool = True,
        model_id: str = "",
        rotary_percent: float = 1.0,
        rotary_base: int = 10_000,
    ) -> None:
        super().__init__(
            model_config,
            pattern=pattern,
            vocab_size=vocab_size,
            max_sequence_length=max_sequence_length,
            trace=trace,
            keep_packed_weights=keep_packed_weights,
            keep_bf16_experts=keep_bf16_experts,
            model_id=model_id,
            rotary_percent=rotary_percent,
            rotary_base=rotary_base,
        )
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
                cuda_graphs=cuda_graphs,
            ),
        )
        self._degeneration = degeneration or DegenerationRule()
        self._session: RolloutSession | None = None
        self.report = RolloutReport()

    @property
    def session(self) -> RolloutSession | None:
        """The open session, whose samples go on over pushes; None if there is none."""
        return self._session if self._session is not None and self._session.is_open else None

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that a token's keys and values take in this engine's cache."""
        return self._kv_bytes(packed=self.trace.quantises_kv)

    @property
    def kv_bytes_per_token_bf16(self) -> int:
        """Bytes that they would take in BF16."""
        return self._kv_bytes(packed=False)

    def generate(
        self,
        prompts: Sequence[Prompt],
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
            prompts: Token ids of each prompt; lists, or integer tensors or arrays of one dim.
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
                quantiser did not run; the engine is usable again afterwards. Or a session is open.
            ValueError: Prompts, sample ids or seeds cannot be used.
        """
        self._require_no_session("generate")
        self._require_calibrated("generate")
        if self._policy_version is None:
            raise RuntimeError("generate needs weights; call push_weights before it")
        prompts = [p for p in token_lists(prompts) for _ in range(sampling.samples_per_prompt)]
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
            samples = self._finished(sample_ids, served, store if keep else None)
        finally:
            self._recorder.stop()
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
            RuntimeError: No rollout is running, or it is a session.
            ValueError: A sample is not of it, or the names are one string.
        """
        if self.session is not None:
            raise RuntimeError("abort is for callbacks of generate; a session is closed as a whole")
        self._server.abort(sample_ids, keep=keep)

    def open_session(
        self, *, store: HintSink | None, sampling: SamplingSettings, on_push: OnPush
    ) -> RolloutSession:
        """Begins a rollout that goes on while weights are pushed; see `RolloutSession`.

        Args:
            store: As of `generate`.
            sampling: How tokens are sampled.
            on_push: What a push does with what running samples have computed.

        Raises:
            RuntimeError: The engine is not ready, or a session is open.
            ValueError: The engine shares prefixes.
        """
        self._require_no_session("open_session")
        self._require_calibrated("open_session")
        if self._policy_version is None:
            raise RuntimeError("open_session needs weights; call push_weights before it")
        if self._server.limits.prefix_caching:
            raise ValueError(
                "open_session contradicts prefix_caching=True: pages that a prompt finds may be of "
                "another policy version; build the engine without it"
            )
        keep = store is not None and bool(self._recorder.places)
        session = self._session = RolloutSession(
            self._server,
            sampling=sampling,
            on_push=on_push,
            keep=keep,
            policy_version=self._policy_version,
            weights_digest=self._weights_digest,
            seconds=self.seconds,
            require_usable=lambda prompts, sample_ids: require_usable(
                prompts,
                sample_ids,
                sampling,
                max_sequence_length=self.max_sequence_length,
                vocab_size=self.model.vocab_size,
                stored=() if store is None else store.sample_ids(),
            ),
            require_quantisers_ran=self._require_quantisers_ran,
            finished=lambda sample_ids, served: self._finished(
                sample_ids, served, store if keep else None, session.weights_digests
            ),
        )
        return session

    def _require_pushable(self, policy_version: int) -> None:
        self._require_not_generating("push_weights")
        if self.session is not None:
            self.session.require_later(policy_version)

    def _pushed(self, policy_version: int, digest: str) -> None:
        if self.session is not None:
            self.session.pushed(policy_version, digest)

    def _finished(
        self,
        sample_ids: Sequence[str],
        served: Sequence[Served | None],
        store: HintSink | None,
        weights_digests: Mapping[int, str] | None = None,
    ) -> list[RolloutSample]:
        """Gives the samples that were served, stores what was recorded of them, and reports."""
        assert self._policy_version is not None, "weights are pushed before a rollout"
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
                weights_digests=weights_digests,
                settings_digest=self._settings.digest() if self._settings is not None else "",
                rule=self._degeneration,
            )
            for sample_id, one in named
        ]
        storing = time.perf_counter()
        if store is not None:
            self._store(store, samples, [one.rows.records for _, one in named])
        self.seconds["record"] += time.perf_counter() - storing
        self.report = make_report(
            samples,
            num_asked=len(served),
            counts=self._server.context.counts,
            sites=self.sites,
            settings_version=self.settings_version,
            policy_version=self._policy_version,
        )
        return samples

    def _require_no_session(self, call: str) -> None:
        self._require_not_generating(call)
        if self.session is not None:
            raise RuntimeError(
                f"{call} while a session is open, whose samples are in flight; close it before"
            )

    def _require_not_generating(self, call: str) -> None:
        if self.session is None and self._server.is_running:
            raise RuntimeError(
                f"{call} from a callback of generate, whose samples are in flight and of one "
                "version; call it after generate, or open a session"
            )

    def _store(self, store: HintSink, samples: list[RolloutSample], records: list[Records]) -> None:
        assert self._settings is not None, "only a quantising engine records"
        try:
            store_records(
                store,
                samples,
                records,
                self._settings,
                kept_bits=self.trace.recorded_bits,
                hint_bits=self.trace.hint_bits,
                hint_scales=self.trace.hint_scales,
                hint_sites=self._hint_sites(),
                diagnostic_share=self.trace.diagnostic_share,
            )
        except BaseException:
            for sample in samples:
                store.drop_sample(sample.sample_id)
            raise

    def _kv_bytes(self, *, packed: bool) -> int:
        num_layers = sum(layer.attention is not None for layer in self.layers)
        number_format = self._formats.kv_cache if packed else None
        return kv_bytes_per_token(self.model.config, num_layers, number_format)

    def _lent_memory(self) -> torch.Tensor | None:
        # Samples of a session go on over a push, with the keys and values that they have.
        if self.session is not None:
            return None
        return self._server.context.memory_buffer.view(-1).view(torch.uint8)

    def _forget(self) -> None:
        self._server.forget_prefixes()
