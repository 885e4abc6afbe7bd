"""RMSNorm and SwiGLU with quantisation: kernels against `fused`, on a GPU."""

import pytest
import torch

from megatron_trace.formats import fused, reference
from megatron_trace.testing.assertions import assert_same_bytes

EPS = 1e-6
SHAPES = [(3, 48), (1, 16), (0, 64), (17, 2048), (2, 3, 1040), (5, 8192)]


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
def test_silu_is_that_of_torch_for_every_gate() -> None:
    gates = torch.arange(2**16, device="cuda", dtype=torch.int32).to(torch.int16)
    gates = gates.view(torch.bfloat16).reshape(-1, 32)
    # Each gate alone in a block whose scale leaves it almost unrounded.
    ups = torch.ones_like(gates)
    gate_up = torch.cat((gates, ups), dim=-1)
    for global_scale in (1e-3, 1e-6, 1e3):
        _assert_all_same(
            _kernels().swiglu_rtn_record(gate_up, global_scale, num_bits=4),
            fused.swiglu_rtn_record(gate_up, global_scale, num_bits=4),
            f"every gate, global scale {global_scale}",
        )


@pytest.mark.gpu
@pytest.mark.parametrize("global_scale", [0.002, 1e3, 0.0])
@pytest.mark.parametrize("num_bits", [1, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_swiglu_kernels_equal_their_reference(shape, num_bits, global_scale) -> None:
    *rows, length = shape
    gate_up = _values(*rows, 2 * length)
    kernels = _kernels()
    _assert_all_same(
        kernels.swiglu_rtn(gate_up, global_scale), fused.swiglu_rtn(gate_up, global_scale), "rtn"
    )
    got = kernels.swiglu_rtn_record(gate_up, global_scale, num_bits=num_bits)
    expected = fused.swiglu_rtn_record(gate_up, global_scale, num_bits=num_bits)
    _assert_all_same(got, expected, "record")
    noisy = (gate_up.float() * 1.01).to(gate_up.dtype)
    _assert_all_same(
        kernels.swiglu_guided(noisy, *got[1:], global_scale, num_bits=num_bits),
        fused.swiglu_guided(noisy, *got[1:], global_scale, num_bits=num_bits),
        "guided",
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("global_scale", [0.002, 1e3, 0.0])
@pytest.mark.parametrize("num_bits", [1, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_norm_kernels_equal_their_reference(shape, num_bits, global_scale, dtype) -> None:
    x = _values(*shape)
    weight = (_values(shape[-1]).float() + 1).to(dtype)
    kernels = _kernels()
    arguments, options = (x, weight, global_scale), {"eps": EPS}
    _assert_all_same(
        kernels.rms_norm_rtn(*arguments, **options),
        fused.rms_norm_rtn(*arguments, **options),
        "rtn",
    )
    options["num_bits"] = num_bits
    got = kernels.rms_norm_rtn_record(*arguments, **options)
    _assert_all_same(got, fused.rms_norm_rtn_record(*arguments, **options), "record")
    on_cpu = fused.rms_norm_rtn_record(x.cpu(), weight.cpu(), global_scale, **options)
    _assert_all_same([tensor.cpu() for tensor in got], on_cpu, "record on a CPU")
    noisy = (x.float() * 1.01).to(x.dtype)
    arguments = (noisy, weight, *got[2:], global_scale)
    _assert_all_same(
        kernels.rms_norm_guided(*arguments, **options),
        fused.rms_norm_guided(*arguments, **options),
        "guided",
    )


@pytest.mark.gpu
def test_fused_kernels_refuse_what_they_cannot_round() -> None:
    with pytest.raises(ValueError, match="take BF16 on a GPU"):
        _kernels().swiglu_rtn(torch.zeros(2, 32, device="cuda"), 1.0)
