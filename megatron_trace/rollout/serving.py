"""Megatron's dynamic inference engine around a model: built once, run over a list of prompts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from megatron.core.inference.config import InferenceConfig
from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.inference.inference_request import DynamicInferenceRequest, Status
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)
from megatron.core.models.hybrid.hybrid_model import HybridModel

from megatron_trace import compat
from megatron_trace.hints import Site
from megatron_trace.models.hybrid import decoder_layers
from megatron_trace.models.routing import global_replay_instances
from megatron_trace.rollout.gated_delta_net import state_bytes_per_request, state_config
from megatron_trace.rollout.kv_cache import (
    PackedKVContext,
    PlainKVContext,
    kv_bytes_per_token,
)
from megatron_trace.rollout.row_sampler import RowSampler, Sampled
from megatron_trace.rollout.sampling import SamplingSettings, sample_seed
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
class Served:
    """A request that finished.

    Attributes:
        request: Megatron's request.
        sampled: What was sampled for it.
    """

    request: DynamicInferenceRequest
    sampled: Sampled


class Server:
    """Megatron's engine, context and controller of one model.

    Args:
        model: Model of the engine.
        sites: Sites of the engine.
        packed: Whether K/V are stored as codes and block scales.
        eod_token: Token that ends a response.
        max_requests: Requests that run at a time.
        max_sequence_length: Longest prompt and response together, in tokens.
        block_size_tokens: Tokens of a page of the cache.

    Attributes:
        context: The paged cache and the bookkeeping of requests.
    """

    def __init__(
        self,
        model: HybridModel,
        sites: RolloutSites,
        *,
        packed: bool,
        eod_token: int,
        max_requests: int,
        max_sequence_length: int,
        block_size_tokens: int,
    ) -> None:
        self.model = model
        self.sites = sites
        self.eod_token = eod_token
        attention_layers = tuple(
            layer.index for layer in decoder_layers(model) if layer.attention is not None
        )
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
                max_requests=max_requests,
                max_sequence_length=max_sequence_length,
                block_size_tokens=block_size_tokens,
            ),
            sites=sites,
            decoder_layers=attention_layers,
        )
        controller = TextGenerationController(
            GPTInferenceWrapper(cast("Any", model), self.context),
            TokenIds(model.vocab_size, eod_token),
        )
        self._sampler = RowSampler()
        compat.set_sampler(controller, self._sampler)
        with compat.inference_mode_of_process(), global_replay_instances(model):
            self._engine = DynamicInferenceEngine(controller, self.context)

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        sample_ids: Sequence[str],
        *,
        sampling: SamplingSettings,
        seed: int,
        keep: bool,
    ) -> list[Served]:
        """Generates a response to every prompt.

        Args:
            prompts: Token ids.
            sample_ids: Name of each sample.
            sampling: How tokens are sampled.
            seed: Seed of the sampling; each sample has its own, of this and its name.
            keep: Whether the recorder keeps rows; take them before the next run.

        Returns:
            The finished requests in the order of the prompts.

        Raises:
            RuntimeError: Megatron's engine refused or lost a request.
        """
        self._engine.reset()
        self.context.finished_routing.clear()
        seeds = {n: sample_seed(seed, sample_id) for n, sample_id in enumerate(sample_ids)}
        self._sampler.begin(sampling, seeds)
        self.sites.recorder.start(sample_ids, 0, keep=keep)
        parameters = sampling.to_megatron(self.eod_token)
        finished: dict[int, DynamicInferenceRequest] = {}
        with (
            compat.inference_mode_of_process(),
            compat.flash_attention_not_needed(),
            global_replay_instances(self.model),
        ):
            try:
                for request_id, prompt in enumerate(prompts):
                    self._engine.add_request(
                        request_id, list(prompt), dataclasses.replace(parameters)
                    )
                while self._engine.has_unfinished_requests():
                    step: Any = self._engine.step_modern()
                    for record in step["finished_request_records"]:
                        finished[record.request_id] = record[-1]
            except BaseException:
                self.reset()
                raise
        for request_id, sample_id in enumerate(sample_ids):
            request = finished.get(request_id)
            if request is not None:
                request.routing_indices = self.context.finished_routing.get(request_id)
            if request is None or request.status != Status.COMPLETED:
                status = "lost" if request is None else request.status
                raise RuntimeError(f"sample {sample_id}: Megatron's engine left it {status}")
        sampled = self._sampler.sampled()
        self._sampler.end()
        return [Served(finished[number], sampled[number]) for number in range(len(prompts))]

    def reset(self) -> None:
        """Drops all requests and what was recorded of them, after an error too."""
        compat.restore_linear_functions()
        self.sites.recorder.stop()
        self._sampler.end()
        self._engine.reset()


def inference_config(
    model: HybridModel,
    bytes_per_token: int,
    *,
    max_requests: int,
    max_sequence_length: int,
    block_size_tokens: int,
) -> InferenceConfig:
    """Gives Megatron's configuration, with a cache that holds all requests at full length.

    No request is ever paused or evicted then, so every position is computed exactly once.
    """
    blocks_per_request = math.ceil(max_sequence_length / block_size_tokens)
    num_blocks = max_requests * blocks_per_request + 1  # one for the rows of padding
    block_bytes = block_size_tokens * bytes_per_token
    # Megatron takes the states' share out by a product of floats, which may lack a byte.
    margin_bytes = block_bytes // 2
    buffer_bytes = num_blocks * block_bytes + margin_bytes
    buffer_bytes += max_requests * state_bytes_per_request(model)
    step_tokens = max(min(MAX_STEP_TOKENS, max_requests * max_sequence_length), max_sequence_length)
    return InferenceConfig(
        block_size_tokens=block_size_tokens,
        buffer_size_gb=buffer_bytes / 1024**3,  # type: ignore[arg-type]
        mamba_inference_state_config=state_config(model, block_size_tokens),
        max_requests=max_requests,
        max_tokens=math.ceil(step_tokens / TOKEN_MULTIPLE) * TOKEN_MULTIPLE,
        max_sequence_length=max_sequence_length,
        num_cuda_graphs=None,
        use_flashinfer_fused_rope=False,
    )
