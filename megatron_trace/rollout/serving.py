"""Megatron's dynamic inference engine around a model: built once, run over a list of prompts."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from megatron.core.inference.config import InferenceConfig, PrefixCachingEvictionPolicy
from megatron.core.inference.contexts.mamba_slot_allocator import (
    MAX_INTERMEDIATE_OFFSETS_PER_REQUEST,
)
from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.moe.router_replay import RouterReplay

from megatron_trace import compat
from megatron_trace.hints import Site
from megatron_trace.models.hybrid import decoder_layers
from megatron_trace.models.routing import global_replay_instances
from megatron_trace.rollout.callbacks import NextTurn, OnTokens
from megatron_trace.rollout.controller import EngineController
from megatron_trace.rollout.decode_graphs import (
    DecodeGraphs,
    EngineForward,
    require_capturable,
    require_static_experts,
)
from megatron_trace.rollout.gated_delta_net import state_bytes_per_request, state_config
from megatron_trace.rollout.grouped_experts import GroupedExperts
from megatron_trace.rollout.kv_cache import (
    PackedKVContext,
    PlainKVContext,
    kv_bytes_per_token,
)
from megatron_trace.rollout.moe import EngineMoELayer
from megatron_trace.rollout.row_sampler import RowSampler
from megatron_trace.rollout.running import Run, Served
from megatron_trace.rollout.sampling import SamplingSettings
from megatron_trace.rollout.sites import RolloutSites

# Megatron pads every step to a multiple of this many tokens.
TOKEN_MULTIPLE = 64
MAX_STEP_TOKENS = 16384


class TokenIds:
    """The tokenizer of an engine that is given token ids and asked for token ids."""

    bos = None

    def __init__(self, vocab_size: int, eod: int) -> None:
        self.vocab_size = vocab_size
        self.eod = eod

    def tokenize(self, text: str) -> list[int]:
        """Raises ValueError: prompts are token ids."""
        raise ValueError(f"the rollout engine takes token ids, not text: {text!r}")

    def detokenize(self, ids: Sequence[int]) -> str:
        """Gives no text; Megatron asks for it when a request finishes."""
        return ""


@dataclass(frozen=True)
class EngineLimits:
    """How much an engine does and holds at a time.

    Attributes:
        max_sequence_length: Longest prompt and response together, in tokens.
        max_requests: Requests that run at a time.
        block_size_tokens: Tokens of a page of the K/V cache.
        max_step_tokens: Tokens of a step; longer prompts are computed in chunks. None: every
            prompt is computed at once.
        cache_tokens: Tokens that the K/V cache holds; where they are too few for all requests,
            some are paused, and evicted to host memory for a while. None: room for all.
        prefix_caching: Whether prompts share the pages, and records, of the blocks that they begin
            with alike; until weights are pushed also with earlier rollouts.
        cuda_graphs: Whether decode steps are captured in CUDA graphs; or the batch sizes to which
            they are padded then, or both as `DecodeGraphs`.
    """

    max_sequence_length: int
    max_requests: int = 64
    block_size_tokens: int = 32
    max_step_tokens: int | None = None
    cache_tokens: int | None = None
    prefix_caching: bool = False
    cuda_graphs: bool | Sequence[int] | DecodeGraphs = False

    def __post_init__(self) -> None:
        """Raises ValueError on limits that leave no room for a request, or no size of a graph."""
        DecodeGraphs.of_setting(self.cuda_graphs, self.max_requests)
        if self.max_step_tokens is not None and self.max_step_tokens < self.max_requests:
            raise ValueError(
                f"max_step_tokens={self.max_step_tokens} must be at least max_requests="
                f"{self.max_requests}, as each running request computes a token in a step"
            )
        if self.num_pages < self.pages_per_request:
            raise ValueError(
                f"cache_tokens={self.cache_tokens} does not hold one request of "
                f"max_sequence_length={self.max_sequence_length}"
            )

    @property
    def decode_graphs(self) -> DecodeGraphs | None:
        """What `cuda_graphs` means."""
        return DecodeGraphs.of_setting(self.cuda_graphs, self.max_requests)

    @property
    def pages_per_request(self) -> int:
        """Pages of the longest request."""
        return math.ceil(self.max_sequence_length / self.block_size_tokens)

    @property
    def num_pages(self) -> int:
        """Pages of the cache, without the one for rows of padding."""
        if self.cache_tokens is None:
            return self.max_requests * self.pages_per_request
        return self.cache_tokens // self.block_size_tokens

    @property
    def step_tokens(self) -> int:
        """Tokens of the largest step, in multiples of Megatron's padding."""
        tokens = self.max_step_tokens
        if tokens is None:
            all_tokens = self.max_requests * self.max_sequence_length
            tokens = max(min(MAX_STEP_TOKENS, all_tokens), self.max_sequence_length)
        return math.ceil(tokens / TOKEN_MULTIPLE) * TOKEN_MULTIPLE


