"""The kernel that draws tokens gives those at which the probabilities pass the numbers."""

import pytest


def test_the_interpreted_kernel_draws_by_definition(run_program) -> None:
    assert run_program("interpreted_draw.py", "cpu", "32", interpret=True) == "192 rows"


@pytest.mark.gpu
def test_the_kernel_draws_by_definition(run_program) -> None:
    assert run_program("interpreted_draw.py", "cuda", "2048", interpret=False) == "192 rows"
