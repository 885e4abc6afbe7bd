"""The Triton kernels of 4over6: in Triton's interpreter everywhere, compiled on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_trace.testing.hard_inputs import hard_inputs

NUM_INPUTS = len(hard_inputs())


def _compare(device: str, **environment: str) -> str:
    here = Path(__file__).parent
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(here / "interpreted_four_over_six.py"), device],
        env=os.environ | {"PYTHONPATH": str(here.parents[1])} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


def test_interpreted_4over6_kernels_equal_the_reference_on_the_hard_inputs() -> None:
    assert _compare("cpu", TRITON_INTERPRET="1") == f"{NUM_INPUTS} inputs"


@pytest.mark.gpu
def test_4over6_kernels_equal_the_reference_on_the_hard_inputs() -> None:
    assert _compare("cuda") == f"{3 * NUM_INPUTS} inputs"


def test_4over6_kernels_refuse_a_cpu_tensor() -> None:
    from megatron_trace.formats import kernels_four_over_six

    with pytest.raises(ValueError, match="needs x on a GPU; got cpu"):
        kernels_four_over_six.rtn(torch.ones(2, 32), 1.0)