class Server:
    """Megatron's engine, context and controller of one model.

    Args:
        model: Model of the engine.
        sites: Sites of the engine.
        packed: Whether K/V are stored as codes and block scales.
        eod_token: Token that ends a response.
        limits: How much it does and holds at a time.

    Attributes:
        context: The paged cache and the bookkeeping of requests.
        forward: Computes the forward of a step.

    Raises:
        ValueError: Decode steps are to be captured, and cannot be.
    """

    def __init__(
        self,
        model: HybridModel,
        sites: RolloutSites,
        *,
        packed: bool,
        eod_token: int,
        limits: EngineLimits,
    ) -> None:
        self.model = model
        self.sites = sites
        self.eod_token = eod_token
        self.limits = limits
        compat.forget_moe_layers()
        attention_layers = tuple(
            layer.index for layer in decoder_layers(model) if layer.attention is not None
        )
        graphs = limits.decode_graphs
        context_class = PackedKVContext if packed else PlainKVContext
        self.context = context_class(
            model.config,
            inference_config(
                model,
                kv_bytes_per_token(
                    model.config,
                    len(attention_layers),
                    sites.format_of(Site.K) if packed else None,
                ),
                limits,
            ),
            sites=sites,
            decoder_layers=attention_layers,
            decode_sizes=() if graphs is None else graphs.sizes,
        )
        if graphs is not None:
            require_static_experts(sites.trace)
            if graphs.captured:
                require_capturable(self.context, model)
        self._choose_experts(without_host=graphs is not None)
        self.forward = EngineForward(
            model, self.context, captures=graphs is not None and graphs.captured
        )
        controller = EngineController(
            self.forward,
            TokenIds(model.vocab_size, eod_token),
        )
        self._sampler = RowSampler()
        compat.set_sampler(controller, self._sampler)
        with compat.inference_mode_of_process(), global_replay_instances(model):
            self._engine = DynamicInferenceEngine(controller, self.context)
        controller.set_stop_word_finished_ids_callback(self._finished_ids)
        self._run: Run | None = None
        # What the prefix cache holds is of the weights that serve now, and recorded.
        self._prefixes_are_valid = self._prefixes_are_recorded = False

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        sample_ids: Sequence[str],
        *,
        sampling: SamplingSettings,
        seeds: Sequence[int],
        keep: bool,
        on_tokens: OnTokens | None = None,
        next_turn: NextTurn | None = None,
    ) -> list[Served | None]:
        """Generates a response to every prompt.

        Args:
            prompts: Token ids.
            sample_ids: Name of each sample.
            sampling: How tokens are sampled.
            seeds: Seed of each sample.
            keep: Whether the recorder keeps rows.
            on_tokens: Is told of every token.
            next_turn: Says how samples go on.

        Returns:
            What was served, in the order of the prompts; None for a sample that was aborted and
            dropped.

        Raises:
            RuntimeError: Megatron's engine refused or lost a request.
        """
        run = self.begin(sampling=sampling, keep=keep, on_tokens=on_tokens, next_turn=next_turn)
        with self.computing():
            self.add(prompts, sample_ids, seeds)
            while run.num_unfinished:
                run.step()
            served = self.take(sample_ids)
        self._run = None
        self._sampler.end()
        self._prefixes_are_valid = True
        return served

    def begin(
        self,
        *,
        sampling: SamplingSettings,
        keep: bool,
        on_tokens: OnTokens | None = None,
        next_turn: NextTurn | None = None,
    ) -> Run:
        """Begins a rollout without samples, as of `run`; `add`, then steps, within `computing`."""
        is_known = self._prefixes_are_valid and (self._prefixes_are_recorded or not keep)
        if not (self.limits.prefix_caching and is_known):
            self._engine.reset()
            self._prefixes_are_recorded = True
        self._prefixes_are_recorded &= keep
        self.context.counts.clear()
        self._sampler.begin(sampling, {})
        self.sites.recorder.start({}, keep=keep)
        self._run = Run(
            self._engine,
            self.context,
            self._sampler,
            sampling=sampling,
            end_tokens=(self.eod_token, *sampling.stop_tokens),
            shares_prefixes=self.limits.prefix_caching,
            on_tokens=on_tokens,
            next_turn=next_turn,
        )
        return self._run

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Lets Megatron's engine compute within; after an error all requests are dropped."""
        with (
            compat.inference_mode_of_process(),
            compat.flash_attention_not_needed(),
            global_replay_instances(self.model),
            _one_thread_beside_a_gpu(next(self.model.parameters()).device),
        ):
            try:
                yield
            except BaseException:
                self.reset()
                raise
            finally:
                # What computes outside a step, such as a calibration, records elsewhere.
                RouterReplay.clear_global_static_buffers()

    def add(
        self, prompts: Sequence[Sequence[int]], sample_ids: Sequence[str], seeds: Sequence[int]
    ) -> None:
        """Adds samples to the running rollout, as of `run`."""
        assert self._run is not None, "begin comes first"
        numbers = self._run.next_numbers(len(sample_ids))
        self._sampler.add(dict(zip(numbers, seeds, strict=True)))
        self.sites.recorder.add(dict(zip(numbers, sample_ids, strict=True)))
        self._run.add(prompts, sample_ids)

    def take(self, sample_ids: Sequence[str]) -> list[Served | None]:
        """Gives samples of the running rollout that are over, and forgets them."""
        assert self._run is not None, "begin comes first"
        served = self._run.take(sample_ids)
        self.context.counts["evictions"] = self._run.num_evictions
        return served

    def note_version(self, policy_version: int) -> None:
        """Notes of all that is computed from now on in this rollout which weights computed it."""
        self.sites.recorder.policy_version = policy_version
        self._sampler.policy_version = policy_version

    def abort(self, sample_ids: Iterable[str], *, keep: bool) -> None:
        """Ends samples of the running rollout, see `Run.abort`.

        Raises:
            RuntimeError: No rollout is running.
            ValueError: A sample is not of it.
        """
        if self._run is None:
            raise RuntimeError("abort is for on_tokens and next_turn: no rollout is running")
        self._run.abort(sample_ids, keep=keep)

    @property
    def is_running(self) -> bool:
        """Whether a rollout is running."""
        return self._run is not None

    def serves(self, run: Run) -> bool:
        """Whether this is the rollout that is running."""
        return self._run is run

    def forget_prefixes(self) -> None:
        """Drops what the prefix cache holds; it is of other weights or settings."""
        self._prefixes_are_valid = False

    def reset(self) -> None:
        """Drops all requests and what was recorded of them, after an error too."""
        compat.restore_linear_functions()
        self._run = None
        self.sites.recorder.stop()
        self._sampler.end()
        self.forget_prefixes()
        self._engine.reset()

    def _choose_experts(self, *, without_host: bool) -> None:
        """Lets routed experts be computed without the host, or by Megatron's modules."""
        for layer in decoder_layers(self.model):
            if not isinstance(layer.moe, EngineMoELayer):
                continue
            if without_host and layer.moe.routed_experts is None:
                layer.moe.routed_experts = GroupedExperts(layer.moe, self.sites, layer.index)
            elif not without_host and isinstance(layer.moe.routed_experts, GroupedExperts):
                layer.moe.routed_experts = None

    def _finished_ids(self, active_ids: list[int]) -> set[int]:
        return set() if self._run is None else self._run.finished_ids(active_ids)


