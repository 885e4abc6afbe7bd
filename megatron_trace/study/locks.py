"""Locks between the processes of a study: the kernel lets go when one dies, so none is stale."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Holds an exclusive lock on a file, which is made and stays; yields whether it is held.

    Args:
        path: The file.
        wait: Whether to wait for another holder; otherwise False is yielded.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
