"""A rollout engine amid samples as long as one likes, whose tokens nobody computed.

Benchmarks of decoding need contexts of 100,000 tokens and more. Here requests get random keys,
values and states instead of a prefill, and are moved to a length; from there the engine's own steps
go on: scheduling, forward, recording, sampling, bookkeeping.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch

from megatron_trace.formats import E4M3_MAX
from megatron_trace.hints import QuantizerSettings, Site
from megatron_trace.models.hybrid import DecoderLayer, decoder_layers
from megatron_trace.rollout.context import RolloutContext
from megatron_trace.rollout.kv_cache import PackedKVContext
from megatron_trace.rollout.packed_experts import PackedRoutedExperts
from megatron_trace.rollout.policy import ServedPolicy
from megatron_trace.rollout.running import Run
from megatron_trace.rollout.sampling import SamplingSettings
from megatron_trace.rollout.serving import Server

# 96 in E4M3: with the global scale below, codes of 3 stand for values of about 1.
_SCALE_BYTE = 0x6C
_KV_GLOBAL_SCALE = 1 / 288
_E4M3_ONE = 0x38
_PACKED_PARTS = ("codes", "scales", "global_scales")


@dataclass(frozen=True)
class StepTime:
    """Time of a step of the engine, median over several.

    Attributes:
        step_ms: Of the whole step, until its tokens are on the host.
        decoder_ms: Of the decoder layers, on the device's clock; None if it has no such clock.
    """

    step_ms: float
    decoder_ms: float | None


class LongDecode:
    """A batch that a server decodes, at lengths whose pages only grow.

    Args:
        server: A server of exactly `batch` requests at most, so that no step has padding.
        batch: Requests.
        keep: Whether rows are recorded.
    """

    def __init__(self, server: Server, batch: int, *, keep: bool) -> None:
        self.server, self.batch, self._keep = server, batch, keep
        self._names = {number: f"long-{number}" for number in range(batch)}
        self._run: Run | None = None
        # Events that a captured graph records too.
        self._events = [torch.cuda.Event(enable_timing=True, external=True) for _ in range(2)]

    @contextlib.contextmanager
    def running(self) -> Iterator[LongDecode]:
        """Begins the requests, and drops them in the end."""
        server, count = self.server, self.batch
        prompts = [[index % server.model.vocab_size] for index in range(count)]
        sampling = SamplingSettings(max_new_tokens=server.context.max_sequence_length)
        with server.computing(), self._timed_decoder():
            self._run = server.begin(sampling=sampling, keep=self._keep)
            server.add(prompts, list(self._names.values()), list(self._names))
            begin_decoding(server)
            move_to(server.context, 2)
            fill_cache(server.context)
            self._run.step()
            # Slots are set to zero in the first step.
            fill_states(server.context)
            try:
                yield self
            finally:
                self._run = None
                server.reset()

    def times(self, context_tokens: int, *, warm_up: int, steps: int) -> StepTime:
        """Gives the time of a step when every request has so many tokens.

        Args:
            context_tokens: Tokens of each request; rounded down so that no page ends meanwhile.
            warm_up: Steps before.
            steps: Steps that are timed.
        """
        self._move_to(context_tokens, warm_up + steps)
        walls, decoders = [], []
        for _ in range(warm_up + steps):
            torch.cuda.synchronize()
            started = time.perf_counter()
            self.step()
            torch.cuda.synchronize()
            walls.append(1000 * (time.perf_counter() - started))
            decoders.append(self._decoder_ms())
        self._require_all_active()
        of_decoder = [ms for ms in decoders[warm_up:] if ms is not None]
        return StepTime(
            statistics.median(walls[warm_up:]),
            statistics.median(of_decoder) if len(of_decoder) == steps else None,
        )

    def mean_ms(self, context_tokens: int, *, warm_up: int, steps: int) -> float:
        """Gives the time of a step, mean of several that follow one another as in a rollout.

        Args:
            context_tokens: As of `times`; may be those of the call before.
            warm_up: Steps before.
            steps: Steps that are timed.
        """
        self._move_to(context_tokens, warm_up + steps)
        for _ in range(warm_up):
            self.step()
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(steps):
            self.step()
        torch.cuda.synchronize()
        elapsed_s = time.perf_counter() - started
        self._require_all_active()
        return 1000 * elapsed_s / steps

    def record(self, keep: bool) -> None:
        """Says whether rows are recorded from the next step on."""
        self.server.sites.recorder.start(self._names, keep=keep)

    def step(self) -> None:
        """Does one step more."""
        assert self._run is not None, "within `running`"
        self._run.step()

    def distinct_experts(self) -> float:
        """Gives the experts that the last step's tokens chose, on average over the layers."""
        moes = [layer.moe for layer in decoder_layers(self.server.model) if layer.moe is not None]
        routers: list[Any] = [moe.router for moe in moes]
        chosen = [router.router_replay.get_recorded_indices()[: self.batch] for router in routers]
        return statistics.mean(len(indices.unique()) for indices in chosen)

    def _move_to(self, context_tokens: int, steps: int) -> None:
        """Moves all requests to a length from which so many steps stay within a page."""
        page = self.server.context.block_size_tokens
        if steps >= page:
            raise ValueError(f"{steps} steps do not stay within a page of {page} tokens")
        move_to(self.server.context, context_tokens // page * page + 1)

    def _require_all_active(self) -> None:
        context = self.server.context
        active = context.total_request_count - context.paused_request_count
        if active != self.batch:
            raise RuntimeError(f"{active} of {self.batch} requests are still active")

    @contextlib.contextmanager
    def _timed_decoder(self) -> Iterator[None]:
        """Lets the events be recorded before and after the decoder's layers."""
        begin, end = self._events
        decoder = cast("torch.nn.Module", self.server.model.decoder)
        hooks = [
            decoder.register_forward_pre_hook(lambda *_: begin.record()),
            decoder.register_forward_hook(lambda *_: end.record()),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _decoder_ms(self) -> float | None:
        begin, end = self._events
        try:
            return begin.elapsed_time(end)
        except RuntimeError:
            return None


def begin_decoding(server: Server) -> None:
    """Takes what waits, of one token each, into the context as if it had been prefilled."""
    engine, context = cast("Any", server)._engine, server.context
    engine.schedule_waiting_requests()
    if engine.waiting_request_ids:
        raise RuntimeError(f"{len(engine.waiting_request_ids)} requests find no room")
    context.num_prefill_requests = 0
    context.request_in_prefill_status_tensor[: context.total_request_count] = 0


@torch.inference_mode()
def fill_cache(context: RolloutContext) -> None:
    """Gives every place of the cache random keys and values."""
    for part in context.memory_buffer.flatten(0, 1):
        if isinstance(context, PackedKVContext):
            part.random_(0, 256)
            context.layout.split(part)[1].fill_(_SCALE_BYTE)
        else:
            part.normal_()


def random_settings(policy: ServedPolicy) -> QuantizerSettings:
    """Gives static scales for activations of about 1, as random weights give them.

    Those of keys and values are of what `fill_cache` gives.
    """
    trace, scales = policy.trace, {}
    largest = 6.0 * E4M3_MAX
    for layer in policy.layers:
        if layer.moe is not None:
            scales[layer.index, Site.FC1], scales[layer.index, Site.FC2] = 8 / largest, 8 / largest
        if layer.attention is not None:
            scales[layer.index, Site.K] = scales[layer.index, Site.V] = _KV_GLOBAL_SCALE
    return QuantizerSettings(
        {place: scale for place, scale in scales.items() if place[1] in trace.quantised_sites},
        number_format=trace.number_format,
        quantised_parts=trace.quantised_parts,
        power_of_two_scales=trace.power_of_two_scales,
        model_id=policy.model_id,
        residual_share=trace.residual_share,
    )


@torch.no_grad()
def fill_experts(layers: Iterable[DecoderLayer]) -> None:
    """Gives packed experts random codes, whose products keep the size of their inputs."""
    for layer in layers:
        packed = getattr(layer.moe, "routed_experts", None)
        if isinstance(packed, PackedRoutedExperts):
            for matrix in ("fc1", "fc2"):
                buffers = (getattr(packed, f"{matrix}_{name}") for name in _PACKED_PARTS)
                codes, scale_bytes, global_scales = buffers
                codes.random_(0, 256)
                scale_bytes.fill_(_E4M3_ONE)
                # Random codes have a root mean square of 2.9.
                global_scales.fill_(0.3 * (2 * codes.shape[-1]) ** -0.5)


@torch.inference_mode()
def fill_states(context: RolloutContext) -> None:
    """Gives every slot random states."""
    if context.is_hybrid_model:
        context.mamba_conv_states.normal_()
        context.mamba_ssm_states.normal_(std=0.1)


def move_to(context: RolloutContext, length: int) -> None:
    """Gives every active request so many tokens before the one that it computes next.

    Args:
        context: Its requests decode, and have no page that lies behind this length.
        length: Tokens that count as computed.

    Raises:
        RuntimeError: The cache has too few pages.
    """
    first, stop = int(context.paused_request_count), int(context.total_request_count)
    active, count, page = slice(first, stop), stop - first, context.block_size_tokens
    allocator = context.kv_block_allocator
    pages = length // page + 1
    for index in range(first, stop):
        has = int(context.request_kv_block_counts[index])
        if pages > has:
            blocks = allocator.allocate_memory_blocks(pages - has)
            if blocks is None:
                raise RuntimeError(
                    f"the cache has no pages for {count} requests of {length} tokens"
                )
            context.request_to_kv_block_ids[index, has:pages] = blocks
    table = context.request_to_kv_block_ids[active, :pages]
    allocator.num_written[table.numpy()] = page
    allocator.num_written[table[:, -1].numpy()] = length % page
    context.request_kv_block_counts[active] = pages
    context.request_last_kv_block_id[active] = table[:, -1]
    context.request_last_kv_block_offset[active] = length % page
    context.request_kv_length_offsets[active] = length
    context.request_output_lengths[active] = context.max_sequence_length + page
    tokens = slice(0, count)
    context.token_to_pos_ids[tokens] = length
    context.token_to_position_in_request[tokens] = length
    context.token_to_local_position_within_kv_block[tokens] = length % page
    context.token_to_block_idx[tokens] = table[:, -1].to(context.token_to_block_idx.dtype)
