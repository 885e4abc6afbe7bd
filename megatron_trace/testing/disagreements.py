"""Why a block of another library differs from ours: every reason is a name and a condition.

Legend: D differing blocks, N values of a block (16 or 32). Conditions are evaluated in FP64:
"beside" means a distance that FP32 roundings explain, and nothing more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron_trace.formats import minifloat, scales_e8m0
from megatron_trace.formats.minifloat import E2M1, Minifloat
from megatron_trace.testing.golden import Differences, Encoded, Format, Input

# A quotient of up to four FP32 operations is off by at most 4 * 2^-24; twice that.
_BESIDE = 8 * 2.0**-24
# A sum of 16 squares in FP32, whose terms are differences of nearly equal numbers.
_NEARLY_TIED = 1e-5


@dataclass(frozen=True)
class Facts:
    """What is known of differing blocks.

    Attributes:
        element: Format of the codes.
        x: FP32 [D, N].
        codes: uint8 [D, N]; ours.
        scale_bytes: uint8 [D]; ours.
        their_codes: uint8 [D, N].
        their_bytes: uint8 [D].
        global_scale: FP32 [D], or None for the MX formats.
    """

    element: Minifloat
    x: torch.Tensor
    codes: torch.Tensor
    scale_bytes: torch.Tensor
    their_codes: torch.Tensor
    their_bytes: torch.Tensor
    global_scale: torch.Tensor | None

    @property
    def is_mx(self) -> bool:
        """Whether scales are powers of two."""
        return self.global_scale is None

    @property
    def amax(self) -> torch.Tensor:
        """FP64 [D]."""
        return self.x.abs().amax(-1).double()

    @property
    def quotient(self) -> torch.Tensor:
        """FP64 [D]; the block scale before rounding that maps the largest magnitude to 6."""
        assert self.global_scale is not None, "MX formats have no quotient by a global scale"
        return self.amax / (6 * self.global_scale.double())

    def effective(self, scale_bytes: torch.Tensor) -> torch.Tensor:
        """Gives the FP32 [D] scales that codes are multiplied by under given bytes."""
        if self.global_scale is None:
            return scales_e8m0.decode(scale_bytes)
        return scale_bytes.view(torch.float8_e4m3fn).float() * self.global_scale


def facts(fmt: Format, given: Input, ours: Encoded, theirs: Differences) -> Facts:
    """Gives the facts of the differing blocks.

    Args:
        fmt: The format.
        given: The input.
        ours: Our codes uint8 [rows, K] and scale bytes uint8 [rows, B].
        theirs: The blocks that differ.
    """
    at = theirs.blocks
    scale = fmt.global_scale(given) if fmt.global_scale else None
    return Facts(
        fmt.element,
        fmt.x(given).float().reshape(-1, fmt.size)[at],
        ours[0].reshape(-1, fmt.size)[at],
        ours[1].flatten()[at],
        theirs.codes,
        theirs.scale_bytes,
        None if scale is None else scale.expand(ours[1].shape).flatten()[at],
    )


Reason = Callable[[Facts], torch.Tensor]


def explain(given: Facts, reasons: Sequence[Reason]) -> tuple[Counter[str], torch.Tensor]:
    """Gives how many blocks the first fitting reason explains, and which none does.

    Args:
        given: The facts.
        reasons: Functions of this file, the strictest first.

    Returns:
        counts: Blocks by name of the reason.
        unexplained: bool [D].
    """
    counts: Counter[str] = Counter()
    unexplained = torch.ones(len(given.x), dtype=torch.bool)
    for reason in reasons:
        explained = reason(given) & unexplained
        counts[reason.__name__] += int(explained.sum())
        unexplained &= ~explained
    return +counts, unexplained


def sign_of_zero(given: Facts) -> torch.Tensor:
    """Equal bytes, and codes that differ only in the sign of a zero."""
    return (given.their_bytes == given.scale_bytes) & _equal_but_for_zeros(
        given, given.their_codes, given.codes
    )


def code_beside_bound(given: Facts) -> torch.Tensor:
    """Equal bytes, and codes one step off whose value lies beside the bound between the two."""
    return (given.their_bytes == given.scale_bytes) & _follow(given)


def nan_block(given: Facts) -> torch.Tensor:
    """A block with a NaN: both scales are NaN, whatever its sign, and codes do not matter."""
    nan_byte = 0xFF if given.is_mx else 0x7F
    return given.x.isnan().any(-1) & ((given.their_bytes & nan_byte) == nan_byte)


def scale_beside_bound(given: Facts) -> torch.Tensor:
    """A scale one step off whose quotient lies beside the bound; the codes follow from it."""
    return _scale_beside(given, given.quotient) & _follow(given)


def candidate_beside_bound(given: Facts) -> torch.Tensor:
    """4over6: a candidate whose quotient lies beside a bound, hence another pair to choose from."""
    beside = torch.zeros_like(given.their_bytes, dtype=torch.bool)
    known = torch.zeros_like(beside)
    for factor in (1.0, 1.5):
        below, above = (
            _nearest_byte(factor * given.quotient * (1 + distance))
            for distance in (-_BESIDE, _BESIDE)
        )
        beside |= below != above
        known |= (given.their_bytes == below) | (given.their_bytes == above)
    return beside & known & _follow(given)


def no_floor(given: Facts) -> torch.Tensor:
    """A scale that rounds to 0 in E4M3: byte 0 and zeros there, the least scale with us."""
    return (given.their_bytes == 0) & (given.quotient <= 2.0**-10 * (1 + _BESIDE))


def least_scale_is_normal(given: Facts) -> torch.Tensor:
    """A scale clamped to E4M3's least normal value, 2^-6; the codes follow from it."""
    return (given.their_bytes == 0x08) & (given.quotient < 2.0**-6) & _follow(given)


