"""The row guard: whether a hint's row plausibly belongs to the trainer's row beside it.

A hint of another token, sample or policy looks like noise: its block scales are far from the
trainer's own, and its mantissa bits agree with rounding to nearest about as often as a coin.

Legend: `...` any leading shape of rows, K values of a row, B blocks of a row.

Share of NVFP4 rows accepted with its thresholds (25 % of blocks, 2 steps, 65 % parity), on
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

The other formats, on the first table's rows, with the thresholds of `THRESHOLDS`
(`tests/unit/hints/test_number_formats.py`):

    the trainer's values      K =  32     64    128   2048
    4over6   within 10 %         .971   .999  1.000  1.000
             another row's       .014   .002   .000   .000
    mxfp4    within 10 %         .971   .997  1.000  1.000
             within 30 %         .183   .121   .039   .000
             within 100 %        .024   .003   .000   .000
             another row's       .008   .001   .000   .000
    mxfp8    within 1 %         1.000  1.000  1.000  1.000
             within 3 %          .857   .916   .964  1.000
             within 10 %         .059   .010   .000   .000
             another row's       .046   .006   .000   .000

* 4over6: a block may have either of two scales, so a wrong one is seldomer far from both.
* MX: the next scale is a factor of 2 away, and noise of 3 % moves 3 % of the blocks there: allowing
  none would refuse 6 % of the true rows of two blocks. But 81 % of a wrong row's blocks are within
  one such step as well, so that parity alone decides; hence 70 % instead of 65 % for MXFP4, which
  with 65 % would take .047 and .006 of the wrong rows of 32 and 64 values. True rows can afford it:
  their parity is .84 at 10 %, that of NVFP4 .82.
* MXFP8: values lie 6 to 12 % apart, so that parity falls fast (.91 at 1 %, .72 at 3 %, .50 at
  10 %): there a lowest bit is of no use, and the guard says so. Its rows are long.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

from megatron_trace.formats import minifloat, ops
from megatron_trace.formats.blocks import fp32_blocks
from megatron_trace.formats.number_format import NVFP4, NumberFormat
from megatron_trace.hints.codec import payload_bits
from megatron_trace.hints.types import require_hint_bits


@dataclass(frozen=True)
class GuardThresholds:
    """What a row must have to be accepted.

    Attributes:
        max_far_blocks: Share of a row's blocks that may be far.
        max_scale_steps: Steps, of which a factor of 2 has eight, between the two block scales
            beyond which a block is far.
        min_parity_agreement: Share of a row's lowest bits that must agree.
    """

    max_far_blocks: float
    max_scale_steps: int
    min_parity_agreement: float

    @property
    def limits(self) -> tuple[int, float, float]:
        """The thresholds as kernels take them."""
        # Triton would compile a share of 1 that is an integer into the kernel.
        return self.max_scale_steps, float(self.max_far_blocks), float(self.min_parity_agreement)


# By number format.
THRESHOLDS = {
    "nvfp4": GuardThresholds(0.25, 2, 0.65),
    "nvfp4_4over6": GuardThresholds(0.25, 2, 0.65),
    "mxfp4": GuardThresholds(0.25, 8, 0.7),
    "mxfp8": GuardThresholds(0.25, 8, 0.65),
}


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
    global_scale: torch.Tensor | float | None,
    *,
    num_bits: int,
    thresholds: GuardThresholds,
    number_format: NumberFormat = NVFP4,
    add_up: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> RowHealth:
    """Gives which rows of a hint may guide x, and the two numbers that decide it.

    Where ranks have different columns of the same rows, a row is judged by all of them, so that it
    is accepted on all or on none.

    Args:
        x: float [..., K]; the trainer's values.
        hint: uint8 [..., K * num_bits / 8]; packed lowest bits, or codes.
        scale_bytes: uint8 [..., B]; the rollout's block scales, restored if residues were stored.
        global_scale: FP32 0-d tensor or number; the rollout's global scale, decode side. None if
            the format has none.
        num_bits: Bits per value of the hint.
        thresholds: What decides.
        number_format: Format of the hint.
        add_up: Gives sums of int64 counts [4, ...] over the ranks that have other columns; None if
            x has all columns.

    Raises:
        ValueError: Shapes disagree, K is not a multiple of the block size, or num_bits is not that
            of a hint of the format.
    """
    counts = _counts(x, hint, scale_bytes, global_scale, number_format, num_bits, thresholds)
    return _health(counts if add_up is None else add_up(counts), thresholds)


@torch.no_grad()
def guided_rows(
    x: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    has_hint: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    *,
    num_bits: int,
    thresholds: GuardThresholds,
    number_format: NumberFormat = NVFP4,
    add_up: Callable[[torch.Tensor], torch.Tensor] | None = None,
    implementation: ops.Implementation = "auto",
) -> torch.Tensor:
    """Gives which rows have a hint that `accept_rows` accepts.

    Args:
        x: float [N, K]; see `accept_rows`, like the others.
        hint: uint8 [N, K * num_bits / 8].
        scale_bytes: uint8 [N, B].
        has_hint: bool [N]; rows that have a hint.
        global_scale: See there.
        num_bits: See there.
        thresholds: See there.
        number_format: See there.
        add_up: See there.
        implementation: `torch`, `triton`, or `auto` (Triton where x is on a GPU).

    Returns:
        bool [N].

    Raises:
        ValueError: See there; or the implementation cannot run on x.
    """
    if not ops.takes_triton(implementation, x):
        health = accept_rows(
            x,
            hint,
            scale_bytes,
            global_scale,
            num_bits=num_bits,
            thresholds=thresholds,
            number_format=number_format,
            add_up=add_up,
        )
        return has_hint & health.accepted
    require_hint_bits(num_bits, number_format)
    given = x, hint, scale_bytes
    how = {"num_bits": num_bits}
    if add_up is None:
        limits = thresholds.limits
        return kernels().accepted_rows(*given, has_hint, global_scale, number_format, limits, **how)
    # Only here: Triton looks for a GPU driver when it is imported.
    from megatron_trace.formats import kernels_guard

    how["max_scale_steps"] = thresholds.max_scale_steps
    counts = kernels_guard.guard_counts(*given, global_scale, number_format, **how)
    return has_hint & _health(add_up(counts.long()), thresholds).accepted


@functools.cache
def kernels() -> ModuleType:
    """Gives the kernels of guard and rounding."""
    # Only here: Triton looks for a GPU driver when it is imported.
    from megatron_trace.formats import kernels_guided

    return kernels_guided


def _counts(
    x: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    number_format: NumberFormat,
    num_bits: int,
    thresholds: GuardThresholds,
) -> torch.Tensor:
    """Gives int64 [4, ...]: blocks that are far, that count, bits that agree, that count."""
    require_hint_bits(num_bits, number_format)
    bits = payload_bits(hint, num_bits)
    expected = (*x.shape[:-1], x.shape[-1] // number_format.block_size)
    if bits.shape != x.shape or scale_bytes.shape != expected:
        raise ValueError(
            f"hint and scale_bytes must cover x {tuple(x.shape)}; got hint {tuple(hint.shape)} at "
            f"{num_bits} bit and scale_bytes {tuple(scale_bytes.shape)}"
        )
    place = number_format, x, scale_bytes, global_scale
    return torch.stack(
        [*_far_blocks(*place, thresholds.max_scale_steps), *_agreeing_bits(*place, bits)]
    )


def _health(counts: torch.Tensor, thresholds: GuardThresholds) -> RowHealth:
    far, num_blocks, agreeing, num_counted = counts
    far_block_share = far / num_blocks.clamp(min=1)
    parity_agreement = (agreeing / num_counted.clamp(min=1)).masked_fill(num_counted == 0, 1.0)
    return RowHealth(
        accepted=(far_block_share <= thresholds.max_far_blocks)
        & (parity_agreement >= thresholds.min_parity_agreement),
        far_block_share=far_block_share,
        parity_agreement=parity_agreement,
    )


def _far_blocks(
    number_format: NumberFormat,
    x: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    max_scale_steps: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives how many blocks of each row are far, and how many count."""
    distance = number_format.specification.scale_distance(x, scale_bytes, global_scale)
    # Where both bytes are 0, the block is zero on both sides.
    counted = (distance != 0) | (scale_bytes != 0)
    return (distance > max_scale_steps).sum(-1), counted.sum(-1)


def _agreeing_bits(
    number_format: NumberFormat,
    x: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    bits: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives how many lowest bits of each row agree, and how many count."""
    effective = number_format.effective_scales(scale_bytes, global_scale)
    blocks = fp32_blocks(x, number_format.block_size)
    codes = minifloat.nearest_codes(number_format.element, blocks, effective)
    counted = effective != 0
    agree = (codes & 1) == bits.view_as(codes)
    num_counted = counted.sum(-1) * number_format.block_size
    return (agree & counted.unsqueeze(-1)).sum((-2, -1)), num_counted
