"""Cases 2, 3, 4, 6, 9 and 11: faults that NVFP4 quantisers had elsewhere.

The others up to 12 are in `test_expert_quantisation.py`.

Each test's name starts with the number of its case.
"""

import math

import pytest
import torch
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

from megatron_trace.formats import (
    decode,
    encode,
    global_scale_from_amax,
    ops,
    pack_codes,
    unpack_bits,
    unpack_codes,
)
from megatron_trace.testing.assertions import assert_same_bytes

LEAST_BYTE = 0x01  # 2^-9
NAN_BYTE = 0x7F
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def poisoned_memory():
    """Fills every tensor that is allocated without values with NaN, or the largest integer."""
    mode = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True)
    yield
    torch.set_deterministic_debug_mode(mode)


def random_rows(num_rows: int, num_values: int, dtype: torch.dtype = torch.bfloat16):
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randn(num_rows, num_values, generator=generator).to(dtype)


@pytest.mark.parametrize("share", [1e-7, 1e-6])
def test_02_a_block_whose_scale_underflows_gets_the_least_scale_not_zero(share: float) -> None:
    x = torch.full((1, 32), share)
    x[0, :16] = 1.0
    global_scale = global_scale_from_amax(x.abs().max())
    assert 0 < share / (6 * global_scale) < 2.0**-9
    codes, scale_bytes = encode(x, global_scale)
    values = decode(codes, scale_bytes, global_scale)
    assert scale_bytes.tolist() == [[0x7E, LEAST_BYTE]]
    assert values[0, 0] == pytest.approx(1.0)
    # Below twice the scale, values of E2M1 are half a scale apart.
    step = 0.5 * 2.0**-9 * float(global_scale)
    assert values[0, 16] == pytest.approx(round(share / step) * step)


def test_03_a_block_of_zeros_or_of_one_denormal_gives_zeros_everywhere() -> None:
    x = torch.zeros(2, 32)
    x[:, :16] = 1.0
    x[1, 20] = 1e-42
    global_scale = global_scale_from_amax(1.0)
    y, hint, scale_bytes = ops.rtn_record(x, global_scale, num_bits=1)
    assert scale_bytes.tolist() == [[0x7E, 0], [0x7E, LEAST_BYTE]]
    assert_same_bytes(y[:, 16:], torch.zeros(2, 16), "rtn")
    assert_same_bytes(unpack_bits(hint)[:, 16:], torch.zeros(2, 16, dtype=torch.uint8), "hint")
    guided = ops.guided(x, hint, scale_bytes, global_scale, num_bits=1)
    assert_same_bytes(guided[:, 16:], torch.zeros(2, 16), "guided")


@pytest.mark.parametrize("amax", [1e-38, 1e-20, 1.0, 1e20, 3e38])
def test_04_every_byte_of_10000_blocks_equals_modelopt(amax: float) -> None:
    x = random_rows(1000, 160, torch.float32).double()
    x = (x / x.abs().max() * amax).float()
    global_scale = global_scale_from_amax(x.abs().max())
    codes, scale_bytes = encode(x, global_scale)
    theirs, their_scales, their_global_scale = NVFP4QTensor.quantize(x, 16)
    assert_same_bytes(global_scale, their_global_scale, "global scale")
    assert_same_bytes(scale_bytes, their_scales.view(torch.uint8), "scale bytes")
    assert_same_bytes(codes, unpack_codes(theirs._quantized_data), "codes")
    assert_same_bytes(pack_codes(codes), theirs._quantized_data, "packed codes")


@pytest.mark.parametrize(("amax", "byte"), [(0.0, 0), (math.nan, NAN_BYTE)])
def test_04_an_amax_of_0_or_nan_gives_that_in_every_block(amax: float, byte: int) -> None:
    x = random_rows(4, 64) * 0 if amax == 0 else random_rows(4, 64)
    _, scale_bytes = encode(x, global_scale_from_amax(amax))
    assert scale_bytes.unique().tolist() == [byte]
    values = ops.rtn(x, global_scale_from_amax(amax))
    assert bool(values.isnan().all()) if math.isnan(amax) else not values.any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("poisoned_memory")
def test_06_no_byte_of_a_partial_tile_is_left_unwritten(device: str) -> None:
    x = random_rows(3, 48)
    codes, scale_bytes = encode(x, 0.002)
    for num_bits in (1, 4):
        y, hint, got_bytes = ops.rtn_record(x.to(device), 0.002, num_bits=num_bits)
        unpacked = unpack_bits(hint.cpu()) if num_bits == 1 else unpack_codes(hint.cpu())
        assert_same_bytes(unpacked, codes & 1 if num_bits == 1 else codes, "hint")
        assert_same_bytes(got_bytes.cpu(), scale_bytes, "scale bytes")
        assert_same_bytes(y.cpu(), decode(codes, scale_bytes, 0.002, x.dtype), "values")


@pytest.mark.parametrize("device", DEVICES)
def test_06_nothing_beside_a_partial_tile_is_read(device: str) -> None:
    x = random_rows(3, 48).to(device)
    buffer = torch.full((8, 128), math.nan, dtype=x.dtype, device=device)
    buffer[2:5, 16:64] = x
    view = buffer[2:5, 16:64]
    for got, expected in zip(
        ops.rtn_record(view, 0.002, num_bits=1), ops.rtn_record(x, 0.002, num_bits=1), strict=True
    ):
        assert_same_bytes(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 17, 31])
def test_09_any_number_of_rows_and_any_dtype_is_quantised(num_rows: int, dtype) -> None:
    x = random_rows(num_rows, 48, dtype)
    y, hint, scale_bytes = ops.rtn_record(x, 0.002, num_bits=1)
    assert (y.shape, hint.shape, scale_bytes.shape) == (
        (num_rows, 48),
        (num_rows, 6),
        (num_rows, 3),
    )
    assert_same_bytes(ops.guided(x, hint, scale_bytes, 0.002, num_bits=1), y)


def test_09_a_transpose_without_whole_blocks_is_refused_with_its_shape() -> None:
    with pytest.raises(ValueError, match=r"multiple of 16 long; got shape \(48, 17\)"):
        ops.rtn(random_rows(17, 48).T, 0.002)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_tokens", [144, 128, 129])
def test_11_scales_have_a_row_for_each_token_and_rows_do_not_mix(num_tokens: int, device) -> None:
    x = random_rows(num_tokens, 128).to(device)
    together = ops.rtn_record(x, 0.002, num_bits=1)
    assert together[2].shape == (num_tokens, 8)
    alone = [ops.rtn_record(row, 0.002, num_bits=1) for row in x.split(1)]
    for got, rows in zip(together, zip(*alone, strict=True), strict=True):
        assert_same_bytes(got, torch.cat(rows))
