"""The part of a record that one rank needs: some rows, and some columns of them.

Legend: R rows and K values of a record, B = K / block blocks of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megatron_trace.formats import ops
from megatron_trace.hints.types import SiteHint

# Residues of 8 blocks stand in 3 whole bytes.
_BLOCKS_OF_RESIDUE_BYTES, _RESIDUE_BYTES = 8, 3


@dataclass(frozen=True)
class HintPart:
    """Which part of a record is wanted.

    Attributes:
        rows: Ascending ranges of rows.
        columns: Values of a row, on block boundaries; None for all.
        num_values: Values that a whole row must have; None if that is not known.
    """

    rows: tuple[range, ...]
    columns: range | None = None
    num_values: int | None = None


def select_part(hint: SiteHint, part: HintPart) -> tuple[SiteHint, int]:
    """Gives a part of a record, and how many of the record's bytes it was made from.

    Nothing else of the record's memory is touched: of a mapped file, nothing else is read.

    Args:
        hint: The record, R rows.
        part: The part.

    Raises:
        ValueError: The record has no such rows or columns, or a block would be split.
    """
    if part.num_values not in (None, hint.num_values):
        raise ValueError(
            f"hint has values of a row {hint.num_values}, expected {part.num_values} ({hint.key})"
        )
    for rows in part.rows:
        if rows.step != 1 or not 0 <= rows.start <= rows.stop <= hint.num_rows:
            raise ValueError(f"no rows {rows} of {hint.num_rows} ({hint.key})")
    if part.columns is None:
        payload, scales = (_rows(x, part.rows) for x in (hint.payload, hint.scale_bytes))
        return replace(hint, payload=payload, scale_bytes=scales), payload.numel() + scales.numel()
    block_size = hint.num_values // hint.num_blocks
    columns = part.columns
    inside = columns.step == 1 and 0 <= columns.start < columns.stop <= hint.num_values
    if not inside or columns.start % block_size or columns.stop % block_size:
        raise ValueError(
            f"columns {columns} are not whole blocks of {block_size} of {hint.num_values} values "
            f"({hint.key})"
        )
    block_bytes = block_size * hint.num_bits // 8
    first, last = columns.start // block_size, columns.stop // block_size
    payload = _rows(hint.payload[:, first * block_bytes : last * block_bytes], part.rows)
    if hint.scale_form == "raw":
        scales = _rows(hint.scale_bytes[:, first:last], part.rows)
        num_read = scales.numel()
    else:
        scales, num_read = _residues(hint, range(first, last), part.rows)
    return replace(hint, payload=payload, scale_bytes=scales), payload.numel() + num_read


def _residues(hint: SiteHint, blocks: range, rows: Sequence[range]) -> tuple[torch.Tensor, int]:
    """Gives the packed residues of some blocks, and how many bytes of groups of 8 hold them."""
    start = blocks.start // _BLOCKS_OF_RESIDUE_BYTES
    stop = -(-blocks.stop // _BLOCKS_OF_RESIDUE_BYTES)
    held = _rows(hint.scale_bytes[:, start * _RESIDUE_BYTES : stop * _RESIDUE_BYTES], rows)
    first = start * _BLOCKS_OF_RESIDUE_BYTES
    num_blocks = min(hint.num_blocks, stop * _BLOCKS_OF_RESIDUE_BYTES) - first
    residues = ops.unpack_residues(held, num_blocks)
    wanted = residues[:, blocks.start - first : blocks.stop - first].contiguous()
    return ops.pack_residues(wanted), held.numel()


def _rows(matrix: torch.Tensor, rows: Sequence[range]) -> torch.Tensor:
    parts = [matrix[part.start : part.stop] for part in rows]
    return torch.cat(parts) if parts else matrix[:0].contiguous()
