"""The Triton kernels of rows: in Triton's interpreter everywhere, compiled on a GPU."""

import pytest
import torch

from megatron_trace.formats import NUMBER_FORMATS, ops
from megatron_trace.testing.hard_inputs import num_of_whole_blocks

WHOLE_BLOCKS = num_of_whole_blocks()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fmt", NUMBER_FORMATS)
def test_interpreted_row_kernels_equal_torch_on_the_hard_inputs(
    run_program, fmt: str, dtype: str
) -> None:
    """BF16 goes in pairs, whose instructions `emulated_ptx` knows."""
    printed = run_program("interpreted_rows.py", fmt, "cpu", dtype, interpret=True)
    assert printed == f"{WHOLE_BLOCKS} inputs"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("fmt", NUMBER_FORMATS)
def test_row_kernels_equal_torch_on_the_hard_inputs(run_program, fmt: str, dtype: str) -> None:
    printed = run_program("interpreted_rows.py", fmt, "cuda", dtype, interpret=False)
    assert printed == f"{WHOLE_BLOCKS} inputs"


def test_row_kernels_say_why_they_cannot_run_on_a_cpu() -> None:
    x = torch.ones(2, 32)
    with pytest.raises(ValueError, match="triton needs x on a GPU; got cpu"):
        ops.encode(x, 1.0, implementation="triton")
