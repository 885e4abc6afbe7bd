"""A rollout engine amid samples as long as one likes, whose tokens nobody computed.

Benchmarks of decoding need contexts of 100,000 tokens and more. Here requests begin with one token
each, get random keys, values and states, and are moved to a length; from there the engine's own
steps go on: scheduling, forward, recording, sampling, bookkeeping.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel

from megatron_trace.models.hybrid import decoder_layers
from megatron_trace.rollout.context import RolloutContext
from megatron_trace.rollout.kv_cache import PackedKVContext
from megatron_trace.rollout.running import Run
from megatron_trace.rollout.sampling import SamplingSettings
from megatron_trace.rollout.serving import Server

# 96 in E4M3: with the global scale below, codes of 3 stand for values of about 1.
_SCALE_BYTE = 0x6C
KV_GLOBAL_SCALE = 1 / 288


@dataclass(frozen=True)
class StepTime:
    """Time of a step of the engine, median over several.

    Attributes:
        step_ms: Of the whole step, until its tokens are on the host.
        decoder_ms: Of the decoder layers, on the device's clock.
    """

    step_ms: float
    decoder_ms: float


class LongDecode:
    """A batch that a server decodes, at lengths that only grow.

    Args:
        server: A server of exactly `batch` requests at most, so that no step has padding.
        batch: Requests.
        keep: Whether rows are recorded.
    """

    def __init__(self, server: Server, batch: int, *, keep: bool) -> None:
        self.server, self.batch, self._keep = server, batch, keep
        self._run: Run | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[LongDecode]:
        """Begins the requests, and drops them in the end."""
        server, count = self.server, self.batch
        names = [f"long-{index}" for index in range(count)]
        prompts = [[index % server.model.vocab_size] for index in range(count)]
        sampling = SamplingSettings(max_new_tokens=server.context.max_sequence_length)
        with server.computing():
            self._run = server.begin(sampling=sampling, keep=self._keep)
            server.add(prompts, names, list(range(count)))
            self._run.step()
            fill_at_random(server.context)
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
        run, context = self._run, self.server.context
        assert run is not None, "within `running`"
        page = context.block_size_tokens
        if warm_up + steps >= page:
            raise ValueError(f"{warm_up} + {steps} steps do not stay within a page of {page}")
        move_to(context, max(2, context_tokens // page * page + 1))
        walls, decoders = [], []
        with _decoder_events(self.server.model) as events:
            for _ in range(warm_up + steps):
                torch.cuda.synchronize()
                started = time.perf_counter()
                run.step()
                torch.cuda.synchronize()
                walls.append(1000 * (time.perf_counter() - started))
                decoders.append(events[0].elapsed_time(events[1]))
        active = context.total_request_count - context.paused_request_count
        if active != self.batch:
            raise RuntimeError(f"{active} of {self.batch} requests are still active")
        return StepTime(statistics.median(walls[warm_up:]), statistics.median(decoders[warm_up:]))

    def distinct_experts(self) -> float:
        """Gives the experts that the last step's tokens chose, on average over the layers."""
        moes = [layer.moe for layer in decoder_layers(self.server.model) if layer.moe is not None]
        routers: list[Any] = [moe.router for moe in moes]
        chosen = [router.router_replay.get_recorded_indices()[: self.batch] for router in routers]
        return statistics.mean(len(indices.unique()) for indices in chosen)


@contextlib.contextmanager
def _decoder_events(model: HybridModel) -> Iterator[tuple[torch.cuda.Event, torch.cuda.Event]]:
    """Lets events be recorded before and after the decoder's layers."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    decoder = cast("torch.nn.Module", model.decoder)
    hooks = [
        decoder.register_forward_pre_hook(lambda *_: begin.record()),
        decoder.register_forward_hook(lambda *_: end.record()),
    ]
    try:
        yield begin, end
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def fill_at_random(context: RolloutContext) -> None:
    """Gives every place of the cache keys and values, and every slot states."""
    with torch.inference_mode():
        for part in context.memory_buffer.flatten(0, 1):
            if isinstance(context, PackedKVContext):
                part.random_(0, 256)
                context.layout.split(part)[1].fill_(_SCALE_BYTE)
            else:
                part.normal_()
        if context.is_hybrid_model:
            context.mamba_conv_states.normal_()
            context.mamba_ssm_states.normal_(std=0.1)


def move_to(context: RolloutContext, length: int) -> None:
    """Gives every active request so many tokens before the one that it computes next.

    Args:
        context: Its requests decode, and have fewer tokens.
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
