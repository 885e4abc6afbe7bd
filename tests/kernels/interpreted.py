"""Runs the kernels on the hard inputs; a program, because Triton reads TRITON_INTERPRET at import.

Triton's interpreter truncates FP32 to BF16 and mistakes denormal BF16 numbers, on loads and stores:
BF16 inputs that have them are left to a GPU.
"""

import sys

import torch

from megatron_trace.formats.kernels_inputs import Launch
from megatron_trace.testing.hard_inputs import hard_inputs
from megatron_trace.testing.kernel_equality import assert_kernels_equal_reference, row_scales

DENORMAL_BF16 = {"ladder", "scale_underflow", "amax_1e-38", "global_scale_denormal"}
# It takes about 20 us a value, in Python.
MAX_VALUES = 320


def main() -> None:
    torch.set_num_threads(1)
    # What the kernels leave unwritten is then NaN, or the largest integer.
    torch.use_deterministic_algorithms(True)
    num_checked = 0
    for dtype in (torch.float32, torch.bfloat16):
        for case in hard_inputs(dtype):
            if dtype == torch.bfloat16 and case.name in DENORMAL_BF16:
                continue
            x = case.x
            if x.numel() > MAX_VALUES:
                x = x[: max(1, MAX_VALUES // x[0].numel())]
            assert_kernels_equal_reference(
                x,
                case.global_scale,
                launch=Launch(tiles=2, num_warps=1),
                what=f"{case.name} {dtype}",
                truncates=dtype == torch.bfloat16,
            )
            num_checked += 1
    for shape in ((11, 16), (2, 5, 32)):
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
        assert_kernels_equal_reference(
            x, row_scales(x, 0.002), launch=Launch(tiles=2, num_warps=1), what=f"rows {shape}"
        )
    sys.stdout.write(f"{num_checked} inputs")


if __name__ == "__main__":
    main()
