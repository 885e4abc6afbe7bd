"""Codes to hints and back, and hints of several samples to one batch."""

import dataclasses

import pytest
import torch

from megatron_trace import formats
from megatron_trace.hints import (
    HintKey,
    Site,
    SiteHint,
    decode_bits,
    decode_codes,
    decode_residues,
    encode_hint,
    encode_packed_hint,
    payload_bits,
    stack_rows,
)
from megatron_trace.hints.codec import NVFP4, encode_hints, encode_narrowed_hint, placed_rows

KEY = HintKey("s0", layer=3, site=Site.FC1, policy_version=7, settings_digest="abc")


def codes_and_scales(
    rows: int, num_values: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(16, (rows, num_values), generator=generator, dtype=torch.uint8)
    scale_bytes = torch.randint(
        127, (rows, num_values // 16), generator=generator, dtype=torch.uint8
    )
    return codes, scale_bytes


def recorded(
    rows: int, num_values: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives values, some of whose blocks are zeros, with the quantiser's codes and scales."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, num_values, generator=generator)
    x *= (
        torch.exp(3 * torch.randn(rows, num_values // 16, 1, generator=generator))
        .expand(-1, -1, 16)
        .reshape(rows, num_values)
    )
    x[:, :16] = torch.where(torch.arange(rows).unsqueeze(1) % 3 == 0, 0.0, x[:, :16])
    return x, *formats.encode(x, 0.01)


def indexed_hint(sample: int, rows: int, num_blocks: int = 2, num_bits: int = 1) -> SiteHint:
    """Gives a hint whose bytes are sample * 64 + row, so that a misplaced row names itself."""
    value = (sample * 64 + torch.arange(rows, dtype=torch.uint8)).unsqueeze(1)
    return SiteHint(
        key=dataclasses.replace(KEY, sample_id=f"s{sample}"),
        num_bits=num_bits,
        payload=value.repeat(1, num_blocks * 2 * num_bits),
        scale_bytes=value.repeat(1, num_blocks),
        global_scale=0.5,
    )


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("num_values", [16, 32, 208])
def test_four_bits_return_every_code_and_scale(rows: int, num_values: int) -> None:
    codes, scale_bytes = codes_and_scales(rows, num_values)
    hint = encode_hint(KEY, codes, scale_bytes, 0.25, 4)
    assert torch.equal(decode_codes(hint), codes)
    assert torch.equal(decode_bits(hint), codes & 1)
    assert torch.equal(hint.scale_bytes, scale_bytes)


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("num_values", [16, 32, 208])
def test_one_bit_returns_every_mantissa_bit_and_scale(rows: int, num_values: int) -> None:
    codes, scale_bytes = codes_and_scales(rows, num_values)
    hint = encode_hint(KEY, codes, scale_bytes, 0.25, 1)
    assert torch.equal(decode_bits(hint), codes & 1)
    assert torch.equal(hint.scale_bytes, scale_bytes)


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("num_values", [16, 32, 208])
def test_two_bits_return_the_two_lowest_bits_of_every_code(rows: int, num_values: int) -> None:
    codes, scale_bytes = codes_and_scales(rows, num_values)
    hint = encode_hint(KEY, codes, scale_bytes, 0.25, 2)
    assert torch.equal(formats.unpack_pairs(hint.payload), codes & 3)
    assert torch.equal(decode_bits(hint), codes & 1)


@pytest.mark.parametrize("num_bits", [1, 2, 4])
@pytest.mark.parametrize("num_values", [16, 64, 128, 208])
def test_residues_return_every_scale_beside_the_same_values(num_bits: int, num_values: int) -> None:
    x, codes, scale_bytes = recorded(7, num_values)
    hint = encode_hint(KEY, codes, scale_bytes, 0.01, num_bits, "residue")
    assert torch.equal(decode_residues(hint), scale_bytes & 7)
    assert torch.equal(decode_bits(hint), codes & 1)
    assert (hint.num_rows, hint.num_values) == (7, num_values)
    found = formats.ops.restored_scales(
        x, hint.payload, decode_residues(hint), hint.global_scale, num_bits=num_bits
    )
    assert torch.equal(found, scale_bytes)


@pytest.mark.parametrize("scale_form", ["raw", "residue"])
@pytest.mark.parametrize("num_bits", [1, 2, 4])
def test_packed_codes_give_the_same_hint(num_bits: int, scale_form) -> None:
    _, codes, scale_bytes = recorded(5, 64)
    hint = encode_hint(KEY, codes, scale_bytes, 0.25, num_bits, scale_form)
    packed_codes = formats.pack_codes(codes)
    other = encode_packed_hint(KEY, packed_codes, scale_bytes, 0.25, num_bits, scale_form)
    assert torch.equal(hint.payload, other.payload)
    assert torch.equal(hint.scale_bytes, other.scale_bytes)
    packed_codes.zero_()
    assert torch.equal(hint.payload, other.payload), "the hint shares the recorder's memory"


@pytest.mark.parametrize("scale_form", ["raw", "residue"])
@pytest.mark.parametrize("are_narrowed", [False, True])
def test_samples_encoded_together_have_the_hints_of_each(are_narrowed: bool, scale_form) -> None:
    keys = [dataclasses.replace(KEY, sample_id=f"s{rows}") for rows in (3, 0, 5)]
    parts = [recorded(rows, 64)[1:] for rows in (3, 0, 5)]
    codes = [formats.pack_codes(of_sample) for of_sample, _ in parts]
    if are_narrowed:
        codes = [formats.ops.narrowed(of_sample, 1) for of_sample in codes]
    scales = [of_sample for _, of_sample in parts]
    encode = encode_narrowed_hint if are_narrowed else encode_packed_hint
    form = 0.25, 1, scale_form, NVFP4
    together = encode_hints(keys, codes, scales, *form, are_narrowed=are_narrowed)
    for hint, key, *rows in zip(together, keys, codes, scales, strict=True):
        alone = encode(key, rows[0], rows[1], *form)
        assert (hint.key, hint.num_rows) == (alone.key, alone.num_rows)
        assert torch.equal(hint.payload, alone.payload)
        assert torch.equal(hint.scale_bytes, alone.scale_bytes)


def test_of_samples_encoded_together_the_wrong_one_is_named() -> None:
    keys = [dataclasses.replace(KEY, sample_id=name) for name in ("good", "bad")]
    codes = [torch.zeros(4, 32, dtype=torch.uint8) for _ in keys]
    scales = [torch.full((4, 4), value, dtype=torch.uint8) for value in (0x38, 0x7F)]
    with pytest.raises(ValueError, match=r"row 0, column 0 .*sample bad"):
        encode_hints(keys, codes, scales, 0.25, 1)


def test_residues_of_a_raw_hint_are_refused() -> None:
    with pytest.raises(ValueError, match=r"holds raw block scales, no residues .*sample s0"):
        decode_residues(indexed_hint(0, 2))


def test_a_block_that_residues_cannot_tell_names_its_place() -> None:
    codes, scale_bytes = torch.zeros(2, 32, dtype=torch.uint8), torch.full((2, 2), 16)
    with pytest.raises(ValueError, match=r"block \[0, 0\] .*hint_scales=raw.*layer 3, site fc1"):
        encode_hint(KEY, codes, scale_bytes.to(torch.uint8), 1.0, 1, "residue")


def test_other_forms_of_block_scales_are_refused() -> None:
    with pytest.raises(ValueError, match="scale_form must be raw or residue; got 'delta'"):
        encode_hint(KEY, *codes_and_scales(1, 16), 1.0, 1, "delta")


def test_hint_equals_what_the_recording_quantiser_gives() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    codes, scale_bytes = formats.encode(x, 0.01)
    for num_bits in (1, 2, 4):
        _, payload, recorded_scales = formats.ops.rtn_record(x, 0.01, num_bits=num_bits)
        hint = encode_hint(KEY, codes, scale_bytes, 0.01, num_bits)
        assert torch.equal(hint.payload, payload), f"{num_bits} bit"
        assert torch.equal(hint.scale_bytes, recorded_scales)


@pytest.mark.parametrize(
    ("num_bits", "scale_form", "bits_per_value"),
    [
        (1, "raw", 1.5),
        (2, "raw", 2.5),
        (4, "raw", 4.5),
        (1, "residue", 1.1875),
        (2, "residue", 2.1875),
        (4, "residue", 4.1875),
    ],
)
def test_bytes_of_a_hint(num_bits: int, scale_form, bits_per_value: float) -> None:
    hint = encode_hint(KEY, *codes_and_scales(10, 128), 1.0, num_bits, scale_form)
    assert hint.num_bytes == 10 * 128 * bits_per_value / 8


def test_hint_owns_its_memory() -> None:
    codes, scale_bytes = codes_and_scales(8, 32)
    hint = encode_hint(KEY, codes[2:4], scale_bytes[2:4], 1.0, 1)
    expected = scale_bytes[2:4].clone()
    scale_bytes.zero_()
    assert torch.equal(hint.scale_bytes, expected)
    assert hint.scale_bytes.untyped_storage().nbytes() == 4


def test_non_contiguous_codes_and_scales() -> None:
    codes, scale_bytes = codes_and_scales(6, 32)
    hint = encode_hint(KEY, codes.T.contiguous().T, scale_bytes.T.contiguous().T, 1.0, 1)
    assert torch.equal(decode_bits(hint), codes & 1)
    assert hint.scale_bytes.is_contiguous()


def test_global_scale_is_kept_in_fp32() -> None:
    hint = encode_hint(KEY, *codes_and_scales(1, 16), 0.1, 1)
    assert hint.global_scale == torch.tensor(0.1).item() != 0.1


def test_codes_of_a_one_bit_hint_are_refused() -> None:
    with pytest.raises(ValueError, match=r"need a 4-bit hint; got 1 bit.*sample s0, layer 3"):
        decode_codes(indexed_hint(0, 2))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e-60])
def test_global_scale_must_be_finite_and_positive_in_fp32(value: float) -> None:
    with pytest.raises(ValueError, match="global_scale must be finite and > 0"):
        encode_hint(KEY, *codes_and_scales(1, 16), value, 1)


def test_code_beyond_15_names_its_place() -> None:
    codes, scale_bytes = codes_and_scales(3, 32)
    codes[2, 5] = 16
    with pytest.raises(ValueError, match=r"code must be at most 15; got 16 in row 2, column 5.*s0"):
        encode_hint(KEY, codes, scale_bytes, 1.0, 1)


@pytest.mark.parametrize("byte", [0x7F, 0x80, 0xFF])
def test_scale_byte_that_is_nan_or_negative_names_its_place(byte: int) -> None:
    codes, scale_bytes = codes_and_scales(3, 32)
    scale_bytes[1, 1] = byte
    with pytest.raises(ValueError, match=rf"got {byte} in row 1, column 1.*layer 3, site fc1"):
        encode_hint(KEY, codes, scale_bytes, 1.0, 4)


def test_shapes_that_disagree_are_refused() -> None:
    codes, scale_bytes = codes_and_scales(3, 32)
    with pytest.raises(ValueError, match=r"codes must be \(3, 16\)"):
        encode_hint(KEY, codes, scale_bytes[:, :1], 1.0, 1)
    with pytest.raises(ValueError, match=r"codes must be \(2, 32\)"):
        encode_hint(KEY, codes, scale_bytes[:2], 1.0, 1)
    with pytest.raises(ValueError, match=r"codes must be uint8 \[rows, columns\]"):
        encode_hint(KEY, codes.int(), scale_bytes, 1.0, 1)


def test_other_numbers_of_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="num_bits must be 1, 2 or 4; got 3"):
        encode_hint(KEY, *codes_and_scales(1, 16), 1.0, 3)
    with pytest.raises(ValueError, match="num_bits must be 1, 2, 4 or 8; got 3"):
        payload_bits(torch.zeros(1, 2, dtype=torch.uint8), 3)


@pytest.mark.parametrize("num_bits", [1, 2, 4])
def test_stacked_rows_stand_at_their_position_and_sample(num_bits: int) -> None:
    lengths = [3, 0, 5, None, 1]
    hints = [
        None if rows is None else indexed_hint(sample, rows, num_bits=num_bits)
        for sample, rows in enumerate(lengths)
    ]
    payload, scale_bytes, valid = stack_rows(hints, 6)
    assert payload.shape == (6, 5, 4 * num_bits)
    assert scale_bytes.shape == (6, 5, 2)
    for sample, rows in enumerate(lengths):
        for position in range(6):
            held = rows is not None and position < rows
            expected = sample * 64 + position if held else 0
            place = f"position {position}, sample {sample}"
            assert valid[position, sample].item() == held, place
            assert (payload[position, sample] == expected).all(), place
            assert (scale_bytes[position, sample] == expected).all(), place


def test_long_and_short_hints_stand_at_their_place_alike() -> None:
    hints = [
        encode_hint(KEY, *codes_and_scales(rows, 32, seed=rows), 0.5, 1)
        for rows in (300, 2, 3, 257)
    ]
    payload, scale_bytes, valid = stack_rows(hints, 301)
    for column, hint in enumerate(hints):
        assert torch.equal(payload[: hint.num_rows, column], hint.payload)
        assert torch.equal(scale_bytes[: hint.num_rows, column], hint.scale_bytes)
        assert valid[:, column].tolist() == [row < hint.num_rows for row in range(301)]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [(300, 2, 3, 257), (300,)])
def test_hints_of_a_gpu_are_placed_into_host_memory(rows: tuple[int, ...]) -> None:
    hints = [encode_hint(KEY, *codes_and_scales(n, 32, seed=n), 0.5, 1) for n in rows]
    places = [range(300 * n, 300 * n + 300) for n in range(len(rows))]
    of_gpu = [
        dataclasses.replace(h, payload=h.payload.cuda(), scale_bytes=h.scale_bytes.cuda())
        for h in hints
    ]
    found = placed_rows(
        of_gpu, places, 300 * len(rows), lambda shape, dtype: torch.zeros(shape, dtype=dtype)
    )
    for got, expected in zip(found, placed_rows(hints, places, 300 * len(rows)), strict=True):
        assert torch.equal(got, expected)


def test_stacked_residues_stay_packed() -> None:
    hints = [
        encode_hint(KEY, *codes_and_scales(rows, 80, seed=rows), 0.5, 2, "residue")
        for rows in (3, 5)
    ]
    payload, packed, valid = stack_rows(hints, 6)
    assert (payload.shape[-1], packed.shape[-1]) == (20, 2)
    for column, hint in enumerate(hints):
        assert torch.equal(packed[: hint.num_rows, column], hint.scale_bytes)
        assert valid[:, column].sum() == hint.num_rows
    with pytest.raises(ValueError, match=r"must agree in .* form of the block scales"):
        stack_rows([hints[0], encode_hint(KEY, *codes_and_scales(3, 80), 0.5, 2)], 6)


def test_stacking_no_hint_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="none of 2 samples has a hint"):
        stack_rows([None, None], 4)


