"""The kernel that watches quantisers' inputs counts what torch counts."""

import pytest


def test_the_interpreted_kernel_counts_what_torch_counts(run_program) -> None:
    assert run_program("interpreted_watch.py", "cpu", interpret=True) == "48 inputs"


@pytest.mark.gpu
def test_the_kernel_counts_what_torch_counts(run_program) -> None:
    assert run_program("interpreted_watch.py", "cuda", interpret=False) == "48 inputs"
