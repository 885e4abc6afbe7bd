"""tools/check_gpu.py passes on the stand-in for the CUDA runtime too."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_trace.testing.programs import load_program

TOOL = Path(__file__).parents[2] / "tools" / "check_gpu.py"


def test_the_check_passes_and_writes_its_numbers(tmp_path, capfd):
    output = tmp_path / "numbers.json"
    tool = load_program(TOOL)
    tool.main(["--cpu", "--prompts", "4", "--warm-start-steps", "10", "--json", str(output)])
    assert "all as it must be" in capfd.readouterr().out
    numbers = json.loads(output.read_text())
    assert [(row["rollout"], row["trainer"]) for row in numbers["rows"][::2]] == [
        ("bf16", "bf16"),
        ("fp4", "bf16"),
        ("fp4", "qat"),
        ("fp4", "trace"),
    ]
