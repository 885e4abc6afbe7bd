"""Apex is used where it is installed, by Megatron's own choice; nothing of ours needs it."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(
    path for part in ("megatron_trace", "examples", "tools") for path in (ROOT / part).rglob("*.py")
)
# One optimizer step of a tiny model, and which Adam took it.
STEP = """
import sys
import warnings
for name in {hidden}:
    sys.modules[name] = None
from megatron_trace.testing import cpu_runtime
cpu_runtime.install()
warnings.simplefilter("ignore")
import torch
from megatron_trace.rl.optimizer import OptimizerSettings, build_optimizer
from megatron_trace.testing.single_process import single_process
from megatron_trace.testing.tiny_trainer import tiny_trainer
with single_process(seed=0):
    model, _ = tiny_trainer("bf16", dtype=torch.bfloat16)
    ddp, optimizer = build_optimizer(model, OptimizerSettings())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.main_grad.fill_(1.0)
    done, norm, _ = optimizer.step()
    changed = sum(
        not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)
    )
    assert done and norm > 0 and changed > 0, (done, norm, changed)
    cls = type(optimizer.optimizer)
    print("stepped by", cls.__module__, cls.__name__)
"""
FUSED_ADAM = """
import torch


class FusedAdam(torch.optim.AdamW):
    def __init__(self, params, adam_w_mode=True, **arguments):
        super().__init__(params, **arguments)


FusedSGD = torch.optim.SGD
"""


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_of_ours_imports_apex(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            assert name.partition(".")[0] != "apex", f"{path}:{node.lineno}"


def step(folder, *, hidden):
    """Runs the step in a fresh process, with a folder of packages of its own."""
    done = subprocess.run(
        [sys.executable, "-c", STEP.format(hidden=hidden)],
        env=os.environ | {"PYTHONPATH": f"{folder}:{ROOT}", "OMP_NUM_THREADS": "1"},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_without_apex_and_transformer_engine_megatron_steps_with_torch(tmp_path):
    told = step(tmp_path, hidden=["apex", "transformer_engine"])
    assert "stepped by torch.optim" in told


def test_where_there_is_an_apex_megatron_steps_with_it(tmp_path):
    """A stand-in of the name: what is tested is that nothing of ours chooses otherwise."""
    package = tmp_path / "apex"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "optimizers.py").write_text(FUSED_ADAM)
    told = step(tmp_path, hidden=["transformer_engine"])
    assert "stepped by apex.optimizers FusedAdam" in told
