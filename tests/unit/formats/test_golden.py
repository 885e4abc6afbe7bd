"""Bit equality with libraries by golden files, and every difference explained by a named reason.

The files say what Transformer Engine, torchao and fouroversix made of 4.2 million values and of the
hard inputs; `tools/make_golden.py` says how they were made.
"""

from collections import Counter
from pathlib import Path

import pytest
import torch

from megatron_trace.testing import disagreements as because
from megatron_trace.testing import golden

DIRECTORY = Path(__file__).parents[2] / "golden"
LIBRARIES = {path.stem: golden.Golden.read(path) for path in sorted(DIRECTORY.glob("*.json"))}

_EDGES = (
    because.nan_block,
    because.sign_of_zero,
    because.degenerate_global_scale,
    because.no_floor,
    because.least_scale_is_normal,
    because.scale_beyond_448_is_nan,
    because.code_beside_bound,
)
_NVFP4 = (*_EDGES, because.scale_beside_bound, because.code_beyond_7)
_FOUR_OVER_SIX = (
    *_EDGES,
    because.candidate_beside_bound,
    because.error_beyond_fp32,
    because.choice_beside_tie,
    because.code_beyond_7,
)
_MX = (
    because.nan_block,
    because.sign_of_zero,
    because.byte_0,
    because.subnormal_scale,
    because.rounded_logarithm,
    because.nan_scale_is_byte_0,
    because.inf_block,
)

# Blocks that differ, by library, format and the reason why. A reason that another library lacks is
# a rule of this one; docs/formats.md puts them in words.
DISAGREEMENTS: dict[str, dict[str, dict[str, int]]] = {
    "fouroversix": {
        "nvfp4": {
            "code_beside_bound": 12,
            "sign_of_zero": 6,
            "no_floor": 34,
            "code_beyond_7": 6,
            "scale_beyond_448_is_nan": 68,
            "nan_block": 8,
            "degenerate_global_scale": 48,
        },
        "four_over_six_256_mse": {
            "code_beside_bound": 18,
            "code_beyond_7": 12,
            "sign_of_zero": 6,
            "no_floor": 30,
            "scale_beyond_448_is_nan": 68,
            "nan_block": 8,
            "degenerate_global_scale": 48,
            "choice_beside_tie": 6,
        },
        "four_over_six_256_mae": {
            "code_beside_bound": 17,
            "code_beyond_7": 12,
            "choice_beside_tie": 46,
            "sign_of_zero": 6,
            "no_floor": 30,
            "scale_beyond_448_is_nan": 68,
            "nan_block": 8,
            "degenerate_global_scale": 48,
            "error_beyond_fp32": 2,
            "candidate_beside_bound": 7,
        },
        "mxfp4_rceil": {
            "sign_of_zero": 6,
            "byte_0": 14,
            "subnormal_scale": 8,
            "nan_scale_is_byte_0": 8,
            "inf_block": 4,
        },
        "mxfp4_ceil": {
            "sign_of_zero": 7,
            "byte_0": 14,
            "subnormal_scale": 8,
            "nan_scale_is_byte_0": 8,
            "inf_block": 4,
        },
    },
    "torchao": {
        "nvfp4": {
            "code_beside_bound": 143,
            "scale_beside_bound": 1,
            "least_scale_is_normal": 514,
            "nan_block": 8,
            "degenerate_global_scale": 60,
        },
        "mxfp4_floor": {"sign_of_zero": 10, "nan_block": 8, "byte_0": 6},
        "mxfp4_rceil": {"rounded_logarithm": 1, "sign_of_zero": 16, "nan_block": 8},
        "mxfp4_ceil": {"sign_of_zero": 10, "nan_block": 8, "byte_0": 6},
        "mxfp4_even": {"sign_of_zero": 10, "nan_block": 8, "byte_0": 6},
        "mxfp8_floor": {"sign_of_zero": 10, "byte_0": 8, "nan_block": 8},
        "mxfp8_rceil": {"sign_of_zero": 16, "nan_block": 8},
        "mxfp8_ceil": {"sign_of_zero": 10, "byte_0": 8, "nan_block": 8},
        "mxfp8_even": {"sign_of_zero": 10, "byte_0": 8, "nan_block": 8},
    },
    "transformer_engine": {
        "nvfp4": {
            "code_beside_bound": 12,
            "sign_of_zero": 6,
            "no_floor": 34,
            "scale_beside_bound": 239,
            "nan_block": 8,
            "degenerate_global_scale": 48,
        },
        "nvfp4_rows": {
            "sign_of_zero": 6,
            "code_beside_bound": 541,
            "no_floor": 12,
            "nan_block": 8,
            "degenerate_global_scale": 44,
            "scale_beside_bound": 186,
        },
        "mxfp4_rceil": {"sign_of_zero": 6, "rounded_logarithm": 1, "byte_0": 8, "nan_block": 8},
        "four_over_six_256_mse": {
            "code_beside_bound": 18,
            "sign_of_zero": 6,
            "no_floor": 30,
            "nan_block": 8,
            "degenerate_global_scale": 48,
            "choice_beside_tie": 3,
        },
        "four_over_six_256_mae": {
            "code_beside_bound": 17,
            "sign_of_zero": 6,
            "no_floor": 30,
            "nan_block": 8,
            "degenerate_global_scale": 48,
            "error_beyond_fp32": 2,
            "choice_beside_tie": 26,
            "candidate_beside_bound": 7,
        },
        "four_over_six_448_mse": {
            "code_beside_bound": 2,
            "choice_beside_tie": 20,
            "sign_of_zero": 6,
            "candidate_beside_bound": 160,
            "no_floor": 30,
            "nan_block": 8,
            "degenerate_global_scale": 48,
        },
        "four_over_six_448_mae": {
            "code_beside_bound": 3,
            "choice_beside_tie": 72,
            "sign_of_zero": 6,
            "candidate_beside_bound": 103,
            "no_floor": 30,
            "nan_block": 8,
            "degenerate_global_scale": 48,
            "error_beyond_fp32": 2,
        },
    },
}


