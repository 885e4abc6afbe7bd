"""Hints of every number format: codec, store, files, guard, and what shows them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_trace.formats import NUMBER_FORMATS, NumberFormat, format_set, ops, unpack_hint
from megatron_trace.hints import (
    THRESHOLDS,
    HintFiles,
    HintFilesWriter,
    HintKey,
    HintStore,
    QuantizerSettings,
    RecordKind,
    RolloutSample,
    Site,
    SiteHint,
    accept_rows,
    decode_bits,
    decode_codes,
    encode_hint,
    encode_packed_hint,
    site_format,
    stack_rows,
    stored_bits,
)
from megatron_trace.hints.settings_file import settings_from_record, settings_record
from megatron_trace.testing.programs import load_program
from megatron_trace.testing.token_rows import rows_of, with_noise

KEY = HintKey("s0", layer=1, site=Site.FC1, policy_version=3, settings_digest="abc")
INSPECT = Path(__file__).parents[3] / "tools" / "inspect_hints.py"
EVERY_FORMAT = pytest.mark.parametrize(
    "number_format", NUMBER_FORMATS.values(), ids=lambda number_format: number_format.name
)


def quantised(number_format: NumberFormat, x: torch.Tensor):
    """Gives packed codes, scale bytes and the global scale."""
    scale = number_format.global_scale_from_amax(x.abs().max())
    return *ops.encode(x, scale, number_format=number_format), scale


@pytest.mark.parametrize(
    ("name", "bytes_per_row"),
    # 64 values: bits / 8 of them, and a byte for each block.
    [
        ("nvfp4", (8 + 4, 16 + 4, 32 + 4)),
        ("nvfp4_4over6", (8 + 4, 16 + 4, 32 + 4)),
        ("mxfp4", (8 + 2, 16 + 2, 32 + 2)),
        ("mxfp8", (8 + 2, 16 + 2, 64 + 2)),
    ],
)
def test_hints_take_the_bytes_that_bits_and_blocks_say(name, bytes_per_row):
    number_format = NUMBER_FORMATS[name]
    packed, scale_bytes, scale = quantised(number_format, rows_of(64)[:5])
    for hint_bits, expected in zip((1, 2, 4), bytes_per_row, strict=True):
        bits = stored_bits(number_format, hint_bits)
        hint = encode_packed_hint(KEY, packed, scale_bytes, scale, bits, "raw", number_format)
        assert (hint.num_rows, hint.num_values, hint.num_bytes) == (5, 64, 5 * expected)


@EVERY_FORMAT
def test_codes_and_lowest_bits_come_back(number_format):
    packed, scale_bytes, scale = quantised(number_format, rows_of(64)[:9])
    codes = unpack_hint(packed, number_format.code_bits)
    form = "raw", number_format
    whole = encode_hint(KEY, codes, scale_bytes, scale, number_format.code_bits, *form)
    one_bit = encode_hint(KEY, codes, scale_bytes, scale, 1, *form)
    assert torch.equal(decode_bits(whole), codes & 1)
    assert torch.equal(decode_codes(whole), codes), "reading changes nothing"
    assert torch.equal(decode_bits(one_bit), codes & 1)
    with pytest.raises(ValueError, match=f"codes need a {number_format.code_bits}-bit hint"):
        decode_codes(one_bit)


@EVERY_FORMAT
def test_a_global_scale_is_given_exactly_where_the_format_has_one(number_format):
    packed, scale_bytes, scale = quantised(number_format, rows_of(64)[:2])
    wrong = None if number_format.has_global_scale else 1.0
    with pytest.raises(ValueError, match=rf"{number_format.name} has (a|no) global scale; got"):
        encode_packed_hint(KEY, packed, scale_bytes, wrong, 1, "raw", number_format)
    hint = encode_packed_hint(KEY, packed, scale_bytes, scale, 1, "raw", number_format)
    assert (hint.global_scale is None) == (scale is None)


@pytest.mark.parametrize("name", ["nvfp4_4over6", "mxfp4", "mxfp8"])
def test_residues_are_refused_where_they_are_not_defined(name):
    number_format = NUMBER_FORMATS[name]
    packed, scale_bytes, scale = quantised(number_format, rows_of(64)[:2])
    with pytest.raises(ValueError, match=f"block scales of {name} have no residues"):
        encode_packed_hint(KEY, packed, scale_bytes, scale, 1, "residue", number_format)


@EVERY_FORMAT
def test_block_scales_of_values_that_are_not_finite_are_refused(number_format):
    x = rows_of(64)[:2]
    packed, scale_bytes, scale = quantised(number_format, x)
    scale_bytes[1, 1] = {"e4m3": 0x7F, "e8m0": 0xFF}[number_format.scale_encoding]
    with pytest.raises(ValueError, match=r"NaN or Inf activations.* in row 1, column 1"):
        encode_packed_hint(KEY, packed, scale_bytes, scale, 1, "raw", number_format)


def test_hints_of_other_formats_do_not_stack():
    hints = []
    for name in ("mxfp4", "mxfp8"):
        number_format = NUMBER_FORMATS[name]
        packed, scale_bytes, scale = quantised(number_format, rows_of(64)[:2])
        hints.append(encode_packed_hint(KEY, packed, scale_bytes, scale, 1, "raw", number_format))
    with pytest.raises(ValueError, match="must agree in layer, site, format"):
        stack_rows(hints, 2)


def records(number_format: NumberFormat) -> tuple[RolloutSample, list[tuple[SiteHint, RecordKind]]]:
    packed, scale_bytes, scale = quantised(number_format, rows_of(64)[:3])
    form = "raw", number_format
    hint = encode_packed_hint(KEY, packed, scale_bytes, scale, 1, *form)
    codes = encode_packed_hint(KEY, packed, scale_bytes, scale, number_format.code_bits, *form)
    sample = RolloutSample(
        sample_id="s0",
        prompt_tokens=(1, 2),
        response_tokens=(3, 4),
        logprobs=torch.zeros(2),
        routing=torch.zeros(3, 1, 1, dtype=torch.int16),
        policy_version=3,
        settings_digest="abc",
        finish_reason="stop",
    )
    return sample, [(hint, RecordKind.HINT), (codes, RecordKind.CODES)]


@EVERY_FORMAT
def test_files_give_back_what_a_store_gives(number_format, tmp_path, capsys):
    sample, kept = records(number_format)
    store = HintStore()
    with HintFilesWriter(tmp_path) as files:
        for hint, kind in kept:
            store.put(hint, kind)
            files.put(hint, kind)
        files.commit([sample])
    for hint, kind in kept:
        for source in (store, HintFiles(tmp_path)):
            found = source.get(KEY, num_rows=3, kind=kind)
            for name in ("num_bits", "global_scale", "scale_form", "number_format"):
                assert getattr(found, name) == getattr(hint, name)
            assert torch.equal(found.payload, hint.payload)
            assert torch.equal(found.scale_bytes, hint.scale_bytes)
    program = load_program(INSPECT)
    assert program.main([str(tmp_path), "--sample", "s0", "--kind", "codes"]) == 0
    shown = capsys.readouterr().out
    assert f"{number_format.name}, {number_format.code_bits} bit, " in shown
    assert ("no global scale" in shown) == (not number_format.has_global_scale)
    codes = decode_codes(kept[1][0])[0, : number_format.block_size].tolist()
    digits = number_format.code_bits // 4
    assert "".join(f"{code:0{digits}x}" for code in codes) in shown


def test_full_codes_of_other_bits_are_refused():
    _, kept = records(NUMBER_FORMATS["mxfp8"])
    with pytest.raises(ValueError, match="full codes need 8 bits per value; got 1"):
        HintStore().put(kept[0][0], RecordKind.CODES)


# Shares that the guard accepts, by K = 32, 64, 128, 2048; measured values in `hints/guard.py`.
@pytest.mark.parametrize(
    ("name", "noise", "least"),
    [
        ("nvfp4_4over6", 0.03, (1.0, 1.0, 1.0, 1.0)),
        ("nvfp4_4over6", 0.1, (0.95, 0.99, 0.995, 1.0)),
        ("mxfp4", 0.03, (0.999, 1.0, 1.0, 1.0)),
        ("mxfp4", 0.1, (0.95, 0.99, 0.998, 1.0)),
        ("mxfp8", 0.01, (0.99, 0.999, 1.0, 1.0)),
        ("mxfp8", 0.03, (0.8, 0.85, 0.93, 1.0)),
    ],
)
def test_true_hints_are_accepted(name, noise, least):
    for num_values, share in zip((32, 64, 128, 2048), least, strict=True):
        x = rows_of(num_values)
        assert _accepted_share(name, with_noise(x, noise), x) >= share, num_values


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("nvfp4_4over6", (0.02, 0.005, 0.0005, 0.0)),
        ("mxfp4", (0.015, 0.003, 0.0005, 0.0)),
        ("mxfp8", (0.06, 0.01, 0.001, 0.0)),
    ],
)
def test_hints_of_shuffled_rows_are_rejected(name, most):
    for num_values, share in zip((32, 64, 128, 2048), most, strict=True):
        x = rows_of(num_values)
        assert _accepted_share(name, x, x.roll(1, dims=0)) <= share, num_values


def _accepted_share(name: str, trainer: torch.Tensor, rollout: torch.Tensor) -> float:
    number_format = NUMBER_FORMATS[name]
    packed, scale_bytes, scale = quantised(number_format, rollout)
    health = accept_rows(
        trainer,
        ops.narrowed(packed, 1, number_format=number_format),
        scale_bytes,
        scale,
        num_bits=1,
        thresholds=THRESHOLDS[name],
        number_format=number_format,
    )
    return health.accepted.float().mean().item()


def test_a_block_scale_of_the_other_of_two_is_not_far_in_4over6():
    """Choosing again moves a scale by half, 4 or 5 steps; NVFP4's guard would reject the row."""
    number_format = NUMBER_FORMATS["nvfp4_4over6"]
    x = rows_of(128)[:64]
    scale = number_format.global_scale_from_amax(x.abs().max())
    four, six = (
        NUMBER_FORMATS["nvfp4"].specification.own_scale_bytes(factor * x, scale)
        for factor in (1.5, 1.0)
    )
    for scale_bytes in (four, six):
        health = accept_rows(
            x,
            torch.zeros(64, 16, dtype=torch.uint8),
            scale_bytes,
            scale,
            num_bits=1,
            thresholds=THRESHOLDS["nvfp4_4over6"],
            number_format=number_format,
        )
        assert health.far_block_share.max() == 0


