"""The engine's requests and pages: records that follow the pages, and pages that outlive them.

What a finished request computed is read from its pages before Megatron hands them on. What an
evicted one computed is kept in host memory and put back (`saved_rows`), so that nothing is computed
twice, with perhaps other codes; a sample that continues with another turn finds its pages in the
same way.

Legend: N rows of a step that belong to a request, R rows of a request, P pages of S tokens, L
attention layers, G key/value heads, C stored values or bytes of a head.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.inference.batch_dimensions_utils import InferenceBatchDimensions
from megatron.core.inference.config import InferenceConfig, KVCacheManagementMode
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.inference_request import DynamicInferenceRequest
from megatron.core.transformer import TransformerConfig

from megatron_trace.hints import Site
from megatron_trace.rollout.block_allocator import WrittenOnceAllocator
from megatron_trace.rollout.routing_buffer import RoutingBuffer
from megatron_trace.rollout.row_sampler import require_finite_logits
from megatron_trace.rollout.saved_rows import RequestRows, SavedRows
from megatron_trace.rollout.sites import RolloutSites

# Beside a largest step, decode steps whose rows may be under way to host memory.
_STEPS_UNDER_WAY = 4


class RolloutContext(DynamicInferenceContext):
    """Megatron's context, whose requests leave their rows behind when they end.

    Args:
        model_config: Configuration of the engine's model.
        inference_config: Configuration of Megatron's engine.
        sites: Sites of the engine.
        decoder_layers: Decoder layer of each attention layer, in order.
        decode_sizes: Numbers of requests to which a decode step is padded, so that its forward can
            be captured; empty lets Megatron pad all steps alike.

    Attributes:
        finished: By request that finished: what it computed.
        continued: By request that waits for its pages: what they are to hold.
        keeps_pages: Whether finished requests may be continued, so that their keys and values are
            kept too.
        counts: Since it was cleared: prefix_tokens (prompt tokens found in the cache),
            restored_tokens (put back from host memory).
    """

    kv_block_allocator: WrittenOnceAllocator

    def __init__(
        self,
        model_config: TransformerConfig,
        inference_config: InferenceConfig,
        *,
        sites: RolloutSites,
        decoder_layers: tuple[int, ...],
        decode_sizes: Sequence[int] = (),
    ) -> None:
        if inference_config.kv_cache_management_mode != KVCacheManagementMode.PERSIST:
            raise ValueError(
                f"{type(self).__name__} supports kv_cache_management_mode=persist only; got "
                f"{inference_config.kv_cache_management_mode}"
            )
        if inference_config.num_speculative_tokens:
            raise ValueError(
                f"{type(self).__name__} does not support speculative decoding, as neither records "
                "nor states of Gated DeltaNet can go back over rejected tokens; got "
                f"num_speculative_tokens={inference_config.num_speculative_tokens}"
            )
        self.model_config = model_config
        self.sites = sites
        self.decoder_layers = decoder_layers
        self._decode_sizes = tuple(decode_sizes)
        self.finished: dict[int, SavedRows] = {}
        self.continued: dict[int, SavedRows] = {}
        self.keeps_pages = False
        self.counts: Counter[str] = Counter()
        self._rows = RequestRows(self)
        self._evicts = False
        # Pages and offsets of a step's rows, and the experts that they chose.
        self._routing: tuple[np.ndarray, np.ndarray, torch.Tensor] | None = None
        super().__init__(model_config=model_config, inference_config=inference_config)
        if self.moe_enable_routing_replay:
            self.moe_routing_metadata = RoutingBuffer(self, model_config.moe_router_topk)
        # Megatron's own sizes begin at 8 or more, and it would capture them itself.
        self.cuda_graph_batch_dimensions_list = [
            InferenceBatchDimensions(token_count=size, prefill_req_count=0, decode_req_count=size)
            for size in self._decode_sizes
        ]

    def initialize_all_tensors(self) -> None:
        """Allocates the cache, once Megatron has counted its pages."""
        # Megatron skips no prefill of a model that it takes for one with recurrent states.
        self.is_hybrid_model = self.num_mamba_layers > 0
        self.kv_block_allocator = WrittenOnceAllocator.in_place_of(self.kv_block_allocator)
        self.sites.recorder.reserve(
            self.kv_block_allocator.total_count,
            self.block_size_tokens,
            largest_step=self.max_tokens,
            ring_rows=self.max_tokens + _STEPS_UNDER_WAY * self.max_requests,
        )
        super().initialize_all_tensors()
        self.sites.watch.real_rows = self.gpu_view.real_token_count

    def _allocate_mamba_states(self) -> None:
        """Allocates states of requests, and one more that rows of padding compute on.

        Megatron gives such rows slot -1, which is the last one.
        """
        super()._allocate_mamba_states()
        if not (self.is_hybrid_model and self._decode_sizes):
            return
        for name in ("mamba_conv_states", "mamba_ssm_states"):
            states = getattr(self, name)
            (layers, _, *rest), dtype, device = states.shape, states.dtype, states.device
            setattr(self, name, None)
            del states  # Both would not fit.
            states = torch.empty(layers, self.max_requests + 1, *rest, dtype=dtype, device=device)
            states[:, -1] = 0
            setattr(self, name, states)

    def initialize_attention_state(self, **kwargs: Any) -> Any:
        """Prepares a step and tells the recorder whose rows it computes."""
        event = super().initialize_attention_state(**kwargs)
        recorder = self.sites.recorder
        if recorder.is_running:
            rows = slice(0, self.active_token_count)
            requests = self.token_to_request_idx[rows].long()
            recorder.begin_step(
                self.request_ids[requests],
                self.token_to_pos_ids[rows],
                self.token_to_block_idx[rows],
                self.token_to_local_position_within_kv_block[rows],
                num_padded=self.padded_active_token_count,
            )
        return event

    def note_written(self) -> None:
        """Notes where the rows of the running step go, once the device has its forward to compute.

        Stores the experts of the step before too.

        Raises:
            RuntimeError: A row is written over another one, or leaves a gap.
        """
        self._store_routing()
        recorder = self.sites.recorder
        if not recorder.is_running:
            return
        rows = slice(0, self.active_token_count)
        wrong = self.kv_block_allocator.write(
            self.token_to_block_idx[rows].numpy(),
            self.token_to_local_position_within_kv_block[rows].numpy(),
        )
        if wrong is not None:
            raise RuntimeError(
                f"{recorder.sample_of_row(wrong)} does not go to the first free place of its page "
                "of the cache; rows are written twice or missing"
            )

    def add_request(
        self, req: DynamicInferenceRequest, prefill_chunk_length: int | None = None
    ) -> None:
        """Adds a request or its next chunk; rows that it has computed already are put back."""
        start = req.finished_chunk_token_count
        length = prefill_chunk_length or req.remaining_prompt_length
        num_skipped = self._compute_prefix_match(req, length)[4]
        self.kv_block_allocator.registers = True
        saved = self.continued.get(req.request_id)
        prefix_states = self.mamba_slot_allocator
        if saved is not None:
            # Megatron would look for its states where a page of the prefix cache ends.
            self.mamba_slot_allocator = None
        try:
            super().add_request(req, prefill_chunk_length)
        finally:
            self.mamba_slot_allocator = prefix_states
        index = int(self.total_request_count) - 1
        if saved is not None:
            self.counts["restored_tokens"] += num_skipped
            self._rows.restore(saved, index, start, start + num_skipped)
            if start + length >= saved.num_rows:
                del self.continued[req.request_id]
            return
        self.counts["prefix_tokens"] += num_skipped
        if not self.kv_block_allocator.registers:
            # Its later pages must neither be found nor registered: they follow a page that is not.
            req.precomputed_block_hashes = []

    def update_requests(
        self,
        active_requests_mask: torch.Tensor,
        new_tokens: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Ends a step; saves the rows of the requests that finished in it.

        What was watched on the device is read here, after all of the step has been computed.

        Megatron 0.19.2 reads their routing after this call has given their pages to other
        requests, and then finds none.

        Raises:
            RuntimeError: An activation or a logit is NaN or Inf, or a quantiser did not run.
        """
        self.sites.require_finite()
        require_finite_logits(new_tokens)
        self.sites.recorder.end_step()
        finished = (active_requests_mask == 0).nonzero()[:, 0] + self.paused_request_count
        chunked = self.get_index_of_chunked_prefill_request(safe=True)
        # The token that is sampled amid a prompt may be an end token.
        ended = [index for index in finished.tolist() if index != chunked]
        self.finished |= self._saved(ended, to_continue=self.keeps_pages)
        return super().update_requests(active_requests_mask, new_tokens, *args, **kwargs)

    def begin_routing(self, routing: torch.Tensor) -> None:
        """Starts to copy the experts of the running step to the host, where its tokens follow.

        They are stored when somebody wants them, or behind the launch of the next step.

        Args:
            routing: integer [N, MoE layers, top-k] on the device.
        """
        num_experts = self.model_config.num_moe_experts or 0
        routing = routing.to(
            torch.int16 if num_experts <= torch.iinfo(torch.int16).max else torch.int32,
            copy=not routing.is_cuda,  # From a GPU it is copied below.
        )
        if routing.is_cuda:
            copy = torch.empty(routing.shape, dtype=routing.dtype, device="cpu", pin_memory=True)
            copy.copy_(routing, non_blocking=True)
            routing = copy
        # Megatron's buffers, which the next step fills anew.
        rows = slice(0, len(routing))
        pages = self.token_to_block_idx[rows].numpy().copy()
        offsets = self.token_to_local_position_within_kv_block[rows].numpy().copy()
        self._routing = pages, offsets, routing

    def _store_routing(self) -> None:
        """Stores the experts of a step; its tokens, copied after them, are here already."""
        stored, self._routing = self._routing, None
        if stored is not None:
            pages, offsets, routing = stored
            self.kv_block_allocator.store_routing(pages, offsets, routing.numpy())

    def resume_paused_requests(self, *args: Any, **kwargs: Any) -> Any:
        """Gives pages to paused requests (Megatron's hook).

        Megatron 0.19.2 takes pages for used that only the prefix cache holds: it evicts requests
        that could have them, and fails where all requests of a step need a page.
        """
        self.kv_block_allocator.make_available(int(self.paused_request_count))
        return super().resume_paused_requests(*args, **kwargs)

    def evict_overflow_paused_requests(self, *args: Any, **kwargs: Any) -> Any:
        """Takes pages from paused requests (Megatron's hook); their rows are saved."""
        self._evicts = True
        try:
            return super().evict_overflow_paused_requests(*args, **kwargs)
        finally:
            self._evicts = False

    def release_memory_blocks_from_request_indexes(self, request_indexes: torch.Tensor) -> None:
        """Hands the pages of requests on."""
        if self._evicts:
            self.continued |= self._saved(request_indexes.tolist(), to_continue=True)
        super().release_memory_blocks_from_request_indexes(request_indexes)

    def reset(self, *args: Any, **kwargs: Any) -> None:
        """Drops all requests and what is kept of them."""
        super().reset(*args, **kwargs)
        self._routing = None
        self.finished.clear()
        self.continued.clear()

    def stored_rows(
        self, pages: torch.Tensor, offsets: torch.Tensor, layers: slice = slice(None)
    ) -> torch.Tensor:
        """Gives keys and values of rows as they are stored, [2, L, R, G, C].

        Args:
            pages: int64 [R], pages of the cache.
            offsets: int64 [R], tokens within them.
            layers: Attention layers.
        """
        return self.memory_buffer[:, layers][:, :, pages, offsets]

    def put_stored_rows(
        self, pages: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """Puts keys and values that `stored_rows` gave at other pages and offsets."""
        self.memory_buffer[:, :, pages, offsets] = rows

    def cached_rows(
        self, layer: int, site: Site, stored: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gives packed codes and scale bytes, uint8 [R, bytes] each, of rows of the cache.

        Args:
            layer: Decoder layer.
            site: k or v.
            stored: [R, G, C], as the cache stores them.

        Raises:
            RuntimeError: The cache stores plain values.
        """
        raise RuntimeError(
            f"layer {layer}, site {site}: the cache stores plain values, not codes to record"
        )

    def _compute_prefix_match(
        self,
        req: DynamicInferenceRequest,
        prefill_chunk_length: int,
        record_mamba_match: bool = False,
    ) -> tuple[list[int], int, int, int, int, int]:
        """Says which pages of a chunk are there already (Megatron's hook).

        Megatron shares pages that it does not skip, and computes and writes their tokens again:
        the last page of a prompt that is found whole, and pages after an unaligned chunk. Other
        requests read them; here they get pages of their own.
        """
        matched, from_pool, allocated, required, skipped, computed = super()._compute_prefix_match(
            req, prefill_chunk_length, record_mamba_match
        )
        start = req.finished_chunk_token_count
        saved = self.continued.get(req.request_id)
        if saved is not None and start < saved.num_rows:
            skipped = min(saved.num_rows - start, prefill_chunk_length - 1)
            computed = prefill_chunk_length - skipped
            return [], required - allocated, allocated, required, skipped, computed
        shared = skipped // self.block_size_tokens
        if self.mamba_slot_allocator is not None and start == 0:
            # Megatron leaves two tokens to compute, if need be by skipping a page less: also to a
            # page at whose end it has no states, where it then begins from zeros.
            while shared and not self.mamba_slot_allocator.has_state(matched[shared - 1]):
                shared -= 1
            skipped = shared * self.block_size_tokens
            computed = prefill_chunk_length - skipped
        from_pool += len(matched) - shared
        return matched[:shared], from_pool, allocated, required, skipped, computed

    # Megatron calls in inference mode, whose tensors could not be used in training.
    @torch.inference_mode(False)
    def _saved(self, indices: Sequence[int], *, to_continue: bool) -> dict[int, SavedRows]:
        """Gives by request what the requests at some indices have computed."""
        if not indices:
            return {}
        started = time.perf_counter()
        self._store_routing()
        saved = self._rows.saved(indices, to_continue=to_continue)
        self.sites.recorder.seconds += time.perf_counter() - started
        return saved
