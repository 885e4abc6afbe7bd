"""Codes of the rollout's quantiser to hints and back, and hints of several samples to one batch.

Legend: R rows of a sample, K values of a row, B = K / 16 blocks of a row, S positions of a batch,
N samples of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from megatron_trace.formats import BLOCK_SIZE, pack_bits, pack_codes, unpack_bits, unpack_codes
from megatron_trace.hints.types import HintKey, SiteHint

MAX_CODE = 15
# The largest finite positive E4M3 value, 448; bytes above it are NaN or carry a sign.
MAX_SCALE_BYTE = 0x7E


def encode_hint(
    key: HintKey,
    codes: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor | float,
    num_bits: int,
) -> SiteHint:
    """Gives the hint of one sample at one place, in memory of its own.

    Args:
        key: Where it belongs.
        codes: uint8 [R, K], 0 to 15; what the rollout's quantiser chose.
        scale_bytes: uint8 [R, B], E4M3; the block scales it used.
        global_scale: Decode-side scale of the place; kept in FP32.
        num_bits: 1 (mantissa bits) or 4 (codes) per value.

    Raises:
        ValueError: Shapes or dtypes disagree, or a code, block scale or global scale is not one
            that a quantiser gives for finite values.
    """
    for name, tensor in (("codes", codes), ("scale_bytes", scale_bytes)):
        if tensor.dtype != torch.uint8 or tensor.dim() != 2:
            raise ValueError(
                f"{name} must be uint8 [rows, columns]; got {tensor.dtype} "
                f"{tuple(tensor.shape)} ({key})"
            )
    rows, num_blocks = scale_bytes.shape
    if tuple(codes.shape) != (rows, num_blocks * BLOCK_SIZE):
        raise ValueError(
            f"codes must be {(rows, num_blocks * BLOCK_SIZE)} for scale_bytes "
            f"{(rows, num_blocks)}; got {tuple(codes.shape)} ({key})"
        )
    if num_bits not in (1, 4):
        raise ValueError(f"num_bits must be 1 or 4; got {num_bits} ({key})")
    _require_at_most(MAX_CODE, "code", codes, key)
    _require_at_most(
        MAX_SCALE_BYTE, "E4M3 block scale byte (NaN or Inf activations?)", scale_bytes, key
    )
    scale = torch.as_tensor(global_scale, dtype=torch.float32).item()
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"global_scale must be finite and > 0 in FP32; got {global_scale} ({key})")
    return SiteHint(
        key=key,
        num_bits=num_bits,
        payload=pack_bits(codes) if num_bits == 1 else pack_codes(codes),
        # The recorder's buffer is reused, and a slice of it would keep all of it alive.
        scale_bytes=scale_bytes.clone(memory_format=torch.contiguous_format),
        global_scale=scale,
    )


def payload_bits(payload: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Gives the mantissa bits that a payload says.

    Args:
        payload: uint8 [..., K * num_bits / 8].
        num_bits: 1 or 4.

    Returns:
        uint8 [..., K], 0 or 1.
    """
    if num_bits not in (1, 4):
        raise ValueError(f"num_bits must be 1 or 4; got {num_bits}")
    return unpack_bits(payload) if num_bits == 1 else unpack_codes(payload) & 1


def decode_bits(hint: SiteHint) -> torch.Tensor:
    """Gives the mantissa bits of a hint, uint8 [R, K]."""
    return payload_bits(hint.payload, hint.num_bits)


def decode_codes(hint: SiteHint) -> torch.Tensor:
    """Gives the codes of a 4-bit hint, uint8 [R, K].

    Raises:
        ValueError: The hint holds mantissa bits only.
    """
    if hint.num_bits != 4:
        raise ValueError(
            f"codes need a 4-bit hint; got {hint.num_bits} bit, which says the mantissa bit only "
            f"({hint.key})"
        )
    return unpack_codes(hint.payload)


def stack_rows(
    hints: Sequence[SiteHint | None], num_positions: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives the hints of N samples at one place in the row order of a model, padded on the right.

    Args:
        hints: One hint per sample, None where the sample has none.
        num_positions: S, at least the rows of the longest hint.

    Returns:
        payload: uint8 [S, N, K * num_bits / 8]; 0 where not valid.
        scale_bytes: uint8 [S, N, B]; 0 where not valid.
        valid: bool [S, N]; whether the row holds what the rollout recorded.

    Raises:
        ValueError: All hints are None, so that K is unknown; the hints differ in place, width,
            bits or global scale; or one has more than S rows.
    """
    present = [hint for hint in hints if hint is not None]
    if not present:
        raise ValueError(f"none of {len(hints)} samples has a hint: there are no rows to stack")
    first = present[0]
    for hint in present[1:]:
        if _layout(hint) != _layout(first):
            raise ValueError(
                "hints of one batch must agree in layer, site, bits, values of a row and global "
                f"scale; got {_layout(first)} ({first.key}) and {_layout(hint)} ({hint.key})"
            )
    shape = (num_positions, len(hints))
    payload = first.payload.new_zeros(*shape, first.payload.shape[1])
    scale_bytes = first.scale_bytes.new_zeros(*shape, first.scale_bytes.shape[1])
    valid = torch.zeros(shape, dtype=torch.bool, device=payload.device)
    for column, hint in enumerate(hints):
        if hint is None:
            continue
        if hint.num_rows > num_positions:
            raise ValueError(
                f"{hint.num_rows} rows do not fit into {num_positions} positions ({hint.key})"
            )
        payload[: hint.num_rows, column] = hint.payload
        scale_bytes[: hint.num_rows, column] = hint.scale_bytes
        valid[: hint.num_rows, column] = True
    return payload, scale_bytes, valid


def _layout(hint: SiteHint) -> tuple[int, str, int, int, float]:
    key = hint.key
    return key.layer, str(key.site), hint.num_bits, hint.num_values, hint.global_scale


def _require_at_most(largest: int, name: str, tensor: torch.Tensor, key: HintKey) -> None:
    too_large = tensor > largest
    if too_large.any():
        row, column = too_large.nonzero()[0].tolist()
        raise ValueError(
            f"{name} must be at most {largest}; got {tensor[row, column]} in row {row}, "
            f"column {column} ({key})"
        )
