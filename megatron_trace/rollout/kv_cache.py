"""The engine's paged K/V cache: plain, or packed FP4 codes with their block scales.

Legend: T tokens of a step (padded), G key/value heads, D head dim, P pages, S tokens of a page,
R requests, M tokens that are read of each request, C packed bytes of D values: their codes, then a
byte for each block scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.transformer import TransformerConfig

from megatron_trace.formats import NumberFormat, ops
from megatron_trace.hints import Site
from megatron_trace.rollout.context import RolloutContext
from megatron_trace.rollout.sites import OPERAND_DTYPE

_SITES = (Site.K, Site.V)


@dataclass(frozen=True)
class Pages:
    """The pages of keys or values of one layer.

    Attributes:
        stored: [P, S, G, D], or uint8 [P, S, G, C] if packed.
        number_format: Format of packed values; None if plain.
        global_scale: FP32 0-d tensor if the format has one.
    """

    stored: torch.Tensor
    number_format: NumberFormat | None = None
    global_scale: torch.Tensor | None = None

    def read(
        self, block_table: torch.Tensor, lengths: torch.Tensor, num_tokens: int
    ) -> torch.Tensor:
        """Gives the first tokens of each request, [R, M, G, D], and 0 beyond its length.

        Pages keep what earlier requests left in them, perhaps NaN, and NaN times 0 is NaN.

        Args:
            block_table: integer [R, >= pages of M tokens]; page ids, -1 where there is none.
            lengths: integer [R], tokens of each request.
            num_tokens: M.
        """
        num_pages = -(-num_tokens // self.stored.shape[1])
        pages = block_table[:, :num_pages].long().clamp(min=0)
        values = self.stored[pages].flatten(1, 2)[:, :num_tokens]
        beyond = torch.arange(num_tokens, device=values.device) >= lengths[:, None]
        values = values.masked_fill(beyond[..., None, None], 0)
        if self.number_format is None:
            return values
        return unpack_values(values, self.number_format, self.global_scale)


def unpack_values(
    packed: torch.Tensor, number_format: NumberFormat, global_scale: torch.Tensor | None
) -> torch.Tensor:
    """Gives the BF16 values [..., D] of packed ones, uint8 [..., C]."""
    codes, scale_bytes = split_packed(packed, number_format)
    return ops.decode(
        codes,
        scale_bytes.contiguous(),
        global_scale,
        number_format=number_format,
        dtype=OPERAND_DTYPE,
    )


def split_packed(
    packed: torch.Tensor, number_format: NumberFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives packed codes and scale bytes, uint8 [..., bytes] each, of packed values [..., C]."""
    num_blocks = packed.shape[-1] // _packed_bytes(number_format.block_size, number_format)
    codes, scale_bytes = packed.split([packed.shape[-1] - num_blocks, num_blocks], dim=-1)
    return codes, scale_bytes


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
        attention_layer = self.layer_map[layer_number - 1]
        rows = slice(0, self.padded_active_token_count)
        block = self.gpu_view.token_to_block_idx[rows].long()
        offset = self.gpu_view.token_to_local_position_within_kv_block[rows].long()
        layer = self.decoder_layers[attention_layer]
        for index, (site, x) in enumerate(zip(_SITES, (key, value), strict=True)):
            stored = self.stored_form(layer, site, x.squeeze(1)[rows])
            self.memory_buffer[index, attention_layer, block, offset] = stored

    def stored_form(self, layer: int, site: Site, x: torch.Tensor) -> torch.Tensor:
        """Gives what is stored for x, [T, G, D]; here x itself."""
        self.sites.check_finite(layer, site, x.flatten(1))
        return x

    def key_value_cache(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, layer_number: int
    ) -> tuple[Pages, Pages, torch.Tensor]:
        """Gives the pages of keys and values of a layer and the block table."""
        keys, values, block_table = super().key_value_cache(layer_number)
        assert values is not None, "only the cache of latent attention has no values"
        return Pages(keys), Pages(values), block_table


class PackedKVContext(PlainKVContext):
    """Paged cache of packed codes and block scales: C bytes per token and head.

    Keys and values are quantised once, when they are written, and attention reads them back from
    the bytes in prefill and in decode.
    """

    @property
    def number_format(self) -> NumberFormat:
        """Format of keys and values."""
        return self.sites.format_of(Site.K)

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

    def stored_form(self, layer: int, site: Site, x: torch.Tensor) -> torch.Tensor:
        """Gives packed codes and scale bytes of x, [T, G, D], as uint8 [T, G, C]."""
        _, packed_codes, scale_bytes = self.sites.record(layer, site, x.flatten(1))
        heads = x.shape[1]
        return torch.cat(
            (packed_codes.unflatten(1, (heads, -1)), scale_bytes.unflatten(1, (heads, -1))), dim=-1
        )

    def cached_rows(
        self, layer: int, site: Site, stored: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gives packed codes and scale bytes of rows, uint8 [R, bytes of all heads] each."""
        codes, scale_bytes = split_packed(stored, self.number_format)
        return codes.flatten(1), scale_bytes.flatten(1)

    def key_value_cache(self, layer_number: int) -> tuple[Pages, Pages, torch.Tensor]:
        """Gives the packed pages of keys and values of a layer and the block table."""
        keys, values, block_table = super().key_value_cache(layer_number)
        layer = self.decoder_layers[self.layer_map[layer_number - 1]]
        return (
            Pages(keys.stored, self.number_format, self.sites.scale(layer, Site.K)),
            Pages(values.stored, self.number_format, self.sites.scale(layer, Site.V)),
            block_table,
        )

    def _allocate_memory_buffer(self) -> None:
        self.memory_buffer = torch.zeros(
            (
                2,
                self.num_attention_layers,
                self.kv_block_allocator.total_count,
                self.block_size_tokens,
                self.num_attention_heads_per_partition,
                _packed_bytes(self.hidden_size_per_attention_head, self.number_format),
            ),
            dtype=torch.uint8,
            device=torch.cuda.current_device(),
        )
