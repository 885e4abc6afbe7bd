"""The kernel of guard and rounding: in Triton's interpreter everywhere, compiled on a GPU."""

import pytest
import torch

from megatron_trace.formats import NUMBER_FORMATS, kernels_guided
from megatron_trace.formats.kernels_guided_rows import guided_kernel
from megatron_trace.hints.guard import THRESHOLDS
from megatron_trace.hints.guided import guided_values
from megatron_trace.testing.hard_inputs import hard_inputs

# Of the hard inputs, one block of 16 and two without values hold no block of 32.
WHOLE_BLOCKS = len(hard_inputs()) - 3


@pytest.mark.parametrize(
    ("formats", "dtype"),
    [("nvfp4,nvfp4_4over6", "bfloat16"), ("nvfp4,mxfp4,mxfp8", "float32")],
)
def test_interpreted_kernel_judges_and_rounds_as_torch(run_program, formats, dtype) -> None:
    """BF16 goes in pairs, whose instructions `emulated_ptx` knows."""
    printed = run_program("interpreted_guided.py", formats, "cpu", dtype, interpret=True)
    assert printed == f"{[WHOLE_BLOCKS] * len(formats.split(','))} inputs"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("fmt", NUMBER_FORMATS)
def test_kernel_judges_and_rounds_as_torch(run_program, fmt: str, dtype: str) -> None:
    printed = run_program("interpreted_guided.py", fmt, "cuda", dtype, interpret=False)
    assert printed == f"{[WHOLE_BLOCKS]} inputs"


def test_a_compiled_kernel_gets_its_arguments_in_its_order() -> None:
    x = torch.ones(2, 64)
    kind = (-1, x.dtype, 64, NUMBER_FORMATS["mxfp8"], 1, None, 1, "none", None, *(False,) * 4)
    constants = list(kernels_guided._new_plan(kind, x).constants)
    assert guided_kernel.arg_names[-len(constants) :] == constants
    assert guided_kernel.arg_names[10 : -len(constants)] == [
        "num_rows",
        "max_scale_steps",
        "max_far_blocks",
        "min_parity_agreement",
    ]


def test_the_kernel_says_why_it_cannot_run_on_a_cpu() -> None:
    with pytest.raises(ValueError, match="triton needs x on a GPU; got cpu"):
        guided_values(
            torch.ones(2, 32),
            torch.zeros(2, 4, dtype=torch.uint8),
            torch.zeros(2, 2, dtype=torch.uint8),
            torch.ones(2, dtype=torch.bool),
            1.0,
            num_bits=1,
            thresholds=THRESHOLDS["nvfp4"],
            implementation="triton",
        )
