"""Power-of-two block scales of the MX formats: a byte b stands for 2^(b - 127), 255 for NaN.

With m the largest magnitude of the elements (6 for E2M1, 448 for E4M3), e its exponent (2, 8), and
amax the largest magnitude of a block, the rules that libraries use are

* `rceil`: 2^ceil(log2(amax / m)); never saturates. cuBLAS, the instruction `cvt.rp` of Blackwell,
  Transformer Engine, ModelOpt, torchao RCEIL, fouroversix.
* `floor`: 2^(floor(log2 amax) - e); saturates where amax / scale is in (m, 2^(e + 1)). OCP MX 1.0
  section 6.3; torchao's default.
* `even`: the same of amax rounded to as many mantissa bits as the elements have; saturates where
  amax / scale is in (6, 7), or (448, 496). torchao EVEN, the kernels for AMD in Modular.
* `ceil`: 2^(ceil(log2 amax) - e); never saturates. torchao CEIL, fouroversix `static_4`.

All are integer arithmetic on FP32 bits, as in hardware: log2 in FP32 rounds away the last bit of an
amax just above a power of two (the tests name who does so).

Rules at the edges: a byte is at least 0 and at most 254; an amax of NaN has byte 255. A block with
byte 0 holds zeros for whoever quantises; `decode` gives its 2^-127 all the same.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from megatron_trace.formats.minifloat import Minifloat

ScaleRule = Literal["rceil", "floor", "even", "ceil"]

# What rollout engines on NVIDIA hardware do; both sides must do the same.
DEFAULT_RULE: ScaleRule = "rceil"

_FRACTION_BITS = 23
_FRACTION_MASK = (1 << _FRACTION_BITS) - 1
_LARGEST_BYTE = 254
_NAN_BYTE = 255
# FP32 bits of 2^-127, the scale of byte 0, which is subnormal there.
_LEAST_SCALE_BITS = 1 << 22


def scale_bytes_of(amax: torch.Tensor, element: Minifloat, rule: ScaleRule) -> torch.Tensor:
    """Gives the scales of blocks.

    Args:
        amax: FP32 [...], largest magnitudes; not negative.
        element: Format of the elements.
        rule: One of the rules above.

    Returns:
        uint8 [...].

    Raises:
        ValueError: Unknown rule.
    """
    if rule == "rceil":
        exponents = _exponents_rounded_up(amax / element.largest)
    elif rule == "floor":
        exponents = _exponents(amax) - element.largest_exponent
    elif rule == "even":
        half_step = 1 << (_FRACTION_BITS - element.mantissa_bits - 1)
        exponents = _exponents(amax, half_step) - element.largest_exponent
    elif rule == "ceil":
        exponents = _exponents_rounded_up(amax) - element.largest_exponent
    else:
        known = ", ".join(get_args(ScaleRule))
        raise ValueError(f"scale_rule must be one of {known}; got {rule!r}")
    found = exponents.clamp_(0, _LARGEST_BYTE).to(torch.uint8)
    return found.masked_fill_(amax.isnan(), _NAN_BYTE)


def decode(scale_bytes: torch.Tensor) -> torch.Tensor:
    """Gives the scales that bytes stand for.

    Args:
        scale_bytes: uint8 [...].

    Returns:
        FP32 [...]; 2^-127, subnormal in FP32, for byte 0; NaN for byte 255.
    """
    bits = (scale_bytes.to(torch.int32) << _FRACTION_BITS).clamp_(min=_LEAST_SCALE_BITS)
    return bits.view(torch.float32).masked_fill(scale_bytes == _NAN_BYTE, torch.nan)


def effective(scale_bytes: torch.Tensor) -> torch.Tensor:
    """Gives the scales to quantise with: those of `decode`, but 0 for byte 0.

    Args:
        scale_bytes: uint8 [...].

    Returns:
        FP32 [...].
    """
    return decode(scale_bytes).masked_fill_(scale_bytes == 0, 0.0)


def _exponents(amax: torch.Tensor, addend: int = 0) -> torch.Tensor:
    """Gives the biased exponents int32 of FP32 values whose bits have been raised by `addend`."""
    return (amax.view(torch.int32) + addend) >> _FRACTION_BITS


def _exponents_rounded_up(values: torch.Tensor) -> torch.Tensor:
    """Gives the biased exponents int32 of the least power of two that is not below; 0 is 2^-127."""
    exponents = _exponents(values, _FRACTION_MASK)
    return exponents.masked_fill_(values.view(torch.int32) <= _LEAST_SCALE_BITS, 0)
