"""What a step costs is measured on the real way of the hints: small, and on a CPU here."""

import json
import subprocess
import sys
from pathlib import Path

SIZES = "--small --tokens 64 --length 32 --rounds 1 --micro-batches 2 --prompts 2 --new-tokens 3"
CASES = "bf16:local qat:local trace:local trace:local:fc1"
# fc1 64 values, fc2 8 slots of 32, k and v 32 each; a bit a value, a byte for 16.
HINT_BYTES = (64 + 8 * 32 + 2 * 32) * 3 // 16


def test_the_benchmark_of_a_step_measures_guided_steps_and_what_they_store(tmp_path: Path) -> None:
    command = f"tools/bench_step.py {SIZES} --cases {CASES} --out {tmp_path}/step.json"
    output = subprocess.run(
        [sys.executable, "-W", "ignore", *command.split()],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    ).stdout
    assert "failed" not in output, output
    report = json.loads((tmp_path / "step.json").read_text())["blocks"]["*E"]
    rows = {row["case"]["name"]: row for row in report["training"]}
    assert len(rows) == 4
    assert all(row["micro_batch_ms"] > 0 for row in rows.values())
    every = rows["trace (all sites), local, process"]["coverage"]
    assert every == {"fc1": 1.0, "fc2": 1.0, "k": 1.0, "v": 1.0}
    assert rows["trace (fc1), local, process"]["coverage"] == every | {
        "fc2": 0.0,
        "k": 0.0,
        "v": 0.0,
    }
    assert not any(rows["qat, local, process"]["coverage"].values())
    store = report["store"]
    assert store["bytes"] == store["tokens"] * HINT_BYTES
    rollout = {row["method"]: row for row in report["rollout"]}
    assert rollout["bf16"]["bytes"] == rollout["qat"]["bytes"] == 0
    assert rollout["trace"]["bytes"] > 0
    assert rollout["trace"]["record"] > 0
