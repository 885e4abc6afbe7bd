"""Runs the codec's kernels on hard inputs; a program, for `interpreted.py` says why."""

import sys

import torch

from megatron_trace.formats import hint_kernels, packing
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.hard_inputs import hard_inputs
from megatron_trace.testing.hint_kernel_equality import assert_codec_kernels_equal_torch
from megatron_trace.testing.kernel_equality import row_scales

MAX_VALUES = 320


def main() -> None:
    torch.set_num_threads(1)
    # What the kernels leave unwritten is then the largest integer.
    torch.use_deterministic_algorithms(True)
    num_checked = 0
    for case in hard_inputs(torch.float32):
        x = case.x if case.x.numel() <= MAX_VALUES else case.x[: MAX_VALUES // case.x[0].numel()]
        x = x.nan_to_num(0.0)
        assert_codec_kernels_equal_torch(x, case.global_scale, what=case.name)
        num_checked += 1
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(11, 32, generator=generator)
    assert_codec_kernels_equal_torch(x, row_scales(x, 0.002), what="scales of rows")
    for num_blocks in (1, 3, 8, 9, 21):
        residues = torch.randint(0, 8, (5, num_blocks), dtype=torch.uint8, generator=generator)
        packed = packing.pack_residues(residues)
        what = f"{num_blocks} blocks"
        assert_same_bytes(hint_kernels.pack_residues(residues), packed, what)
        assert_same_bytes(hint_kernels.unpack_residues(packed, num_blocks), residues, what)
    sys.stdout.write(f"{num_checked} inputs")


if __name__ == "__main__":
    main()
