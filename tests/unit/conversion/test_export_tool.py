"""The program that exports what an engine serves, with the settings of a folder of rollouts."""

import json
import sys
from pathlib import Path

import pytest
import torch

from megatron_trace.conversion.modelopt_folder import read_modelopt_folder
from megatron_trace.hints.files_writer import HintFilesWriter
from megatron_trace.hints.settings_file import save_settings
from megatron_trace.hints.types import QuantizerSettings, Site
from megatron_trace.testing.programs import load_program
from megatron_trace.testing.published_model import calibration_sample, published_model

TOOL = Path(__file__).parents[3] / "tools" / "export_rollout_weights.py"


@pytest.fixture
def export(monkeypatch):
    """Runs the program in this process, which has imported everything already."""
    tool = load_program(TOOL)

    def export(*flags):
        monkeypatch.setattr(sys, "argv", list(map(str, [TOOL, *flags])))
        tool.main()

    return export


def test_the_tool_writes_a_checkpoint_and_says_its_digest(tmp_path, export, capsys):
    published_model("qwen3_5_moe", tmp_path / "published")
    scales = {(layer, site): 0.001 for layer in range(4) for site in (Site.FC1, Site.FC2)}
    kv = {(3, Site.K): 0.01, (3, Site.V): 0.02}
    rollouts = tmp_path / "rollouts"
    rollouts.mkdir()
    save_settings(QuantizerSettings(scales | kv, model_id="tiny"), rollouts)
    flags = ["--published", tmp_path / "published", "--settings", rollouts]
    flags += ["--output", tmp_path / "out"]
    export(*flags)
    assert "out: 64 matrices in NVFP4, digest" in capsys.readouterr().out
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_algo"] == "NVFP4"
    with pytest.raises(SystemExit, match="out exists; remove it or name another folder"):
        export(*flags)


def test_after_bf16_rollouts_the_tool_calibrates_and_applies_a_recipe(tmp_path, export, capsys):
    published_model("qwen3_5_moe", tmp_path / "published")
    with HintFilesWriter(tmp_path / "rollouts") as files:
        files.commit([calibration_sample(number) for number in range(8)])
    flags = ["--published", tmp_path / "published", "--calibration", tmp_path / "rollouts"]
    export(*flags, "--recipe", "h_scale", "--output", tmp_path / "h_scale")
    assert "our reading of H-Scale" in capsys.readouterr().out
    export(*flags, "--output", tmp_path / "vanilla")
    first, second = (
        read_modelopt_folder(tmp_path / name, tmp_path / "published")
        for name in ("h_scale", "vanilla")
    )
    assert first.input_scales == second.input_scales
    differing = [
        place
        for place, packed in first.experts.items()
        if not torch.equal(packed.scale_bytes, second.experts[place].scale_bytes)
    ]
    assert len(differing) > len(first.experts) / 2


def test_hessians_without_samples_are_refused(tmp_path, export, capsys):
    flags = ["--published", tmp_path, "--settings", tmp_path, "--output", tmp_path / "out"]
    with pytest.raises(SystemExit):
        export(*flags, "--recipe", "h_scale")
    assert "--recipe h_scale needs --calibration, not --settings" in capsys.readouterr().err
