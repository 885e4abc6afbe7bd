"""The Triton kernels of MXFP4 and MXFP8: in Triton's interpreter everywhere, compiled on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_trace.testing.hard_inputs import hard_inputs

# Of the hard inputs, one block of 16 and two without values hold no block of 32.
WHOLE_BLOCKS = len(hard_inputs()) - 3


def _compare(fmt: str, device: str, **environment: str) -> str:
    here = Path(__file__).parent
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(here / "interpreted_mx.py"), fmt, device],
        env=os.environ | {"PYTHONPATH": str(here.parents[1])} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8"])
def test_interpreted_mx_kernels_equal_the_reference_on_the_hard_inputs(fmt: str) -> None:
    assert _compare(fmt, "cpu", TRITON_INTERPRET="1") == f"{WHOLE_BLOCKS} inputs"


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8"])
def test_mx_kernels_equal_the_reference_on_the_hard_inputs(fmt: str) -> None:
    assert _compare(fmt, "cuda") == f"{3 * WHOLE_BLOCKS} inputs"


def test_mx_kernels_refuse_a_global_scale_and_a_cpu_tensor() -> None:
    from megatron_trace.formats import kernels_mxfp4, kernels_mxfp8

    for kernels in (kernels_mxfp4, kernels_mxfp8):
        with pytest.raises(ValueError, match="MX formats have no global scale"):
            kernels.rtn(torch.ones(2, 32), 1.0)
        with pytest.raises(ValueError, match="need x on a GPU; got cpu"):
            kernels.rtn(torch.ones(2, 32))
