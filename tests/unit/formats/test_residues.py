"""Block scales as residues modulo 8: every pair of bytes, blocks of zeros, what is refused."""

import pytest
import torch

from megatron_trace.formats import (
    BLOCK_SIZE,
    decode,
    encode,
    four_over_six,
    own_scale_bytes,
    pack_hint,
    reference,
    residues,
)
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.hard_inputs import hard_inputs

EVERY_BYTE = torch.arange(127, dtype=torch.uint8)


def values_of(scale_bytes: torch.Tensor, sixth: float = 6.0) -> torch.Tensor:
    """Gives FP32 [..., B * 16] whose own block scales are the bytes, under a global scale of 1."""
    scales = scale_bytes.view(torch.float8_e4m3fn).float()
    steps = torch.arange(BLOCK_SIZE) / (BLOCK_SIZE - 1)
    return (scales.unsqueeze(-1) * sixth * steps).flatten(-2)


def nearest_byte(rollout: int, own: int) -> int:
    """Gives the rule by enumeration: the nearest byte of that residue, of two the smaller."""
    candidates = [byte for byte in range(1, 127) if byte % 8 == rollout % 8]
    return min(candidates, key=lambda byte: (abs(byte - own), byte))


def test_every_pair_of_bytes() -> None:
    """All 127 x 127 pairs, through the trainer's values; a rollout's byte 0 is a block of zeros."""
    rollout = EVERY_BYTE.repeat(127, 1)
    hint = pack_hint(encode(values_of(rollout), 1.0)[0], 1)
    hint, found = residues.to_residues(hint, rollout, num_bits=1)
    trainer = values_of(EVERY_BYTE.unsqueeze(1).expand(127, 127).contiguous())
    assert_same_bytes(own_scale_bytes(trainer, 1.0), EVERY_BYTE.unsqueeze(1).expand(127, 127))
    restored = residues.restored(trainer, hint, found, 1.0, num_bits=1)
    for own in range(127):
        expected = [0, *(nearest_byte(byte, own) for byte in range(1, 127))]
        assert restored[own].tolist() == expected, f"the trainer's own byte is {own}"
    distance = rollout.int() - EVERY_BYTE.unsqueeze(1).int()
    near = ((distance >= -4) & (distance <= 3)) | (rollout == 0)
    assert_same_bytes(restored[near], rollout[near], "bytes from 4 below to 3 above the own")


@pytest.mark.parametrize(
    ("rollout", "own", "restored"),
    [
        (36, 40, 36),  # 4 below: the smaller of two
        (44, 40, 36),  # 4 above is taken for it
        (8, 4, 8),  # byte 0 is no candidate, though 4 below
        (8, 0, 8),
        (7, 0, 7),
        (126, 126, 126),
        (119, 126, 119),  # 127 is NaN, so 7 below is nearest
        (1, 6, 9),
    ],
)
def test_ties_and_ends(rollout: int, own: int, restored: int) -> None:
    one = torch.tensor([rollout & 7], dtype=torch.uint8)
    assert residues.nearest(one, torch.tensor([own], dtype=torch.uint8)).item() == restored


