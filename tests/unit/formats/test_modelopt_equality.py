"""Bit equality with ModelOpt's NVFP4QTensor, and each known disagreement by name."""

import math

import pytest
import torch
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

from megatron_trace.formats import (
    E2M1_VALUES,
    decode,
    encode,
    global_scale_from_amax,
    pack_codes,
    unpack_codes,
)
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.hard_inputs import hard_inputs

DTYPES = [torch.float32, torch.bfloat16]
CASES = {dtype: {case.name: case for case in hard_inputs(dtype)} for dtype in DTYPES}
# ModelOpt refuses tensors without elements.
NAMES = [name for name, case in CASES[torch.float32].items() if case.x.numel()]
ONE = 0x38  # E4M3 byte of 1.0


def modelopt(
    x: torch.Tensor, global_scale: float | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives ModelOpt's codes, scale bytes and values."""
    scale_2 = torch.as_tensor(global_scale, dtype=torch.float32)
    # ModelOpt reshapes by views, which zero rows and strided tensors do not allow.
    packed, scales, _ = NVFP4QTensor.quantize(x.contiguous(), 16, weights_scaling_factor_2=scale_2)
    values = packed.dequantize(scale=scales, double_scale=scale_2, block_sizes={-1: 16})
    return unpack_codes(packed._quantized_data), scales.view(torch.uint8), values


def assert_equal_to_modelopt(x: torch.Tensor, global_scale: float | torch.Tensor) -> None:
    codes, scale_bytes = encode(x, global_scale)
    values = decode(codes, scale_bytes, global_scale, x.dtype)
    their_codes, their_bytes, their_values = modelopt(x, global_scale)
    assert_same_bytes(codes, their_codes, "codes")
    assert_same_bytes(scale_bytes, their_bytes, "scale bytes")
    # ModelOpt's table decodes -0 (code 8) to +0.
    assert_same_bytes(values + 0.0, their_values + 0.0, "values")


def gauss(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(1024, 512, generator=generator)


def heavy_tails(generator: torch.Generator) -> torch.Tensor:
    x = torch.randn(1024, 512, generator=generator)
    return x / torch.rand(1024, 512, generator=generator).clamp_min(1e-3)


def lognormal_blocks(generator: torch.Generator) -> torch.Tensor:
    x = torch.randn(1024, 32, 16, generator=generator)
    return (x * (2 * torch.randn(1024, 32, 1, generator=generator)).exp()).flatten(1)


def ties(generator: torch.Generator) -> torch.Tensor:
    x = torch.randint(-24, 25, (1024, 512), generator=generator) / 4
    x[:, ::16] = 6.0
    return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [gauss, heavy_tails, lognormal_blocks, ties])
def test_half_a_million_values_of_a_distribution_equal_modelopt(make, dtype: torch.dtype) -> None:
    x = make(torch.Generator().manual_seed(0)).to(dtype)
    # -0 and blocks of zeros are disagreements, tested below.
    x = torch.where(x == 0, torch.zeros_like(x), x)
    x[:, ::16] += (x[:, ::16] == 0) * 1e-3
    global_scale = 1.0 if make is ties else global_scale_from_amax(x.abs().max())
    assert_equal_to_modelopt(x, global_scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_hard_inputs_equal_modelopt_but_for_the_named_disagreements(
    name: str, dtype: torch.dtype
) -> None:
    case = CASES[dtype][name]
    x = case.x.unsqueeze(0) if case.x.dim() == 1 else case.x
    codes, scale_bytes = encode(x, case.global_scale)
    their_codes, their_bytes, their_values = modelopt(x, case.global_scale)

    blocks = x.float().unflatten(-1, (-1, 16))
    their_codes = their_codes.unflatten(-1, (-1, 16))
    zero = (scale_bytes == 0).unsqueeze(-1)
    nan = (scale_bytes == 0x7F).unsqueeze(-1)
    # Only a quotient of -0 has code 0 and a negative x.
    agreed = their_codes + 8 * ((their_codes == 0) & blocks.signbit())
    agreed = torch.where(nan, 7 + 8 * blocks.signbit(), agreed).masked_fill(zero, 0)
    assert_same_bytes(codes.unflatten(-1, (-1, 16)), agreed.to(torch.uint8), "codes")
    agreed = (their_bytes & 0x7F).masked_fill(scale_bytes == 0, 0)
    assert_same_bytes(scale_bytes, agreed, "scale bytes")
    values = decode(codes, scale_bytes, case.global_scale, dtype)
    agreed = their_values.unflatten(-1, (-1, 16)).masked_fill(zero, 0.0).reshape(x.shape)
    assert_same_bytes(values + 0.0, agreed + 0.0, "values", any_nan=True)


def test_modelopt_stores_scale_1_for_a_block_of_zeros_and_ours_byte_0() -> None:
    x = torch.zeros(1, 32)
    x[0, 16:] = 1.0
    assert encode(x, 1.0)[1].tolist() == [[0, 0x23]]
    assert modelopt(x, 1.0)[1].tolist() == [[ONE, 0x23]]


def test_modelopt_stores_scale_1_for_a_quotient_of_0_and_ours_the_least_scale() -> None:
    x = torch.full((1, 16), 1e-20)
    assert encode(x, 1e30)[1].item() == 1
    assert modelopt(x, 1e30)[1].item() == ONE


def test_modelopt_drops_the_sign_of_minus_zero_and_ours_keeps_it() -> None:
    x = torch.ones(1, 16)
    x[0, 3] = -0.0
    assert encode(x, 1.0)[0][0, 3] == 8
    assert modelopt(x, 1.0)[0][0, 3] == 0


def test_modelopt_decodes_negative_values_that_round_to_zero_to_plus_zero() -> None:
    x = torch.full((1, 16), 6.0)
    x[0, 3] = -0.01
    codes, scale_bytes = encode(x, 1.0)
    their_codes, _, their_values = modelopt(x, 1.0)
    assert codes[0, 3] == their_codes[0, 3] == 8
    assert decode(codes, scale_bytes, 1.0).signbit()[0, 3]
    assert not their_values.signbit()[0, 3]


def test_modelopt_gives_a_block_with_nan_the_code_7_and_ours_keeps_the_signs() -> None:
    x = torch.tensor([[-1.0, math.nan] * 8])
    codes, scale_bytes = encode(x, 1.0)
    their_codes, their_bytes, their_values = modelopt(x, 1.0)
    assert codes[0, :2].tolist() == [15, 7]
    assert their_codes.unique().tolist() == [7]
    assert scale_bytes.item() == their_bytes.item() == 0x7F
    assert bool(their_values.isnan().all())
    assert bool(decode(codes, scale_bytes, 1.0).isnan().all())


def test_modelopt_gives_a_global_scale_of_0_full_codes_and_ours_a_zero_block() -> None:
    x = torch.ones(1, 16)
    assert encode(x, 0.0)[1].item() == 0
    assert modelopt(x, 0.0)[1].item() == 0x7E
    assert not modelopt(x, 0.0)[2].any()


def fake_quant_kernel_model(x: torch.Tensor, global_scale: float) -> torch.Tensor:
    """Gives the rule of ModelOpt's GPU kernel `fp4_fake_quant_block`, in FP32 torch.

    Source: ModelOpt 0.47 `kernels/quantization/gemm/fp4_kernel_hopper.py` and
    `common/nvfp4_quant.py`.
    """
    scale = torch.tensor(global_scale)
    blocks = x.unflatten(-1, (-1, 16))
    block_scales = (blocks.abs().amax(-1, keepdim=True) / (6 * scale)).clamp(max=448.0)
    effective = block_scales.to(torch.float8_e4m3fn).float() * scale
    effective = torch.where(effective >= 1e-5, effective, 1.0)
    a = blocks.abs() / effective
    table = torch.tensor(E2M1_VALUES)
    distance = (a.unsqueeze(-1) - table).abs()
    even_first = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    nearest = table[even_first[distance[..., even_first].argmin(-1)]]
    return torch.where(blocks >= 0, nearest * effective, -nearest * effective).flatten(-2)


def test_modelopt_fake_quant_kernel_zeroes_blocks_under_an_effective_scale_of_1e_5() -> None:
    x = torch.full((1, 32), 3e-5)
    x[0, 16:] = 1.0
    global_scale = float(global_scale_from_amax(1.0))
    values = decode(*encode(x, global_scale), global_scale)
    theirs = fake_quant_kernel_model(x, global_scale)
    assert theirs[0, :16].tolist() == [0.0] * 16
    assert torch.allclose(values[0, :16], x[0, :16], rtol=0.07)
    assert_same_bytes(values[0, 16:], theirs[0, 16:])


def test_modelopt_fake_quant_kernel_agrees_above_that_scale() -> None:
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    global_scale = float(global_scale_from_amax(x.abs().max()))
    values = decode(*encode(x, global_scale), global_scale)
    assert_same_bytes(values + 0.0, fake_quant_kernel_model(x, global_scale) + 0.0)


def test_exported_bytes_of_modelopt_decode_to_its_values() -> None:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    global_scale = global_scale_from_amax(x.abs().max())
    codes, scale_bytes, values = modelopt(x, global_scale)
    assert_same_bytes(decode(codes, scale_bytes, global_scale, x.dtype) + 0.0, values + 0.0)
    assert_same_bytes(pack_codes(codes), pack_codes(encode(x, global_scale)[0]))
