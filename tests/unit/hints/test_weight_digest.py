"""The digest of quantised weights depends on every byte and place, and on no order."""

import pytest
import torch

from megatron_trace.hints import weight_digest
from megatron_trace.hints.weight_digest import combine_digests, matrix_digest


@pytest.fixture
def matrix():
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (4, 16), dtype=torch.uint8, generator=generator)
    scale_bytes = torch.randint(0, 127, (4, 2), dtype=torch.uint8, generator=generator)
    return codes, scale_bytes


def test_order_and_grouping_of_the_matrices_do_not_matter(matrix):
    digests = [matrix_digest(0, expert, "fc1", *matrix, 0.5) for expert in range(4)]
    grouped = [digests[2] + digests[0], digests[3] + digests[1]]
    assert combine_digests(digests) == combine_digests(reversed(digests))
    assert combine_digests(digests) == combine_digests(grouped)


def test_exchanged_experts_change_the_digest(matrix):
    codes, scale_bytes = matrix
    first = (codes, scale_bytes, 0.5)
    second = (codes.flip(0), scale_bytes.flip(0), 0.25)
    as_is = [matrix_digest(0, 0, "fc1", *first), matrix_digest(0, 1, "fc1", *second)]
    exchanged = [matrix_digest(0, 1, "fc1", *first), matrix_digest(0, 0, "fc1", *second)]
    assert combine_digests(as_is) != combine_digests(exchanged)


@pytest.mark.parametrize("bytes_at_once", [1, 300, 1 << 20])
def test_matrices_that_are_hashed_together_have_the_sum_of_their_digests(
    monkeypatch, bytes_at_once: int
) -> None:
    monkeypatch.setattr(weight_digest, "_BYTES_AT_ONCE", bytes_at_once)
    device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    digests, expected = weight_digest.DigestSum(), []
    for expert, scale in enumerate((0.5, torch.tensor(0.25), None)):
        columns = 32 if scale is None else 16
        codes = torch.full((5, 48), expert, dtype=torch.uint8)
        scales = torch.full((5, 96 // columns), 7, dtype=torch.uint8)
        expected.append(matrix_digest(1, expert, "fc2", codes, scales, scale))
        if isinstance(scale, torch.Tensor):
            scale = scale.to(device)
        digests.add(1, expert, "fc2", codes.to(device), scales.to(device), scale)
    assert digests.total() == sum(expected)


@pytest.mark.parametrize(
    "change", ["layer", "expert", "matrix", "codes", "scale_bytes", "global_scale", "shape"]
)
def test_every_part_of_a_matrix_changes_its_digest(matrix, change):
    codes, scale_bytes = matrix
    parts = {
        "layer": 0,
        "expert": 0,
        "matrix": "fc1",
        "codes": codes,
        "scale_bytes": scale_bytes,
        "global_scale": 0.5,
    }
    before = matrix_digest(*parts.values())
    flipped = codes.clone()
    flipped[1, 3] ^= 1
    other_scale = scale_bytes.clone()
    other_scale[3, 1] += 1
    parts |= {
        "layer": {"layer": 1},
        "expert": {"expert": 1},
        "matrix": {"matrix": "fc2"},
        "codes": {"codes": flipped},
        "scale_bytes": {"scale_bytes": other_scale},
        "global_scale": {"global_scale": 0.5000001},
        "shape": {"codes": codes.view(2, 32), "scale_bytes": scale_bytes.view(2, 4)},
    }[change]
    assert matrix_digest(*parts.values()) != before


def test_a_view_digests_as_its_copy(matrix):
    codes, scale_bytes = matrix
    wide = torch.cat([codes, codes], dim=1)[:, :16]
    assert not wide.is_contiguous()
    assert matrix_digest(0, 0, "fc1", wide, scale_bytes, 0.5) == matrix_digest(
        0, 0, "fc1", codes, scale_bytes, torch.tensor(0.5)
    )


def test_scale_bytes_that_do_not_fit_are_refused(matrix):
    codes, scale_bytes = matrix
    with pytest.raises(ValueError, match=r"scale_bytes must be \(4, 2\).*layer 3, expert 7, fc2"):
        matrix_digest(3, 7, "fc2", codes, scale_bytes[:, :1], 0.5)
