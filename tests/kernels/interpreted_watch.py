"""Compares the kernel that watches quantisers' inputs with torch; a program, for TRITON_INTERPRET.

python interpreted_watch.py DEVICE     prints how many inputs were compared
"""

import itertools
import sys

import torch

from megatron_trace.rollout.kernels import watch as kernel
from megatron_trace.rollout.watch import Watch

LARGEST = 1.5


def compare(device: str) -> int:
    """Gives the number of inputs: rows that are padding or not, with and without their tokens."""
    generator = torch.Generator().manual_seed(0)
    num_compared = 0
    tokens = torch.tensor([3, 1, 0, 2, 2, 0, 1, 3])
    for width, of_rows, real, largest, finite in itertools.product(
        (16, 96), ((None, 1), (None, 2), (tokens, 2)), (None, 3), (None, LARGEST), (False, True)
    ):
        x = torch.randn(8, width, generator=generator).bfloat16()
        x[5, 3], x[2, 7], x[7, 1] = torch.nan, torch.inf, torch.nan
        watch = Watch()
        watch.real_rows = None if real is None else torch.tensor([real], dtype=torch.int32)
        rows_of = {"tokens": of_rows[0], "rows_of_token": of_rows[1]}
        watch.observe((0, "fc1"), x, largest=largest, finite=finite, **rows_of)
        expected = Watch()._of((0, "fc1"), x.device)
        if largest is not None or finite:
            expected = watch._of((0, "fc1"), x.device)
        counts = Watch()._of((0, "fc1"), torch.device(device))
        kernel.observe(
            x.to(device),
            counts,
            None if watch.real_rows is None else watch.real_rows.to(device),
            largest,
            finite,
            None if of_rows[0] is None else of_rows[0].to(device),
            of_rows[1],
        )
        assert counts.tolist() == expected.tolist(), (width, of_rows, real, largest, finite)
        num_compared += 1
    return num_compared


if __name__ == "__main__":
    sys.stdout.write(f"{compare(sys.argv[1])} inputs")
