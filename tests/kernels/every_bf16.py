"""Compares parts of the kernels that take BF16 with torch, for each BF16 number; a program.

python every_bf16.py silu cuda              prints how many numbers were compared
python every_bf16.py scale_bytes DEVICE     likewise, for TRITON_INTERPRET too
"""

import sys

import torch
import triton
import triton.language as tl

from megatron_trace.formats import kernels_bf16_mx, kernels_fused
from megatron_trace.formats.minifloat import E2M1, E4M3
from megatron_trace.formats.scales_e8m0 import scale_bytes_of
from megatron_trace.testing.assertions import assert_same_bytes


@triton.jit
def _silu_kernel(gate_ptr, y_ptr, N: tl.constexpr):
    pairs = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y_ptr + pairs, kernels_fused.silu_pairs(tl.load(gate_ptr + pairs)))


@triton.jit
def _scale_bytes_kernel(amax_ptr, byte_ptr, LARGEST: tl.constexpr, EXPONENT: tl.constexpr):
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    byte = kernels_bf16_mx.rceil_byte(tl.load(amax_ptr + at), LARGEST, EXPONENT)
    tl.store(byte_ptr + at, byte.to(tl.uint8))


def _numbers(device: str) -> torch.Tensor:
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(device)


def compare_silu(device: str) -> int:
    """Compares BF16 silu with torch's on the same device."""
    gates = _numbers(device)
    y = torch.empty_like(gates)
    _silu_kernel[(32,)](gates.view(torch.int32), y.view(torch.int32), N=1024)
    assert_same_bytes(y, torch.nn.functional.silu(gates), "silu", any_nan=True)
    return gates.numel()


def compare_scale_bytes(device: str) -> int:
    """Compares the E8M0 bytes that largest magnitudes get."""
    amax = _numbers(device)[: 2**15].float()
    for element, largest, exponent in ((E2M1, 6.0, 2), (E4M3, 448.0, 8)):
        byte = torch.empty(2**15, dtype=torch.uint8, device=device)
        _scale_bytes_kernel[(32,)](amax, byte, LARGEST=largest, EXPONENT=exponent)
        assert_same_bytes(byte, scale_bytes_of(amax, element, "rceil"), f"bytes of {largest}")
    return amax.numel()


if __name__ == "__main__":
    part, device = sys.argv[1:]
    count = {"silu": compare_silu, "scale_bytes": compare_scale_bytes}[part](device)
    sys.stdout.write(f"{count} numbers")
