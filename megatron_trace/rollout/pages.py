"""Pages of the K/V cache: plain, or packed FP4 codes with their block scales.

Legend: T tokens of a step, G key/value heads, D head dim, P pages, S tokens of a page, R requests,
M tokens that are read of each request, B blocks of a token and head.

A packed page holds one head after the other, and of each head its tokens in lines. A line is the
packed codes of a few tokens, one after the other, then their block scales. It has 256 values where
D divides 256, which are 144 bytes in NVFP4: kernels load them in pieces of 16 bytes without
conflicts of banks. Otherwise a line is one token. docs/kv_cache.md has a picture.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_trace.formats import NumberFormat, ops
from megatron_trace.rollout.sites import OPERAND_DTYPE

LINE_VALUES = 256


class ReadablePages(Protocol):
    """What the specification of attention demands of pages."""

    def read(
        self, block_table: torch.Tensor, lengths: torch.Tensor, num_tokens: int
    ) -> torch.Tensor:
        """Gives the first tokens of each request, [R, M, G, D], and 0 beyond its length."""
        ...


@dataclass(frozen=True)
class PageLayout:
    """How a packed page is laid out.

    Attributes:
        number_format: Format of its values.
        head_dim: D.
        page_tokens: S.
    """

    number_format: NumberFormat
    head_dim: int
    page_tokens: int

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of a token and head."""
        return self.head_dim * self.number_format.code_bits // 8

    @property
    def num_blocks(self) -> int:
        """B: block scales of a token and head, a byte each."""
        return self.head_dim // self.number_format.block_size

    @property
    def tokens_per_line(self) -> int:
        """Tokens of a line."""
        if LINE_VALUES % self.head_dim:
            return 1
        return math.gcd(self.page_tokens, LINE_VALUES // self.head_dim)

    @property
    def line_bytes(self) -> int:
        """Bytes of a line."""
        return self.tokens_per_line * (self.code_bytes + self.num_blocks)

    @property
    def lines(self) -> int:
        """Lines of a head in a page."""
        return self.page_tokens // self.tokens_per_line

    def shape(self, num_pages: int, num_heads: int) -> tuple[int, int, int, int]:
        """Gives the shape of packed pages, uint8 [P, G, lines, bytes of a line]."""
        return num_pages, num_heads, self.lines, self.line_bytes

    def place(self, offset: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gives the line of a token of a page, and its place in the line."""
        return offset // self.tokens_per_line, offset % self.tokens_per_line

    def split(self, stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gives views of packed pages.

        Args:
            stored: uint8 [..., lines, bytes of a line].

        Returns:
            codes: uint8 [..., lines, tokens of a line, code bytes].
            scale_bytes: uint8 [..., lines, tokens of a line, B].
        """
        tokens = self.tokens_per_line
        codes, scale_bytes = stored.split(
            [tokens * self.code_bytes, tokens * self.num_blocks], dim=-1
        )
        return (
            codes.unflatten(-1, (tokens, self.code_bytes)),
            scale_bytes.unflatten(-1, (tokens, self.num_blocks)),
        )


@dataclass(frozen=True)
class Pages:
    """The plain pages of keys or values of one layer.

    Attributes:
        stored: [P, S, G, D].
    """

    stored: torch.Tensor

    @property
    def page_tokens(self) -> int:
        """S."""
        return self.stored.shape[1]

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
        values = _chosen(self.stored, block_table, self.page_tokens, num_tokens)
        values = values.flatten(1, 2)[:, :num_tokens]
        return values.masked_fill(_beyond(lengths, num_tokens), 0)


@dataclass(frozen=True)
class PackedPages:
    """The packed pages of keys or values of one layer.

    Attributes:
        stored: uint8 [P, G, lines, bytes of a line].
        layout: How they are laid out.
        global_scale: FP32 0-d tensor if the format has one.
    """

    stored: torch.Tensor
    layout: PageLayout
    global_scale: torch.Tensor | None

    @property
    def page_tokens(self) -> int:
        """S."""
        return self.layout.page_tokens

    @property
    def num_heads(self) -> int:
        """G."""
        return self.stored.shape[1]

    def write(
        self,
        block: torch.Tensor,
        offset: torch.Tensor,
        packed_codes: torch.Tensor,
        scale_bytes: torch.Tensor,
    ) -> None:
        """Puts tokens into their pages.

        Args:
            block: int64 [T], page of each token.
            offset: int64 [T], its place in the page.
            packed_codes: uint8 [T, G, code bytes].
            scale_bytes: uint8 [T, G, B].
        """
        line, token = self.layout.place(offset)
        codes, scales = self.layout.split(self.stored)
        codes[block, :, line, token] = packed_codes
        scales[block, :, line, token] = scale_bytes

    def read_packed(
        self, block_table: torch.Tensor, lengths: torch.Tensor, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gives the bytes of the first tokens of each request, and 0 beyond its length.

        Args:
            block_table: integer [R, >= pages of M tokens]; page ids, -1 where there is none.
            lengths: integer [R], tokens of each request.
            num_tokens: M.

        Returns:
            packed_codes: uint8 [R, M, G, code bytes].
            scale_bytes: uint8 [R, M, G, B].
        """
        chosen = _chosen(self.stored, block_table, self.page_tokens, num_tokens)
        beyond = _beyond(lengths, num_tokens)
        # [R, pages, G, lines, tokens, bytes]: heads behind the tokens.
        codes, scales = (
            part.permute(0, 1, 3, 4, 2, 5).flatten(1, 3)[:, :num_tokens].masked_fill(beyond, 0)
            for part in self.layout.split(chosen)
        )
        return codes, scales

    def read(
        self, block_table: torch.Tensor, lengths: torch.Tensor, num_tokens: int
    ) -> torch.Tensor:
        """Gives the first tokens of each request, BF16 [R, M, G, D], and 0 beyond its length.

        Args:
            block_table: integer [R, >= pages of M tokens]; page ids, -1 where there is none.
            lengths: integer [R], tokens of each request.
            num_tokens: M.
        """
        codes, scale_bytes = self.read_packed(block_table, lengths, num_tokens)
        return ops.decode(
            codes,
            scale_bytes,
            self.global_scale,
            number_format=self.layout.number_format,
            dtype=OPERAND_DTYPE,
        )


AnyPages = Pages | PackedPages


def _chosen(
    stored: torch.Tensor, block_table: torch.Tensor, page_tokens: int, num_tokens: int
) -> torch.Tensor:
    """Gives the pages of the first tokens of each request, [R, pages, ...]."""
    num_pages = -(-num_tokens // page_tokens)
    return stored[block_table[:, :num_pages].long().clamp(min=0)]


def _beyond(lengths: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Gives bool [R, M, 1, 1]."""
    beyond = torch.arange(num_tokens, device=lengths.device) >= lengths[:, None]
    return beyond[..., None, None]
