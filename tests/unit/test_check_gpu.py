"""tools/check_gpu.py passes on the stand-in for the CUDA runtime too."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "check_gpu.py"


def test_the_check_passes_and_writes_its_numbers(tmp_path, capfd):
    output = tmp_path / "numbers.json"
    spec = importlib.util.spec_from_file_location("check_gpu", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    tool.main(["--cpu", "--prompts", "4", "--warm-start-steps", "10", "--json", str(output)])
    assert "all as it must be" in capfd.readouterr().out
    numbers = json.loads(output.read_text())
    assert [(row["rollout"], row["trainer"]) for row in numbers["rows"][::2]] == [
        ("bf16", "bf16"),
        ("fp4", "bf16"),
        ("fp4", "qat"),
        ("fp4", "trace"),
    ]
