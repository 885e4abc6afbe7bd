"""tools/check_gpu.py does what it says on the stand-in too; on a GPU it is a test of its own."""

import json
import sys
from pathlib import Path

TOOLS = Path(__file__).parents[2] / "tools"


def test_the_check_passes_and_writes_its_numbers(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(TOOLS))
    import check_gpu

    output = tmp_path / "numbers.json"
    check_gpu.main(["--cpu", "--prompts", "4", "--warm-start-steps", "10", "--json", str(output)])
    assert "all as it must be" in capsys.readouterr().out
    numbers = json.loads(output.read_text())
    assert [(row["rollout"], row["trainer"]) for row in numbers["rows"][::2]] == [
        ("bf16", "bf16"),
        ("fp4", "bf16"),
        ("fp4", "qat"),
        ("fp4", "trace"),
    ]
    sys.modules.pop("check_gpu")
