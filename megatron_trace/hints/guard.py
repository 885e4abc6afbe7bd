"""The row guard: whether a hint's row plausibly belongs to the trainer's row beside it.

A hint of another token, sample or policy looks like noise: its block scales are far from the
trainer's own, and its mantissa bits agree with rounding to nearest about as often as a coin.

Legend: `...` any leading shape of rows, K values of a row, B = K / 16 blocks of a row.

Share of rows accepted with the default thresholds (25 % of blocks, 2 steps, 65 % parity), on
Gaussian rows with a log-normal size each (`tests/unit/hints/test_guard.py`):

    the trainer's values                   K = 32     K = 64    K = 128   K = 2048
    within 3 %                              1.000      1.000      1.000      1.000
    within 10 %                              .938       .994       .999      1.000
    within 30 %                              .129       .112       .040       .000
    within 100 % (stale)                     .004       .001       .000       .000
    another row's or another sample's        .004       .001       .000       .000

Block scales kept as residues are restored beside the trainer's own, never more than 4 steps from
them but at the ends of the range and for blocks of zeros: the guard then relies on parity first.
What is left of the other number: in a wrong row 3 of 8 blocks still look far, which is above the
threshold. Accepted with raw scales, and with residues (`tools/measure_residues.py`; noise here is
a share of the row's root mean square, which changes small values more):

    noise                      K = 64           K = 128          K = 2048
    3 % and less            1.000  1.000     1.000  1.000     1.000  1.000
    10 %                     .832   .832      .894   .894     1.000  1.000
    30 %                     .039   .039      .004   .004      .000   .000
    100 % (stale)            .001   .005      .000   .000      .000   .000
    another row's            .001   .006      .000   .000      .000   .000
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_trace.formats import BLOCK_SIZE, minifloat, own_scale_bytes, scales_e4m3
from megatron_trace.formats.blocks import fp32_blocks
from megatron_trace.formats.checks import as_row_scales
from megatron_trace.formats.minifloat import E2M1
from megatron_trace.hints.codec import payload_bits


@dataclass(frozen=True)
class RowHealth:
    """What the guard found in every row.

    Attributes:
        accepted: bool [...]; whether the row may guide.
        far_block_share: FP32 [...]; share of the blocks whose scale bytes are far apart. Blocks
            that are zero on both sides say nothing and do not count; 0 if there are no others.
        parity_agreement: FP32 [...]; share of the mantissa bits that agree with rounding to
            nearest under the rollout's scale. Blocks that are zero in the rollout do not count;
            1 if there are no others.
    """

    accepted: torch.Tensor
    far_block_share: torch.Tensor
    parity_agreement: torch.Tensor


@torch.no_grad()
def accept_rows(
    x: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor | float,
    *,
    num_bits: int,
    max_far_blocks: float,
    max_scale_steps: int,
    min_parity_agreement: float,
) -> RowHealth:
    """Gives which rows of a hint may guide x, and the two numbers that decide it.

    Args:
        x: float [..., K]; the trainer's values.
        hint: uint8 [..., K * num_bits / 8]; packed lowest bits (1, 2) or codes (4).
        scale_bytes: uint8 [..., B]; the rollout's block scales, restored if residues were stored.
        global_scale: FP32 0-d tensor or number; the rollout's global scale, decode side.
        num_bits: 1, 2 or 4.
        max_far_blocks: Share of a row's blocks that may be far.
        max_scale_steps: E4M3 steps between the two scale bytes beyond which a block is far.
        min_parity_agreement: Share of a row's mantissa bits that must agree.

    Raises:
        ValueError: Shapes disagree, K is not a multiple of 16, or num_bits is not 1, 2 or 4.
    """
    bits = payload_bits(hint, num_bits)
    if bits.shape != x.shape or scale_bytes.shape != (*x.shape[:-1], x.shape[-1] // BLOCK_SIZE):
        raise ValueError(
            f"hint and scale_bytes must cover x {tuple(x.shape)}; got hint {tuple(hint.shape)} at "
            f"{num_bits} bit and scale_bytes {tuple(scale_bytes.shape)}"
        )
    far_block_share = _far_block_share(x, scale_bytes, global_scale, max_scale_steps)
    parity_agreement = _parity_agreement(x, bits, scale_bytes, global_scale)
    return RowHealth(
        accepted=(far_block_share <= max_far_blocks) & (parity_agreement >= min_parity_agreement),
        far_block_share=far_block_share,
        parity_agreement=parity_agreement,
    )


def _far_block_share(
    x: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor | float,
    max_scale_steps: int,
) -> torch.Tensor:
    own_bytes = own_scale_bytes(x, global_scale)
    # Positive E4M3 values are ordered like their bytes, so bytes differ by the steps between them.
    far = (own_bytes.int() - scale_bytes.int()).abs() > max_scale_steps
    counted = (own_bytes != 0) | (scale_bytes != 0)
    return (far & counted).sum(-1) / counted.sum(-1).clamp(min=1)


def _parity_agreement(
    x: torch.Tensor,
    bits: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor | float,
) -> torch.Tensor:
    effective = scales_e4m3.effective(scale_bytes, as_row_scales(global_scale, x))
    codes = minifloat.nearest_codes(E2M1, fp32_blocks(x, BLOCK_SIZE), effective)
    counted = effective != 0
    agree = (codes & 1) == bits.view_as(codes)
    num_counted = counted.sum(-1) * BLOCK_SIZE
    share = (agree & counted.unsqueeze(-1)).sum((-2, -1)) / num_counted.clamp(min=1)
    return share.masked_fill(num_counted == 0, 1.0)
