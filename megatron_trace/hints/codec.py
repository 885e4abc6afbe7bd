"""Codes of the rollout's quantiser to hints and back, and hints of several samples to one batch.

Legend: R rows of a sample, K values of a row, B blocks of a row, S positions of a batch,
N samples of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from megatron_trace.formats import ops, pack_hint, unpack_bits, unpack_hint
from megatron_trace.formats.number_format import NVFP4, NumberFormat
from megatron_trace.formats.residues import to_residues
from megatron_trace.hints.row_groups import groups_of_rows
from megatron_trace.hints.types import (
    HintKey,
    ScaleForm,
    SiteHint,
    require_hint_bits,
    require_scale_form,
)

# Rows up to which samples go to their places by one call. Beyond, calls hardly cost, and a slice
# is copied twenty times as fast as numbered rows (measured on a CPU, rows of 512 bytes).
_ROWS_TOGETHER = 256

# The largest finite positive value of each encoding; bytes above it are NaN or carry a sign.
MAX_SCALE_BYTE = {"e4m3": 0x7E, "e8m0": 0xFE}


def encode_hint(
    key: HintKey,
    codes: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    num_bits: int,
    scale_form: ScaleForm = "raw",
    number_format: NumberFormat = NVFP4,
) -> SiteHint:
    """Gives the hint of one sample at one place, in memory of its own.

    Args:
        key: Where it belongs.
        codes: uint8 [R, K]; what the rollout's quantiser chose.
        scale_bytes: uint8 [R, B]; the block scales it used.
        global_scale: Decode-side scale of the place; kept in FP32. None if the format has none.
        num_bits: 1 or 2 (lowest bits) or those of a code (codes) per value.
        scale_form: Whether block scales are kept `raw`, or as `residue` modulo 8.
        number_format: Format of the values.

    Raises:
        ValueError: Shapes or dtypes disagree, or a code, block scale or global scale is not one
            that a quantiser gives for finite values.
    """
    _require_rows("codes", codes, scale_bytes, number_format.block_size, key)
    _require_at_most((1 << number_format.code_bits) - 1, "code", codes, key)
    packed_codes = pack_hint(codes, number_format.code_bits)
    return encode_packed_hint(
        key, packed_codes, scale_bytes, global_scale, num_bits, scale_form, number_format
    )


def encode_packed_hint(
    key: HintKey,
    packed_codes: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    num_bits: int,
    scale_form: ScaleForm = "raw",
    number_format: NumberFormat = NVFP4,
) -> SiteHint:
    """Gives what `encode_hint` gives, from codes that are packed already.

    Args:
        key: Where it belongs.
        packed_codes: uint8 [R, K * bits of a code / 8]; what the rollout's quantiser chose.
        scale_bytes: uint8 [R, B]; the block scales it used.
        global_scale: Decode-side scale of the place; kept in FP32. None if the format has none.
        num_bits: 1 or 2 (lowest bits) or those of a code (codes) per value.
        scale_form: Whether block scales are kept `raw`, or as `residue` modulo 8.
        number_format: Format of the values.

    Raises:
        ValueError: As `encode_hint`.
    """
    block_bytes = number_format.block_size * number_format.code_bits // 8
    _require_rows("packed_codes", packed_codes, scale_bytes, block_bytes, key)
    require_hint_bits(num_bits, number_format, key)
    payload = ops.narrowed(packed_codes, num_bits, number_format=number_format)
    form = global_scale, num_bits, scale_form, number_format
    # The recorder's buffer is reused, and a slice of it would keep all of it alive.
    return _hint_of(key, _owned(payload, packed_codes), scale_bytes, *form)


def encode_narrowed_hint(
    key: HintKey,
    payload: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    num_bits: int,
    scale_form: ScaleForm = "raw",
    number_format: NumberFormat = NVFP4,
) -> SiteHint:
    """Gives what `encode_packed_hint` gives, where the codes were narrowed already.

    Args:
        key: Where it belongs.
        payload: uint8 [R, K * num_bits / 8]; what `formats.ops.narrowed` gave. Kept, not copied.
        scale_bytes: uint8 [R, B]; the block scales that the rollout used.
        global_scale: Decode-side scale of the place; kept in FP32. None if the format has none.
        num_bits: Bits of a value that the payload has.
        scale_form: Whether block scales are kept `raw`, or as `residue` modulo 8.
        number_format: Format of the values.

    Raises:
        ValueError: As `encode_hint`.
    """
    require_hint_bits(num_bits, number_format, key)
    block_bytes = number_format.block_size * num_bits // 8
    _require_rows("payload", payload, scale_bytes, block_bytes, key)
    form = global_scale, num_bits, scale_form, number_format
    return _hint_of(key, payload, scale_bytes, *form)


def encode_hints(
    keys: Sequence[HintKey],
    codes: Sequence[torch.Tensor],
    scale_bytes: Sequence[torch.Tensor],
    global_scale: torch.Tensor | float | None,
    num_bits: int,
    scale_form: ScaleForm = "raw",
    number_format: NumberFormat = NVFP4,
    *,
    are_narrowed: bool = False,
) -> list[SiteHint]:
    """Gives the hints of several samples at one place by one call for all, in memory they share.

    Args:
        keys: Where each belongs.
        codes: Of each sample what `encode_packed_hint` takes, or what `encode_narrowed_hint` does.
        scale_bytes: uint8 [R, B] of each; the block scales that the rollout used.
        global_scale: Decode-side scale of the place; kept in FP32. None if the format has none.
        num_bits: Bits per value.
        scale_form: Whether block scales are kept `raw`, or as `residue` modulo 8.
        number_format: Format of the values.
        are_narrowed: Whether the codes were narrowed already.

    Raises:
        ValueError: As `encode_hint`, of the first sample that is wrong.
    """
    encode = encode_narrowed_hint if are_narrowed else encode_packed_hint
    form = global_scale, num_bits, scale_form, number_format
    try:
        every = encode(keys[0], torch.cat(list(codes)), torch.cat(list(scale_bytes)), *form)
    except ValueError:
        for key, of_sample, scales in zip(keys, codes, scale_bytes, strict=True):
            encode(key, of_sample, scales, *form)
        raise
    counts = [len(scales) for scales in scale_bytes]
    parts = every.payload.split(counts), every.scale_bytes.split(counts)
    return [
        SiteHint(
            key, num_bits, payload, scales, every.global_scale, scale_form, every.number_format
        )
        for key, payload, scales in zip(keys, *parts, strict=True)
    ]


def _hint_of(
    key: HintKey,
    payload: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    num_bits: int,
    scale_form: ScaleForm,
    number_format: NumberFormat,
) -> SiteHint:
    encoding = number_format.scale_encoding
    require_scale_form(scale_form, number_format, key)
    _require_at_most(
        MAX_SCALE_BYTE[encoding],
        f"{encoding.upper()} block scale byte (NaN or Inf activations?)",
        scale_bytes,
        key,
    )
    scale = _fp32_scale(global_scale, number_format, key)
    if scale_form == "residue":
        try:
            payload, residues = to_residues(payload, scale_bytes, num_bits=num_bits)
        except ValueError as error:
            raise ValueError(f"{error} ({key})") from error
        scale_bytes = ops.pack_residues(residues)
    return SiteHint(
        key=key,
        num_bits=num_bits,
        payload=payload,
        scale_bytes=scale_bytes.clone(memory_format=torch.contiguous_format),
        global_scale=scale,
        scale_form=scale_form,
        number_format=number_format.name,
    )


def payload_bits(payload: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Gives the mantissa bits that a payload says.

    Args:
        payload: uint8 [..., K * num_bits / 8].
        num_bits: 1, 2, 4 or 8.

    Returns:
        uint8 [..., K], 0 or 1.
    """
    if num_bits not in (1, 2, 4, 8):
        raise ValueError(f"num_bits must be 1, 2, 4 or 8; got {num_bits}")
    # Codes of 8 bits are the payload itself, so nothing is changed in place.
    return unpack_bits(payload) if num_bits == 1 else unpack_hint(payload, num_bits) & 1


