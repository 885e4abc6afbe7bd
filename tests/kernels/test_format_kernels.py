"""The Triton kernels of NVFP4: in Triton's interpreter everywhere, compiled on a GPU."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from megatron_trace.formats import global_scale_from_amax, kernels_inputs, ops, reference
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.hard_inputs import hard_inputs
from megatron_trace.testing.kernel_equality import assert_kernels_equal_reference, row_scales

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAMES = [case.name for case in hard_inputs()]
# Each length of a row is compiled anew.
ROWS_OF_32 = [case.name for case in hard_inputs() if case.x.dim() == 2 and case.x.shape[1] == 32]


def test_interpreted_kernels_equal_the_reference_on_the_hard_inputs(run_program) -> None:
    printed = run_program("interpreted.py", interpret=True)
    # Four of them have denormal BF16 numbers, which the interpreter mistakes.
    assert printed == f"{2 * len(NAMES) - 4} inputs"


def test_interpreted_kernels_of_fp32_in_quads_equal_the_reference(run_program) -> None:
    """Their instructions are those that `emulated_ptx` knows."""
    assert run_program("interpreted_fp32.py", interpret=True) == "84720 values"


def test_no_quotient_by_a_reciprocal_is_rounded_wrongly(tmp_path: Path) -> None:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no gcc")
    source, program = Path(__file__).with_name("quotients.c"), tmp_path / "quotients"
    # Each operation rounds by itself, and as the program says.
    options = "-O2", "-march=native", "-ffp-contract=off", "-frounding-math"
    subprocess.run([compiler, *options, source, "-o", program, "-lm"], check=True)
    assert subprocess.run([program], capture_output=True, text=True).stdout == (
        "46517480 quotients\n"
    )


def test_triton_on_a_cpu_tensor_says_why_it_cannot_run() -> None:
    x = torch.ones(2, 16)
    hint, scale_bytes = torch.zeros(2, 2, dtype=torch.uint8), torch.ones(2, 1, dtype=torch.uint8)
    for call in (
        lambda: ops.rtn(x, 1.0, implementation="triton"),
        lambda: ops.rtn_record(x, 1.0, num_bits=1, implementation="triton"),
        lambda: ops.guided(x, hint, scale_bytes, 1.0, num_bits=1, implementation="triton"),
    ):
        with pytest.raises(ValueError, match="triton needs x on a GPU; got cpu"):
            call()


@pytest.mark.gpu
@pytest.mark.parametrize("rounded_to", [None, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_kernels_equal_the_reference_on_the_hard_inputs(name: str, dtype, rounded_to) -> None:
    case = next(case for case in hard_inputs(dtype, "cuda") if case.name == name)
    assert_kernels_equal_reference(case.x, case.global_scale, dtype=rounded_to, what=name)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 31, 255, 1000])
def test_kernels_equal_the_reference_for_any_number_of_rows(rows: int, dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, 48, device="cuda", generator=generator).to(dtype)
    assert_kernels_equal_reference(x, 0.0123)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*ROWS_OF_32, "partial_tile", "three_axes"])
def test_kernels_equal_the_reference_under_scales_of_rows(name: str, dtype) -> None:
    case = next(case for case in hard_inputs(dtype, "cuda") if case.name == name)
    x = case.x
    assert_kernels_equal_reference(x, row_scales(x, case.global_scale), what=name)
    # All usual, so that BF16 goes in pairs; one for all rows of the first axis.
    usual = 0.002 * (1 + torch.arange(x.shape[:-1].numel(), device="cuda") % 7)
    assert_kernels_equal_reference(x, usual.reshape(*x.shape[:-1], 1), what=name)
    assert_kernels_equal_reference(x, usual[: x.shape[0]].reshape(-1, *[1] * (x.dim() - 1)))


@pytest.mark.gpu
def test_a_scale_on_the_gpu_is_that_on_the_cpu() -> None:
    x = torch.randn(64, 64, device="cuda")
    scale = torch.tensor(0.0123)
    assert_same_bytes(ops.rtn(x, scale.cuda()), ops.rtn(x, scale))
    assert_same_bytes(ops.rtn(x, scale), ops.rtn(x, scale.item()))


@pytest.mark.gpu
def test_global_scales_are_the_same_on_both_devices() -> None:
    amax = torch.rand(10000, generator=torch.Generator().manual_seed(0))
    assert_same_bytes(global_scale_from_amax(amax.cuda()).cpu(), global_scale_from_amax(amax))


@pytest.mark.gpu
def test_auto_takes_the_kernels_and_keeps_the_gradient() -> None:
    x = torch.randn(64, 64, device="cuda", requires_grad=True)
    y = ops.rtn(x, 0.002)
    y.backward(torch.full_like(x, 3.0))
    assert_same_bytes(x.grad, torch.full_like(x, 3.0))
    assert_same_bytes(y.detach().cpu(), reference.rtn(x.detach().cpu(), 0.002))


@pytest.mark.parametrize("num_bits", [1, 2, 4, 8])
def test_words_of_every_second_byte_are_those_of_a_copy(num_bits: int) -> None:
    hint = torch.arange(128, dtype=torch.uint8).view(4, 32)[:, : 4 * num_bits]
    apart = torch.stack((hint, ~hint), dim=-1)[..., 0]
    words = kernels_inputs.words_of(apart, num_bits)
    assert words.is_contiguous()
    assert_same_bytes(words, kernels_inputs.words_of(hint.clone(), num_bits))


@pytest.mark.gpu
def test_hints_in_an_unaligned_view_guide_like_their_copy() -> None:
    x = torch.randn(8, 32, device="cuda")
    _, hint, scale_bytes = ops.rtn_record(x, 0.002, num_bits=4)
    buffer = torch.zeros(hint.numel() + 1, dtype=torch.uint8, device="cuda")
    buffer[1:] = hint.flatten()
    view = buffer[1:].view(hint.shape)
    assert_same_bytes(
        ops.guided(x * 1.01, view, scale_bytes, 0.002, num_bits=4),
        ops.guided(x * 1.01, hint, scale_bytes, 0.002, num_bits=4),
    )


@pytest.mark.gpu
def test_hints_on_another_device_are_refused() -> None:
    x = torch.randn(8, 32, device="cuda")
    _, hint, scale_bytes = ops.rtn_record(x, 0.002, num_bits=1)
    with pytest.raises(ValueError, match="hint must lie on cuda:0 like x; got cpu"):
        ops.guided(x, hint.cpu(), scale_bytes, 0.002, num_bits=1)


@pytest.mark.gpu
def test_scales_that_fit_no_row_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one for each row in a shape that fits \(3, 1\)"):
        ops.rtn(torch.ones(3, 16, device="cuda"), torch.ones(2, 1))


@pytest.mark.gpu
def test_addresses_beyond_two_to_the_31_values_are_right() -> None:
    rows = 2**31 // 4096 + 8
    x = torch.ones(rows, 4096, dtype=torch.bfloat16, device="cuda")
    x[-1] = torch.arange(4096, device="cuda") % 7
    y = ops.rtn(x, 0.01)
    assert_same_bytes(y[-1].cpu(), reference.rtn(x[-1].cpu(), 0.01))
    assert bool((y[:-1] == y[0, 0]).all())
