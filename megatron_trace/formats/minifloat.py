"""Small floats under a given scale: rounding to nearest even, and by the rollout's hint.

Legend: `...` any leading shape, B blocks of a row, N values of a block (16 or 32). A code is a
value as an integer: the index of its magnitude on the ladder, and the sign in the bit above. The
lowest bit of a code is the lowest bit of the mantissa: neighbours on the ladder differ in it.

Rules at the edges, equal for every format:
* nearest: ties go to the even code; beyond the largest value lies the largest code, for Inf and NaN
  too (a format gives a block with a NaN the scale NaN, so the whole block decodes to NaN).
* guided: beyond the largest value the candidates are the two largest. The code of a NaN is that of
  an Inf, but its value is NaN.
* guided by two bits: they are the index of the rollout's magnitude modulo 4, which is taken to be
  the nearest such index to x's place on the ladder. Between the indices i and i + 1 the four from
  i - 1 to i + 2 are nearest; the one that is not on the ladder stands for the fourth in the other
  direction. Never is one of two equally near to be chosen, but where x lies on the ladder itself,
  and there the only candidate is x. The sign is that of x. Where the rollout's index is one of
  these four and its sign that of x, two bits guide like the code.
* The sign of x is kept, also of -0 and of values that round to 0. A block whose scale is 0 has
  codes 0 and values +0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from megatron_trace.formats.constants import E2M1_VALUES

_EXPONENT_MASK = 0x7F800000
_EXPONENT_BIAS = 127
_FRACTION_BITS = 23


def _ladder(mantissa_bits: int, least_exponent: int, num_magnitudes: int) -> tuple[float, ...]:
    steps = 1 << mantissa_bits
    return tuple(
        math.ldexp(
            index if index < steps else steps + index % steps,
            least_exponent - mantissa_bits + max(index >> mantissa_bits, 1) - 1,
        )
        for index in range(num_magnitudes)
    )


@dataclass(frozen=True)
class Minifloat:
    """A float of few bits, with subnormal values.

    Attributes:
        ladder: Its finite magnitudes by index.
        mantissa_bits: Stored bits of the mantissa.
        least_exponent: Exponent of the least normal value.
        code_bits: Bits of a code, the sign included.
    """

    ladder: tuple[float, ...]
    mantissa_bits: int
    least_exponent: int
    code_bits: int

    @cached_property
    def largest(self) -> float:
        """The largest magnitude."""
        return self.ladder[-1]

    @cached_property
    def largest_exponent(self) -> int:
        """Exponent of the largest magnitude."""
        return math.frexp(self.largest)[1] - 1

    @cached_property
    def sign_code(self) -> int:
        """The sign bit of a code."""
        return 1 << (self.code_bits - 1)

    @cached_property
    def beyond(self) -> float:
        """A value between the two largest, of which guided may take either for what lies beyond."""
        return (self.ladder[-2] + self.ladder[-1]) / 2

    @cached_property
    def least_bits(self) -> int:
        """FP32 bits of the least normal value."""
        return (_EXPONENT_BIAS + self.least_exponent) << _FRACTION_BITS

    @cached_property
    def bias_bits(self) -> int:
        """What to add to the FP32 bits of a power of two p for 1.5 * 2^(23 - mantissa_bits) * p.

        Added to a value in [p, 2p), that leaves a multiple of the ladder's spacing there.
        """
        return ((_FRACTION_BITS - self.mantissa_bits) << _FRACTION_BITS) | (1 << 22)


E2M1 = Minifloat(E2M1_VALUES, mantissa_bits=1, least_exponent=0, code_bits=4)
# Code 0x7F is NaN; no code is Inf.
E4M3 = Minifloat(_ladder(3, -6, 0x7F), mantissa_bits=3, least_exponent=-6, code_bits=8)


def nearest(
    fmt: Minifloat, blocks: torch.Tensor, effective: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives `nearest_codes` and `nearest_values` in one pass.

    Args:
        fmt: The small float.
        blocks: FP32 [..., B, N].
        effective: FP32 [..., B]; the scale by which codes are multiplied.

    Returns:
        codes: uint8 [..., B, N].
        values: FP32 [..., B, N].
    """
    biased, bias = _biased(fmt, _quotients(blocks, effective, fmt.largest).nan_to_num_(fmt.largest))
    codes = _nearest_codes(fmt, blocks, biased, bias, effective)
    return codes, _signed_values(biased.sub_(bias.view(torch.float32)), blocks, effective)


