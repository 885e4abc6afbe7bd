"""Writing hint files: one writer, no half commit whatever the disk does, leftovers collected."""

import contextlib
import errno
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_trace.hints.files import HintFiles
from megatron_trace.hints.files_writer import HintFilesWriter
from megatron_trace.hints.findings import Finding, FindingKind
from megatron_trace.hints.writer_lock import WriterLock
from megatron_trace.testing.file_size_limit import file_size_limit
from megatron_trace.testing.hint_samples import (
    RecordedSample,
    commit_recorded,
    recorded_sample,
    require_same,
)

FIRST = recorded_sample("first")
SECOND = recorded_sample("second")
LARGE = recorded_sample("large", response_tokens=3000)


def require_only(folder: Path, *recorded: RecordedSample) -> None:
    """Fails unless the folder holds these samples, intact, and no other file."""
    files = HintFiles(folder)
    assert set(files.sample_ids()) == {one.sample.sample_id for one in recorded}
    for one in recorded:
        require_same(files, one)
    assert files.findings == ()


def find(findings: tuple[Finding, ...], kind: FindingKind) -> Finding:
    matching = [finding for finding in findings if finding.kind is kind]
    assert len(matching) == 1, findings
    return matching[0]


@contextlib.contextmanager
def tiny_disk(folder: Path, *, size: str) -> Iterator[None]:
    """Mounts a file system of a given size; skips where that is not allowed."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.decode().strip()}")
    try:
        yield
    finally:
        # Lazily: a map of a file in it may be alive in some traceback.
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextlib.contextmanager
def failing(
    monkeypatch: pytest.MonkeyPatch, number: int, first_call: int, last_call: float
) -> Iterator[list[int]]:
    """Makes calls of `os`, counted together, fail with an error number; gives the count."""
    count = [0]

    def wrap(function: Callable) -> Callable:
        def call(*arguments: object, **options: object) -> object:
            count[0] += 1
            if first_call <= count[0] <= last_call:
                raise OSError(number, os.strerror(number), "the disk")
            return function(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        for name in ("fsync", "replace", "write", "mkdir"):
            patch.setattr(os, name, wrap(getattr(os, name)))
        yield count


def test_second_writer_is_refused_and_told_who_writes(tmp_path: Path) -> None:
    with HintFilesWriter(tmp_path) as files:
        with pytest.raises(RuntimeError, match=rf"written by process {os.getpid()} on .+ sin"):
            HintFilesWriter(tmp_path)
        commit_recorded(files, [FIRST])
        require_only(tmp_path, FIRST)
    HintFilesWriter(tmp_path).close()


def test_writer_that_is_forgotten_gives_its_lock_up(tmp_path: Path) -> None:
    files = HintFilesWriter(tmp_path)
    del files
    with HintFilesWriter(tmp_path) as files:
        assert files.findings == ()


def test_stale_lock_is_taken_over_and_reported(tmp_path: Path, caplog) -> None:
    owner = {"host": os.uname().nodename, "process": 123456, "since": "yesterday"}
    (tmp_path / "writer.0of1.lock").write_text(json.dumps(owner))
    with HintFilesWriter(tmp_path) as files:
        finding = find(files.findings, FindingKind.STALE_LOCK)
        assert "left by process 123456 on" in finding.detail
        assert finding.action == "taken over"
        assert "process 123456" in caplog.text
    with HintFilesWriter(tmp_path) as files:
        assert files.findings == ()


def test_lock_of_another_host_is_taken_over_on_demand_only(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text(json.dumps({"host": "elsewhere", "process": 1, "since": "then"}))
    with pytest.raises(RuntimeError, match=r"process 1 on elsewhere .*pass take_over=True"):
        WriterLock(path)
    lock = WriterLock(path, take_over=True)
    assert lock.finding is not None
    lock.release()


def test_unreadable_lock_counts_as_stale(tmp_path: Path) -> None:
    (tmp_path / "lock").write_bytes(b"\xff\0")
    lock = WriterLock(tmp_path / "lock")
    assert lock.finding is not None
    assert "an unnamed process" in lock.finding.detail
    lock.release()


def test_writer_whose_lock_was_removed_stops(tmp_path: Path) -> None:
    with HintFilesWriter(tmp_path) as files:
        commit_recorded(files, [FIRST])
        (tmp_path / "writer.0of1.lock").unlink()
        with HintFilesWriter(tmp_path), pytest.raises(RuntimeError, match="removed or replaced"):
            commit_recorded(files, [SECOND])
    require_only(tmp_path, FIRST)


def test_forked_child_may_not_write(tmp_path: Path) -> None:
    files = HintFilesWriter(tmp_path)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            files.expire(before=0)
        except RuntimeError as error:
            status = 0 if "forked from it" in str(error) else 2
            files.close()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pytest.raises(RuntimeError, match="being written"):
        HintFilesWriter(tmp_path)
    files.close()


def test_full_disk_loses_nothing_and_the_commit_can_be_repeated(tmp_path: Path) -> None:
    with tiny_disk(tmp_path, size="256k"):
        with HintFilesWriter(tmp_path) as files:
            commit_recorded(files, [FIRST])
            with pytest.raises(
                OSError, match=r"committing 1 samples .* No space .*free space"
            ) as e:
                commit_recorded(files, [LARGE])
            assert e.value.errno == errno.ENOSPC
            require_same(files, FIRST)
            require_only(tmp_path, FIRST)
            subprocess.run(["mount", "-o", "remount,size=2m", tmp_path], check=True)
            files.commit([LARGE.sample])
            require_same(files, LARGE)
        require_only(tmp_path, FIRST, LARGE)


def test_limit_of_the_file_size_loses_nothing(tmp_path: Path) -> None:
    with HintFilesWriter(tmp_path) as files:
        commit_recorded(files, [FIRST])
        with pytest.raises(OSError, match="File too large"), file_size_limit(64 * 1024):
            commit_recorded(files, [LARGE])
        require_only(tmp_path, FIRST)
        files.commit([LARGE.sample])
    require_only(tmp_path, FIRST, LARGE)


@pytest.mark.parametrize(
    ("error_number", "lasting"),
    [(errno.ENOSPC, False), (errno.EROFS, True)],
    ids=["full_once", "read_only_from_then_on"],
)
def test_any_call_that_fails_leaves_all_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error_number: int, lasting: bool
) -> None:
    batch = [SECOND, recorded_sample("third")]
    for number in range(1, 100):
        folder = tmp_path / str(number)
        with HintFilesWriter(folder) as files:
            commit_recorded(files, [recorded_sample("early", 6)])
            for one in batch:
                for (kind, _, _), hint in one.records.items():
                    files.put(hint, kind)
            last_call = float("inf") if lasting else number
            with failing(monkeypatch, error_number, number, last_call) as count:
                failed = False
                try:
                    files.commit([one.sample for one in batch])
                except OSError as error:
                    failed = error.errno == error_number
            if failed:
                require_only(folder, recorded_sample("early", 6))
                files.commit([one.sample for one in batch])
            require_only(folder, recorded_sample("early", 6), *batch)
        if not failed:
            assert count[0] == number - 1 > 6
            return
    pytest.fail("the commit never succeeded")


def test_half_a_manifest_line_that_cannot_be_cut_off_stops_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_half(descriptor: int, text: memoryview) -> int:
        if len(text) < 60:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_write(descriptor, text[:50])

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    real_write = os.write
    with HintFilesWriter(tmp_path) as files:
        commit_recorded(files, [FIRST])
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", write_half)
            patch.setattr(os, "ftruncate", refuse)
            with pytest.raises(OSError, match="committing"):
                commit_recorded(files, [SECOND])
        with pytest.raises(RuntimeError, match="ends in half a line"):
            files.commit([SECOND.sample])
    reader = HintFiles(tmp_path)
    require_same(reader, FIRST)
    find(reader.findings, FindingKind.TORN)
    with HintFilesWriter(tmp_path) as files:
        assert find(files.findings, FindingKind.TORN).action == "cut off"
        commit_recorded(files, [SECOND])
    require_only(tmp_path, FIRST, SECOND)


def test_read_only_folder_is_read_and_not_written(tmp_path: Path) -> None:
    with tiny_disk(tmp_path, size="2m"):
        with HintFilesWriter(tmp_path) as files:
            commit_recorded(files, [FIRST])
        subprocess.run(["mount", "-o", "remount,ro", tmp_path], check=True)
        require_only(tmp_path, FIRST)
        with pytest.raises(OSError, match=r"opening .* Read-only .*read it with HintFiles"):
            HintFilesWriter(tmp_path)


def test_commit_syncs_each_step_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []

    def note(name: str, function: Callable, describe: Callable[..., str]) -> None:
        def call(*arguments: object, **options: object) -> object:
            steps.append(f"{name} {describe(*arguments)}")
            return function(*arguments, **options)

        monkeypatch.setattr(os, name, call)

    def name_of(descriptor: int, *_: object) -> str:
        return os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))

    with HintFilesWriter(tmp_path) as files:
        commit_recorded(files, [recorded_sample("zeroth")])
        note("fsync", os.fsync, name_of)
        note("write", os.write, name_of)
        note("replace", os.replace, lambda _, new: os.path.basename(new))
        commit_recorded(files, [FIRST, SECOND])
    assert steps == [
        "fsync first.0of1.hints.tmp",
        "fsync second.0of1.hints.tmp",
        "replace first.0of1.hints",
        "replace second.0of1.hints",
        "fsync v00000007",
        "write manifest.0of1.jsonl",
        "fsync manifest.0of1.jsonl",
    ]


def test_leftovers_are_collected_and_reported_at_start(tmp_path: Path, caplog) -> None:
    with HintFilesWriter(tmp_path) as files:
        commit_recorded(files, [FIRST, SECOND, recorded_sample("third")])
    version = tmp_path / "v00000007"
    (version / "fourth.0of1.hints.tmp").write_bytes(b"half")
    (version / "notes.txt").write_text("mine")
    content = (version / "first.0of1.hints").read_bytes()
    (version / "fifth%2F.0of1.hints").write_bytes(content)
    (version / "second.0of1.hints").unlink()
    before = sorted(version.iterdir())
    assert len(HintFiles(tmp_path).findings) == 4
    assert sorted(version.iterdir()) == before, "a reader changed the folder"

    with HintFilesWriter(tmp_path) as files:
        actions = {finding.kind: finding.action for finding in files.findings}
        assert actions == {
            FindingKind.TEMPORARY: "removed",
            FindingKind.ORPHAN: "moved to orphans/",
            FindingKind.MISSING: "dropped from the manifest",
            FindingKind.UNKNOWN: "",
        }
        assert "sample fifth/" in find(files.findings, FindingKind.ORPHAN).detail
        assert "sample second" in find(files.findings, FindingKind.MISSING).detail
        assert files.sample_ids() == ("first", "third")
        commit_recorded(files, [SECOND])
    for kind in ("temporary", "orphan", "missing", "unknown"):
        assert f"{kind}: " in caplog.text
    assert (version / "orphans" / "fifth%2F.0of1.hints").read_bytes() == content
    assert [finding.kind for finding in HintFiles(tmp_path).findings] == [FindingKind.UNKNOWN]
    (version / "notes.txt").unlink()
    with HintFilesWriter(tmp_path) as files:
        files.expire(before=8)
    assert not version.exists()


def test_expiry_keeps_what_is_not_ours(tmp_path: Path) -> None:
    with HintFilesWriter(tmp_path) as files:
        commit_recorded(files, [FIRST])
        (tmp_path / "v00000007" / "notes.txt").write_text("mine")
        (tmp_path / "v00000009").mkdir()
        files.expire(before=8)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "v00000007",
        "v00000007/notes.txt",
        "v00000009",
        "writer.0of1.lock",
    ]


def test_manifest_that_was_emptied_is_written_anew(tmp_path: Path) -> None:
    with HintFilesWriter(tmp_path) as files:
        commit_recorded(files, [FIRST])
    (tmp_path / "v00000007" / "manifest.0of1.jsonl").write_bytes(b"")
    with HintFilesWriter(tmp_path) as files:
        assert "first line is missing" in find(files.findings, FindingKind.DAMAGED).detail
        assert find(files.findings, FindingKind.ORPHAN).action == "moved to orphans/"
        commit_recorded(files, [SECOND])
    require_only(tmp_path, SECOND)


def test_negative_policy_version_is_refused(tmp_path: Path) -> None:
    with (
        HintFilesWriter(tmp_path) as files,
        pytest.raises(ValueError, match=">= 0; got -1"),
    ):
        commit_recorded(files, [recorded_sample("s", -1)])


def test_interrupted_write_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with HintFilesWriter(tmp_path) as files:
        commit_recorded(files, [FIRST])
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", interrupt)
            with pytest.raises(KeyboardInterrupt):
                commit_recorded(files, [SECOND])
        require_only(tmp_path, FIRST)
        files.commit([SECOND.sample])
    require_only(tmp_path, FIRST, SECOND)
