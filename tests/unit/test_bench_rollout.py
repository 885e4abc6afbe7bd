"""tools/bench_rollout.py measures a small model on a CPU, and its rows add up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = (
    "bf16/off/largest",
    "fp4_kv/off/largest",
    "fp4_kv_only/off/largest",
    "fp4/off/3",
    "fp4_kv_only/off/3",
    "fp4_kv_only/latter_half/3",
)
SIZES = {"prompt": 64, "response": 256}


def test_every_mode_is_measured_and_scaled_to_all_layers(tmp_path):
    output, table = tmp_path / "numbers.json", tmp_path / "table.md"
    program = [sys.executable, "-W", "ignore", str(ROOT / "tools" / "bench_rollout.py"), "--cpu"]
    flags = ["--reduced", "--layers", "4", "--memory-gib", "3.003", "--page-tokens", "16"]
    flags += [f"--{name}-tokens={count}" for name, count in SIZES.items()]
    flags += ["--steps=1", "--warm-up=1", "--points=2", "--graphs=padded"]
    flags += ["--packed-experts=torch", "--push", "--cases", *CASES]
    result = subprocess.run(
        [*program, *flags, "--json", str(output), "--markdown", str(table)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    numbers = json.loads(output.read_text())
    assert (numbers["facts"]["layers"], numbers["facts"]["layers_measured"]) == (8, 4)
    assert numbers["facts"]["push_s"] > 0
    rows = {(row["mode"], row["recording"], row["batch_name"]): row for row in numbers["rows"]}
    assert len(rows) == len(table.read_text().splitlines()) - 2 == len(CASES)
    for row in rows.values():
        whole = [row["step_ms"][length] + row["decoder_ms"][length] for length in row["step_ms"]]
        assert list(row["whole_ms"].values()) == pytest.approx(whole), "twice the layers"
        assert row["mean_ms"] == pytest.approx(sum(whole) / 2), "the trapezoid of two points"
        assert row["tokens_per_s"] == pytest.approx(1000 * row["batch"] / row["mean_ms"])
        moved = sum(row["bytes_read"].values())
        assert row["bytes_per_token_read"] == pytest.approx(moved / row["batch"])
    plain, both, packed = (
        rows[mode, "off", "largest"]["batch"] for mode in ("bf16", "fp4_kv", "fp4_kv_only")
    )
    assert packed > 2 * plain, "a cache of 4.5 bits a value, beside states in FP32"
    assert plain < both < packed, "the engine keeps its experts in BF16 too"
    of_recording = (rows["fp4_kv_only", "latter_half", "3"], rows["fp4_kv_only", "off", "3"])
    hints = [row["bytes_read"]["hints"] for row in of_recording]
    assert hints == [3 * 4 * (64 // 8 + 64 // 16), 0], "1 bit of fc1 in 4 of 8 layers, and scales"