def nearest_codes(fmt: Minifloat, blocks: torch.Tensor, effective: torch.Tensor) -> torch.Tensor:
    """Gives the codes of blocks / effective, rounded to nearest even.

    Args:
        fmt: The small float.
        blocks: FP32 [..., B, N].
        effective: FP32 [..., B].

    Returns:
        uint8 [..., B, N].
    """
    biased, bias = _biased(fmt, _quotients(blocks, effective, fmt.largest).nan_to_num_(fmt.largest))
    return _nearest_codes(fmt, blocks, biased, bias, effective)


def nearest_values(fmt: Minifloat, blocks: torch.Tensor, effective: torch.Tensor) -> torch.Tensor:
    """Gives what `nearest_codes` decode to, but NaN where blocks or effective are NaN.

    Args:
        fmt: The small float.
        blocks: FP32 [..., B, N].
        effective: FP32 [..., B].

    Returns:
        FP32 [..., B, N].
    """
    biased, bias = _biased(fmt, _quotients(blocks, effective, fmt.largest))
    return _signed_values(biased.sub_(bias.view(torch.float32)), blocks, effective)


def guided_codes(
    fmt: Minifloat,
    blocks: torch.Tensor,
    effective: torch.Tensor,
    wanted: torch.Tensor,
    *,
    num_bits: int,
) -> torch.Tensor:
    """Gives, of the two codes beside blocks / effective, the one that the rollout's hint says.

    Args:
        fmt: The small float.
        blocks: FP32 [..., B, N]; the trainer's values.
        effective: FP32 [..., B]; the rollout's scales.
        wanted: uint8, as many as blocks; the rollout's one or two lowest bits, or its codes.
        num_bits: 1 or 2 for lowest bits, `fmt.code_bits` for codes.

    Returns:
        uint8 [..., B, N], with the sign of blocks.
    """
    a = _quotients(blocks, effective, fmt.beyond).nan_to_num_(fmt.beyond)
    steps, step = _guide(fmt, a, blocks, wanted, num_bits)
    index = steps.to(torch.int32) + _first_index(fmt, step.view(torch.int32))
    return _signed_codes(fmt, index, blocks, effective)


def guided_values(
    fmt: Minifloat,
    blocks: torch.Tensor,
    effective: torch.Tensor,
    wanted: torch.Tensor,
    *,
    num_bits: int,
) -> torch.Tensor:
    """Gives what `guided_codes` decode to, but NaN where blocks or effective are NaN.

    Args:
        fmt: The small float.
        blocks: FP32 [..., B, N]; the trainer's values.
        effective: FP32 [..., B]; the rollout's scales.
        wanted: uint8, as many as blocks; the rollout's one or two lowest bits, or its codes.
        num_bits: 1 or 2 for lowest bits, `fmt.code_bits` for codes.

    Returns:
        FP32 [..., B, N].
    """
    steps, step = _guide(fmt, _quotients(blocks, effective, fmt.beyond), blocks, wanted, num_bits)
    return _signed_values(steps.mul_(step), blocks, effective)


def decoded(fmt: Minifloat, codes: torch.Tensor, effective: torch.Tensor) -> torch.Tensor:
    """Gives the values of codes.

    Args:
        fmt: The small float.
        codes: uint8 [..., B, N].
        effective: FP32 [..., B].

    Returns:
        FP32 [..., B, N]; +0 where the scale is 0, NaN where the code is NaN.
    """
    magnitudes = torch.full((fmt.sign_code,), math.nan, device=codes.device)
    magnitudes[: len(fmt.ladder)] = torch.tensor(fmt.ladder, device=codes.device)
    values = torch.cat((magnitudes, -magnitudes))[codes.to(torch.int32)] * effective.unsqueeze(-1)
    return values.masked_fill_((effective == 0).unsqueeze(-1), 0.0)


def _quotients(blocks: torch.Tensor, effective: torch.Tensor, limit: float) -> torch.Tensor:
    """Gives |blocks| / effective, at most `limit`; NaN where a NaN or 0 / 0 is."""
    return blocks.abs().div_(effective.unsqueeze(-1)).clamp_(max=limit)


def _power_bits(fmt: Minifloat, a: torch.Tensor) -> torch.Tensor:
    """Gives the FP32 bits of the power of two below a, at least the least normal value."""
    return (a.view(torch.int32) & _EXPONENT_MASK).clamp_(min=fmt.least_bits)