def test_stacking_more_rows_than_positions_is_refused() -> None:
    with pytest.raises(ValueError, match=r"5 rows do not fit into 4 positions.*sample s1"):
        stack_rows([indexed_hint(0, 4), indexed_hint(1, 5)], 4)


@pytest.mark.parametrize(
    "change",
    [
        {"key": dataclasses.replace(KEY, layer=2)},
        {"key": dataclasses.replace(KEY, site=Site.K)},
        {"global_scale": 0.25},
    ],
    ids=["layer", "site", "global_scale"],
)
def test_stacking_hints_of_different_places_or_scales_is_refused(change: dict) -> None:
    with pytest.raises(ValueError, match="hints of one batch must agree"):
        stack_rows([indexed_hint(0, 2), dataclasses.replace(indexed_hint(1, 2), **change)], 4)


def test_stacking_hints_of_different_widths_or_bits_is_refused() -> None:
    for other in (indexed_hint(1, 2, num_blocks=3), indexed_hint(1, 2, num_bits=4)):
        with pytest.raises(ValueError, match="hints of one batch must agree"):
            stack_rows([indexed_hint(0, 2), other], 4)


def test_stacking_samples_of_different_policy_versions_is_allowed() -> None:
    newer = dataclasses.replace(
        indexed_hint(1, 2), key=dataclasses.replace(KEY, sample_id="s1", policy_version=8)
    )
    _, _, valid = stack_rows([indexed_hint(0, 2), newer], 2)
    assert valid.all()
