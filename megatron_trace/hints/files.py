"""Hints of finished rollouts in a folder, read as from the store in memory.

Training reads `HintFiles` wherever it reads a `HintStore`; `HintFilesWriter` is the rollout's side.
Damage is a `ValueError` that names the file, never a `LookupError`: a setting that tolerates
missing hints does not tolerate damaged ones. Neither class is safe to use from two threads.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from megatron_trace.hints.findings import Finding, FindingKind
from megatron_trace.hints.folder import (
    StoredSample,
    sample_file_name,
    scan_folder,
    version_folder,
    version_folders,
)
from megatron_trace.hints.manifest import manifest_name
from megatron_trace.hints.part import HintPart
from megatron_trace.hints.sample_file import Place, SampleFile, Shard
from megatron_trace.hints.store import RecordKind, require_same_rollout
from megatron_trace.hints.tensor_file import BytesRead, DamagedFileError
from megatron_trace.hints.types import HintKey, RolloutSample, SiteHint

logger = logging.getLogger(__name__)
# A header of 20 layers and 3 sites takes about 60 kB of memory once it is parsed.
_MAX_OPEN_FILES = 256


class HintSource(Protocol):
    """What training reads hints from: `HintStore` or `HintFiles`."""

    def get(
        self,
        key: HintKey,
        *,
        num_rows: int,
        kind: RecordKind = ...,
        part: HintPart | None = None,
    ) -> SiteHint:
        """Gives the record of one sample at one place, or a part of it."""
        ...

    def places(self, sample_id: str, kind: RecordKind = ...) -> tuple[Place, ...]:
        """Gives the (layer, site) of a sample's records in ascending order; none if unknown."""
        ...


