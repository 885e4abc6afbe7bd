"""A Gated DeltaNet's step in its slots gives what its definition gives."""

import pytest


def test_the_interpreted_kernels_give_what_the_definition_gives(run_program) -> None:
    found = run_program("interpreted_delta_step.py", "cpu", "float32", interpret=True)
    assert found == "17 layers"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernels_give_what_the_definition_gives(run_program, dtype) -> None:
    found = run_program("interpreted_delta_step.py", "cuda", dtype, interpret=False)
    assert found == "17 layers"
