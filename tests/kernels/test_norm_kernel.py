"""The engine's kernel of RMSNorm rounds what FP64 gives."""

import pytest


def test_the_interpreted_kernel_gives_what_torch_gives(run_program) -> None:
    assert run_program("interpreted_norm.py", "cpu", interpret=True) == "30 inputs"


@pytest.mark.gpu
def test_the_kernel_gives_what_torch_gives(run_program) -> None:
    assert run_program("interpreted_norm.py", "cuda", interpret=False) == "30 inputs"