def decode_bits(hint: SiteHint) -> torch.Tensor:
    """Gives the mantissa bits of a hint, uint8 [R, K]."""
    return payload_bits(hint.payload, hint.num_bits)


def decode_codes(hint: SiteHint) -> torch.Tensor:
    """Gives the codes of a hint of whole codes, uint8 [R, K].

    Raises:
        ValueError: The hint holds lowest bits only.
    """
    code_bits = hint.format.code_bits
    if hint.num_bits != code_bits:
        raise ValueError(
            f"codes need a {code_bits}-bit hint; got {hint.num_bits} bit, which says the lowest "
            f"bits only ({hint.key})"
        )
    return unpack_hint(hint.payload, code_bits)


def decode_residues(hint: SiteHint) -> torch.Tensor:
    """Gives the residues of a hint's block scales, uint8 [R, B], 0 to 7.

    Raises:
        ValueError: The hint holds raw block scales.
    """
    if hint.scale_form != "residue":
        raise ValueError(f"the hint holds {hint.scale_form} block scales, no residues ({hint.key})")
    return ops.unpack_residues(hint.scale_bytes, hint.num_blocks)


def stack_rows(
    hints: Sequence[SiteHint | None], num_positions: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives the hints of N samples at one place in the row order of a model, padded on the right.

    Args:
        hints: One hint per sample, None where the sample has none.
        num_positions: S, at least the rows of the longest hint.

    Returns:
        payload: uint8 [S, N, K * num_bits / 8]; 0 where not valid.
        scale_bytes: uint8 [S, N, B], or packed residues if the hints hold them; 0 where not valid.
        valid: bool [S, N]; whether the row holds what the rollout recorded.

    Raises:
        ValueError: All hints are None, so that K is unknown; the hints differ in place, format,
            width, bits, form of the block scales or global scale; or one has more than S rows.
    """
    num_samples = len(hints)
    places = [range(b, num_positions * num_samples, num_samples) for b in range(num_samples)]
    payload, scale_bytes, valid = placed_rows(hints, places, num_positions * num_samples)
    shape = (num_positions, num_samples)
    return payload.unflatten(0, shape), scale_bytes.unflatten(0, shape), valid.unflatten(0, shape)


def placed_rows(
    hints: Sequence[SiteHint | None],
    places: Sequence[range],
    num_rows: int,
    zeros: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives the hints of samples at one place, each sample's rows where they are to stand.

    Args:
        hints: One hint per sample, None where the sample has none.
        places: For each sample the rows of the result that it may take; its own are the first.
        num_rows: Rows of the result.
        zeros: Gives memory for the result; None takes new one beside the hints.

    Returns:
        payload: uint8 [num_rows, K * num_bits / 8]; 0 where not valid.
        scale_bytes: uint8 [num_rows, B], or packed residues; 0 where not valid.
        valid: bool [num_rows]; whether the row holds what the rollout recorded.

    Raises:
        ValueError: All hints are None, so that K is unknown; the hints differ in place, format,
            width, bits, form of the block scales or global scale; or one has too many rows.
    """
    present = [hint for hint in hints if hint is not None]
    if not present:
        raise ValueError(f"none of {len(hints)} samples has a hint: there are no rows to stack")
    first = present[0]
    for hint in present[1:]:
        if _layout(hint) != _layout(first):
            raise ValueError(
                "hints of one batch must agree in layer, site, format, bits, values of a row, form "
                f"of the block scales and global scale; got {_layout(first)} ({first.key}) and "
                f"{_layout(hint)} ({hint.key})"
            )
    zeros = zeros or (lambda shape, dtype: first.payload.new_zeros(shape, dtype=dtype))
    payload, scale_bytes = (
        zeros((num_rows, source.shape[1]), torch.uint8)
        for source in (first.payload, first.scale_bytes)
    )
    valid = zeros((num_rows,), torch.bool)
    own: list[tuple[SiteHint, range]] = []
    for hint, place in zip(hints, places, strict=True):
        if hint is None or not hint.num_rows:
            continue
        if hint.num_rows > len(place):
            raise ValueError(
                f"{hint.num_rows} rows do not fit into {len(place)} positions ({hint.key})"
            )
        own.append((hint, place[: hint.num_rows]))
    for group in groups_of_rows([hint.num_rows for hint, _ in own], _ROWS_TOGETHER):
        _put_rows(own[group], payload, scale_bytes, valid)
    return payload, scale_bytes, valid


def _put_rows(
    hints: Sequence[tuple[SiteHint, range]],
    payload: torch.Tensor,
    scale_bytes: torch.Tensor,
    valid: torch.Tensor,
) -> None:
    """Puts the rows of hints where they are to stand; those of several short ones by one call.

    Hints may be on another device: a study keeps them on its GPU, rows are read into host memory.
    """
    if len(hints) == 1:
        hint, place = hints[0]
        rows = slice(place.start, place.stop, place.step)
        payload[rows], scale_bytes[rows], valid[rows] = hint.payload, hint.scale_bytes, True
        return
    numbers = [np.arange(place.start, place.stop, place.step) for _, place in hints]
    rows = torch.from_numpy(np.concatenate(numbers)).to(payload.device)
    own = torch.cat([hint.payload for hint, _ in hints])
    payload.index_copy_(0, rows, own.to(payload.device))
    own = torch.cat([hint.scale_bytes for hint, _ in hints])
    scale_bytes.index_copy_(0, rows, own.to(payload.device))
    valid.index_fill_(0, rows, True)


def _layout(hint: SiteHint) -> tuple[int, str, str, int, int, str, float | None]:
    what = hint.key.layer, str(hint.key.site), hint.number_format
    return *what, hint.num_bits, hint.num_values, hint.scale_form, hint.global_scale


def _fp32_scale(
    global_scale: torch.Tensor | float | None, number_format: NumberFormat, key: HintKey
) -> float | None:
    if number_format.has_global_scale == (global_scale is None):
        has = "a" if number_format.has_global_scale else "no"
        raise ValueError(
            f"{number_format.name} has {has} global scale; got global_scale {global_scale} ({key})"
        )
    if global_scale is None:
        return None
    scale = torch.as_tensor(global_scale, dtype=torch.float32).item()
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"global_scale must be finite and > 0 in FP32; got {global_scale} ({key})")
    return scale


def _owned(payload: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    shared = payload.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    return payload.clone(memory_format=torch.contiguous_format) if shared else payload


def _require_rows(
    name: str, rows: torch.Tensor, scale_bytes: torch.Tensor, block_columns: int, key: HintKey
) -> None:
    for what, tensor in ((name, rows), ("scale_bytes", scale_bytes)):
        if tensor.dtype != torch.uint8 or tensor.dim() != 2:
            raise ValueError(
                f"{what} must be uint8 [rows, columns]; got {tensor.dtype} "
                f"{tuple(tensor.shape)} ({key})"
            )
    num_rows, num_blocks = scale_bytes.shape
    expected = (num_rows, num_blocks * block_columns)
    if tuple(rows.shape) != expected:
        raise ValueError(
            f"{name} must be {expected} for scale_bytes {(num_rows, num_blocks)}; got "
            f"{tuple(rows.shape)} ({key})"
        )


def _require_at_most(largest: int, name: str, tensor: torch.Tensor, key: HintKey) -> None:
    too_large = tensor > largest
    if too_large.any():
        row, column = too_large.nonzero()[0].tolist()
        raise ValueError(
            f"{name} must be at most {largest}; got {tensor[row, column]} in row {row}, "
            f"column {column} ({key})"
        )
