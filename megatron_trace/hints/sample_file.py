"""What a hint file holds: one sample (tokens, log-probs, routing) and its records.

Records are stored field by field, as the dataclasses declare them: tensors and tuples of integers
as tensors, everything else, spans of versions too, as JSON. A field that is added to `SiteHint` or
`RolloutSample` is stored without a change here; a reader that does not know it refuses the file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_trace.hints.part import HintPart, select_part
from megatron_trace.hints.store import RecordKind
from megatron_trace.hints.tensor_file import (
    BytesRead,
    DamagedFileError,
    TensorEntry,
    TensorFile,
    write_tensor_file,
)
from megatron_trace.hints.types import HintKey, RolloutSample, Site, SiteHint, VersionSpan

Place = tuple[int, Site]
# Stored once a file, not once a record.
_IDENTITY_FIELDS = ("sample_id", "policy_version", "settings_digest")
_SPAN_FIELDS = {"version_spans", "record_spans"}


@dataclass(frozen=True)
class Shard:
    """The part of every sample that one writer has.

    The shards of a sample hold different places (pipeline stages of a rollout, say); the sample's
    own tokens, log-probs and routing are in shard 0.

    Attributes:
        index: Which part, from 0.
        count: Number of parts.
    """

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        """Raises ValueError unless 0 <= index < count."""
        if not 0 <= self.index < self.count:
            raise ValueError(f"shard must be 0 to count - 1; got {self.index} of {self.count}")

    def __str__(self) -> str:
        """Gives the shard as it stands in file names."""
        return f"{self.index}of{self.count}"


def write_sample_file(
    path: Path,
    sample: RolloutSample,
    records: Mapping[RecordKind, Sequence[SiteHint]],
    shard: Shard,
) -> tuple[Path, int]:
    """Writes the file of one sample and shard under its temporary name and syncs it.

    Args:
        path: Name that the file will have.
        sample: The sample; stored in shard 0 only.
        records: Its records by kind.
        shard: Part that the records are.

    Returns:
        The temporary name and the checksum of the header.
    """
    tensors: dict[str, torch.Tensor] = {}
    attributes = {name: getattr(sample, name) for name in _IDENTITY_FIELDS} | {
        "num_rows": sample.num_rows,
        "shard": dataclasses.asdict(shard),
        "sample": None,
        "records": [],
    }
    if shard.index == 0:
        attributes["sample"] = _take_apart(sample, "sample", tensors)
    for kind, hints in records.items():
        for hint in hints:
            place = {"kind": kind, "layer": hint.key.layer, "site": hint.key.site}
            prefix = _prefix(kind, (hint.key.layer, hint.key.site))
            attributes["records"].append(place | _take_apart(hint, prefix, tensors))
    return write_tensor_file(path, attributes, tensors)


class SampleFile:
    """The file of one sample and shard; a record's bytes are read when it is asked for.

    Attributes:
        path: The file.
        header_crc32: Checksum of the header, which stands for the whole content.
        sample_id: The sample.
        policy_version: Version of the weights.
        settings_digest: Digest of the quantiser settings.
        num_rows: Rows of every record.
        shard: Which part of the sample it is.
    """

    def __init__(self, path: Path, counter: BytesRead) -> None:
        """Reads and checks the header.

        Raises:
            FileNotFoundError: There is no such file.
            DamagedFileError: The header is not what was written.
        """
        self._file = TensorFile(path, counter)
        self._counter = counter
        self.path = path
        self.header_crc32 = self._file.header_crc32
        attributes = self._file.attributes
        try:
            self.sample_id: str = attributes["sample_id"]
            self.policy_version: int = attributes["policy_version"]
            self.settings_digest: str = attributes["settings_digest"]
            self.num_rows: int = attributes["num_rows"]
            self.shard = Shard(**attributes["shard"])
            self._sample = attributes["sample"]
            self._records: dict[tuple[RecordKind, Place], dict[str, Any]] = {
                (RecordKind(record["kind"]), (record["layer"], Site(record["site"]))): record
                for record in attributes["records"]
            }
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedFileError(f"{path}: not the header of a sample ({error!r})") from error

    def places(self, kind: RecordKind) -> tuple[Place, ...]:
        """Gives the (layer, site) of the records of a kind, in ascending order."""
        return tuple(sorted(place for stored, place in self._records if stored is kind))

    def entries(self, kind: RecordKind, place: Place) -> dict[str, TensorEntry]:
        """Gives shape and checksum of a record's tensors, by field; nothing is read for it."""
        prefix = _prefix(kind, place) + "/"
        return {
            name.removeprefix(prefix): entry
            for name, entry in self._file.entries.items()
            if name.startswith(prefix)
        }

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self._file.num_bytes

    def record(
        self, kind: RecordKind, place: Place, part: HintPart | None = None
    ) -> SiteHint | None:
        """Gives the record of a place, or None where there is none.

        Args:
            kind: Hints or full codes.
            place: Decoder layer and site.
            part: What is wanted of it, read without comparing checksums; None for all.

        Raises:
            DamagedFileError: Its bytes are not those that were written.
        """
        stored = self._records.get((kind, place))
        if stored is None:
            return None
        key = HintKey(self.sample_id, *place, self.policy_version, self.settings_digest)
        prefix = _prefix(kind, place)
        if part is None:
            return self._put_together(SiteHint, stored, prefix, {"key": key}, self._file.tensor)
        whole = self._put_together(SiteHint, stored, prefix, {"key": key}, self._file.unread_tensor)
        record, num_read = select_part(whole, part)
        self._counter.tensor_bytes += num_read
        return record

    def sample(self) -> RolloutSample | None:
        """Gives the sample, or None in another shard than 0.

        Raises:
            DamagedFileError: Its bytes are not those that were written.
        """
        if self._sample is None:
            return None
        identity = {name: getattr(self, name) for name in _IDENTITY_FIELDS}
        return self._put_together(
            RolloutSample, self._sample, "sample", identity, self._file.tensor
        )

    def _put_together[T](
        self,
        kind: type[T],
        stored: Mapping[str, Any],
        prefix: str,
        given: Mapping[str, Any],
        tensor: Callable[[str], torch.Tensor],
    ) -> T:
        try:
            fields = dict(stored["values"])
            for name in stored["tensors"]:
                fields[name] = tensor(f"{prefix}/{name}")
            for name in stored["tuples"]:
                fields[name] = tuple(tensor(f"{prefix}/{name}").tolist())
            for name in _SPAN_FIELDS & fields.keys():
                fields[name] = tuple(VersionSpan(*span) for span in fields[name])
            return kind(**given, **fields)
        except DamagedFileError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedFileError(
                f"{self.path}: {prefix} is no {kind.__name__} of this version ({error!r})"
            ) from error


def _prefix(kind: RecordKind, place: Place) -> str:
    layer, site = place
    return f"{kind}/{layer}/{site}"


def _take_apart(
    record: SiteHint | RolloutSample, prefix: str, tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Gives the JSON part of a record and adds its tensors to `tensors`."""
    stored: dict[str, Any] = {"values": {}, "tensors": [], "tuples": []}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if field.name == "key" or field.name in _IDENTITY_FIELDS:
            continue
        if value is None and field.default is None:
            continue  # An optional field that is not there; readers that do not know it go on.
        if isinstance(value, torch.Tensor):
            stored["tensors"].append(field.name)
            tensors[f"{prefix}/{field.name}"] = value
        elif field.name in _SPAN_FIELDS and value is not None:
            stored["values"][field.name] = [list(span) for span in value]
        elif isinstance(value, tuple):
            stored["tuples"].append(field.name)
            tensors[f"{prefix}/{field.name}"] = torch.tensor(value, dtype=torch.int64)
        elif value is None or isinstance(value, (str, int, float)):
            stored["values"][field.name] = value
        else:
            raise TypeError(
                f"{type(record).__name__}.{field.name} must be a tensor, a tuple of integers or a "
                f"plain value to be stored; got {type(value).__name__}"
            )
    return stored
