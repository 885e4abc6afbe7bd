"""Programs that compare kernels with their references, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def run_program() -> Callable[..., str]:
    """Gives a function that runs a program beside this file and gives what it prints.

    Its arguments are the program's; `interpret` runs the kernels in Triton's interpreter, which
    Triton decides when it is imported.
    """

    def run(name: str, *arguments: str, interpret: bool) -> str:
        interpreter = {"TRITON_INTERPRET": "1"} if interpret else {}
        # Where packages that are no part of the environment are found stays in it.
        found_in = [str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        programs = [str(HERE / "quick_interpreter.py"), name] if interpret else [str(HERE / name)]
        process = subprocess.run(
            [sys.executable, "-W", "ignore", *programs, *arguments],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(found_in)} | interpreter,
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.returncode == 0, process.stderr[-2000:]
        return process.stdout

    return run
