"""The engine's paged K/V cache: plain, or packed FP4 codes with their block scales.

Legend: T tokens of a step (padded), G key/value heads, D head dim, P pages, R rows, L attention
layers, C packed bytes of a token and head: its codes, then its block scales.
"""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig

from megatron_trace.formats import NumberFormat
from megatron_trace.hints import Site
from megatron_trace.rollout.context import RolloutContext
from megatron_trace.rollout.kernels import ops
from megatron_trace.rollout.pages import AnyPages, PackedPages, PageLayout, Pages

_SITES = (Site.K, Site.V)


def kv_bytes_per_token(
    config: TransformerConfig, num_attention_layers: int, number_format: NumberFormat | None
) -> int:
    """Gives the bytes that keys and values of a token take in the cache, over all layers.

    Args:
        config: Configuration of the model.
        num_attention_layers: Layers that have keys and values.
        number_format: Format in which they are packed; None if they are plain.
    """
    num_heads = config.num_query_groups or config.num_attention_heads
    head_dim = config.kv_channels
    assert head_dim is not None, "TransformerConfig sets kv_channels"
    if number_format is None:
        per_head = head_dim * config.params_dtype.itemsize
    else:
        per_head = _packed_bytes(head_dim, number_format)
    return 2 * num_attention_layers * num_heads * per_head


def _packed_bytes(num_values: int, number_format: NumberFormat) -> int:
    return num_values * number_format.code_bits // 8 + num_values // number_format.block_size


class PlainKVContext(RolloutContext):
    """Cache of plain values, with a write of our own, which needs neither Triton nor a GPU."""

    def append_key_value_cache(
        self, layer_number: int, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Writes the step's keys and values, both [T, 1, G, D], after RoPE."""
        rows = slice(0, self.padded_active_token_count)
        self._append(
            self.layer_map[layer_number - 1],
            key.squeeze(1)[rows],
            value.squeeze(1)[rows],
            self.gpu_view.token_to_block_idx[rows].long(),
            self.gpu_view.token_to_local_position_within_kv_block[rows].long(),
        )

    def _append(
        self,
        attention_layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        block: torch.Tensor,
        offset: torch.Tensor,
    ) -> None:
        """Writes [T, G, D] to pages and offsets, int64 [T] each."""
        layer = self.decoder_layers[attention_layer]
        for index, (site, x) in enumerate(zip(_SITES, (key, value), strict=True)):
            self.sites.check_finite(layer, site, x.flatten(1))
            self.memory_buffer[index, attention_layer, block, offset] = x

    def key_value_cache(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, layer_number: int
    ) -> tuple[AnyPages, AnyPages, torch.Tensor]:
        """Gives the pages of keys and values of a layer and the block table."""
        _, _, block_table = super().key_value_cache(layer_number)
        keys, values = self._pages(self.layer_map[layer_number - 1])
        return keys, values, block_table

    def _pages(self, attention_layer: int) -> tuple[AnyPages, AnyPages]:
        keys, values = self.memory_buffer[:, attention_layer]
        return Pages(keys), Pages(values)


class PackedKVContext(PlainKVContext):
    """Paged cache of packed codes and block scales: C bytes per token and head.

    Keys and values are quantised once, when they are written, and attention reads them back from
    the bytes in prefill and in decode. `pages.PageLayout` says where they lie.
    """

    @property
    def number_format(self) -> NumberFormat:
        """Format of keys and values."""
        return self.sites.format_of(Site.K)

    @property
    def layout(self) -> PageLayout:
        """Layout of a page."""
        return PageLayout(
            self.number_format, self.hidden_size_per_attention_head, self.block_size_tokens
        )

    @property
    def block_size_bytes(self) -> int:
        """Bytes of one block of tokens over all layers, from which the block count follows."""
        layers = self.num_attention_layers
        per_token = kv_bytes_per_token(self.model_config, layers, self.number_format)
        return self.block_size_tokens * per_token

    @block_size_bytes.setter
    def block_size_bytes(self, unpacked: int) -> None:
        # Megatron computes the size from params_dtype in __init__, without a hook.
        assert unpacked > 0

    def stored_rows(
        self, pages: torch.Tensor, offsets: torch.Tensor, layers: slice = slice(None)
    ) -> torch.Tensor:
        """Gives packed codes and scale bytes of rows, uint8 [2, L, R, G, C].

        Args:
            pages: int64 [R], pages of the cache.
            offsets: int64 [R], tokens within them.
            layers: Attention layers.
        """
        line, token = self.layout.place(offsets)
        parts = self.layout.split(self.memory_buffer[:, layers])
        # Indexed axes come first: [R, 2, L, G, bytes].
        rows = torch.cat([part[:, :, pages, :, line, token] for part in parts], dim=-1)
        return rows.movedim(0, 2)

    def put_stored_rows(
        self, pages: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """Puts keys and values that `stored_rows` gave at other pages and offsets."""
        line, token = self.layout.place(offsets)
        parts = self.layout.split(self.memory_buffer)
        for part, values in zip(parts, self._apart(rows), strict=True):
            part[:, :, pages, :, line, token] = values.movedim(2, 0)

    def cached_rows(
        self, layer: int, site: Site, stored: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gives packed codes and scale bytes of rows, uint8 [R, bytes of all heads] each."""
        codes, scale_bytes = self._apart(stored)
        return codes.flatten(1), scale_bytes.flatten(1)

    def _apart(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gives packed codes and scale bytes, of rows [..., C]."""
        return rows.split([self.layout.code_bytes, self.layout.num_blocks], dim=-1)

    def _append(
        self,
        attention_layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        block: torch.Tensor,
        offset: torch.Tensor,
    ) -> None:
        layer = self.decoder_layers[attention_layer]
        for site, x in zip(_SITES, (key, value), strict=True):
            self.sites.begin(layer, site, x.flatten(1))
        ops.append(
            key,
            value,
            *self._pages(attention_layer),
            block,
            offset,
            num_bits=None,
            implementation=self.sites.trace.implementation,
        )
        for site in _SITES:
            self.sites.recorder.put_cached(layer, site)

    def _pages(self, attention_layer: int) -> tuple[PackedPages, PackedPages]:
        layer, layout = self.decoder_layers[attention_layer], self.layout
        keys, values = self.memory_buffer[:, attention_layer]
        return (
            PackedPages(keys, layout, self.sites.scale(layer, Site.K)),
            PackedPages(values, layout, self.sites.scale(layer, Site.V)),
        )

    def _allocate_memory_buffer(self) -> None:
        pages = self.layout.shape(
            self.kv_block_allocator.total_count, self.num_attention_heads_per_partition
        )
        self.memory_buffer = torch.zeros(
            (2, self.num_attention_layers, *pages),
            dtype=torch.uint8,
            device=torch.cuda.current_device(),
        )
