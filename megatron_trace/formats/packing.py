"""Codes and bits in bytes: the same for every format.

Legend: `...` any leading shape, K values of a row. Two codes of 4 bits share a byte, the even
column in its low nibble; eight mantissa bits share a byte, the first column in bit 0.
"""

from __future__ import annotations

import torch

from megatron_trace.formats.checks import require_multiple


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Gives two codes in a byte, the even column in the low nibble.

    Args:
        codes: uint8 [..., K], K even.

    Returns:
        uint8 [..., K / 2].
    """
    require_multiple(codes, 2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """Gives the codes of packed bytes.

    Args:
        packed: uint8 [..., K / 2].

    Returns:
        uint8 [..., K].
    """
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def pack_bits(codes: torch.Tensor) -> torch.Tensor:
    """Gives the mantissa bits of codes, eight in a byte, the first column in bit 0.

    Args:
        codes: uint8 [..., K], K % 8 == 0; only bit 0 counts.

    Returns:
        uint8 [..., K / 8].
    """
    require_multiple(codes, 8)
    # One product moves bit 0 of byte j to bit 56 + j; partial products never meet, so none carries.
    words = (codes & 1).reshape(-1).view(torch.int64)
    packed = ((words * 0x0102040810204080) >> 56).to(torch.uint8)
    return packed.reshape(*codes.shape[:-1], codes.shape[-1] // 8)


def unpack_bits(bits: torch.Tensor) -> torch.Tensor:
    """Gives the bits of packed bytes.

    Args:
        bits: uint8 [..., K / 8].

    Returns:
        uint8 [..., K], 0 or 1.
    """
    # Byte j keeps bit j of the copied byte; adding 0x7F carries it into bit 7, wherever it was.
    copies = bits.reshape(-1).to(torch.int64) * 0x0101010101010101
    copies = copies.bitwise_and_(0x8040201008040201 - (1 << 64))
    unpacked = copies.add_(0x7F7F7F7F7F7F7F7F).bitwise_right_shift_(7)
    unpacked = unpacked.bitwise_and_(0x0101010101010101).view(torch.uint8)
    return unpacked.reshape(*bits.shape[:-1], bits.shape[-1] * 8)


def pack_hint(codes: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Gives the hint that codes leave behind.

    Args:
        codes: uint8 [..., K].
        num_bits: 1 (mantissa bits), 4 (codes of 4 bits) or 8 (codes of 8 bits).

    Returns:
        uint8 [..., K * num_bits / 8].
    """
    if num_bits == 1:
        return pack_bits(codes)
    return pack_codes(codes) if num_bits == 4 else codes


def unpack_hint(hint: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Gives the mantissa bits or codes of a hint.

    Args:
        hint: uint8 [..., K * num_bits / 8].
        num_bits: 1, 4 or 8.

    Returns:
        uint8 [..., K].
    """
    if num_bits == 1:
        return unpack_bits(hint)
    return unpack_codes(hint) if num_bits == 4 else hint