def test_settings_say_which_formats_have_global_scales():
    assert QuantizerSettings({}, number_format="mxfp4").global_scale(0, Site.K) is None
    with pytest.raises(ValueError, match="mxfp4 has no global scales; got 1 of them"):
        QuantizerSettings({(0, Site.K): 1.0}, number_format="mxfp4")
    with pytest.raises(ValueError, match="power_of_two_scales=True"):
        QuantizerSettings({}, number_format="mxfp4_w4a8", power_of_two_scales=True)
    with pytest.raises(ValueError, match=r"number_format must be one of nvfp4, .*; got 'fp4'"):
        QuantizerSettings({}, number_format="fp4")
    with pytest.raises(ValueError, match="quantised_parts must be experts_and_kv, experts, kv"):
        QuantizerSettings({}, quantised_parts="router")  # pyright: ignore[reportArgumentType]


def test_settings_of_every_format_and_part_have_a_digest_of_their_own():
    settings = [
        QuantizerSettings({}, number_format=name, quantised_parts=parts)
        for name in ("nvfp4", "nvfp4_4over6", "mxfp4", "mxfp4_w4a8")
        for parts in ("experts_and_kv", "experts", "kv")
    ]
    assert len({one.digest() for one in settings}) == 12
    for one in settings:
        assert settings_from_record(settings_record(one)) == one


def test_w4a8_has_fp8_inputs_and_fp4_keys_and_values():
    formats = format_set("mxfp4_w4a8")
    assert [site_format(formats, site).name for site in Site] == [
        "mxfp8",
        "mxfp8",
        "mxfp4",
        "mxfp4",
    ]


def test_an_unknown_format_of_a_hint_is_refused():
    _, kept = records(NUMBER_FORMATS["mxfp4"])
    with pytest.raises(ValueError, match=r"number_format must be one of .*; got 'fp4'"):
        replace(kept[0][0], number_format="fp4")
