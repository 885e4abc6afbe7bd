"""What this process has open, and waiting for what another thread or process does."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import NamedTuple


class Descriptor(NamedTuple):
    """An open descriptor of this process.

    Attributes:
        number: Its number.
        target: Path, or what the system says instead.
        inode: Inode of what is open.
    """

    number: int
    target: str
    inode: int


def open_descriptors(prefix: str) -> set[Descriptor]:
    """Gives this process's descriptors whose targets begin with a text."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{number}"
        with contextlib.suppress(OSError):  # That of the folder is closed already.
            if (target := os.readlink(path)).startswith(prefix):
                found.add(Descriptor(int(number), target, os.stat(path).st_ino))
    return found


def came_true(condition: Callable[[], object], *, within_s: float) -> bool:
    """Waits until a condition holds, and says whether it did in the time."""
    until = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True
