"""Codes, their lowest bits, and residues of block scales in bytes: the same for every format.

Legend: `...` any leading shape, K values of a row, B blocks of a row. A byte is filled from its
lowest bit: by two codes of 4 bits (the even column in the low nibble), by four pairs of lowest
bits, or by eight mantissa bits. The residues of a row are one string of 3 bits each, filled alike.

Bytes are spread and gathered a machine word at a time, never value by value; on a CPU in parts of
which what lies between two operations fits into its cache.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_trace.formats.checks import require_multiple

RESIDUE_BITS = 3
_WORDS_OF_A_PART = 1 << 15


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Gives two codes in a byte, the even column in the low nibble.

    Args:
        codes: uint8 [..., K], 0 to 15, K even.

    Returns:
        uint8 [..., K / 2].
    """
    require_multiple(codes, 2)
    packed = _converted(_words(codes, torch.int16), _together_nibbles, torch.uint8)
    return _rows(packed, codes, codes.shape[-1] // 2)


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """Gives the codes of packed bytes.

    Args:
        packed: uint8 [..., K / 2].

    Returns:
        uint8 [..., K].
    """
    words = _converted(packed.reshape(-1), _apart_nibbles, torch.int16)
    return _rows(words.view(torch.uint8), packed, packed.shape[-1] * 2)


def pack_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Gives the two lowest bits of codes, four pairs in a byte, the first column in bits 0 and 1.

    Args:
        codes: uint8 [..., K], K % 4 == 0; only bits 0 and 1 count.

    Returns:
        uint8 [..., K / 4].
    """
    require_multiple(codes, 4)
    packed = _converted(_words(codes, torch.int32), _together_pairs, torch.uint8)
    return _rows(packed, codes, codes.shape[-1] // 4)


def unpack_pairs(packed: torch.Tensor) -> torch.Tensor:
    """Gives the pairs of bits of packed bytes.

    Args:
        packed: uint8 [..., K / 4].

    Returns:
        uint8 [..., K], 0 to 3.
    """
    words = _converted(packed.reshape(-1), _apart_pairs, torch.int32)
    return _rows(words.view(torch.uint8), packed, packed.shape[-1] * 4)


def pack_bits(codes: torch.Tensor) -> torch.Tensor:
    """Gives the mantissa bits of codes, eight in a byte, the first column in bit 0.

    Args:
        codes: uint8 [..., K], K % 8 == 0; only bit 0 counts.

    Returns:
        uint8 [..., K / 8].
    """
    require_multiple(codes, 8)
    packed = _converted(_words(codes, torch.int64), _together_bits, torch.uint8)
    return _rows(packed, codes, codes.shape[-1] // 8)


def unpack_bits(bits: torch.Tensor) -> torch.Tensor:
    """Gives the bits of packed bytes.

    Args:
        bits: uint8 [..., K / 8].

    Returns:
        uint8 [..., K], 0 or 1.
    """
    words = _converted(bits.reshape(-1), _apart_bits, torch.int64)
    return _rows(words.view(torch.uint8), bits, bits.shape[-1] * 8)


def residue_bytes(num_blocks: int) -> int:
    """Gives how many bytes the residues of a row of blocks take: 3 for every 8 blocks."""
    return -(-num_blocks * RESIDUE_BITS // 8)


def pack_residues(residues: torch.Tensor) -> torch.Tensor:
    """Gives residues as a string of 3 bits each, the first in bits 0 to 2 of the first byte.

    Args:
        residues: uint8 [..., B], 0 to 7.

    Returns:
        uint8 [..., residue_bytes(B)]; bits that are left over are 0.
    """
    num_blocks = residues.shape[-1]
    if num_blocks % 8:
        residues = torch.nn.functional.pad(residues, (0, -num_blocks % 8))
    words = _words(residues, torch.int64)
    # Neighbours close up: from 8 bits apart to 3, then pairs, then quartets.
    words = (words >> 5).bitwise_or_(words).bitwise_and_(0x003F003F003F003F)
    words = (words >> 10).bitwise_or_(words).bitwise_and_(0x00000FFF00000FFF)
    words = (words >> 20).bitwise_or_(words)
    packed = words.view(torch.uint8).view(-1, 8)[:, :RESIDUE_BITS]
    packed = _rows(packed, residues, residues.shape[-1] // 8 * RESIDUE_BITS)
    return packed[..., : residue_bytes(num_blocks)].contiguous()


def unpack_residues(packed: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Gives the residues of packed bytes.

    Args:
        packed: uint8 [..., residue_bytes(B)].
        num_blocks: B.

    Returns:
        uint8 [..., B], 0 to 7.

    Raises:
        ValueError: A row has another number of bytes.
    """
    expected = residue_bytes(num_blocks)
    if packed.dim() == 0 or packed.shape[-1] != expected:
        raise ValueError(
            f"residues of {num_blocks} blocks take {expected} bytes; got {tuple(packed.shape)}"
        )
    if expected % RESIDUE_BITS:
        packed = torch.nn.functional.pad(packed, (0, -expected % RESIDUE_BITS))
    triples = packed.reshape(-1, RESIDUE_BITS)
    words = torch.zeros((len(triples), 8), dtype=torch.uint8, device=packed.device)
    words[:, :RESIDUE_BITS] = triples
    words = words.view(-1).view(torch.int64)
    words = (words << 20).bitwise_or_(words).bitwise_and_(0x00000FFF00000FFF)
    words = (words << 10).bitwise_or_(words).bitwise_and_(0x003F003F003F003F)
    words = (words << 5).bitwise_or_(words).bitwise_and_(0x0707070707070707)
    residues = _rows(words.view(torch.uint8), packed, packed.shape[-1] // RESIDUE_BITS * 8)
    return residues if residues.shape[-1] == num_blocks else residues[..., :num_blocks].contiguous()


def pack_hint(codes: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Gives the hint that codes leave behind.

    Args:
        codes: uint8 [..., K].
        num_bits: 1 or 2 (lowest bits), 4 (codes of 4 bits) or 8 (codes of 8 bits).

    Returns:
        uint8 [..., K * num_bits / 8].
    """
    return codes if num_bits == 8 else _PACK[num_bits](codes)


def unpack_hint(hint: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Gives the lowest bits or codes of a hint.

    Args:
        hint: uint8 [..., K * num_bits / 8].
        num_bits: 1, 2, 4 or 8.

    Returns:
        uint8 [..., K].
    """
    return hint if num_bits == 8 else _UNPACK[num_bits](hint)


def narrowed(packed_codes: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Gives the hint of codes that are packed already, without unpacking them.

    Args:
        packed_codes: uint8 [..., K / 2], K % 8 == 0.
        num_bits: 1, 2 or 4; at 4, the argument itself is given.

    Returns:
        uint8 [..., K * num_bits / 8].
    """
    if num_bits == 4:
        return packed_codes
    require_multiple(packed_codes, 4)
    dtype, convert = {
        1: (torch.int32, _bits_of_nibbles),
        2: (torch.int16, _pairs_of_nibbles),
    }[num_bits]
    hint = _converted(_words(packed_codes, dtype), convert, torch.uint8)
    return _rows(hint, packed_codes, packed_codes.shape[-1] * num_bits // 4)


def block_words(hint: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Gives a hint with one word for each block of 16 values; may share memory with it.

    Args:
        hint: uint8 [..., K * num_bits / 8], K % 16 == 0.
        num_bits: 1, 2 or 4.

    Returns:
        int16, int32 or int64 [..., K / 16].
    """
    words = _words(hint, {1: torch.int16, 2: torch.int32, 4: torch.int64}[num_bits])
    return _rows(words, hint, hint.shape[-1] // (2 * num_bits))


_PACK = {1: pack_bits, 2: pack_pairs, 4: pack_codes}
_UNPACK = {1: unpack_bits, 2: unpack_pairs, 4: unpack_codes}


def _together_nibbles(words: torch.Tensor) -> torch.Tensor:
    return (words >> 4).bitwise_or_(words)


def _apart_nibbles(packed: torch.Tensor) -> torch.Tensor:
    words = packed.to(torch.int16)
    return (words << 4).bitwise_or_(words).bitwise_and_(0x0F0F)


def _together_pairs(words: torch.Tensor) -> torch.Tensor:
    # One product moves the pair of byte j to bit 24 + 2 j; partial products never meet.
    return (words & 0x03030303).mul_(0x01041040).bitwise_right_shift_(24)


def _apart_pairs(packed: torch.Tensor) -> torch.Tensor:
    words = packed.to(torch.int32)
    words = (words << 12).bitwise_or_(words).bitwise_and_(0x000F000F)
    return (words << 6).bitwise_or_(words).bitwise_and_(0x03030303)


def _together_bits(words: torch.Tensor) -> torch.Tensor:
    # One product moves bit 0 of byte j to bit 56 + j; partial products never meet, so none carries.
    return (words & 0x0101010101010101).mul_(0x0102040810204080).bitwise_right_shift_(56)


def _apart_bits(packed: torch.Tensor) -> torch.Tensor:
    # Byte j keeps bit j of the copied byte; adding 0x7F carries it into bit 7, wherever it was.
    copies = packed.to(torch.int64).mul_(0x0101010101010101)
    copies = copies.bitwise_and_(0x8040201008040201 - (1 << 64)).add_(0x7F7F7F7F7F7F7F7F)
    return copies.bitwise_right_shift_(7).bitwise_and_(0x0101010101010101)


def _pairs_of_nibbles(words: torch.Tensor) -> torch.Tensor:
    words = words & 0x3333
    words = (words >> 2).bitwise_or_(words).bitwise_and_(0x0F0F)
    return (words >> 4).bitwise_or_(words)


def _bits_of_nibbles(words: torch.Tensor) -> torch.Tensor:
    words = words & 0x11111111
    words = (words >> 3).bitwise_or_(words).bitwise_and_(0x03030303)
    words = (words >> 6).bitwise_or_(words).bitwise_and_(0x000F000F)
    return (words >> 12).bitwise_or_(words)


def _converted(
    words: torch.Tensor, convert: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """Gives convert(words), whose low bits are kept, as dtype."""
    if words.is_cuda or words.numel() <= _WORDS_OF_A_PART:
        return convert(words).to(dtype)
    converted = torch.empty(words.shape, dtype=dtype)
    parts = (tensor.split(_WORDS_OF_A_PART) for tensor in (words, converted))
    for part, target in zip(*parts, strict=True):
        target.copy_(convert(part))
    return converted


def _words(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Gives bytes as words, [-1]; an unaligned view is copied."""
    flat = values.reshape(-1)
    return (flat.clone() if flat.storage_offset() % dtype.itemsize else flat).view(dtype)


def _rows(flat: torch.Tensor, like: torch.Tensor, length: int) -> torch.Tensor:
    """Gives flat bytes in rows as many as those of `like`."""
    return flat.reshape(*like.shape[:-1], length)
