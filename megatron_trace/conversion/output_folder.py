"""Folders that exist under their name only when they are whole."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def output_folder(output: Path) -> Iterator[Path]:
    """Gives an empty folder to write into, which is renamed to `output` at the end.

    If the writing fails, nothing is left. What a process that was ended left under the temporary
    name is replaced.

    Args:
        output: Folder to make.

    Raises:
        ValueError: `output` exists.
    """
    require_absent(output)
    temporary = output.with_name(f"{output.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        temporary.rename(output)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def require_absent(output: Path) -> None:
    """Refuses to write over something.

    Raises:
        ValueError: `output` exists.
    """
    if output.exists():
        raise ValueError(f"{output} exists; remove it or name another folder")
