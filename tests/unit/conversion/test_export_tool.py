"""The program that exports what an engine serves, with the settings of a folder of rollouts."""

import json
import subprocess
import sys
from pathlib import Path

from megatron_trace.hints.settings_file import save_settings
from megatron_trace.hints.types import QuantizerSettings, Site
from megatron_trace.testing.published_model import published_model

TOOL = Path(__file__).parents[3] / "tools" / "export_rollout_weights.py"


def test_the_tool_writes_a_checkpoint_and_says_its_digest(tmp_path):
    published_model("qwen3_5_moe", tmp_path / "published")
    scales = {(layer, site): 0.001 for layer in range(4) for site in (Site.FC1, Site.FC2)}
    kv = {(3, Site.K): 0.01, (3, Site.V): 0.02}
    rollouts = tmp_path / "rollouts"
    rollouts.mkdir()
    save_settings(QuantizerSettings(scales | kv, model_id="tiny"), rollouts)
    command = [sys.executable, TOOL, "--published", tmp_path / "published"]
    command += ["--settings", rollouts, "--output", tmp_path / "out"]
    told = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr[-2000:]
    assert "out: 64 matrices in NVFP4, digest" in told.stdout
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_algo"] == "NVFP4"
    again = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "out exists; remove it or name another folder" in again.stderr
