"""A folder of hint files: what is committed is read back, by its key and by nothing else."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from megatron_trace.hints import HintStore, RecordKind, Site, VersionSpan, stack_rows
from megatron_trace.hints.files import HintFiles
from megatron_trace.hints.files_writer import HintFilesWriter
from megatron_trace.hints.findings import FindingKind
from megatron_trace.hints.sample_file import Shard
from megatron_trace.hints.tensor_file import ALIGNMENT, BytesRead, TensorFile, write_tensor_file
from megatron_trace.testing.hint_samples import (
    LAYERS,
    RecordedSample,
    commit_recorded,
    recorded_sample,
    require_same,
)
from megatron_trace.testing.processes import open_descriptors


def committed(folder: Path, *recorded: RecordedSample) -> HintFiles:
    with HintFilesWriter(folder) as files:
        commit_recorded(files, recorded)
    return HintFiles(folder)


def key_of(recorded: RecordedSample, layer: int = 2, site: Site = Site.FC1):
    return recorded.records[RecordKind.HINT, layer, site].key


def kinds(files: HintFiles) -> list[FindingKind]:
    return [finding.kind for finding in files.findings]


def test_committed_samples_are_read_back_identical(tmp_path: Path) -> None:
    recorded = [recorded_sample(f"s{index}", response_tokens=index) for index in range(4)]
    files = committed(tmp_path, *recorded)
    for one in recorded:
        require_same(files, one)
    assert files.findings == files.verify() == ()
    assert files.sample_ids() == ("s0", "s1", "s2", "s3")


def test_spans_of_versions_are_read_back(tmp_path: Path) -> None:
    recorded = recorded_sample("s0", policy_version=7)
    sample = dataclasses.replace(
        recorded.sample,
        version_spans=(VersionSpan(0, 7, "ab"), VersionSpan(2, 9, "cd")),
        record_spans=(VersionSpan(0, 9, "cd"),),
    )
    found = committed(tmp_path, dataclasses.replace(recorded, sample=sample)).sample("s0")
    assert found.version_spans == sample.version_spans
    assert found.record_spans == sample.record_spans
    assert found.token_versions.tolist() == [7, 7, 9, 9]
    assert found.row_versions.tolist() == [9] * 6


def test_sample_without_records_and_full_range_of_names(tmp_path: Path) -> None:
    names = ["a/b", "..", ".", "ü %2F\n", "x" * 200]
    recorded = [recorded_sample(name, layers=()) for name in names]
    files = committed(tmp_path, *recorded)
    for one in recorded:
        require_same(files, one)
    assert files.places("..") == ()


@pytest.mark.parametrize("name", ["", "x" * 250, "/" * 90])
def test_name_that_fits_no_file_is_refused(tmp_path: Path, name: str) -> None:
    with HintFilesWriter(tmp_path) as files, pytest.raises(ValueError, match="at most 251 bytes"):
        commit_recorded(files, [recorded_sample(name)])
    assert list(tmp_path.rglob("*.tmp")) == []


def test_files_and_store_give_the_same_answers(tmp_path: Path) -> None:
    recorded = [recorded_sample("s0", 6), recorded_sample("s1", 7, full_codes=False)]
    files, store = committed(tmp_path, *recorded), HintStore()
    for one in recorded:
        for (kind, _, _), hint in one.records.items():
            store.put(hint, kind)
    assert len(files) == len(store)
    assert files.num_bytes == store.num_bytes
    assert files.sample_ids() == store.sample_ids()
    for kind in RecordKind:
        assert files.coverage(kind) == store.coverage(kind)
        assert files.places("s1", kind) == store.places("s1", kind)
    assert files.places("s9") == ()
    for source in (files, store):
        hints = [source.get(key_of(one), num_rows=6) for one in recorded]
        payload, _, _ = stack_rows(hints, 8)
        assert torch.equal(
            payload[:6, 1], recorded[1].records[RecordKind.HINT, 2, Site.FC1].payload
        )


@pytest.mark.parametrize(
    ("changes", "num_rows", "message"),
    [
        ({"policy_version": 8}, 6, "policy version 7, but 8"),
        ({"settings_digest": "x"}, 6, "quantiser settings settings, but x"),
        ({}, 5, "number of rows 6, but 5"),
    ],
)
def test_record_of_another_rollout_is_refused(
    tmp_path: Path, changes: dict, num_rows: int, message: str
) -> None:
    recorded = recorded_sample("s0")
    files = committed(tmp_path, recorded)
    key = dataclasses.replace(key_of(recorded), **changes)
    with pytest.raises(ValueError, match=message):
        files.get(key, num_rows=num_rows)


def test_missing_is_a_lookup_error_that_names_what_there_is(tmp_path: Path) -> None:
    recorded = recorded_sample("s0")
    files = committed(tmp_path, recorded)
    with pytest.raises(LookupError, match=r"no such sample, of 1 committed.*sample s9"):
        files.get(dataclasses.replace(key_of(recorded), sample_id="s9"), num_rows=6)
    with pytest.raises(LookupError, match=r"shards 0of1 with records at layer\.site 2\.fc1, 2\.k"):
        files.get(dataclasses.replace(key_of(recorded), layer=0), num_rows=6)


def test_reading_one_place_reads_its_bytes_only(tmp_path: Path) -> None:
    recorded = recorded_sample("s0")
    files = committed(tmp_path, recorded)
    hint = files.get(key_of(recorded, 3, Site.V), num_rows=6)
    path = next(tmp_path.rglob("*.hints"))
    header = TensorFile(path, BytesRead())
    assert files.bytes_read.tensor_bytes == hint.num_bytes
    assert 0 < files.bytes_read.header_bytes <= header.tensors_start
    # The proof that nothing else is looked at: all else may be wrong.
    content = bytearray(path.read_bytes())
    for name, entry in header.entries.items():
        if not name.startswith("hint/3/v/"):
            start = header.tensors_start + entry.offset
            content[start : start + entry.num_bytes] = b"\xff" * entry.num_bytes
    path.write_bytes(content)
    found = HintFiles(tmp_path).get(key_of(recorded, 3, Site.V), num_rows=6)
    assert torch.equal(found.payload, hint.payload)
    assert len(HintFiles(tmp_path).verify()) == 1


def test_tensors_are_mapped_at_aligned_places_and_keep_no_descriptor(tmp_path: Path) -> None:
    recorded = recorded_sample("s0")
    files = committed(tmp_path, recorded)
    hints = [files.get(one.key, num_rows=6) for one in recorded.records.values()]
    assert not open_descriptors(str(tmp_path))
    storages = {hint.payload.untyped_storage().data_ptr() for hint in hints}
    assert len(storages) == 1, "records of one file were copied"
    for hint in hints:
        assert hint.payload.data_ptr() % ALIGNMENT == hint.scale_bytes.data_ptr() % ALIGNMENT == 0


def test_mapped_tensors_outlive_the_file(tmp_path: Path) -> None:
    recorded = recorded_sample("s0")
    hint = committed(tmp_path, recorded).get(key_of(recorded), num_rows=6)
    with HintFilesWriter(tmp_path) as files:
        files.drop_sample("s0")
    assert torch.equal(hint.payload, recorded.records[RecordKind.HINT, 2, Site.FC1].payload)


def test_reader_finds_what_is_committed_and_loses_what_is_dropped_later(tmp_path: Path) -> None:
    first, second = recorded_sample("s0"), recorded_sample("s1", 8)
    with HintFilesWriter(tmp_path) as writer:
        reader = HintFiles(tmp_path)
        assert reader.sample_ids() == ()
        commit_recorded(writer, [first])
        require_same(reader, first)
        commit_recorded(writer, [second])
        require_same(reader, second)
        writer.drop_sample("s0")
        reader.refresh()
        with pytest.raises(LookupError, match="no such sample"):
            reader.get(key_of(first), num_rows=6)


def test_reader_that_has_not_noticed_an_expiry_says_so(tmp_path: Path) -> None:
    recorded = recorded_sample("s0")
    with HintFilesWriter(tmp_path) as writer:
        commit_recorded(writer, [recorded])
        reader = HintFiles(tmp_path)
        writer.expire(before=8)
        with pytest.raises(LookupError, match="expired or dropped since the folder was read"):
            reader.get(key_of(recorded), num_rows=6)


def test_staged_records_are_not_readable_before_their_commit(tmp_path: Path, caplog) -> None:
    recorded = recorded_sample("s0")
    with HintFilesWriter(tmp_path) as files:
        for (kind, _, _), hint in recorded.records.items():
            files.put(hint, kind)
        with pytest.raises(LookupError):
            files.get(key_of(recorded), num_rows=6)
    assert "closed with 1 samples staged, but not committed: s0" in caplog.text
    assert HintFiles(tmp_path).sample_ids() == ()


def test_committing_twice_is_refused_until_the_sample_is_dropped(tmp_path: Path) -> None:
    recorded, again = recorded_sample("s0"), recorded_sample("s0", 8)
    with HintFilesWriter(tmp_path) as files:
        commit_recorded(files, [recorded])
        with pytest.raises(ValueError, match=r"committed to .* already, under policy version 7"):
            files.put(next(iter(again.records.values())))
        with pytest.raises(ValueError, match="already"):
            files.commit([again.sample])
        assert files.drop_sample("s0") == len(recorded.records)
        assert files.drop_sample("s0") == 0
        commit_recorded(files, [again])
        require_same(files, again)
    require_same(HintFiles(tmp_path), again)


def test_sample_that_is_not_the_one_of_its_records_is_refused(tmp_path: Path) -> None:
    recorded = recorded_sample("s0")
    with HintFilesWriter(tmp_path) as files:
        files.put(recorded.records[RecordKind.HINT, 2, Site.K])
        with pytest.raises(ValueError, match="policy version 7, but 8"):
            files.commit([recorded_sample("s0", 8).sample])
        with pytest.raises(ValueError, match="occurs twice"):
            files.commit([recorded.sample, recorded.sample])
        assert files.sample_ids() == ()
        assert list(tmp_path.rglob("*.hints*")) == []


def test_expiry_removes_older_versions_with_their_folders(tmp_path: Path) -> None:
    recorded = [recorded_sample(f"s{version}", version) for version in (5, 6, 7)]
    with HintFilesWriter(tmp_path) as files:
        commit_recorded(files, recorded)
        assert files.expire(before=7) == ("s5", "s6")
        assert files.sample_ids() == ("s7",)
        assert files.expire(before=7) == ()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v00000007", "writer.0of1.lock"]
    require_same(HintFiles(tmp_path), recorded[2])


def test_shards_of_a_sample_are_read_as_one(tmp_path: Path) -> None:
    whole = recorded_sample("s0")
    parts = [recorded_sample("s0", layers=[layer]) for layer in LAYERS]
    parts = [
        dataclasses.replace(
            part, records={key: whole.records[key] for key in part.records}, sample=whole.sample
        )
        for part in parts
    ]
    writers = [HintFilesWriter(tmp_path, shard=Shard(index, 2)) for index in range(2)]
    commit_recorded(writers[1], [parts[1]])
    reader = HintFiles(tmp_path)
    assert reader.sample_ids() == ()
    assert reader.incomplete() == {"s0": (Shard(1, 2),)}
    with pytest.raises(LookupError, match="shard 0 holds it"):
        reader.sample("s0")
    with pytest.raises(LookupError, match=r"shards 1of2 with records at layer\.site 3\.fc1"):
        reader.get(key_of(whole, 2), num_rows=6)
    commit_recorded(writers[0], [parts[0]])
    require_same(reader, whole)
    assert reader.incomplete() == {}
    for writer in writers:
        assert writer.expire(before=8) == ("s0",)
        writer.close()
    assert not list(tmp_path.glob("v*"))


def test_folder_of_another_number_of_shards_is_refused(tmp_path: Path) -> None:
    HintFilesWriter(tmp_path, shard=Shard(1, 2)).close()
    with pytest.raises(ValueError, match=r"written in 2 shards .* shard 0of1"):
        HintFilesWriter(tmp_path)


def test_file_says_in_words_what_it_holds(tmp_path: Path) -> None:
    committed(tmp_path, recorded_sample("s0"))
    content = next(tmp_path.rglob("*.hints")).read_bytes()
    size = int.from_bytes(content[16:24], "little")
    attributes = json.loads(content[32 : 32 + size])["attributes"]
    assert attributes["sample_id"] == "s0"
    assert attributes["policy_version"] == 7
    assert attributes["settings_digest"] == "settings"
    assert attributes["shard"] == {"index": 0, "count": 1}
    assert {
        (record["kind"], record["layer"], record["site"]) for record in attributes["records"]
    } == {(str(kind), layer, str(site)) for kind, layer, site in recorded_sample("s0").records}
    assert len(content) == int.from_bytes(content[24:32], "little")
    assert len(content) % ALIGNMENT == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (5, 7)])
def test_tensors_of_every_shape_and_dtype_come_back(tmp_path: Path, dtype, shape) -> None:
    tensor = (torch.arange(35)[: torch.Size(shape).numel()].reshape(shape)).to(dtype)
    path = tmp_path / "file"
    temporary, _ = write_tensor_file(
        path, {}, {"a": tensor, "b": tensor.mT if tensor.dim() > 1 else tensor}
    )
    found = TensorFile(temporary, BytesRead())
    assert found.tensor("a").dtype == dtype
    assert torch.equal(found.tensor("a"), tensor)
    assert found.tensor("b").shape == (shape[::-1] if len(shape) > 1 else shape)