class HintFiles:
    """The committed samples of a folder; samples committed later are found when asked for.

    Attributes:
        folder: The folder.
        findings: What was wrong with the folder when it was last read; each is logged as well.
        bytes_read: Bytes of headers and tensors that were read so far.
    """

    # The shard whose leftovers may be collected: none for a reader.
    _collected_shard: Shard | None = None

    def __init__(self, folder: str | Path) -> None:
        """Reads the manifests; writes nothing.

        Raises:
            FileNotFoundError: There is no such folder.
        """
        self.folder = Path(folder)
        self.findings: tuple[Finding, ...] = ()
        self.bytes_read = BytesRead()
        self._samples: dict[str, StoredSample] = {}
        self._open_files: OrderedDict[Path, SampleFile] = OrderedDict()
        self._seen: object = None
        self._scan()

    def __len__(self) -> int:
        """Records of both kinds in complete samples."""
        return sum(
            entry.num_records for _, stored in self._complete() for entry in stored.entries.values()
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all payloads and block scales in complete samples."""
        return sum(
            entry.hint_bytes for _, stored in self._complete() for entry in stored.entries.values()
        )

    def sample_ids(self) -> tuple[str, ...]:
        """Gives the complete samples, in the order of policy version and commit."""
        return tuple(sample_id for sample_id, _ in self._complete())

    def get(
        self,
        key: HintKey,
        *,
        num_rows: int,
        kind: RecordKind = RecordKind.HINT,
        part: HintPart | None = None,
    ) -> SiteHint:
        """Gives the record of one sample at one place; reads the bytes of this record only.

        The tensors are a private map of the file: do not write to them. It would not change the
        file, but the next read of this process would find a wrong checksum.

        A part is copied, and nothing else of the record is read. Its bytes are then not compared
        with the checksum, which is of the whole record: `verify` does that once for all.

        Args:
            key: Where it belongs, with the policy version and settings the caller trains on.
            num_rows: Rows that the sample has.
            kind: Hints or full codes.
            part: Rows and columns that are wanted; None for all.

        Raises:
            LookupError: Nothing is committed there.
            ValueError: What is committed comes from another policy version or other quantiser
                settings, or has another number of rows; or the file is damaged.
        """
        stored = self._find(key.sample_id)
        if stored is None:
            raise LookupError(
                f"no {kind} record: {self.folder} has no such sample, of {len(self._samples)} "
                f"committed; record it, or set missing_hints=rtn ({key})"
            )
        for file in self._files(key.sample_id, stored):
            require_same_rollout(file, key, num_rows, where=f"{file.path}: ")
            record = file.record(kind, (key.layer, key.site), part)
            if record is not None:
                return record
        places = ", ".join(f"{layer}.{site}" for layer, site in self.places(key.sample_id, kind))
        raise LookupError(
            f"no {kind} record at this place; {self.folder} has the sample's shards "
            f"{', '.join(map(str, stored.entries))} with records at layer.site "
            f"{places or '(none)'}; record the place, or set missing_hints=rtn ({key})"
        )

    def places(self, sample_id: str, kind: RecordKind = RecordKind.HINT) -> tuple[Place, ...]:
        """Gives the (layer, site) of a sample's records in ascending order; none if unknown."""
        stored = self._find(sample_id)
        if stored is None:
            return ()
        files = self._files(sample_id, stored)
        return tuple(sorted(place for file in files for place in file.places(kind)))

    def coverage(self, kind: RecordKind = RecordKind.HINT) -> dict[Place, int]:
        """Gives how many complete samples have a record, by (layer, site) in ascending order."""
        counts = Counter(
            place
            for sample_id, stored in self._complete()
            for file in self._files(sample_id, stored)
            for place in file.places(kind)
        )
        return dict(sorted(counts.items()))

    def folder_of(self, sample_id: str) -> Path:
        """Gives the folder that a sample would be in: this one."""
        return self.folder

    def sample(self, sample_id: str) -> RolloutSample:
        """Gives a sample as the rollout returned it.

        Raises:
            LookupError: The shard that holds it is not committed.
            ValueError: The file is damaged.
        """
        stored = self._find(sample_id)
        for file in () if stored is None else self._files(sample_id, stored):
            sample = file.sample()
            if sample is not None:
                return sample
        raise LookupError(f"{self.folder} has no sample {sample_id} (shard 0 holds it)")

    def policy_version(self, sample_id: str) -> int:
        """Gives the policy version of a complete sample, without reading its file.

        Raises:
            LookupError: There is no such sample.
        """
        stored = self._find(sample_id)
        if stored is None or not stored.is_complete:
            raise LookupError(f"{self.folder} has no complete sample {sample_id}")
        return stored.policy_version

    def shard_files(self, sample_id: str) -> tuple[SampleFile, ...]:
        """Gives the open files of a sample's committed shards; none if unknown."""
        stored = self._find(sample_id)
        return () if stored is None else tuple(self._files(sample_id, stored))

    def release(self, sample_ids: Iterable[str]) -> None:
        """Closes the files of samples; reading a sample again opens them again.

        A file's pages count as this process's memory while they are mapped: until it is closed, and
        no tensor that was read from it is left.
        """
        for sample_id in sample_ids:
            stored = self._samples.get(sample_id)
            if stored is None:
                continue
            for shard in stored.entries:
                self._open_files.pop(self._path(sample_id, stored.policy_version, shard), None)

    def incomplete(self) -> dict[str, tuple[Shard, ...]]:
        """Gives the samples of which a shard is not committed, with the shards that are."""
        return {
            sample_id: tuple(stored.entries)
            for sample_id, stored in self._samples.items()
            if not stored.is_complete
        }

    def refresh(self) -> None:
        """Takes notice of what was committed, dropped and expired since."""
        if self._signature() != self._seen:
            self._scan()

    def verify(self) -> tuple[Finding, ...]:
        """Reads every committed file completely and gives what is damaged."""
        findings = []
        for sample_id, stored in self._samples.items():
            for shard in stored.entries:
                try:
                    file = self._file(sample_id, stored, shard)
                    file.sample()
                    for kind in RecordKind:
                        for place in file.places(kind):
                            file.record(kind, place)
                except (LookupError, ValueError) as error:
                    path = self._path(sample_id, stored.policy_version, shard)
                    detail = str(error).removeprefix(f"{path}: ")
                    findings.append(Finding(FindingKind.DAMAGED, path, detail))
        return tuple(findings)

    def _complete(self) -> Iterator[tuple[str, StoredSample]]:
        return (item for item in self._samples.items() if item[1].is_complete)

    def _find(self, sample_id: str) -> StoredSample | None:
        if sample_id not in self._samples or not self._samples[sample_id].is_complete:
            self.refresh()
        return self._samples.get(sample_id)

    def _files(self, sample_id: str, stored: StoredSample) -> Iterator[SampleFile]:
        return (self._file(sample_id, stored, shard) for shard in sorted_shards(stored))

    def _file(self, sample_id: str, stored: StoredSample, shard: Shard) -> SampleFile:
        path = self._path(sample_id, stored.policy_version, shard)
        entry = stored.entries[shard]
        file = self._open_files.get(path)
        if file is None or file.header_crc32 != entry.header_crc32:
            try:
                file = SampleFile(path, self.bytes_read)
            except FileNotFoundError:
                raise LookupError(
                    f"{path} is gone: sample {sample_id} was expired or dropped since the folder "
                    "was read; keep more versions, or refresh"
                ) from None
            expected = (sample_id, stored.policy_version, shard, entry.header_crc32)
            found = (file.sample_id, file.policy_version, file.shard, file.header_crc32)
            if found != expected:
                raise DamagedFileError(
                    f"{path}: not the file that was committed: sample, policy version, shard, "
                    f"header checksum are {found}, but {manifest_name(shard)} says {expected}"
                )
            self._open_files[path] = file
            while len(self._open_files) > _MAX_OPEN_FILES:
                self._open_files.popitem(last=False)
        self._open_files.move_to_end(path)
        return file

    def _path(self, sample_id: str, policy_version: int, shard: Shard) -> Path:
        return version_folder(self.folder, policy_version) / sample_file_name(sample_id, shard)

    def _scan(self) -> None:
        # Before the scan: what changes during it is seen by the next refresh.
        self._seen = self._signature()
        content = scan_folder(self.folder, self._collected_shard)
        self._samples = content.samples
        for finding in set(content.findings) - set(self.findings):
            # A writer at work always has a file that is not committed yet.
            level = logging.INFO if finding.may_be_in_progress else logging.WARNING
            logger.log(level, "%s", finding)
        done = (finding for finding in self.findings if finding.action)
        self.findings = (*done, *content.findings)

    def _signature(self) -> object:
        manifests = (
            path
            for folder in version_folders(self.folder).values()
            for path in folder.glob("manifest.*.jsonl")
        )
        return {path: _stamp(path) for path in manifests}


def sorted_shards(stored: StoredSample) -> list[Shard]:
    """Gives the committed shards of a sample in ascending order."""
    return sorted(stored.entries, key=lambda shard: shard.index)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ino
