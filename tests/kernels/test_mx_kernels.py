"""The Triton kernels of MXFP4 and MXFP8: in Triton's interpreter everywhere, compiled on a GPU."""

import pytest
import torch

from megatron_trace.formats import MXFP4, MXFP8, ops
from megatron_trace.testing.hard_inputs import num_of_whole_blocks

WHOLE_BLOCKS = num_of_whole_blocks()


@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8"])
def test_interpreted_mx_kernels_equal_the_reference_on_the_hard_inputs(
    run_program, fmt: str
) -> None:
    assert run_program("interpreted_mx.py", fmt, "cpu", interpret=True) == f"{WHOLE_BLOCKS} inputs"


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8"])
def test_mx_kernels_equal_the_reference_on_the_hard_inputs(run_program, fmt: str) -> None:
    assert (
        run_program("interpreted_mx.py", fmt, "cuda", interpret=False)
        == f"{3 * WHOLE_BLOCKS} inputs"
    )


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", id="interpreted"), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def test_the_scale_of_every_bf16_number_follows_without_a_division(run_program, device) -> None:
    printed = run_program("every_bf16.py", "scale_bytes", device, interpret=device == "cpu")
    assert printed == "32768 numbers"


def test_mx_kernels_refuse_a_global_scale_and_a_cpu_tensor() -> None:
    for number_format in (MXFP4, MXFP8):
        options = {"number_format": number_format, "implementation": "triton"}
        with pytest.raises(ValueError, match="MX formats have no global scale"):
            ops.rtn(torch.ones(2, 32), 1.0, **options)
        with pytest.raises(ValueError, match="needs x on a GPU; got cpu"):
            ops.rtn(torch.ones(2, 32), None, **options)
