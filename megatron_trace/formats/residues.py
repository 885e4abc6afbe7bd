"""E4M3 block scales as residues modulo 8, told from the trainer's own block scales.

The rollout's byte and the one that the trainer computes for the same block are seldom more than a
step apart, so that 3 bits tell which byte it was: a hint takes 1.19 bits a value instead of 1.5.

Legend: `...` any leading shape, K values of a row, B = K / 16 blocks of a row.

Rules:
* The residue is `byte & 7`. It stands for the byte of 1 to 126 (126 is 448, 127 NaN) that has it
  and is nearest to the trainer's own. Of two that are 4 steps off it is the smaller: noise makes
  the largest magnitude of a block larger more often than smaller. What lies further off is taken
  for another byte.
* The trainer's own byte is that under the rollout's global scale; NaN counts as 126.
* A block of zeros, byte 0, is residue 0 and a hint without a magnitude. No other block has both:
  its byte is 8 or more, so its scale is normal, within 1/16 of a sixth of the largest magnitude,
  and the code of that is 7. Where a quantiser chose otherwise, `to_residues` refuses.
"""

from __future__ import annotations

import torch

from megatron_trace.formats.checks import require_guide, require_num_bits
from megatron_trace.formats.packing import block_words
from megatron_trace.formats.reference import own_scale_bytes

NUM_RESIDUES = 8
LARGEST_BYTE = 0x7E


def to_residues(
    hint: torch.Tensor, scale_bytes: torch.Tensor, *, num_bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives the residues of the rollout's block scales, and the hint that goes with them.

    Args:
        hint: uint8 [..., K * num_bits / 8]; packed lowest bits (1, 2) or codes (4).
        scale_bytes: uint8 [..., B], 0 to 126.
        num_bits: 1, 2 or 4.

    Returns:
        hint: The same, but 0 in blocks of zeros.
        residues: uint8 [..., B], 0 to 7.

    Raises:
        ValueError: A block would be taken for one of zeros, which rounding to nearest under a block
            scale of a sixth of the largest magnitude never gives.
    """
    require_num_bits(num_bits)
    words = block_words(hint, num_bits)
    zero, residues = scale_bytes == 0, scale_bytes & (NUM_RESIDUES - 1)
    taken_for_zero = (residues == 0).logical_and_(~zero)
    if taken_for_zero.any():
        taken_for_zero &= _without_magnitude(words, num_bits)
        if taken_for_zero.any():
            place = taken_for_zero.nonzero()[0].tolist()
            raise ValueError(
                f"block {place} has scale byte {scale_bytes[tuple(place)].item()}, but a "
                f"{num_bits}-bit hint of zeros, so that residue 0 would say that its values are "
                "zero; record raw scale bytes (hint_scales=raw)"
            )
    if zero.any():
        hint = words.masked_fill(zero, 0).view(torch.uint8)
    return hint, residues


def restored(
    x: torch.Tensor,
    hint: torch.Tensor,
    residues: torch.Tensor,
    global_scale: torch.Tensor | float,
    *,
    num_bits: int,
) -> torch.Tensor:
    """Gives the rollout's block scales from their residues and the trainer's values.

    Args:
        x: float [..., K]; the trainer's values.
        hint: uint8 [..., K * num_bits / 8], as `to_residues` gives it.
        residues: uint8 [..., B], 0 to 7.
        global_scale: FP32 0-d tensor or number, or one for each row; the rollout's, decode side.
        num_bits: 1, 2 or 4.

    Returns:
        uint8 [..., B], E4M3.

    Raises:
        ValueError: Shapes disagree, K is not a multiple of 16, or num_bits is not 1, 2 or 4.
    """
    require_guide(x, hint, residues, num_bits)
    scale_bytes = nearest(residues, own_scale_bytes(x, global_scale))
    zero = (residues == 0) & _without_magnitude(block_words(hint, num_bits), num_bits)
    return scale_bytes.masked_fill_(zero, 0)


def nearest(residues: torch.Tensor, own_bytes: torch.Tensor) -> torch.Tensor:
    """Gives the bytes of 1 to 126 that have the residues and are nearest to the trainer's own.

    Args:
        residues: uint8, 0 to 7.
        own_bytes: uint8 in the same shape.

    Returns:
        uint8 in the same shape.
    """
    own = own_bytes.to(torch.int16).clamp_(max=LARGEST_BYTE)
    steps = (residues - own).add_(4).bitwise_and_(NUM_RESIDUES - 1).sub_(4)
    found = own.add_(steps)
    found += NUM_RESIDUES * (found < 1)
    found -= NUM_RESIDUES * (found > LARGEST_BYTE)
    return found.to(torch.uint8)


def _without_magnitude(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Gives bool [..., B]: blocks of which every lowest bit is 0, or every code 0 or -0."""
    return (words & 0x7777777777777777 if num_bits == 4 else words) == 0
