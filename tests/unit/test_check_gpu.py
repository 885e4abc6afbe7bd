"""tools/check_gpu.py passes on the stand-in for the CUDA runtime too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_check_passes_and_writes_its_numbers(tmp_path):
    output = tmp_path / "numbers.json"
    program = [sys.executable, "-W", "ignore", str(ROOT / "tools" / "check_gpu.py"), "--cpu"]
    result = subprocess.run(
        [*program, "--prompts", "4", "--warm-start-steps", "10", "--json", str(output)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "all as it must be" in result.stdout
    numbers = json.loads(output.read_text())
    assert [(row["rollout"], row["trainer"]) for row in numbers["rows"][::2]] == [
        ("bf16", "bf16"),
        ("fp4", "bf16"),
        ("fp4", "qat"),
        ("fp4", "trace"),
    ]
