"""Bit equality with ModelOpt: MXFP4, MXFP8, row scales, power-of-two scales, 4over6."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from modelopt.torch.quantization.calib.mse import MseCalibrator
from modelopt.torch.quantization.qtensor.mxfp4_tensor import MXFP4QTensor
from modelopt.torch.quantization.qtensor.mxfp8_tensor import MXFP8QTensor
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

from megatron_trace.formats import (
    decode,
    encode,
    four_over_six,
    global_scale_from_amax,
    mxfp4,
    mxfp8,
    unpack_codes,
)
from megatron_trace.testing import disagreements as because
from megatron_trace.testing import golden
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.integer_inputs import integer_inputs

_MX = (
    because.sign_of_zero,
    because.ties_go_down,
    because.rounded_logarithm,
    because.byte_0,
    because.nan_scale_is_byte_0,
    because.inf_block,
)
# Blocks that differ, of 132,000 of the same inputs as in test_golden.py.
MX_DISAGREEMENTS = {
    "mxfp4_rceil": {
        "sign_of_zero": 1319,
        "ties_go_down": 37017,
        "rounded_logarithm": 1,
        "byte_0": 8,
        "nan_scale_is_byte_0": 8,
        "inf_block": 4,
    },
    "mxfp8_rceil": {"sign_of_zero": 10, "byte_0": 8, "nan_scale_is_byte_0": 8},
}


# Of 32,768 blocks each. BF16 has few mantissas, so that quotients lie on a bound exactly, and the
# order of FP32 operations decides.
FOUR_OVER_SIX_DISAGREEMENTS: dict[str, dict[str, int]] = {
    "bell/float32": {},
    "scaled_blocks/float32": {},
    "binades/float32": {},
    "bell/bfloat16": {},
    "scaled_blocks/bfloat16": {},
    "binades/bfloat16": {"candidate_beside_bound": 505, "choice_beside_tie": 2},
}


@pytest.fixture(scope="module")
def inputs() -> list[golden.Input]:
    return list(golden.golden_inputs())


def modelopt_mxfp4(x: torch.Tensor) -> golden.Encoded:
    packed, scale_bytes = MXFP4QTensor.quantize(x, 32)
    return unpack_codes(packed._quantized_data), scale_bytes.reshape(x.shape[0], -1)


def modelopt_mxfp8(x: torch.Tensor) -> golden.Encoded:
    quantised, scale_bytes = MXFP8QTensor.quantize(x)
    return quantised._quantized_data.view(torch.uint8), scale_bytes


@pytest.mark.parametrize(
    ("format_name", "theirs"), [("mxfp4_rceil", modelopt_mxfp4), ("mxfp8_rceil", modelopt_mxfp8)]
)
def test_mx_blocks_are_equal_or_differ_for_a_named_reason(
    format_name: str, theirs, inputs: list[golden.Input]
) -> None:
    fmt = golden.FORMATS[format_name]
    counts: Counter[str] = Counter()
    for given in inputs:
        ours = fmt.ours(given)
        differing = golden.differences(golden.record(ours, theirs(fmt.x(given)), fmt), fmt)
        found, unexplained = because.explain(because.facts(fmt, given, ours, differing), _MX)
        assert not unexplained.any(), f"{given.name}: {differing.blocks[unexplained].tolist()}"
        counts += found
    assert dict(counts) == MX_DISAGREEMENTS[format_name]


def test_modelopt_rounds_ties_of_mxfp4_down_and_ours_to_even() -> None:
    x = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 4])
    assert mxfp4.encode(x)[0][0, :8].tolist() == [0, 2, 2, 4, 4, 6, 6, 7]
    assert modelopt_mxfp4(x)[0][0, :8].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_modelopt_codes_zeros_of_mxfp4_as_minus_zero() -> None:
    x = torch.tensor([[6.0, 0.0, -0.0, 0.1] * 8])
    assert mxfp4.encode(x)[0][0, :4].tolist() == [7, 0, 8, 0]
    assert modelopt_mxfp4(x)[0][0, :4].tolist() == [7, 8, 8, 0]


def test_modelopt_scales_down_a_block_just_above_a_power_of_two() -> None:
    above = torch.nextafter(torch.tensor(6 * 2.0**20), torch.tensor(torch.inf))
    x = torch.full((1, 32), float(above))
    assert mxfp4.encode(x)[1].item() == 127 + 21
    assert modelopt_mxfp4(x)[1].item() == 127 + 20


def test_modelopt_gives_a_block_with_nan_byte_0_and_ours_gives_nan() -> None:
    x = torch.ones(1, 32)
    x[0, 3] = torch.nan
    assert mxfp4.encode(x)[1].item() == mxfp8.encode(x)[1].item() == 255
    assert modelopt_mxfp4(x)[1].item() == modelopt_mxfp8(x)[1].item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mx_codes_decode_to_the_values_of_modelopt(dtype: torch.dtype) -> None:
    x = integer_inputs(dtype)["scaled_blocks"]
    packed, scales = MXFP4QTensor.quantize(x, 32)
    codes, scale_bytes = unpack_codes(packed._quantized_data), scales.reshape(x.shape[0], -1)
    theirs = packed.dequantize(dtype, scale=scales, block_sizes={-1: 32})
    assert_same_bytes(mxfp4.decode(codes, scale_bytes, dtype=dtype), theirs, "MXFP4")
    quantised, scale_bytes = MXFP8QTensor.quantize(x)
    theirs = quantised.dequantize(dtype, scale=scale_bytes)
    codes = quantised._quantized_data.view(torch.uint8)
    assert_same_bytes(mxfp8.decode(codes, scale_bytes, dtype=dtype), theirs, "MXFP8")


def modelopt_nvfp4(
    x: torch.Tensor, scale_2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    packed, scales, _ = NVFP4QTensor.quantize(x, 16, weights_scaling_factor_2=scale_2)
    values = packed.dequantize(scale=scales, double_scale=scale_2, block_sizes={-1: 16})
    return unpack_codes(packed._quantized_data), scales.view(torch.uint8), values


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_and_power_of_two_scales_equal_modelopt(
    dtype: torch.dtype, per_row: bool, power_of_two: bool
) -> None:
    for name in ("bell", "scaled_blocks", "binades"):
        x = integer_inputs(dtype)[name]
        # -0 is a disagreement, tested for the scale of a tensor.
        x = torch.where(x == 0, torch.zeros_like(x), x)
        amax = x.abs().amax(-1, keepdim=True) if per_row else x.abs().max()
        scale = global_scale_from_amax(amax, power_of_two)
        codes, scale_bytes = encode(x, scale)
        their_codes, their_bytes, their_values = modelopt_nvfp4(x, scale)
        assert_same_bytes(codes, their_codes, f"{name} codes")
        assert_same_bytes(scale_bytes, their_bytes, f"{name} scale bytes")
        values = decode(codes, scale_bytes, scale, dtype)
        assert_same_bytes(values + 0.0, their_values + 0.0, f"{name} values")


def modelopt_four_over_six(x: torch.Tensor, amax: torch.Tensor) -> golden.Encoded:
    """Gives what ModelOpt exports after its calibrator has chosen by the squared error.

    Its fake quantiser runs on a GPU only; its exporter stands in for it here.
    """

    def quantised(values: torch.Tensor, block_amax: torch.Tensor) -> tuple[torch.Tensor, ...]:
        quantiser = SimpleNamespace(
            block_sizes={-1: 16, "four_over_six": True}, _amax=block_amax, global_amax=amax
        )
        scales, scale_2 = NVFP4QTensor.get_weights_scaling_factor_from_quantizer(quantiser, values)
        packed, _, _ = NVFP4QTensor.quantize(values.clone(), 16, scales, scale_2)
        dequantised = packed.dequantize(
            torch.float32, scale=scales, double_scale=scale_2, block_sizes={-1: 16}
        )
        return unpack_codes(packed._quantized_data), scales.view(torch.uint8), dequantised

    blocks = x.float().reshape(-1, 16)
    calibrator = MseCalibrator(
        amax=blocks.abs().amax(-1, keepdim=True),
        axis=0,
        step_size=0.5,
        start_multiplier=1.0,
        stop_multiplier=1.5,
        quant_func=lambda values, block_amax: quantised(values, block_amax)[2],
    )
    calibrator.collect(blocks)
    codes, scale_bytes, _ = quantised(blocks, calibrator.compute_amax())
    return codes.reshape(x.shape), scale_bytes.reshape(x.shape[0], -1)


@pytest.mark.parametrize("name", ["bell", "scaled_blocks", "binades"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_four_over_six_chooses_as_modelopts_calibrator(
    name: str, dtype: str, inputs: list[golden.Input]
) -> None:
    fmt = golden.FORMATS["four_over_six_256_mse"]
    given = next(given for given in inputs if given.name == f"{name}/{dtype}")
    ours = fmt.ours(given)
    theirs = modelopt_four_over_six(given.x, given.amax())
    differing = golden.differences(golden.record(ours, theirs, fmt), fmt)
    counts, unexplained = because.explain(
        because.facts(fmt, given, ours, differing),
        (because.sign_of_zero, because.candidate_beside_bound, because.choice_beside_tie),
    )
    assert not unexplained.any(), f"{differing.blocks[unexplained].tolist()}"
    assert dict(counts) == FOUR_OVER_SIX_DISAGREEMENTS[given.name]


def test_four_over_six_global_scale_is_modelopts() -> None:
    quantiser = SimpleNamespace(
        block_sizes={-1: 16, "four_over_six": True}, global_amax=torch.tensor(3.3)
    )
    theirs = NVFP4QTensor.get_weights_scaling_factor_2_from_quantizer(quantiser)
    assert_same_bytes(four_over_six.global_scale_from_amax(3.3), theirs)
