"""What requests have computed: read from their pages into host memory, and put back from there.

Legend: R rows of a request, P pages of S tokens, L attention layers, G key/value heads, C stored
values or bytes of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatron_trace.hints import Site
from megatron_trace.hints.row_groups import groups_of_rows
from megatron_trace.rollout.recorder import Place

if TYPE_CHECKING:
    from megatron_trace.rollout.context import RolloutContext

_SITES = (Site.K, Site.V)
Records = dict[Place, tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class SavedRows:
    """What a request has computed, in host memory.

    Attributes:
        num_rows: R, token positions that were forwarded.
        records: By place: packed codes uint8 [R, bytes], scale bytes uint8 [R, blocks].
        routing: int16 [R, MoE layers, top-k]; None if the model has no MoE layers.
        cache: [2, L, R, G, C], keys and values as the cache stores them; None if the request is
            not to be continued.
        states: Convolution and recurrent states of the request's layers that have them; None if
            there are none, or the request is not to be continued.
        versions: int64 [R], policy version that computed each row; None if none was noted.
    """

    num_rows: int
    records: Records
    routing: np.ndarray | None
    cache: torch.Tensor | None = None
    states: tuple[torch.Tensor, torch.Tensor] | None = None
    versions: torch.Tensor | None = None


class RequestRows:
    """The rows of a context's requests.

    Args:
        context: The context, which knows their pages and slots.
    """

    def __init__(self, context: RolloutContext) -> None:
        self._context = context

    def saved(self, indices: Sequence[int], *, to_continue: bool) -> dict[int, SavedRows]:
        """Gives by request what the requests at some indices have computed.

        Rows of several are read together: one by one, short samples wait for hundreds of copies.

        Args:
            indices: Places of the requests in the context; at least one.
            to_continue: Whether they may be continued, so that keys, values and states are kept.

        Raises:
            RuntimeError: Pages do not hold what a request has computed.
        """
        context, saved = self._context, dict[int, SavedRows]()
        lengths = context.request_kv_length_offsets + context.request_query_lengths
        rows = lengths[list(indices)].tolist()
        for group in groups_of_rows(rows):
            saved |= self._saved_together(indices[group], rows[group], to_continue=to_continue)
        return saved

    def _saved_together(
        self, indices: Sequence[int], counts: Sequence[int], *, to_continue: bool
    ) -> dict[int, SavedRows]:
        context = self._context
        own = [self._written_places(*one) for one in zip(indices, counts, strict=True)]
        blocks, pages, offsets = zip(*own, strict=True)
        pages, offsets = torch.cat(pages), torch.cat(offsets)
        recorder, on_device = context.sites.recorder, self._on_device(pages, offsets)
        places = sorted(recorder.places) if recorder.is_recording else []
        others = [place for place in places if not place[1].is_cached]
        every: Records = dict(recorder.rows_of_places(others, pages, offsets))
        every |= self._cached_records([p for p in places if p[1].is_cached], *on_device)
        records: list[Records] = [{} for _ in indices]
        for place, (codes, scale_bytes) in every.items():
            parts = zip(records, codes.split(counts), scale_bytes.split(counts), strict=True)
            for of_request, *rows in parts:
                of_request[place] = rows[0], rows[1]
        nothing = [None] * len(indices)
        noted = recorder.versions(pages, offsets)
        versions = nothing if noted is None else noted.split(counts)
        cache, states = nothing, nothing
        if to_continue:
            cache = context.stored_rows(*on_device).cpu().split(counts, dim=2)
            states = [self._saved_states(index) for index in indices]
        routing = nothing
        if context.moe_enable_routing_replay:
            read = context.kv_block_allocator.reconstruct_routing_from_blocks
            routing = [read(of.tolist(), count) for of, count in zip(blocks, counts, strict=True)]
        fields = zip(counts, records, routing, cache, states, versions, strict=True)
        requests = context.request_ids[list(indices)].tolist()
        return {request: SavedRows(*own) for request, own in zip(requests, fields, strict=True)}

    def _written_places(
        self, index: int, num_rows: int
    ) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
        """Gives `_places` of all that a request has computed."""
        context = self._context
        blocks, pages, offsets = self._places(index, 0, num_rows)
        written = context.kv_block_allocator.num_written[blocks]
        if (written[:-1] < context.block_size_tokens).any() or num_rows > written.sum():
            raise RuntimeError(
                f"request {int(context.request_ids[index])} computed {num_rows} tokens, but its "
                f"pages hold {written.sum()}"
            )
        return blocks, pages, offsets

    def _cached_records(
        self, places: Sequence[Place], pages: torch.Tensor, offsets: torch.Tensor
    ) -> Records:
        """Gives what is recorded of keys and values; narrowed here, and copied at once."""
        context, parts = self._context, list[torch.Tensor]()
        for layer in sorted({layer for layer, _ in places}):
            index = context.decoder_layers.index(layer)
            keys_values = context.stored_rows(pages, offsets, slice(index, index + 1))[:, 0]
            for site, stored in zip(_SITES, keys_values, strict=True):
                if (layer, site) in places:
                    codes, scale_bytes = context.cached_rows(layer, site, stored)
                    parts += [context.sites.recorder.narrowed(site, codes), scale_bytes]
        if not parts:
            return {}
        rows = torch.cat(parts, dim=1).cpu().split([part.shape[1] for part in parts], dim=1)
        both = [part.contiguous() for part in rows]
        return dict(zip(places, zip(both[::2], both[1::2], strict=True), strict=True))

    def _saved_states(self, index: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        context = self._context
        if not context.is_hybrid_model:
            return None
        slot = self._slot(index)
        # On a CPU, a slot's state would be what the next request in the slot makes of it.
        conv, recurrent = (
            states[:, slot].to("cpu", copy=True)
            for states in (context.mamba_conv_states, context.mamba_ssm_states)
        )
        return conv, recurrent

    @torch.inference_mode()
    def restore(self, saved: SavedRows, index: int, start: int, stop: int) -> None:
        """Puts rows of a request at the pages that it has now, and its states.

        Args:
            saved: What it computed before, with its pages.
            index: Its place in the context.
            start: The first row.
            stop: The row after the last; nothing is put back where it is `start`.

        Raises:
            RuntimeError: It has states, and they are those after another row.
        """
        if stop == start:
            return
        assert saved.cache is not None, "what is continued was saved with its pages"
        context, rows = self._context, slice(start, stop)
        recorder = context.sites.recorder
        blocks, pages, offsets = self._places(index, start, stop)
        on_device = self._on_device(pages, offsets)
        context.put_stored_rows(*on_device, saved.cache[:, :, rows].to(on_device[0].device))
        for place, (codes, scale_bytes) in saved.records.items():
            if not place[1].is_cached:
                recorder.restore(place, pages, offsets, (codes[rows], scale_bytes[rows]))
        if saved.versions is not None:
            recorder.restore_versions(pages, offsets, saved.versions[rows])
        allocator, size = context.kv_block_allocator, context.block_size_tokens
        positions = np.arange(start, stop)
        for number, block in enumerate(blocks.tolist(), start // size):
            here = positions[positions // size == number]
            allocator.num_written[block] += len(here)
            if saved.routing is not None:
                allocator.store_block_routing(block, here % size, saved.routing[here])
        if saved.states is not None:
            if stop < saved.num_rows:
                raise RuntimeError(
                    f"request {int(context.request_ids[index])}: its states are known after "
                    f"{saved.num_rows} tokens, but Megatron continues after {stop}"
                )
            self._restore_states(index, *saved.states)

    def _restore_states(self, index: int, conv: torch.Tensor, recurrent: torch.Tensor) -> None:
        context, slot = self._context, self._slot(index)
        if slot in context._pending_mamba_zeros:
            context._pending_mamba_zeros.remove(slot)
        for states, state in (
            (context.mamba_conv_states, conv),
            (context.mamba_ssm_states, recurrent),
        ):
            states[:, slot] = state.to(states.device)

    def _slot(self, index: int) -> int:
        """Gives where the states of a request are."""
        assert self._context.mamba_metadata is not None, "the model has layers with states"
        return int(self._context.mamba_metadata.request_to_mamba_state_idx[index])

    def _places(
        self, index: int, start: int, stop: int
    ) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
        """Gives the pages of some positions of a request, then page and offset of each, int64."""
        positions, size = np.arange(start, stop), self._context.block_size_tokens
        table = self._context.request_to_kv_block_ids[index].numpy()
        blocks = table[start // size : -(-stop // size)].copy()
        pages, offsets = table[positions // size].astype(np.int64), positions % size
        return blocks, torch.from_numpy(pages), torch.from_numpy(offsets)

    @staticmethod
    def _on_device(pages: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        device = torch.cuda.current_device()
        return pages.to(device), offsets.to(device)