def scale_beyond_448_is_nan(given: Facts) -> torch.Tensor:
    """A block scale of 464 or more: torch's cast to E4M3 gives NaN, ours is clamped to 448."""
    return (given.their_bytes == 0x7F) & (1.5 * given.quotient >= 464)


def degenerate_global_scale(given: Facts) -> torch.Tensor:
    """A global scale whose reciprocal, or itself, FP32 does not hold as a normal number."""
    assert given.global_scale is not None, "MX formats have no global scale"
    scale = given.global_scale
    return ~((scale >= 2.0**-126) & (1 / scale >= 2.0**-126))


def choice_beside_tie(given: Facts) -> torch.Tensor:
    """4over6: the other candidate, of nearly the same error; the codes follow from it."""
    ours, theirs = (
        _error(given, scale_bytes) for scale_bytes in (given.scale_bytes, given.their_bytes)
    )
    tied = torch.zeros_like(given.x[:, 0], dtype=torch.bool)
    for exponent in (1, 2):
        difference = (ours[exponent] - theirs[exponent]).abs()
        tied |= difference <= _NEARLY_TIED * torch.maximum(ours[exponent], theirs[exponent])
    return tied & _follow(given)


def error_beyond_fp32(given: Facts) -> torch.Tensor:
    """4over6: errors in which code * scale * largest magnitude of the tensor overflows FP32."""
    return (given.amax * 6 * 256 > torch.finfo(torch.float32).max) & _follow(given)


def code_beyond_7(given: Facts) -> torch.Tensor:
    """fouroversix: a value beyond 7 in either candidate, under a scale that rounded down much.

    It rounds 7 and more to 8, whose code is that of -0, and counts the error of 8 in its choice.
    """
    beyond = torch.zeros_like(given.x[:, 0], dtype=torch.bool)
    for factor in (1.0, 1.5):
        effective = given.effective(_nearest_byte(factor * given.quotient)).double()
        beyond |= given.amax / effective >= 7 * (1 - _BESIDE)
    return beyond


def byte_0(given: Facts) -> torch.Tensor:
    """MX: both bytes are 0; the library divides by something for all that, we give zeros."""
    return (given.their_bytes == 0) & (given.scale_bytes == 0)