def _biased(fmt: Minifloat, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives a (overwritten) plus a bias that rounds it to the ladder, and the bias as int32 bits.

    The FP32 addition itself rounds to nearest even, and what it rounds to is the ladder's spacing.
    Even multiples of the spacing are the even codes.
    """
    bias = _power_bits(fmt, a).add_(fmt.bias_bits)
    return a.add_(bias.view(torch.float32)), bias


def _nearest_codes(
    fmt: Minifloat,
    blocks: torch.Tensor,
    biased: torch.Tensor,
    bias: torch.Tensor,
    effective: torch.Tensor,
) -> torch.Tensor:
    """Gives codes uint8 [..., B, N] from what `_biased` gives."""
    # The sum's bits exceed the bias's by the steps from the first code of the binade.
    first_index = (bias - (fmt.bias_bits + fmt.least_bits)) >> (_FRACTION_BITS - fmt.mantissa_bits)
    index = first_index.add_(biased.view(torch.int32)).sub_(bias)
    return _signed_codes(fmt, index, blocks, effective)


def _signed_codes(
    fmt: Minifloat, index: torch.Tensor, blocks: torch.Tensor, effective: torch.Tensor
) -> torch.Tensor:
    """Gives codes uint8 from magnitude codes int32 (overwritten), 0 where the scale is 0."""
    signs = (blocks.view(torch.int32) >> (32 - fmt.code_bits)).bitwise_and_(fmt.sign_code)
    codes = index.add_(signs).to(torch.uint8)
    return codes.masked_fill_((effective == 0).unsqueeze(-1), 0)


def _signed_values(
    ladder_values: torch.Tensor, blocks: torch.Tensor, effective: torch.Tensor
) -> torch.Tensor:
    """Gives sign(blocks) * ladder_values (overwritten) * effective, +0 where the scale is 0."""
    values = ladder_values.copysign_(blocks).mul_(effective.unsqueeze(-1))
    return values.masked_fill_((effective == 0).unsqueeze(-1), 0.0)


def _guide(
    fmt: Minifloat, a: torch.Tensor, blocks: torch.Tensor, wanted: torch.Tensor, num_bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives the chosen candidate as a multiple of the ladder's spacing, and that spacing.

    Args:
        fmt: The small float.
        a: FP32 [..., B, N], |blocks| / effective, at most `fmt.beyond`; overwritten.
        blocks: FP32 [..., B, N].
        wanted: uint8, as many as blocks; lowest bits or codes.
        num_bits: 1, 2 or `fmt.code_bits`.
    """
    step_bits = _power_bits(fmt, a).sub_(fmt.mantissa_bits << _FRACTION_BITS)
    step = step_bits.view(torch.float32)
    position = a.div_(step)
    steps = position.floor()
    between = position != steps
    wanted = wanted.reshape(a.shape)
    if num_bits == 1:
        # Steps count from an even code, so their parity is the lowest bit.
        upper = (steps.to(torch.uint8) ^ wanted).bitwise_and_(1).logical_and_(between)
    else:
        index = steps.to(torch.int32) + _first_index(fmt, step_bits)
        if num_bits == 2:
            upper = _nearest_congruent(fmt, wanted, index) > index
        else:
            same_sign = (wanted >= fmt.sign_code) == torch.signbit(blocks)
            upper = ((wanted & (fmt.sign_code - 1)) > index).logical_and_(same_sign)
        upper = upper.logical_and_(between)
    return steps.add_(upper), step


def _nearest_congruent(fmt: Minifloat, residue: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Gives the index on the ladder that is `residue` modulo 4 and nearest to index + 1 / 2.

    Args:
        fmt: The small float.
        residue: uint8.
        index: int32 in the shape of residue, 0 to the index of the largest magnitude but one.

    Returns:
        int32.
    """
    nearest = index - 1 + ((residue - index + 1) & 3)
    nearest += 4 * (nearest < 0)
    return nearest.sub_(4 * (nearest >= len(fmt.ladder)))


def _first_index(fmt: Minifloat, step_bits: torch.Tensor) -> torch.Tensor:
    """Gives the code of 0 steps where the FP32 bits of a step say the binade."""
    least_step_bits = fmt.least_bits - (fmt.mantissa_bits << _FRACTION_BITS)
    return (step_bits - least_step_bits) >> (_FRACTION_BITS - fmt.mantissa_bits)
