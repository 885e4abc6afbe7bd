"""Hints of finished rollouts, kept until training has used them.

A hint is found by its key and by nothing else. Reading does not consume: recomputation reads twice.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from megatron_trace.hints.part import HintPart, select_part
from megatron_trace.hints.types import HintKey, Site, SiteHint


class RecordKind(enum.StrEnum):
    """What a record is for."""

    HINT = "hint"
    CODES = "codes"


class HintSink(Protocol):
    """What a rollout writes records to: `HintStore` or `HintFilesWriter`."""

    def put(self, hint: SiteHint, kind: RecordKind = ...) -> None:
        """Adds the record of one sample at one place."""
        ...

    def sample_ids(self) -> tuple[str, ...]:
        """Gives the samples that are there already."""
        ...

    def drop_sample(self, sample_id: str) -> int:
        """Removes the records of a sample and gives their number; 0 if there are none."""
        ...


@dataclass
class _SampleRecords:
    policy_version: int
    settings_digest: str
    num_rows: int
    by_place: dict[RecordKind, dict[tuple[int, Site], SiteHint]] = field(
        default_factory=lambda: {kind: {} for kind in RecordKind}
    )

    def all_hints(self) -> list[SiteHint]:
        return [hint for places in self.by_place.values() for hint in places.values()]


class HintStore:
    """Hints in memory, by sample, decoder layer and site.

    Two kinds of record exist: hints, which guide training, and full codes, which only metrics read.
    """

    def __init__(self) -> None:
        self._samples: dict[str, _SampleRecords] = {}

    def __len__(self) -> int:
        """Records of both kinds."""
        return sum(len(records.all_hints()) for records in self._samples.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all payloads and block scales."""
        return sum(
            hint.num_bytes for records in self._samples.values() for hint in records.all_hints()
        )

    def put(self, hint: SiteHint, kind: RecordKind = RecordKind.HINT) -> None:
        """Adds the record of one sample at one place.

        Raises:
            ValueError: The place has a record of this kind already; the sample's other records
                have another policy version, settings digest or number of rows; or full codes do
                not hold whole codes and raw block scales.
        """
        key = hint.key
        code_bits = hint.format.code_bits
        if kind is RecordKind.CODES and hint.num_bits != code_bits:
            raise ValueError(
                f"full codes need {code_bits} bits per value; got {hint.num_bits} ({key})"
            )
        if kind is RecordKind.CODES and hint.scale_form != "raw":
            raise ValueError(f"full codes need raw block scales; got {hint.scale_form} ({key})")
        records = self._samples.get(key.sample_id)
        if records is None:
            records = _SampleRecords(key.policy_version, key.settings_digest, hint.num_rows)
        require_same_rollout(records, key, hint.num_rows)
        places = records.by_place[kind]
        if (key.layer, key.site) in places:
            raise ValueError(
                f"a {kind} record is stored already; drop the sample before it is rolled out again "
                f"({key})"
            )
        places[key.layer, key.site] = hint
        self._samples[key.sample_id] = records

    def get(
        self,
        key: HintKey,
        *,
        num_rows: int,
        kind: RecordKind = RecordKind.HINT,
        part: HintPart | None = None,
    ) -> SiteHint:
        """Gives the record of one sample at one place, or a part of it.

        Args:
            key: Where it belongs, with the policy version and settings the caller trains on.
            num_rows: Rows that the sample has.
            kind: Hints or full codes.
            part: Rows and columns that are wanted; None for all.

        Raises:
            LookupError: Nothing is stored there.
            ValueError: What is stored comes from another policy version or other quantiser
                settings, or has another number of rows.
        """
        records = self._samples.get(key.sample_id)
        if records is None:
            raise LookupError(
                f"no {kind} record: nothing is stored for this sample, of {len(self._samples)} "
                f"samples stored; record it, or set missing_hints=rtn ({key})"
            )
        require_same_rollout(records, key, num_rows)
        hint = records.by_place[kind].get((key.layer, key.site))
        if hint is None:
            stored = ", ".join(f"{layer}.{site}" for layer, site in sorted(records.by_place[kind]))
            raise LookupError(
                f"no {kind} record at this place; the sample has them at layer.site "
                f"{stored or '(none)'}; record the place, or set missing_hints=rtn ({key})"
            )
        return hint if part is None else select_part(hint, part)[0]

    def places(
        self, sample_id: str, kind: RecordKind = RecordKind.HINT
    ) -> tuple[tuple[int, Site], ...]:
        """Gives the (layer, site) of a sample's records in ascending order; none if unknown."""
        records = self._samples.get(sample_id)
        return () if records is None else tuple(sorted(records.by_place[kind]))

    def coverage(self, kind: RecordKind = RecordKind.HINT) -> dict[tuple[int, Site], int]:
        """Gives how many samples have a record, by (layer, site) in ascending order."""
        counts = Counter(
            place for records in self._samples.values() for place in records.by_place[kind]
        )
        return dict(sorted(counts.items()))

    def sample_ids(self) -> tuple[str, ...]:
        """Gives the samples that have a record of either kind, in the order of their arrival."""
        return tuple(self._samples)

    def drop_sample(self, sample_id: str) -> int:
        """Drops a sample's records of both kinds and gives how many there were."""
        records = self._samples.pop(sample_id, None)
        return 0 if records is None else len(records.all_hints())

    def expire(self, *, before: int) -> tuple[str, ...]:
        """Drops the samples of policy versions older than `before` and gives their ids."""
        expired = tuple(
            sample_id
            for sample_id, records in self._samples.items()
            if records.policy_version < before
        )
        for sample_id in expired:
            del self._samples[sample_id]
        return expired


class RolloutRecords(Protocol):
    """What is stored of one sample, in memory or in a file."""

    @property
    def policy_version(self) -> int: ...

    @property
    def settings_digest(self) -> str: ...

    @property
    def num_rows(self) -> int: ...


def require_same_rollout(
    records: RolloutRecords, key: HintKey, num_rows: int, *, where: str = ""
) -> None:
    """Checks that the stored records are of the rollout that the key names.

    Args:
        records: What is stored of the sample.
        key: What is asked for, or about to be added.
        num_rows: Rows that the sample has.
        where: Beginning of the message, such as a file's name and a colon.

    Raises:
        ValueError: Policy version, quantiser settings or number of rows differ.
    """
    for name, stored, wanted in (
        ("policy version", records.policy_version, key.policy_version),
        ("quantiser settings", records.settings_digest, key.settings_digest),
        ("number of rows", records.num_rows, num_rows),
    ):
        if stored != wanted:
            raise ValueError(
                f"{where}the records of sample {key.sample_id} have {name} {stored}, but {wanted} "
                f"was given; hints guide only the rollout that made them ({key})"
            )
