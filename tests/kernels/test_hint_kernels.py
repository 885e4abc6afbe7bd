"""The Triton kernels of the hint codec: in Triton's interpreter everywhere, compiled on a GPU."""

import pytest
import torch

from megatron_trace.formats import ops
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.hard_inputs import hard_inputs
from megatron_trace.testing.hint_kernel_equality import assert_codec_kernels_equal_torch
from megatron_trace.testing.kernel_equality import row_scales

NAMES = [case.name for case in hard_inputs()]


def test_interpreted_kernels_equal_torch_on_the_hard_inputs(run_program) -> None:
    printed = run_program("interpreted_hints.py", interpret=True)
    assert printed == f"{len(NAMES)} inputs"


def test_triton_on_a_cpu_tensor_says_why_it_cannot_run() -> None:
    x, hint = torch.ones(2, 16), torch.zeros(2, 2, dtype=torch.uint8)
    residues = torch.zeros(2, 1, dtype=torch.uint8)
    for call in (
        lambda: ops.narrowed(hint.repeat(1, 4), 1, implementation="triton"),
        lambda: ops.pack_residues(residues, implementation="triton"),
        lambda: ops.unpack_residues(residues, 1, implementation="triton"),
        lambda: ops.restored_scales(x, hint, residues, 1.0, num_bits=1, implementation="triton"),
    ):
        with pytest.raises(ValueError, match=r"triton needs \w+ on a GPU, on one; got cpu"):
            call()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_kernels_equal_torch_on_the_hard_inputs(name: str, dtype: torch.dtype) -> None:
    case = next(case for case in hard_inputs(dtype, "cuda") if case.name == name)
    x = case.x.nan_to_num(0.0)
    assert_codec_kernels_equal_torch(x, case.global_scale, what=name)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [16, 48, 64, 128, 2048])
@pytest.mark.parametrize("rows", [0, 1, 31, 1000])
def test_kernels_equal_torch_for_any_shape(rows: int, length: int) -> None:
    generator = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, length, device="cuda", generator=generator)
    noise = 0.3 * torch.randn(rows, length, device="cuda", generator=generator)
    assert_codec_kernels_equal_torch(x, 0.0123, trainer_x=x + noise)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [48, 2048])
def test_kernels_equal_torch_under_scales_of_rows(length: int) -> None:
    generator = torch.Generator("cuda").manual_seed(length)
    x = torch.randn(1000, length, device="cuda", generator=generator)
    noise = 0.3 * torch.randn(1000, length, device="cuda", generator=generator)
    assert_codec_kernels_equal_torch(x, row_scales(x, 0.0123), trainer_x=x + noise)


@pytest.mark.gpu
def test_auto_takes_the_kernels_on_a_gpu() -> None:
    x = torch.randn(64, 128, device="cuda")
    _, codes, _ = ops.rtn_record(x, 0.002, num_bits=4)
    for num_bits in (1, 2):
        _, hint, _ = ops.rtn_record(x, 0.002, num_bits=num_bits)
        assert_same_bytes(ops.narrowed(codes, num_bits), hint)
        assert_same_bytes(ops.narrowed(codes, num_bits, implementation="torch"), hint)
    residues = torch.randint(0, 8, (64, 8), device="cuda").to(torch.uint8)
    packed = ops.pack_residues(residues)
    assert_same_bytes(packed.cpu(), ops.pack_residues(residues.cpu()))
    assert_same_bytes(ops.unpack_residues(packed, 8), residues)
