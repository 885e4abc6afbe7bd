"""One writer a folder and shard: a lock file that names its owner.

The owner holds `flock` on the file as long as it lives; the kernel lets go when it dies, so a name
without a held lock is a stale one. The file stays when the lock is released, empty: removing
it would let two processes hold locks on two files of the same name.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from megatron_trace.hints.findings import Finding, FindingKind


class WriterLock:
    """The right to write, held from construction to `release`."""

    def __init__(self, path: Path, *, take_over: bool = False) -> None:
        """Takes the lock.

        Args:
            path: The lock file.
            take_over: Whether a stale lock of another host may be taken: not every network file
                system shows the locks of one host to another, so its owner may be alive.

        Raises:
            RuntimeError: Another writer holds it, or one on another host might.
            OSError: The file cannot be written.
        """
        self.path = path
        self.finding: Finding | None = None
        self._process = os.getpid()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._acquire(take_over)
        except BaseException:
            os.close(self._descriptor)
            raise

    def require_held(self) -> None:
        """Raises RuntimeError in a forked child, and when the lock file was removed or replaced."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"{self.path.parent} was opened for writing by process {self._process}; process "
                f"{os.getpid()}, forked from it, must open its own folder"
            )
        try:
            intact = os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except FileNotFoundError:
            intact = False
        if not intact:
            raise RuntimeError(
                f"lock file {self.path} was removed or replaced while process {self._process} was "
                "writing; another writer may be at work: close the folder and open it again"
            )

    def release(self) -> None:
        """Gives the lock up; harmless in a forked child, and when done already."""
        if self._descriptor >= 0 and os.getpid() == self._process:
            # On a full or failing disk, the name is left and the next writer reports it as stale.
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)
            # Closing alone would leave it to a child that was forked meanwhile.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = -1

    def _acquire(self, take_over: bool) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(
                f"{self.path.parent} is being written by {_describe(self._owner())} (or a process "
                "forked from it): one writer a folder and shard; give this one another folder, or "
                "end that one"
            ) from None
        owner = self._owner()
        if owner:
            elsewhere = owner.get("host", socket.gethostname()) != socket.gethostname()
            if elsewhere and not take_over:
                raise RuntimeError(
                    f"{self.path} names {_describe(owner)}, and whether that is alive cannot be "
                    "told from this host; if it is not, pass take_over=True"
                )
            self.finding = Finding(
                FindingKind.STALE_LOCK,
                self.path,
                f"left by {_describe(owner)}",
                "taken over",
            )
        mine = {
            "host": socket.gethostname(),
            "process": self._process,
            "since": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        }
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(mine).encode(), 0)
        os.fsync(self._descriptor)

    def _owner(self) -> dict[str, Any]:
        """Gives what the file says about its owner: nothing after a release."""
        text = os.pread(self._descriptor, 4096, 0)
        try:
            owner = json.loads(text or b"{}")
        except ValueError:
            owner = None
        return owner if isinstance(owner, dict) else {"text": repr(text)}


def _describe(owner: dict[str, Any]) -> str:
    if "process" not in owner:
        return "an unnamed process"
    return f"process {owner['process']} on {owner.get('host')} since {owner.get('since')}"
