"""Parts of the engine that need no Megatron are imported without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_trace import rollout

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys
import megatron_trace.rollout.pages
found = [name for name in ("megatron.core", "modelopt") if name in sys.modules]
assert not found, f"imported: {found}"
"""


def test_a_module_beside_the_engine_is_imported_without_megatron_and_modelopt():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_the_package_gives_what_it_exports():
    assert {name: getattr(rollout, name).__name__ for name in rollout.__all__} == {
        "RolloutEngine": "RolloutEngine",
        "SamplingSettings": "SamplingSettings",
    }


def test_what_the_package_does_not_export_is_named():
    with pytest.raises(AttributeError, match="rollout' has no attribute 'Engine'"):
        rollout.Engine  # noqa: B018
