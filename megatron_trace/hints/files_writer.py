"""The rollout's side of a folder of hint files: stage records, commit samples, expire versions.

A sample is committed in this order, each step durable before the next: its file under a temporary
name, the rename, the line in the manifest. A crash before the last step leaves no sample, and at
most a temporary file or an orphan, which the next writer collects and reports.
"""

from __future__ import annotations

import errno
import logging
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from megatron_trace.hints.durable import make_folder, sync_folder
from megatron_trace.hints.files import HintFiles
from megatron_trace.hints.folder import (
    ORPHANS,
    StoredSample,
    sample_file_name,
    shard_of,
    version_folder,
    version_folders,
)
from megatron_trace.hints.manifest import (
    Entry,
    commit_entries,
    create_manifest,
    drop_entries,
    manifest_name,
)
from megatron_trace.hints.sample_file import Shard, write_sample_file
from megatron_trace.hints.store import HintStore, RecordKind
from megatron_trace.hints.types import HintKey, RolloutSample, SiteHint
from megatron_trace.hints.writer_lock import WriterLock

logger = logging.getLogger(__name__)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
ONLY_SHARD = Shard()


class HintFilesWriter(HintFiles):
    """A folder that this process alone writes, for one shard; readers may come and go.

    Records are staged in memory by `put` and written by `commit`, which takes the samples that they
    belong to. Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        shard: Shard = ONLY_SHARD,
        take_over: bool = False,
    ) -> None:
        """Makes the folder if need be, locks it, and collects what a crash left of this shard.

        Args:
            folder: The folder.
            shard: Part of every sample that this writer has.
            take_over: Whether a stale lock of another host may be taken; see `WriterLock`.

        Raises:
            RuntimeError: Another process writes this shard.
            ValueError: The folder is written in another number of shards.
            OSError: The folder cannot be written.
        """
        self.shard = self._collected_shard = shard
        self._staged = HintStore()
        folder = Path(folder)
        with _explained(f"opening {folder} for writing"):
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.glob("writer.*.lock"):
                other = shard_of(path.name)
                if other is not None and other.count != shard.count:
                    raise ValueError(
                        f"{folder} is written in {other.count} shards ({path.name}), but this "
                        f"writer has shard {shard}; use another folder"
                    )
            self._lock = WriterLock(folder / f"writer.{shard}.lock", take_over=take_over)
            self._finalizer = weakref.finalize(self, self._lock.release)
            try:
                super().__init__(folder)
            except BaseException:
                self.close()
                raise
        if self._lock.finding is not None:
            logger.warning("%s", self._lock.finding)
            self.findings = (self._lock.finding, *self.findings)

    def __enter__(self) -> Self:
        """Gives itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes it."""
        self.close()

    def close(self) -> None:
        """Gives the lock up; what is staged and not committed is lost, and logged."""
        staged = self._staged.sample_ids()
        if staged:
            logger.warning(
                "%s: closed with %d samples staged, but not committed: %s",
                self.folder,
                len(staged),
                ", ".join(staged[:8]),
            )
        self._staged = HintStore()
        self._finalizer()

    def put(self, hint: SiteHint, kind: RecordKind = RecordKind.HINT) -> None:
        """Stages the record of one sample at one place; `get` gives it once it is committed.

        Raises:
            ValueError: The sample is committed already, or `HintStore.put` refuses the record.
        """
        self._require_new(hint.key.sample_id)
        self._staged.put(hint, kind)

    def commit(self, samples: Sequence[RolloutSample]) -> None:
        """Writes samples with their staged records: all samples of a policy version, or none.

        Args:
            samples: Finished samples; one without staged records is stored without.

        Raises:
            ValueError: A sample is committed already, occurs twice, or is not the one that its
                staged records belong to.
            RuntimeError: The lock was lost.
            OSError: The file system refuses. Nothing committed is lost, and the samples stay
                staged: commit them again.
        """
        self._lock.require_held()
        by_version: dict[int, dict[str, RolloutSample]] = {}
        for sample in samples:
            self._require_new(sample.sample_id)
            of_version = by_version.setdefault(sample.policy_version, {})
            if sample.sample_id in of_version:
                raise ValueError(f"sample {sample.sample_id} occurs twice in one commit")
            of_version[sample.sample_id] = sample
        for policy_version, of_version in by_version.items():
            with _explained(
                f"committing {len(of_version)} samples of policy version {policy_version} to "
                f"{self.folder}"
            ):
                self._commit_version(policy_version, list(of_version.values()))

    def drop_sample(self, sample_id: str) -> int:
        """Drops this shard of a sample, staged or committed, and gives how many records it had."""
        self._lock.require_held()
        dropped = self._staged.drop_sample(sample_id)
        stored = self._samples.get(sample_id)
        if stored is None or self.shard not in stored.entries:
            return dropped
        path = self._path(sample_id, stored.policy_version, self.shard)
        with _explained(f"dropping sample {sample_id} from {self.folder}"):
            drop_entries(path.with_name(manifest_name(self.shard)), [sample_id])
            path.unlink(missing_ok=True)
        dropped += stored.entries[self.shard].num_records
        self._forget(sample_id)
        return dropped

    def expire(self, *, before: int) -> tuple[str, ...]:
        """Removes this shard of all policy versions older than `before`; gives their samples.

        To keep the versions that are at most `lag` behind the newest, `before` is newest - lag.
        """
        self._lock.require_held()
        expired = [
            sample_id
            for sample_id, stored in self._samples.items()
            if stored.policy_version < before and self.shard in stored.entries
        ]
        expired += self._staged.expire(before=before)
        with _explained(f"expiring versions before {before} in {self.folder}"):
            for policy_version, path in version_folders(self.folder).items():
                if policy_version < before:
                    self._remove_version(path)
        for sample_id in expired:
            self._forget(sample_id)
        return tuple(expired)

    def refresh(self) -> None:
        """Takes notice of what the other shards committed, dropped and expired since."""
        if self.shard.count > 1:
            super().refresh()

    def _require_new(self, sample_id: str) -> None:
        stored = self._samples.get(sample_id)
        if stored is not None and self.shard in stored.entries:
            raise ValueError(
                f"sample {sample_id} is committed to {self.folder} already, under policy version "
                f"{stored.policy_version}; drop it before it is rolled out again"
            )

    def _commit_version(self, policy_version: int, samples: list[RolloutSample]) -> None:
        folder = version_folder(self.folder, policy_version)
        manifest = folder / manifest_name(self.shard)
        make_folder(folder)
        if not manifest.exists() or manifest.stat().st_size == 0:
            create_manifest(manifest, policy_version, self.shard)
        entries: list[Entry] = []
        made: list[Path] = []
        try:
            for sample in samples:
                path = folder / sample_file_name(sample.sample_id, self.shard)
                records = self._staged_records(sample)
                temporary, header_crc32 = write_sample_file(path, sample, records, self.shard)
                made.append(temporary)
                hints = [hint for of_kind in records.values() for hint in of_kind]
                entries.append(
                    Entry(
                        sample.sample_id,
                        header_crc32,
                        temporary.stat().st_size,
                        sum(hint.num_bytes for hint in hints),
                        len(hints),
                    )
                )
            for number, sample in enumerate(samples):
                path = folder / sample_file_name(sample.sample_id, self.shard)
                os.replace(made[number], path)
                made[number] = path
            sync_folder(folder)
        except BaseException:
            _remove(made)
            raise
        try:
            commit_entries(manifest, entries)
        except (OSError, RuntimeError):
            # No other exception: what an interrupt interrupts may have become durable.
            _remove(made)
            raise
        for entry in entries:
            self._staged.drop_sample(entry.sample_id)
            stored = self._samples.setdefault(entry.sample_id, StoredSample(policy_version))
            stored.entries[self.shard] = entry

    def _staged_records(self, sample: RolloutSample) -> dict[RecordKind, list[SiteHint]]:
        return {
            kind: [
                self._staged.get(
                    HintKey(
                        sample.sample_id, *place, sample.policy_version, sample.settings_digest
                    ),
                    num_rows=sample.num_rows,
                    kind=kind,
                )
                for place in self._staged.places(sample.sample_id, kind)
            ]
            for kind in RecordKind
        }

    def _forget(self, sample_id: str) -> None:
        stored = self._samples.get(sample_id)
        if stored is None or self.shard not in stored.entries:
            return
        self._open_files.pop(self._path(sample_id, stored.policy_version, self.shard), None)
        del stored.entries[self.shard]
        if not stored.entries:
            del self._samples[sample_id]

    def _remove_version(self, folder: Path) -> None:
        # The manifest first: files without it are orphans, but it without files would be damage.
        (folder / manifest_name(self.shard)).unlink(missing_ok=True)
        sync_folder(folder)
        orphans = folder / ORPHANS
        for part in (orphans, folder):
            for path in part.iterdir() if part.is_dir() else ():
                if shard_of(path.name) == self.shard:
                    path.unlink()
        for part in (orphans, folder):
            _remove_if_empty(part)


@contextmanager
def _explained(doing: str) -> Iterator[None]:
    """Says what was being done, and what to do, when the file system refuses."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            remedy = "nothing committed is lost; free space or expire versions, then try again"
        elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            remedy = "it cannot be written here; name another folder, or read it with HintFiles"
        else:
            remedy = "nothing committed is lost"
        raise OSError(
            error.errno,
            f"{doing} failed with {error.strerror} ({error.filename or 'no file named'}); {remedy}",
        ) from error


def _remove(paths: list[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
