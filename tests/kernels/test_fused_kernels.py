"""RMSNorm and SwiGLU with quantisation: kernels against `fused`, interpreted and on a GPU."""

import pytest
import torch

from megatron_trace.formats import MXFP4, NUMBER_FORMATS, fused, reference
from megatron_trace.testing.assertions import assert_same_bytes

EPS = 1e-6


def _kernels():
    from megatron_trace.formats import kernels_fused

    return kernels_fused


def _values(*shape: int, device: str = "cuda") -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (3 * torch.randn(*shape, generator=generator)).to(device, torch.bfloat16)


def _assert_all_same(got, expected, what: str) -> None:
    got, expected = ((t,) if isinstance(t, torch.Tensor) else t for t in (got, expected))
    for index, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        assert_same_bytes(mine, theirs, f"{what}, result {index}", any_nan=True)


def test_the_norm_is_that_of_torch_but_for_the_order_of_the_sum() -> None:
    x, weight = _values(64, 1040, device="cpu"), torch.rand(1040) + 0.5
    expected = torch.nn.functional.rms_norm(x.double(), (1040,), weight.double(), EPS)
    # One rounding to BF16 is 2^-8 at most; measured 0.00389.
    torch.testing.assert_close(
        fused.rms_norm(x, weight, EPS).double(), expected, rtol=2**-7.99, atol=0
    )


def test_swiglu_quantises_what_a_gated_mlp_feeds_to_fc2() -> None:
    gate_up = _values(8, 96, device="cpu")
    gate, up = gate_up[:, :48], gate_up[:, 48:]
    expected = reference.rtn(torch.nn.functional.silu(gate) * up, 0.002)
    assert_same_bytes(fused.swiglu_rtn(gate_up, 0.002), expected)


@pytest.mark.gpu
def test_silu_is_that_of_torch_for_every_gate(run_program) -> None:
    assert run_program("every_bf16.py", "silu", "cuda", interpret=False) == "65536 numbers"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fmt", NUMBER_FORMATS)
def test_interpreted_fused_kernels_equal_their_reference(run_program, fmt: str, dtype: str) -> None:
    """BF16 goes in pairs, whose instructions `emulated_ptx` knows."""
    printed = run_program("interpreted_fused.py", fmt, "cpu", dtype, interpret=True)
    assert printed == ("6 inputs" if NUMBER_FORMATS[fmt].has_global_scale else "3 inputs")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("fmt", NUMBER_FORMATS)
def test_fused_kernels_equal_their_reference(run_program, fmt: str, dtype: str) -> None:
    printed = run_program("interpreted_fused.py", fmt, "cuda", dtype, interpret=False)
    assert printed == ("7 inputs" if NUMBER_FORMATS[fmt].has_global_scale else "4 inputs")


@pytest.mark.gpu
def test_the_norm_kernel_gives_the_same_on_both_devices() -> None:
    x, weight = _values(17, 2048), _values(2048) + 1
    got = _kernels().rms_norm_rtn_record(x, weight, 0.002, eps=EPS, num_bits=1)
    expected = fused.rms_norm_rtn_record(x.cpu(), weight.cpu(), 0.002, eps=EPS, num_bits=1)
    _assert_all_same([tensor.cpu() for tensor in got], expected, "record on a CPU")


def test_fused_kernels_refuse_what_they_cannot_round() -> None:
    with pytest.raises(ValueError, match="triton needs x on a GPU; got cpu"):
        _kernels().swiglu_rtn(torch.zeros(2, 32), 1.0)
    with pytest.raises(ValueError, match="must be a multiple of 64 long"):
        _kernels().swiglu_rtn(torch.zeros(2, 32), None, number_format=MXFP4)
    with pytest.raises(ValueError, match="MX formats have no global scale"):
        _kernels().rms_norm_rtn(
            torch.zeros(2, 32), torch.ones(32), 1.0, eps=EPS, number_format=MXFP4
        )