@pytest.mark.parametrize("num_bits", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_values_restore_every_hard_input(num_bits: int, dtype: torch.dtype) -> None:
    for case in hard_inputs(dtype):
        _, hint, scale_bytes = reference.rtn_record(case.x, case.global_scale, num_bits=num_bits)
        if (scale_bytes > residues.LARGEST_BYTE).any():
            continue  # a NaN, which no record may hold
        same, found = residues.to_residues(hint, scale_bytes, num_bits=num_bits)
        assert_same_bytes(same, hint, f"{case.name}, hint")
        restored = residues.restored(case.x, same, found, case.global_scale, num_bits=num_bits)
        assert_same_bytes(restored, scale_bytes, f"{case.name}, scale bytes")


def test_a_block_of_zeros_survives_any_trainer() -> None:
    rollout = torch.zeros(127, BLOCK_SIZE)
    for num_bits in (1, 2, 4):
        _, hint, scale_bytes = reference.rtn_record(rollout, 1.0, num_bits=num_bits)
        hint, found = residues.to_residues(hint, scale_bytes, num_bits=num_bits)
        trainer = values_of(EVERY_BYTE.unsqueeze(1))
        assert not residues.restored(trainer, hint, found, 1.0, num_bits=num_bits).any()


@pytest.mark.parametrize("num_bits", [1, 2, 4])
def test_codes_under_byte_0_are_dropped(num_bits: int) -> None:
    """Transformer Engine leaves codes of 6 under block scales that underflow to 0."""
    codes = torch.full((2, 32), 15, dtype=torch.uint8)
    scale_bytes = torch.tensor([[0, 56], [56, 0]], dtype=torch.uint8)
    hint, found = residues.to_residues(pack_hint(codes, num_bits), scale_bytes, num_bits=num_bits)
    codes[0, :16] = codes[1, 16:] = 0
    assert_same_bytes(hint, pack_hint(codes, num_bits))
    assert found.tolist() == [[0, 0], [0, 0]]


def test_zeros_with_a_sign_are_no_magnitude() -> None:
    codes = torch.full((1, 16), 8, dtype=torch.uint8)
    scale_bytes = torch.zeros(1, 1, dtype=torch.uint8)
    hint, found = residues.to_residues(pack_hint(codes, 4), scale_bytes, num_bits=4)
    restored = residues.restored(torch.ones(1, 16), hint, found, 1.0, num_bits=4)
    assert restored.tolist() == [[0]]


@pytest.mark.parametrize("num_bits", [1, 2, 4])
def test_no_block_of_the_quantiser_is_taken_for_zeros(num_bits: int) -> None:
    """One value a block, at the ends of what every byte of 8 or more is rounded from."""
    bytes_ = torch.arange(8, 127, dtype=torch.uint8)
    scales = torch.cat(
        [
            values_of(bytes_.unsqueeze(1), 6.0 * part)[:, -1:]
            for part in (0.9376, 0.95, 1.0, 1.05, 1.0624)
        ]
    )
    x = torch.nn.functional.pad(scales, (0, BLOCK_SIZE - 1))
    _, hint, scale_bytes = reference.rtn_record(x, 1.0, num_bits=num_bits)
    residues.to_residues(hint, scale_bytes, num_bits=num_bits)


def test_a_block_that_would_be_taken_for_zeros_is_refused() -> None:
    """4over6 may give a block a scale of a fourth of its largest magnitude, so the code 6."""
    x = torch.zeros(2, 32)
    x[1, 16:] = torch.tensor([4.0, 1.0, -4.0, 2.0] * 4)
    _, hint, scale_bytes = four_over_six.rtn_record(x, 2.0**-6, num_bits=1)
    assert scale_bytes[1, 1] & 7 == 0
    with pytest.raises(ValueError, match=r"block \[1, 1\] has scale byte 104, .*hint_scales=raw"):
        residues.to_residues(hint, scale_bytes, num_bits=1)
    _, hint, scale_bytes = four_over_six.rtn_record(x, 2.0**-6, num_bits=2)
    residues.to_residues(hint, scale_bytes, num_bits=2)


# Measured shares of other bytes: 0, 0, 2.6e-5, 9.6e-3.
@pytest.mark.parametrize(
    ("noise", "largest_share"), [(0.003, 0.0), (0.01, 0.0), (0.03, 1e-4), (0.1, 2e-2)]
)
def test_share_of_bytes_that_are_not_restored(noise: float, largest_share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    rollout = torch.randn(2048, 512, generator=generator)
    rollout *= torch.exp(torch.randn(512, generator=generator))
    size = rollout.square().mean(-1, keepdim=True).sqrt()
    trainer = rollout + noise * size * torch.randn(rollout.shape, generator=generator)
    _, hint, scale_bytes = reference.rtn_record(rollout, 0.002, num_bits=1)
    hint, found = residues.to_residues(hint, scale_bytes, num_bits=1)
    restored = residues.restored(trainer, hint, found, 0.002, num_bits=1)
    share = (restored != scale_bytes).float().mean().item()
    assert share <= largest_share, f"measured {share:.2e}"


def test_nan_of_the_trainer_counts_as_the_largest_scale() -> None:
    _, hint, scale_bytes = reference.rtn_record(torch.full((1, 16), 2688.0), 1.0, num_bits=1)
    hint, found = residues.to_residues(hint, scale_bytes, num_bits=1)
    restored = residues.restored(torch.full((1, 16), torch.nan), hint, found, 1.0, num_bits=1)
    assert restored.tolist() == [[126]]


def test_inputs_are_left_as_they_were() -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    x[2, :16] = 0.0
    _, hint, scale_bytes = reference.rtn_record(x, 0.01, num_bits=1)
    kept = hint.clone(), scale_bytes.clone()
    _, found = residues.to_residues(hint, scale_bytes, num_bits=1)
    before = found.clone()
    residues.restored(x, hint, found, 0.01, num_bits=1)
    for got, expected in zip((hint, scale_bytes, found), (*kept, before), strict=True):
        assert_same_bytes(got, expected)
    assert_same_bytes(decode(encode(x, 0.01)[0], scale_bytes, 0.01), reference.rtn(x, 0.01))


def test_residues_that_do_not_fit_the_values_are_refused() -> None:
    hint = torch.zeros(2, 4, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"scale_bytes must be uint8 \(2, 2\)"):
        residues.restored(torch.ones(2, 32), hint, hint[:, :1], 1.0, num_bits=1)
    with pytest.raises(ValueError, match="num_bits must be 1"):
        residues.to_residues(hint, hint[:, :2], num_bits=3)
