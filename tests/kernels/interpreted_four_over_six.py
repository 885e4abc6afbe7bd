"""Compares the 4over6 kernels with `four_over_six`; a program, for TRITON_INTERPRET.

python interpreted_four_over_six.py DEVICE        prints how many inputs were compared
"""

import sys
from dataclasses import replace

import torch

from megatron_trace.formats import NVFP4_4OVER6, four_over_six, kernels_whole
from megatron_trace.formats.kernels_inputs import Launch
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.hard_inputs import hard_inputs
from megatron_trace.testing.kernel_equality import row_scales

# The interpreter takes about 20 us a value and scale.
MAX_VALUES = {"cpu": 128, "cuda": 1 << 20}
# A GPU goes over several tiles of a program, as with more values than these.
LAUNCHES = {"cpu": None, "cuda": Launch(tiles=4, num_warps=1)}


def compare(dtype: torch.dtype, device: str) -> int:
    """Compares rtn and rtn_record on each hard input; gives how many there are."""
    cases = hard_inputs(dtype)
    for index, case in enumerate(cases):
        x = case.x
        if x.numel() > MAX_VALUES[device]:
            x = x[: max(1, MAX_VALUES[device] // x[0].numel())]
        rules = ("mse", "mae") if device == "cuda" or index % 4 == 0 else ("mse",)
        for error in rules:
            _compare(x, torch.tensor(case.global_scale), error, device, f"{case.name} {dtype}")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(11, 32 if device == "cuda" else 16, generator=generator).to(dtype)
    _compare(x, row_scales(x, 0.002), "mse", device, f"scales of rows {dtype}")
    return len(cases)


def _compare(x: torch.Tensor, scale: torch.Tensor, error: str, device: str, what: str) -> None:
    def check(got: torch.Tensor, expected: torch.Tensor, name: str) -> None:
        assert_same_bytes(got.cpu(), expected, f"{what} {error} {name}", any_nan=True)

    number_format = replace(NVFP4_4OVER6, rules={"error": error})
    given, launch = (x.to(device), scale, number_format), LAUNCHES[device]
    y = four_over_six.rtn(x, scale, error=error)
    check(kernels_whole.rtn(*given, launch=launch), y, "rtn")
    for bits in (1, 2, 4) if device == "cuda" else (4,):
        got = kernels_whole.rtn_record(*given, num_bits=bits, launch=launch)
        expected = four_over_six.rtn_record(x, scale, num_bits=bits, error=error)
        for name, mine, theirs in zip(("y", "hint", "bytes"), got, expected, strict=True):
            check(mine, theirs, f"record {bits} {name}")


def main() -> None:
    torch.set_num_threads(1)
    device = sys.argv[1]
    # The interpreter truncates FP32 to BF16; a GPU does not.
    dtypes = [torch.float32, torch.bfloat16, torch.float16][: 3 if device == "cuda" else 1]
    sys.stdout.write(f"{sum(compare(dtype, device) for dtype in dtypes)} inputs")


if __name__ == "__main__":
    main()
