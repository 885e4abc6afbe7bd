"""The Triton kernel of the row guard: in Triton's interpreter everywhere, compiled on a GPU."""

import pytest
import torch

from megatron_trace.formats import NUMBER_FORMATS
from megatron_trace.hints.guard import THRESHOLDS, guided_rows
from megatron_trace.testing.hard_inputs import num_of_whole_blocks

WHOLE_BLOCKS = num_of_whole_blocks()


@pytest.mark.parametrize(
    ("formats", "dtype"),
    [("nvfp4", "bfloat16"), ("nvfp4_4over6,mxfp4,mxfp8", "float32")],
)
def test_interpreted_guard_kernel_counts_and_decides_as_torch(run_program, formats, dtype) -> None:
    """BF16 goes in pairs, whose instructions `emulated_ptx` knows."""
    printed = run_program("interpreted_guard.py", formats, "cpu", dtype, interpret=True)
    assert printed == f"{[WHOLE_BLOCKS] * len(formats.split(','))} inputs"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_guard_kernel_counts_and_decides_as_torch(run_program, dtype) -> None:
    formats = ",".join(NUMBER_FORMATS)
    printed = run_program("interpreted_guard.py", formats, "cuda", dtype, interpret=False)
    assert printed == f"{[WHOLE_BLOCKS] * len(NUMBER_FORMATS)} inputs"


def test_the_guard_kernel_says_why_it_cannot_run_on_a_cpu() -> None:
    with pytest.raises(ValueError, match="triton needs x on a GPU; got cpu"):
        guided_rows(
            torch.ones(2, 32),
            torch.zeros(2, 4, dtype=torch.uint8),
            torch.zeros(2, 2, dtype=torch.uint8),
            torch.ones(2, dtype=torch.bool),
            1.0,
            num_bits=1,
            thresholds=THRESHOLDS["nvfp4"],
            implementation="triton",
        )
