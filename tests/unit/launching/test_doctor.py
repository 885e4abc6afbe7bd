"""tools/doctor.py where there is no GPU."""

import importlib
import json
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_trace.testing.programs import load_program

TOOL = Path(__file__).parents[3] / "tools" / "doctor.py"


def doctor(*flags):
    return subprocess.run(
        [sys.executable, str(TOOL), *map(str, flags)], text=True, capture_output=True, check=False
    )


def test_what_works_is_told_with_what_was_measured(tmp_path):
    done = doctor("--only", "disk", "torch", "--json", "--folder", tmp_path)
    assert done.returncode == 0, done.stdout
    disk, specification = json.loads(done.stdout)
    assert (disk["state"], specification["state"]) == ("works", "works")
    assert "GB/s written" in disk["detail"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is absent with a GPU")
def test_what_is_absent_is_told_with_what_serves_instead(tmp_path):
    done = doctor("--only", "triton", "--folder", tmp_path)
    assert done.returncode == 0
    assert "absent  it needs a GPU" in done.stdout
    assert "instead: the torch implementation" in done.stdout


def test_what_is_broken_ends_with_an_error(tmp_path):
    broken = TOOL.read_text().replace("torch.equal(ops.rtn(x, 1.0", "torch.equal(ops.rtn(x, 1.5")
    (tmp_path / "doctor.py").write_text(broken)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "doctor.py"), "--only", "torch", "--folder", str(tmp_path)],
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1
    assert "gives other values than the specification" in done.stdout


def test_a_module_whose_bytecode_is_not_kept_is_named(tmp_path, monkeypatch):
    for name in ("kept_module", "compiled_module"):
        (tmp_path / f"{name}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    py_compile.compile(str(tmp_path / "kept_module.py"))
    modules = [importlib.import_module(name) for name in ("kept_module", "compiled_module")]
    assert load_program(TOOL).without_bytecode([*modules, sys]) == ["compiled_module"]
