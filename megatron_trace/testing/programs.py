"""Programs under `tools/` and `examples/` as modules, for tests that call their functions."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load_program(path: Path) -> ModuleType:
    """Gives a program as a module of the file's name, executed anew but for its `main`.

    It is what the name stands for from then on, as its dataclasses look their module up.

    Args:
        path: Its file.

    Raises:
        FileNotFoundError: There is none.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
