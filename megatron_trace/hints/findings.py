"""What was found in a folder of hint files beside what belongs there."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path


class FindingKind(enum.StrEnum):
    """What is wrong with a file.

    A crash leaves the first four; nothing committed is lost by them. A damaged manifest can leave
    `ORPHAN` and `TORN` too, and then something is.
    """

    STALE_LOCK = "stale lock"
    TEMPORARY = "temporary"
    ORPHAN = "orphan"
    TORN = "torn"
    UNKNOWN = "unknown"
    MISSING = "missing"
    DAMAGED = "damaged"


@dataclass(frozen=True)
class Finding:
    """One file that is not as it should be.

    Attributes:
        kind: What is wrong.
        path: The file.
        detail: In words.
        action: What was done about it; empty if nothing.
    """

    kind: FindingKind
    path: Path
    detail: str
    action: str = ""

    @property
    def may_be_in_progress(self) -> bool:
        """Whether it looks the same as a commit that a writer is busy with."""
        uncommitted = (FindingKind.TEMPORARY, FindingKind.ORPHAN, FindingKind.TORN)
        return self.kind in uncommitted and not self.action

    def __str__(self) -> str:
        """Gives one line."""
        return f"{self.kind}: {self.path}: {self.detail}" + (
            f"; {self.action}" if self.action else ""
        )
