"""Compares the kernels of FP32 in quads with the reference; a program, for TRITON_INTERPRET.

Prints how many values were compared.
"""

import sys

import emulated_ptx
import torch

from megatron_trace.formats import NVFP4, kernels_whole, reference
from megatron_trace.formats.kernels_inputs import Launch
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.hard_inputs import hard_inputs
from megatron_trace.testing.kernel_equality import assert_kernels_equal_reference, row_scales

# The interpreter takes less time with few programs, and about 20 us a value.
MAX_VALUES = 2048
LAUNCH = Launch(tiles=1, num_warps=8)
# Both ends of what is usual, what is beyond, and what is between.
GLOBAL_SCALES = (2.0**-90, 2.0**-90 * (1 + 2.0**-23), 0.0123, 1.7, 128.0, 128.1)


def compare_hard_inputs() -> int:
    num_compared = 0
    for case in hard_inputs():
        x = case.x
        if x.numel() > MAX_VALUES:
            x = x[: MAX_VALUES // x[0].numel()]
        assert_kernels_equal_reference(x, case.global_scale, launch=LAUNCH, what=case.name)
        num_compared += x.numel()
    x = torch.randn(11, 16)
    assert_kernels_equal_reference(x, row_scales(x, 0.002), launch=LAUNCH, what="rows")
    usual = 0.002 * (1 + torch.arange(11) % 7).reshape(11, 1)
    assert_kernels_equal_reference(x, usual, launch=LAUNCH, what="usual rows")
    return num_compared + 2 * x.numel()


def compare_quotients_near_0(global_scale: float) -> int:
    """Compares values guided under every scale byte, of any size and so small that they may be 0.

    Args:
        global_scale: The global scale.
    """
    byte = torch.arange(128, dtype=torch.uint8).repeat_interleave(2).reshape(-1, 2)
    any_bits = torch.randint(0, 2**31 - 1, (128, 16))
    least = torch.randint(0, 17, (128, 16)) << torch.randint(0, 13, (128, 16))
    # Beside a quotient of 2^-150, which is 0, lie those that are not.
    middle = (byte[:, :1].view(torch.float8_e4m3fn).float() * global_scale / 2).nan_to_num(1)
    middle = middle.long() + torch.arange(-8, 8)
    for bits in (any_bits, least, middle.clamp(0, 2**31 - 1)):
        x = torch.cat((bits, bits + 2**31), 1).to(torch.uint32).view(torch.float32)
        hint = torch.randint(0, 256, (128, 4), dtype=torch.uint8)
        got = kernels_whole.guided(x, hint, byte, global_scale, NVFP4, num_bits=1, launch=LAUNCH)
        expected = reference.guided(x, hint, byte, global_scale, num_bits=1)
        assert_same_bytes(got, expected, f"global scale {global_scale}", any_nan=True)
    return 3 * byte.numel() * 16


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    emulated_ptx.install()
    num_compared = compare_hard_inputs() + sum(map(compare_quotients_near_0, GLOBAL_SCALES))
    sys.stdout.write(f"{num_compared} values")


if __name__ == "__main__":
    main()
