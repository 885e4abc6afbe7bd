"""The layout of a folder of hint files, and what is in one.

v00000007/                        one folder a policy version
  manifest.0of1.jsonl             which samples shard 0 of 1 committed
  <sample id>.0of1.hints          a sample's file; its id percent-encoded
  orphans/                        files that no manifest names, moved here by the next writer
writer.0of1.lock                  who may write shard 0 of 1
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

from megatron_trace.hints.durable import TEMPORARY_SUFFIX, sync_folder
from megatron_trace.hints.findings import Finding, FindingKind
from megatron_trace.hints.manifest import (
    Entry,
    Manifest,
    drop_entries,
    manifest_name,
    read_manifest,
)
from megatron_trace.hints.sample_file import Shard

ORPHANS = "orphans"
_VERSION_NAME = re.compile(r"v(\d{8,})")
_SHARD_FILE_NAME = re.compile(r"(.+)\.(\d+)of(\d+)\.(hints|jsonl|lock)")
_MAX_NAME_BYTES = 255 - len(TEMPORARY_SUFFIX)


@dataclass
class StoredSample:
    """A sample of which a shard at least is committed.

    Attributes:
        policy_version: Version whose folder it is in.
        entries: Committed files by shard.
    """

    policy_version: int
    entries: dict[Shard, Entry] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether every shard is committed."""
        return len(self.entries) == next(iter(self.entries)).count


@dataclass
class FolderContent:
    """What a folder holds.

    Attributes:
        samples: Samples by id, in the order of policy version and commit.
        findings: What does not belong there, or is missing or damaged.
    """

    samples: dict[str, StoredSample] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def add(self, kind: FindingKind, path: Path, detail: str, action: str = "") -> None:
        """Adds a finding."""
        self.findings.append(Finding(kind, path, detail, action))


def version_folder(folder: Path, policy_version: int) -> Path:
    """Gives the folder of a policy version."""
    if policy_version < 0:
        raise ValueError(f"policy version must be >= 0; got {policy_version}")
    return folder / f"v{policy_version:08d}"


