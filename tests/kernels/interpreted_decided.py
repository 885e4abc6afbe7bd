"""Compares the octets that 4over6 decides in pairs of BF16 with the specification, one by one.

A kernel rounds a tile anew if one of its blocks is undecided, so that what it stores would not show
a wrong decision beside one. Prints how many octets were compared, and how many of all.
"""

import sys

import emulated_ptx
import torch
import triton
import triton.language as tl

from megatron_trace.formats import four_over_six
from megatron_trace.formats import kernels_bf16_four_over_six as pairs_of_4over6

ROWS, COLUMNS = 4, 4096
OCTETS = 1024


@triton.jit
def _recorded_kernel(
    x_ptr,
    y_ptr,
    word_ptr,
    byte_ptr,
    decided_ptr,
    scale_ptr,
    ERROR: tl.constexpr,
    T: tl.constexpr,
):
    octet = tl.program_id(0) * T + tl.arange(0, T)
    at = octet[:, None] * 4 + tl.arange(0, 4)[None, :]
    scale = tl.load(scale_ptr)
    y, word, byte, decided = pairs_of_4over6.recorded(tl.load(x_ptr + at), scale, 1, ERROR, T)
    tl.store(y_ptr + at, y)
    tl.store(word_ptr + octet, word)
    tl.store(byte_ptr + octet, byte)
    tl.store(decided_ptr + octet, decided.to(tl.int32))


def compare(x: torch.Tensor, scale: torch.Tensor, error: str) -> int:
    """Gives how many octets of BF16 x are decided; each must be as specified."""
    num_octets = x.numel() // 8
    y = torch.zeros(num_octets, 4, dtype=torch.int32)
    word, byte, decided = torch.zeros(3, num_octets, dtype=torch.int32)
    arguments = x.view(torch.int32), y, word, byte, decided, scale.view(1)
    _recorded_kernel[(num_octets // OCTETS,)](*arguments, ERROR=error, T=OCTETS)
    expected_y, hint, scale_bytes = four_over_six.rtn_record(x, scale, num_bits=1, error=error)
    same = (y == expected_y.view(torch.int32).view_as(y)).all(1)
    same &= word == hint.flatten()
    same &= byte == scale_bytes.flatten().repeat_interleave(2)
    wrong = ((decided != 0) & ~same).nonzero()
    assert len(wrong) == 0, f"{error}, scale {scale}: {len(wrong)} octets, the first {wrong[0]}"
    return int(decided.sum())


def _products(scale: torch.Tensor) -> torch.Tensor:
    """Gives products of quarter steps and scales, among which ties and equal errors are many."""
    steps = torch.randint(-24, 25, (ROWS, COLUMNS // 16, 16)) / 4
    scales = torch.randint(0x20, 0x7E, (ROWS, COLUMNS // 16, 1), dtype=torch.uint8)
    return (steps * scales.view(torch.float8_e4m3fn).float() * scale).flatten(1)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    emulated_ptx.install()
    decided = compared = 0
    for error in ("mse", "mae"):
        for scale in (torch.tensor(0.0021), torch.tensor(2.0**-9)):
            for x in (torch.randn(ROWS, COLUMNS), _products(scale)):
                decided += compare(x.bfloat16(), scale, error)
                compared += x.numel() // 8
    sys.stdout.write(f"{decided} of {compared} octets")


if __name__ == "__main__":
    main()
