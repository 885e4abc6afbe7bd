"""Programs under `tools/` and `examples/`: as modules, for tests that call them, and on ranks."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType


def load_program(path: Path) -> ModuleType:
    """Gives a program as a module of the file's name, executed anew but for its `main`.

    It is what the name stands for from then on, as its dataclasses look their module up, and finds
    the modules beside it.

    Args:
        path: Its file.

    Raises:
        FileNotFoundError: There is none.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def clean_environment() -> dict[str, str]:
    """Gives this process's environment without what Megatron set in it, building models."""
    return {name: value for name, value in os.environ.items() if not name.startswith("NVTE_")}


def torchrun(
    path: Path, flags: Sequence[str], folder: Path, *, ranks: int = 1
) -> subprocess.CompletedProcess[str]:
    """Runs a program under torchrun, each rank on one thread, and gives what it printed.

    Args:
        path: Its file.
        flags: Its command line.
        folder: Where it runs.
        ranks: Processes.
    """
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(ranks), str(path)),
            *flags,
        ],
        cwd=folder,
        env=clean_environment()
        | {
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "PYTHONWARNINGS": "ignore",
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
