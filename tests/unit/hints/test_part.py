"""Parts of records: the rows and columns that are asked for, and no other byte."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_trace.hints import (
    HintFiles,
    HintFilesWriter,
    HintKey,
    HintStore,
    Site,
    encode_hint,
    payload_bits,
)
from megatron_trace.hints.codec import decode_residues
from megatron_trace.hints.part import HintPart, select_part
from megatron_trace.hints.types import RolloutSample

KEY = HintKey("s0", 1, Site.K, 0, "settings")
ROWS, BLOCKS = 9, 11
PARTS = [
    HintPart((range(ROWS),)),
    HintPart((range(2, 4), range(7, 9))),
    HintPart(()),
    HintPart((range(1, 5),), range(16, 48)),
    HintPart((range(3), range(5, 6)), range(128, 176)),
    HintPart((range(0),), range(16)),
]


def whole(num_bits=1, scale_form="raw"):
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(16, (ROWS, BLOCKS * 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(1, 100, (ROWS, BLOCKS), generator=generator, dtype=torch.uint8)
    return encode_hint(KEY, codes, scales, 0.5, num_bits, scale_form)


def selected(matrix, part, per_block):
    rows = [row for part_rows in part.rows for row in part_rows]
    columns = range(BLOCKS * 16) if part.columns is None else part.columns
    blocks = [block for block in range(BLOCKS) if block * 16 in columns]
    return matrix.view(ROWS, BLOCKS, per_block)[rows][:, blocks].flatten(1)


@pytest.mark.parametrize("part", PARTS, ids=str)
@pytest.mark.parametrize("scale_form", ["raw", "residue"])
@pytest.mark.parametrize("num_bits", [1, 2, 4])
def test_a_part_holds_the_rows_and_columns_of_the_whole(num_bits, scale_form, part):
    hint = whole(num_bits, scale_form)
    if not part.rows or not any(part.rows):
        assert select_part(hint, part)[0].num_rows == 0
        return
    got, num_read = select_part(hint, part)
    bits = [payload_bits(h.payload, num_bits) for h in (hint, got)]
    assert torch.equal(bits[1], selected(bits[0], part, 16))
    if scale_form == "raw":
        assert torch.equal(got.scale_bytes, selected(hint.scale_bytes, part, 1))
        assert num_read == got.num_bytes
    else:
        assert torch.equal(decode_residues(got), selected(decode_residues(hint), part, 1))
        columns = range(BLOCKS * 16) if part.columns is None else part.columns
        groups = {block // 8 for block in range(columns.start // 16, columns.stop // 16)}
        read = min(3 * len(groups), hint.scale_bytes.shape[1] - 3 * min(groups))
        assert num_read == got.payload.numel() + read * got.num_rows


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (HintPart((range(8, 10),)), r"no rows range\(8, 10\) of 9"),
        (HintPart((range(9),), range(8, 24)), "not whole blocks of 16 of 176"),
        (HintPart((range(9),), range(160, 192)), "not whole blocks"),
        (HintPart((range(9),), range(16, 16)), "not whole blocks"),
        (HintPart((range(9),), range(8, 32)), "not whole blocks"),
        (HintPart((range(9),), range(16, 40)), "not whole blocks"),
        (HintPart((range(9),), range(0, 64, 16)), "not whole blocks"),
        (HintPart((range(0, 9, 2),)), "no rows range"),
        (HintPart((range(9),), num_values=160), "values of a row 176, expected 160"),
    ],
)
def test_a_part_that_does_not_exist_is_refused(part, message):
    with pytest.raises(ValueError, match=message):
        select_part(whole(), part)


@pytest.mark.parametrize("scale_form", ["raw", "residue"])
def test_files_give_the_parts_that_the_store_gives_and_read_no_other_byte(tmp_path, scale_form):
    hint = whole(2, scale_form)
    sample = RolloutSample(
        "s0",
        (1,) * 4,
        (2,) * 6,
        torch.zeros(6),
        torch.zeros(9, 1, 2).short(),
        0,
        "settings",
        "stop",
    )
    store = HintStore()
    store.put(hint)
    with HintFilesWriter(tmp_path) as writer:
        writer.put(hint)
        writer.commit([sample])
    files = HintFiles(tmp_path)
    for part in PARTS:
        before = files.bytes_read.tensor_bytes
        got = files.get(KEY, num_rows=ROWS, part=part)
        assert files.bytes_read.tensor_bytes - before == select_part(hint, part)[1]
        expected = store.get(KEY, num_rows=ROWS, part=part)
        for name in ("payload", "scale_bytes"):
            assert torch.equal(getattr(got, name), getattr(expected, name)), (part, name)
        assert (
            dataclasses.replace(got, payload=hint.payload, scale_bytes=hint.scale_bytes).key == KEY
        )
    before = files.bytes_read.tensor_bytes
    files.get(KEY, num_rows=ROWS)
    assert files.bytes_read.tensor_bytes - before == hint.num_bytes