def version_folders(folder: Path) -> dict[int, Path]:
    """Gives the folders of the policy versions on disk, in ascending order."""
    matches = ((_VERSION_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return dict(sorted((int(match[1]), path) for match, path in matches if match and path.is_dir()))


def sample_file_name(sample_id: str, shard: Shard) -> str:
    """Gives the file name of a sample.

    Raises:
        ValueError: The sample id is empty or too long for a file name.
    """
    name = f"{quote(sample_id, safe='')}.{shard}.hints"
    if not sample_id or len(name) > _MAX_NAME_BYTES:
        raise ValueError(
            f"sample id must give a file name of at most {_MAX_NAME_BYTES} bytes, percent-encoded; "
            f"got {len(name)} bytes for {sample_id!r}"
        )
    return name


def shard_of(name: str) -> Shard | None:
    """Gives the shard that a file name says, or None for a name that is not ours."""
    match = _SHARD_FILE_NAME.fullmatch(name)
    if match is None or not int(match[2]) < int(match[3]):
        return None
    return Shard(int(match[2]), int(match[3]))


def scan_folder(folder: Path, own: Shard | None = None) -> FolderContent:
    """Reads the manifests of a folder and compares them with the files beside them.

    Args:
        folder: The folder.
        own: Shard whose writer the caller is. Of this shard, temporary files are removed, orphans
            moved aside, half lines cut off and entries without a file dropped.
    """
    content = FolderContent()
    for policy_version, path in version_folders(folder).items():
        try:
            _scan_version(path, policy_version, own, content)
        except FileNotFoundError:
            if path.exists():
                raise  # Otherwise its writer expired it meanwhile.
    return content


def _scan_version(
    folder: Path, policy_version: int, own: Shard | None, content: FolderContent
) -> None:
    # Names first: a file that is committed after this is not mistaken for an orphan.
    names = sorted(os.listdir(folder))
    shards = set()
    for name in names:
        shard = shard_of(name.removesuffix(TEMPORARY_SUFFIX))
        if shard is not None:
            shards.add(shard)
        elif name != ORPHANS:
            content.add(FindingKind.UNKNOWN, folder / name, "no name of a hint file")
    for shard in sorted(shards, key=lambda shard: (shard.count, shard.index)):
        of_shard = [n for n in names if shard_of(n.removesuffix(TEMPORARY_SUFFIX)) == shard]
        _scan_shard(folder, policy_version, shard, of_shard, shard == own, content)


def _scan_shard(
    folder: Path,
    policy_version: int,
    shard: Shard,
    names: list[str],
    collect: bool,
    content: FolderContent,
) -> None:
    path = folder / manifest_name(shard)
    manifest = read_manifest(path, policy_version, shard) if path.name in names else Manifest()
    for finding in manifest.findings:
        cut = collect and finding.kind is FindingKind.TORN
        if cut:
            os.truncate(path, manifest.whole_bytes)
        content.add(finding.kind, path, finding.detail, "cut off" if cut else "")
    named = {sample_file_name(sample_id, shard) for sample_id in manifest.entries}
    for name in names:
        if name.endswith(TEMPORARY_SUFFIX):
            _report_temporary(folder / name, collect, content)
        elif name.endswith(".hints") and name not in named:
            _report_orphan(folder / name, path.name, collect, content)
    missing = [
        sample_id
        for sample_id, entry in manifest.entries.items()
        if not _is_there(folder / sample_file_name(sample_id, shard), entry, content)
    ]
    for sample_id in missing:
        del manifest.entries[sample_id]
        content.add(
            FindingKind.MISSING,
            folder / sample_file_name(sample_id, shard),
            f"sample {sample_id} is committed, but its file is not there",
            "dropped from the manifest" if collect else "",
        )
    if collect and missing:
        drop_entries(path, missing)
    for sample_id, entry in manifest.entries.items():
        _index(sample_id, policy_version, shard, entry, folder, content)


def _report_temporary(path: Path, collect: bool, content: FolderContent) -> None:
    if collect:
        path.unlink()
    content.add(
        FindingKind.TEMPORARY, path, "its writer did not finish", "removed" if collect else ""
    )


def _report_orphan(path: Path, manifest: str, collect: bool, content: FolderContent) -> None:
    if collect:
        orphans = path.parent / ORPHANS
        orphans.mkdir(exist_ok=True)
        os.replace(path, orphans / path.name)
        sync_folder(orphans)
        sync_folder(path.parent)
    sample_id = unquote(path.name.rsplit(".", 2)[0])
    content.add(
        FindingKind.ORPHAN,
        path,
        f"{manifest} does not name it; sample {sample_id} by its file name",
        f"moved to {ORPHANS}/" if collect else "",
    )


def _is_there(path: Path, entry: Entry, content: FolderContent) -> bool:
    try:
        file_bytes = path.stat().st_size
    except FileNotFoundError:
        return False
    if file_bytes != entry.file_bytes:
        content.add(
            FindingKind.DAMAGED, path, f"{file_bytes} bytes, but {entry.file_bytes} were committed"
        )
    return True


def _index(
    sample_id: str,
    policy_version: int,
    shard: Shard,
    entry: Entry,
    folder: Path,
    content: FolderContent,
) -> None:
    stored = content.samples.setdefault(sample_id, StoredSample(policy_version))
    if stored.policy_version != policy_version or any(
        other.count != shard.count for other in stored.entries
    ):
        content.add(
            FindingKind.DAMAGED,
            folder / sample_file_name(sample_id, shard),
            f"sample {sample_id} is committed under policy version {stored.policy_version} and "
            f"shards {', '.join(map(str, stored.entries))} too; this file is not used",
        )
        return
    stored.entries[shard] = entry
