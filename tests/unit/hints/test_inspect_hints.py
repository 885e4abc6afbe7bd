"""The program that shows a folder of hint files: what it says, and its exit status."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_trace.hints import RecordKind, Site, VersionSpan, decode_codes
from megatron_trace.hints.files_writer import HintFilesWriter
from megatron_trace.hints.sample_file import Shard
from megatron_trace.testing.hint_samples import commit_recorded, recorded_sample
from megatron_trace.testing.programs import load_program

PROGRAM = Path(__file__).parents[3] / "tools" / "inspect_hints.py"
RECORDED = [recorded_sample("s0", 6), recorded_sample("s1", 7, full_codes=False)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with HintFilesWriter(tmp_path / "hints") as files:
        commit_recorded(files, RECORDED)
    return tmp_path / "hints"


@pytest.fixture(scope="module")
def program():
    return load_program(PROGRAM)


def run(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, PROGRAM, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_intact_folder_exits_with_zero(folder: Path) -> None:
    result = run(folder, "--verify", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["num_samples"], report["damaged"], report["findings"]) == (2, False, [])
    assert [version["policy_version"] for version in report["versions"]] == [6, 7]
    coverage = {
        (place["kind"], place["layer"], place["site"]): place["coverage"]
        for place in report["places"]
    }
    assert coverage["hint", 2, "k"] == 1.0
    assert coverage["codes", 3, "fc1"] == 0.5
    hint_bytes = sum(
        hint.num_bytes for key, hint in RECORDED[0].records.items() if key[0] == "hint"
    )
    assert report["versions"][0]["hint_bytes"] == hint_bytes
    path = folder / "v00000006" / "s0.0of1.hints"
    (file,) = report["samples"][0]["files"]
    assert file["path"] == str(path)
    assert file["file_bytes"] == path.stat().st_size
    assert int(file["header_crc32"], 16) == int.from_bytes(path.read_bytes()[12:16], "little")


def test_damaged_tensor_is_named_and_exits_with_one(folder: Path) -> None:
    path = folder / "v00000007" / "s1.0of1.hints"
    flip(path, path.stat().st_size - 64)
    result = run(folder, "--verify")
    assert result.returncode == 1
    assert f"damaged: {path}: tensor hint/3/v/scale_bytes has checksum" in result.stdout
    assert result.stdout.splitlines()[-1] == "DAMAGED (everything read, checksums compared)"


def test_headers_alone_are_read_unless_asked_to_verify(folder: Path, program, capsys) -> None:
    path = folder / "v00000007" / "s1.0of1.hints"
    flip(path, path.stat().st_size - 64)
    assert program.main([str(folder), "--json"]) == 0
    all_bytes = sum(file.stat().st_size for file in folder.rglob("*.hints"))
    assert json.loads(capsys.readouterr().out)["bytes_read"] < all_bytes
    flip(path, 40)
    assert program.main([str(folder)]) == 1
    output = capsys.readouterr().out
    assert f"damaged: {path}: the header has checksum" in output
    assert "DAMAGED (headers read only)" in output


@pytest.mark.parametrize("kind", ["missing", "orphan", "torn"])
def test_lost_file_exits_with_one(folder: Path, program, capsys, monkeypatch, kind: str) -> None:
    monkeypatch.setattr(program, "_SECONDS_OF_A_COMMIT", 0)
    manifest = folder / "v00000007" / "manifest.0of1.jsonl"
    if kind == "missing":
        (folder / "v00000007" / "s1.0of1.hints").unlink()
    elif kind == "orphan":
        manifest.unlink()
    else:
        manifest.write_bytes(manifest.read_bytes()[:-1])
    assert program.main([str(folder)]) == 1
    assert f"{kind}: {folder}/v00000007/" in capsys.readouterr().out


def test_what_a_crash_leaves_is_shown_and_is_no_damage(folder: Path, program, capsys) -> None:
    program._SECONDS_OF_A_COMMIT = 0
    (folder / "v00000007" / "s2.0of1.hints.tmp").write_bytes(b"half")
    assert program.main([str(folder), "--verify"]) == 0
    assert "temporary: " in capsys.readouterr().out


def test_sample_shows_codes_beside_its_text(folder: Path, tmp_path: Path) -> None:
    vocabulary = tmp_path / "vocabulary.json"
    vocabulary.write_text(json.dumps([f"<{token}>" for token in range(99)]))
    arguments = (folder, "--sample", "s0", "--layer", 3, "--site", "fc1", "--kind", "codes")
    result = run(*arguments, "--vocab", vocabulary, "--blocks", 1)
    assert result.returncode == 0, result.stderr
    hint = RECORDED[0].records[RecordKind.CODES, 3, Site.FC1]
    tokens = RECORDED[0].sample.tokens
    lines = result.stdout.splitlines()[-len(tokens) :]
    for position, (line, token) in enumerate(zip(lines, tokens, strict=True)):
        assert line.split()[:3] == [str(position), str(token), f"'<{token}>'"]
        if position < hint.num_rows:
            codes = "".join(f"{code:x}" for code in decode_codes(hint)[position, :16].tolist())
            assert line.endswith(f" {hint.scale_bytes[position, 0]:02x}:{codes}")


def test_sample_as_json_has_every_block(folder: Path, program, capsys) -> None:
    assert program.main([str(folder), "--sample", "s1", "--site", "v", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["shown"]["layer"] == 2
    assert (report["shown"]["num_bits"], report["shown"]["scale_form"]) == (2, "residue")
    assert [len(row.get("values", [])) for row in report["rows"]] == [2] * 6 + [0]
    assert len(report["rows"][0]["values"][0]) == 16
    assert set("".join(report["rows"][0]["values"])) <= set("0123")
    assert all(
        len(scale) == 1 and scale in "01234567" for scale in report["rows"][0]["scale_bytes"]
    )
    assert [row["logprob"] is None for row in report["rows"]] == [True] * 3 + [False] * 4
    assert len(report["records"]) == 6


def test_versions_stand_beside_rows_and_tokens_that_several_made(tmp_path, program, capsys):
    recorded = recorded_sample("s0", policy_version=7)
    spans = {
        "version_spans": (VersionSpan(0, 7, "ab"), VersionSpan(2, 9, "cd")),
        "record_spans": (VersionSpan(0, 9, "cd"),),
    }
    sample = dataclasses.replace(recorded.sample, **spans)
    with HintFilesWriter(tmp_path) as files:
        commit_recorded(files, [dataclasses.replace(recorded, sample=sample)])
    assert program.main([str(tmp_path), "--sample", "s0", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["version"] for row in rows] == [9] * 6 + [None]
    assert [row["sampled_by"] for row in rows] == [None] * 3 + [7, 7, 9, 9]
    assert program.main([str(tmp_path), "--sample", "s0", "--blocks", "0"]) == 0
    lines = [line.split()[-2:] for line in capsys.readouterr().out.splitlines()[-7:]]
    assert lines == [["@9", "<"]] * 3 + [["@9", "<7"]] * 2 + [["@9", "<9"], ["@", "<9"]]


@pytest.mark.parametrize(
    "content", [{"a": 5}, {"model": {"vocab": {"a": 5}}}, ["", "", "", "", "", "a"]]
)
def test_vocabularies_of_three_forms_are_read(program, tmp_path: Path, content) -> None:
    path = tmp_path / "vocabulary.json"
    path.write_text(json.dumps(content))
    assert program.load_vocabulary(str(path))(5) == "a"
    assert program.load_vocabulary(str(path))(50) == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{}/nowhere"], "is not a folder of hint files"),
        (["{}", "--sample", "s9"], "has no sample s9"),
        (["{}", "--sample", "s0", "--layer", "0"], "no hint record at layer 0"),
        (["{}", "--sample", "s1", "--kind", "codes"], "no codes record"),
        (["{}", "--sample", "s0", "--vocab", "{}/none"], "is not a vocabulary"),
    ],
)
def test_bad_request_exits_with_two(
    folder: Path, program, capsys, arguments: list[str], message: str
) -> None:
    assert program.main([argument.format(folder) for argument in arguments]) == 2
    assert message in capsys.readouterr().err


def test_damaged_sample_exits_with_one(folder: Path, program, capsys) -> None:
    path = folder / "v00000007" / "s1.0of1.hints"
    flip(path, path.stat().st_size - 64)
    assert program.main([str(folder), "--sample", "s1", "--layer", "3", "--site", "v"]) == 1
    assert "DAMAGED: " in capsys.readouterr().err
    assert program.main([str(folder), "--sample", "s1", "--layer", "2", "--site", "v"]) == 0


def test_sample_without_all_shards_is_counted_apart(tmp_path: Path, program, capsys) -> None:
    with HintFilesWriter(tmp_path, shard=Shard(1, 2)) as files:
        commit_recorded(files, RECORDED[:1])
        assert program.main([str(tmp_path), "--verify"]) == 0
    assert "0 samples, 1 more without some shard" in capsys.readouterr().out
