"""Large inputs built by integer arithmetic, hence the same bits on every processor.

torch.randn is not: its vectorised path differs between instruction sets. Golden files of other
libraries hold the differences from ours, which only works on equal inputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

ROWS, COLUMNS = 1024, 512


def integer_inputs(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Gives tensors of `ROWS` x `COLUMNS` by name.

    Args:
        dtype: torch.float32 or torch.bfloat16; the FP32 values are rounded to it.
    """
    return {
        name: make(torch.Generator().manual_seed(seed)).to(dtype)
        for seed, (name, make) in enumerate(_MAKERS.items())
    }


def _bell(generator: torch.Generator) -> torch.Tensor:
    """Sums of twelve uniform integers: close to a Gauss distribution of variance 1."""
    total = torch.zeros(ROWS, COLUMNS, dtype=torch.int32)
    for _ in range(12):
        total += torch.randint(0, 1 << 16, total.shape, generator=generator, dtype=torch.int32)
    return (total - 6 * (1 << 16)).to(torch.float32) * 2.0**-16


def _scaled_blocks(generator: torch.Generator) -> torch.Tensor:
    """The same with blocks of 16 scaled by 1 to 31/16 times 2^-8 to 2^5."""
    values = _bell(generator).unflatten(-1, (-1, 16))
    shape = (*values.shape[:2], 1)
    factor = torch.randint(16, 32, shape, generator=generator).to(torch.float32) / 16
    exponent = torch.randint(127 - 8, 127 + 6, shape, generator=generator, dtype=torch.int32)
    # FP32 rounds the product: correctly, hence everywhere alike.
    return (values * factor * (exponent << 23).view(torch.float32)).flatten(-2)


def _binades(generator: torch.Generator) -> torch.Tensor:
    """Random mantissas in 16 binades: heavy tails."""
    fraction = torch.randint(0, 1 << 23, (ROWS, COLUMNS), generator=generator, dtype=torch.int32)
    shape = fraction.shape
    exponent = torch.randint(127 - 12, 127 + 4, shape, generator=generator, dtype=torch.int32)
    sign = torch.randint(0, 2, shape, generator=generator, dtype=torch.int32)
    return ((sign << 31) | (exponent << 23) | fraction).view(torch.float32)


def _ties(generator: torch.Generator) -> torch.Tensor:
    """Multiples of 1/4 up to 6, each block of 16 with a 6: at scale 1 most lie on a bound."""
    x = torch.randint(-24, 25, (ROWS, COLUMNS), generator=generator) / 4
    x[:, ::16] = 6.0
    return x


_MAKERS: dict[str, Callable[[torch.Generator], torch.Tensor]] = {
    "bell": _bell,
    "scaled_blocks": _scaled_blocks,
    "binades": _binades,
    "ties": _ties,
}