@pytest.fixture(scope="module")
def inputs() -> list[golden.Input]:
    return list(golden.golden_inputs())


def reasons(format_name: str):
    if format_name.startswith("mx"):
        return _MX
    return _FOUR_OVER_SIX if format_name.startswith("four_over_six") else _NVFP4


@pytest.mark.parametrize("library", LIBRARIES)
def test_inputs_are_those_that_the_library_got(library: str, inputs: list[golden.Input]) -> None:
    digests = {given.name: golden.digest(given.x) for given in inputs}
    expected = LIBRARIES[library].inputs
    differing = sorted(
        name for name in {**digests, **expected} if digests.get(name) != expected.get(name)
    )
    assert not differing, (
        f"changed since the file was made, or made by another torch or processor: {differing}; "
        f"make it anew with {LIBRARIES[library].header['command']}"
    )
    assert sum(given.x.numel() for given in inputs) > 4_000_000


@pytest.mark.parametrize(
    ("library", "format_name"),
    [
        (library, format_name)
        for library, found in LIBRARIES.items()
        for format_name in dict.fromkeys(name.split("/")[0] for name in found.cases)
    ],
)
def test_all_blocks_are_equal_or_differ_for_a_named_reason(
    library: str, format_name: str, inputs: list[golden.Input]
) -> None:
    fmt = golden.FORMATS[format_name]
    counts: Counter[str] = Counter()
    for given in inputs:
        entry = LIBRARIES[library].cases.get(f"{format_name}/{given.name}")
        if entry is None:
            continue  # the test above fails for it
        ours, theirs = fmt.ours(given), golden.differences(entry, fmt)
        golden.require_equal_elsewhere(ours, theirs, entry["theirs"])
        found, unexplained = because.explain(
            because.facts(fmt, given, ours, theirs), reasons(format_name)
        )
        assert not unexplained.any(), (
            f"{given.name}: blocks {theirs.blocks[unexplained].tolist()} differ without a reason"
        )
        counts += found
    assert dict(counts) == DISAGREEMENTS[library][format_name]


def test_a_wrong_code_is_neither_equal_nor_explained(inputs: list[golden.Input]) -> None:
    fmt, given = golden.FORMATS["nvfp4"], inputs[0]
    ours = fmt.ours(given)
    wrong = ours[0].clone(), ours[1]
    wrong[0][5, 40] ^= 2
    with pytest.raises(AssertionError, match="beyond the 0 blocks"):
        golden.require_equal_elsewhere(
            ours, golden.differences({"blocks": {}}, fmt), golden.digest(*wrong)
        )
    theirs = golden.differences(golden.record(ours, wrong, fmt), fmt)
    assert theirs.blocks.tolist() == [5 * 32 + 2]
    counts, unexplained = because.explain(because.facts(fmt, given, ours, theirs), _NVFP4)
    assert not counts
    assert unexplained.tolist() == [True]


def test_a_scale_off_by_one_step_is_not_explained_away(inputs: list[golden.Input]) -> None:
    fmt, given = golden.FORMATS["four_over_six_256_mse"], inputs[0]
    ours = fmt.ours(given)
    wrong = ours[0], ours[1].clone()
    wrong[1][:, 0] += 1
    theirs = golden.differences(golden.record(ours, wrong, fmt), fmt)
    _, unexplained = because.explain(because.facts(fmt, given, ours, theirs), _FOUR_OVER_SIX)
    assert bool(unexplained.all())
    assert torch.equal(theirs.blocks, torch.arange(0, ours[1].numel(), ours[1].shape[1]))