@contextlib.contextmanager
def _one_thread_beside_a_gpu(device: torch.device) -> Iterator[None]:
    """Lets one thread compute the host's tensors of a step, where a GPU computes the rest.

    They are small, but some reach the size from which torch lets all cores share the work: tables
    of pages, rows of a record. Waking them and waiting for the last one took milliseconds a step.
    """
    num_threads = torch.get_num_threads()
    if device.type == "cuda":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def inference_config(
    model: HybridModel, bytes_per_token: int, limits: EngineLimits
) -> InferenceConfig:
    """Gives Megatron's configuration.

    Args:
        model: Model of the engine.
        bytes_per_token: Bytes of a token's keys and values.
        limits: How much the engine does and holds at a time.
    """
    block_bytes = limits.block_size_tokens * bytes_per_token
    # Megatron takes the states' share out by a product of floats, which may lack a byte.
    margin_bytes = block_bytes // 2
    buffer_bytes = (limits.num_pages + 1) * block_bytes + margin_bytes
    buffer_bytes += limits.max_requests * state_bytes_per_request(model)
    is_chunked = limits.max_step_tokens is not None
    return InferenceConfig(
        block_size_tokens=limits.block_size_tokens,
        buffer_size_gb=buffer_bytes / 1024**3,  # type: ignore[arg-type]
        mamba_inference_state_config=state_config(model, limits.block_size_tokens),
        max_requests=limits.max_requests,
        max_tokens=limits.step_tokens,
        max_sequence_length=limits.max_sequence_length,
        enable_chunked_prefill=is_chunked,
        # Without it Megatron's chunks do not skip tokens that are put back after an eviction.
        enable_prefix_caching=limits.prefix_caching or is_chunked,
        prefix_caching_mamba_gb=_prefix_states_gb(model, limits),
        prefix_caching_eviction_policy=PrefixCachingEvictionPolicy.LRU,
        num_cuda_graphs=None,
        use_flashinfer_fused_rope=False,
    )


def _prefix_states_gb(model: HybridModel, limits: EngineLimits) -> int | None:
    """Gives the GiB of states that the prefix cache keeps; None if there are none."""
    state_bytes = state_bytes_per_request(model)
    if not (limits.prefix_caching and state_bytes):
        return None
    pages_per_step = math.ceil(limits.step_tokens / limits.block_size_tokens)
    per_step = min(pages_per_step, MAX_INTERMEDIATE_OFFSETS_PER_REQUEST * limits.max_requests)
    # Megatron fails where running requests hold all: a request keeps one at the end of its prompt,
    # at those it was matched to, and at one of each chunk.
    chunks = math.ceil(limits.max_sequence_length / limits.step_tokens)
    per_request = MAX_INTERMEDIATE_OFFSETS_PER_REQUEST + chunks
    kept = min(limits.num_pages, limits.max_requests * per_request)
    return cast("int", (kept + per_step) * state_bytes / 1024**3)
