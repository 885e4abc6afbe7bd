"""Writing that survives a crash: temporary name, flush, fsync, rename, fsync of the folder.

Functions call `os.fsync`, `os.replace` and the like by these names, so that the tests can end the
process at each of them.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

TEMPORARY_SUFFIX = ".tmp"


def temporary_path(path: Path) -> Path:
    """Gives the name that a file has until it is complete, in the same folder."""
    return path.with_name(path.name + TEMPORARY_SUFFIX)


def write_temporary(path: Path, write: Callable[[BinaryIO], None]) -> Path:
    """Writes a file under its temporary name and syncs it; removes it if that fails.

    Args:
        path: Name that the file will have; not touched.
        write: Writes the content to a stream.

    Returns:
        The temporary name; rename it with `os.replace`, then sync the folder.

    Raises:
        OSError: The file system refuses; nothing is left behind.
    """
    temporary = temporary_path(path)
    try:
        with temporary.open("wb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def write_file(path: Path, content: bytes) -> None:
    """Writes a whole file, or none of it, durably."""
    temporary = write_temporary(path, lambda stream: _discard(stream.write(content)))
    try:
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def create_file(path: Path, content: bytes) -> bool:
    """Writes a whole file durably unless there is one: of several writers, the first one wins.

    Returns:
        Whether the file is this one's.
    """
    # A name of its own: others may be writing the same file, also on other hosts.
    own = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    temporary = write_temporary(own, lambda stream: _discard(stream.write(content)))
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    sync_folder(path.parent)
    return True


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Makes a folder whose parent exists, durably; nothing happens if it is there."""
    if not folder.is_dir():
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def append_durably(path: Path, text: bytes) -> None:
    """Appends whole lines to a file of lines, or nothing.

    Raises:
        OSError: The file system refuses; the file is as before.
        RuntimeError: The file does not end with a whole line.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
    try:
        length = os.fstat(descriptor).st_size
        if length and os.pread(descriptor, 1, length - 1) != b"\n":
            raise RuntimeError(
                f"{path} ends in half a line, so nothing may follow; close the folder and open it "
                "for writing again, which cuts the half line off"
            )
        try:
            _write_all(descriptor, text)
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, length)
            os.fsync(descriptor)
            raise
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, text: bytes) -> None:
    view = memoryview(text)
    while view:
        view = view[os.write(descriptor, view) :]


def _discard(_: object) -> None:
    pass