def rounded_logarithm(given: Facts) -> torch.Tensor:
    """MX: a largest magnitude just above a power of two, whose FP32 log2 is a whole number."""
    ratio = given.amax / given.element.largest
    below = torch.exp2(torch.floor(torch.log2(ratio)))
    just_above = (ratio / below - 1).abs() <= 1e-5
    return just_above & (given.their_bytes.int() == given.scale_bytes.int() - 1) & _follow(given)


def subnormal_scale(given: Facts) -> torch.Tensor:
    """MX: a scale of 2^-127 or less, rounded up to the byte 1 of 2^-126; byte 0 with us."""
    return (given.their_bytes == 1) & (given.scale_bytes == 0)


def inf_block(given: Facts) -> torch.Tensor:
    """MX: a block with an Inf, whose other values its Inf scale turns into NaN."""
    return given.x.isinf().any(-1) & ~given.x.isnan().any(-1)


def nan_scale_is_byte_0(given: Facts) -> torch.Tensor:
    """MX: a block with a NaN and byte 0: 255 rounded up wraps around, a cast of NaN gives 0."""
    return given.x.isnan().any(-1) & (given.their_bytes == 0)


def ties_go_down(given: Facts) -> torch.Tensor:
    """MXFP4: equal bytes, and values on a bound have the code below it, be it even or odd."""
    if given.element is not E2M1:
        return torch.zeros_like(given.their_bytes, dtype=torch.bool)
    a = given.x.abs() / given.effective(given.their_bytes).unsqueeze(-1)
    # Of the bounds, those below an even code: there, ties to even go up.
    tie = (a == 0.75) | (a == 1.75) | (a == 3.5)
    raised = given.their_codes + tie.to(torch.uint8)
    return (given.their_bytes == given.scale_bytes) & _equal_but_for_zeros(
        given, raised, given.codes
    )


def _equal_but_for_zeros(given: Facts, codes: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    magnitude = given.element.sign_code - 1
    zeros = ((codes & magnitude) == 0) & ((others & magnitude) == 0)
    return ((codes == others) | zeros).all(-1)


def _follow(given: Facts) -> torch.Tensor:
    """Whether their codes are the nearest under their own scale, but beside a bound."""
    effective = given.effective(given.their_bytes)
    expected = minifloat.nearest_codes(given.element, given.x, effective)
    magnitude = given.element.sign_code - 1
    ladder = torch.tensor(given.element.ladder, dtype=torch.float64)
    theirs, nearest = (
        (codes & magnitude).long().clamp(max=len(ladder) - 1)
        for codes in (given.their_codes, expected)
    )
    bound = (ladder[theirs] + ladder[nearest]) / 2
    a = given.x.abs().double() / effective.double().unsqueeze(-1)
    one_step = (theirs - nearest).abs() == 1
    same_sign = (given.their_codes ^ expected) < given.element.sign_code
    beside = one_step & same_sign & ((a / bound - 1).abs() <= _BESIDE)
    zeros = (theirs == 0) & (nearest == 0)
    return ((given.their_codes == expected) | beside | zeros).all(-1)


def _scale_beside(given: Facts, quotient: torch.Tensor) -> torch.Tensor:
    """Whether the bytes are neighbours and the quotient lies beside the bound between them."""
    theirs, ours = (
        scale_bytes.view(torch.float8_e4m3fn).double()
        for scale_bytes in (given.their_bytes, given.scale_bytes)
    )
    neighbours = (given.their_bytes.int() - given.scale_bytes.int()).abs() == 1
    return neighbours & ((quotient / ((theirs + ours) / 2) - 1).abs() <= _BESIDE)


def _nearest_byte(quotient: torch.Tensor) -> torch.Tensor:
    return quotient.clamp(2.0**-9, 448).float().to(torch.float8_e4m3fn).view(torch.uint8)


def _error(given: Facts, scale_bytes: torch.Tensor) -> dict[int, torch.Tensor]:
    """Gives the FP64 sums of errors and of squared errors under given bytes."""
    effective = given.effective(scale_bytes)
    codes = minifloat.nearest_codes(E2M1, given.x, effective)
    values = minifloat.decoded(E2M1, codes, effective).double()
    difference = (values - given.x.double()).abs()
    return {exponent: (difference**exponent).sum(-1) for exponent in (1, 2)}
