"""The manifest of a policy version and shard: which samples are committed.

A file of lines, `crc32 json`, the checksum in 8 hexadecimal digits over the JSON text. The first
line says whose manifest it is; each later line commits or drops samples, and the last one about
a sample counts. Samples are committed when their line is durable: one line, hence all of them or
none. A crash can leave half a last line; it commits nothing, and the next writer cuts it off.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_trace.hints.durable import append_durably, write_file
from megatron_trace.hints.findings import Finding, FindingKind
from megatron_trace.hints.sample_file import Shard

MANIFEST_SCHEMA = 1


@dataclass(frozen=True)
class Entry:
    """A committed file.

    Attributes:
        sample_id: The sample.
        header_crc32: Checksum of the file's header, which holds the checksums of its tensors.
        file_bytes: Size of the file.
        hint_bytes: Bytes of all payloads and block scales in it.
        num_records: Records of both kinds in it.
    """

    sample_id: str
    header_crc32: int
    file_bytes: int
    hint_bytes: int
    num_records: int


@dataclass
class Manifest:
    """What a manifest says.

    Attributes:
        entries: Committed files by sample, in the order of their commit.
        whole_bytes: Bytes up to the last whole line.
        findings: What is wrong with it.
    """

    entries: dict[str, Entry] = field(default_factory=dict)
    whole_bytes: int = 0
    findings: list[Finding] = field(default_factory=list)


def manifest_name(shard: Shard) -> str:
    """Gives the file name of a shard's manifest."""
    return f"manifest.{shard}.jsonl"


def create_manifest(path: Path, policy_version: int, shard: Shard) -> None:
    """Writes the manifest of a version without samples, durably."""
    write_file(path, _line(_title(policy_version, shard)))


def commit_entries(path: Path, entries: Iterable[Entry]) -> None:
    """Makes files committed: all of them, or none if it raises OSError."""
    append_durably(path, _line({"commit": [asdict(entry) for entry in entries]}))


def drop_entries(path: Path, sample_ids: Iterable[str]) -> None:
    """Makes files uncommitted: all of them, or none if it raises OSError."""
    append_durably(path, _line({"drop": list(sample_ids)}))


def read_manifest(path: Path, policy_version: int, shard: Shard) -> Manifest:
    """Reads a manifest; a damaged line is a finding and commits nothing.

    Args:
        path: The manifest.
        policy_version: Version that its first line must name.
        shard: Shard that its first line must name.
    """
    manifest = Manifest()
    content = path.read_bytes()
    manifest.whole_bytes = content.rfind(b"\n") + 1
    if manifest.whole_bytes < len(content):
        detail = f"ends in half a line of {len(content) - manifest.whole_bytes} bytes"
        manifest.findings.append(Finding(FindingKind.TORN, path, detail))
    lines = content[: manifest.whole_bytes].split(b"\n")[:-1]
    for number, line in enumerate(lines, start=1):
        try:
            _apply(_parse(line), manifest, number, _title(policy_version, shard))
        except (KeyError, TypeError, ValueError) as error:
            manifest.findings.append(
                Finding(FindingKind.DAMAGED, path, f"line {number} is not readable: {error}")
            )
    if not lines:
        manifest.findings.append(Finding(FindingKind.DAMAGED, path, "the first line is missing"))
    return manifest


def _title(policy_version: int, shard: Shard) -> dict[str, Any]:
    return {
        "manifest": MANIFEST_SCHEMA,
        "policy_version": policy_version,
        "shard": asdict(shard),
    }


def _apply(record: dict[str, Any], manifest: Manifest, number: int, title: dict[str, Any]) -> None:
    if number == 1:
        if record != title:
            raise ValueError(f"expected {title}; got {record}")
    elif "commit" in record:
        for entry in [Entry(**fields) for fields in record["commit"]]:
            # A sample that was dropped and rolled out again takes its new place in the order.
            manifest.entries.pop(entry.sample_id, None)
            manifest.entries[entry.sample_id] = entry
    else:
        for sample_id in record["drop"]:
            manifest.entries.pop(sample_id, None)


def _line(record: dict[str, Any]) -> bytes:
    text = json.dumps(record).encode()
    return b"%08x %b\n" % (zlib.crc32(text), text)


def _parse(line: bytes) -> dict[str, Any]:
    checksum, separator, text = line.partition(b" ")
    if not separator or checksum != b"%08x" % zlib.crc32(text):
        raise ValueError(f"its checksum is not {checksum[:8]!r}")
    return json.loads(text)
