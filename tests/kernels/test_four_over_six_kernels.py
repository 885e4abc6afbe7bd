"""The Triton kernels of 4over6: in Triton's interpreter everywhere, compiled on a GPU."""

import pytest
import torch

from megatron_trace.formats import NVFP4_4OVER6, ops
from megatron_trace.testing.hard_inputs import hard_inputs

NUM_INPUTS = len(hard_inputs())


def test_interpreted_4over6_kernels_equal_the_reference_on_the_hard_inputs(run_program) -> None:
    assert (
        run_program("interpreted_four_over_six.py", "cpu", interpret=True) == f"{NUM_INPUTS} inputs"
    )


def test_every_octet_that_4over6_decides_is_as_specified(run_program) -> None:
    decided, _, compared, _ = run_program("interpreted_decided.py", interpret=True).split()
    assert int(decided) > 0.99 * int(compared)


@pytest.mark.gpu
def test_4over6_kernels_equal_the_reference_on_the_hard_inputs(run_program) -> None:
    assert (
        run_program("interpreted_four_over_six.py", "cuda", interpret=False)
        == f"{3 * NUM_INPUTS} inputs"
    )


def test_4over6_kernels_refuse_a_cpu_tensor() -> None:
    with pytest.raises(ValueError, match="needs x on a GPU; got cpu"):
        ops.rtn(torch.ones(2, 32), 1.0, number_format=NVFP4_4OVER6, implementation="triton")
