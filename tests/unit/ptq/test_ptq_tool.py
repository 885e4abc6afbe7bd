"""The program that compares recipes on a run of the demo."""

import json
import sys
from pathlib import Path

import pytest

from megatron_trace.rl.html_report.runs import read_run
from megatron_trace.testing.programs import load_program

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def tool():
    return load_program(ROOT / "tools" / "ptq.py")


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A BF16 run of the demo, of one step on few problems."""
    from megatron_trace.testing.single_process import single_process

    demo = load_program(ROOT / "examples" / "tiny_rl" / "run.py")
    output = tmp_path_factory.mktemp("demo")
    flags = "--warm-start-steps 2 --prompts 2 --samples 2 --held-out 8 --save-every 1 --steps 1"
    options = demo.parse_options([*flags.split(), "--runs", "bf16", "--output", str(output)])
    with pytest.MonkeyPatch.context() as patch, single_process(seed=0):
        patch.setattr(demo, "TASK_SIZE", 300)
        demo.do_all_runs(options)
    return output / "seed-0" / "bf16"


def test_the_program_asks_the_same_problems_under_every_recipe(
    tool, run_folder, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["ptq.py", "--run", str(run_folder), "--calibration", "16"])
    tool.main()
    printed = capsys.readouterr().out
    assert "method bf16, 8 held-out problems" in printed
    results = {one["recipe"]: one for one in json.loads((run_folder / "ptq.json").read_text())}
    assert list(results) == ["bf16", "vanilla", "4over6", "mse", "h_scale"]
    assert {one["asked"] for one in results.values()} == {8}
    for one in results.values():
        assert one["right"] == results["bf16"]["right"] - one["lost"] + one["gained"]
    assert results["mse"]["weight_error"] < results["vanilla"]["weight_error"]
    assert results["h_scale"]["output_error"] < results["mse"]["output_error"]


def test_the_demos_run_is_whole_for_the_report(run_folder):
    run = read_run(run_folder)
    assert (run.status, run.problems) == ("finished, 1 of 1 steps", [])
    assert run.settings["trace.method"] == "bf16"
    assert set(run.held_out) == {"before", "after"}


def test_another_prompt_file_is_refused(tool, run_folder, tmp_path, monkeypatch):
    tasks = (run_folder.parents[1] / "tasks.jsonl").read_text()
    (tmp_path / "tasks.jsonl").write_text(tasks + tasks.splitlines()[0] + "\n")
    flags = ["--run", str(run_folder), "--tasks", str(tmp_path / "tasks.jsonl")]
    monkeypatch.setattr(sys, "argv", ["ptq.py", *flags])
    with pytest.raises(SystemExit, match="is not the prompt file of the run"):
        tool.main()


def test_more_problems_than_were_held_out_are_refused(tool, run_folder, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ptq.py", "--run", str(run_folder), "--held-out", "9"])
    with pytest.raises(SystemExit, match="must be 1 to 8"):
        tool.main()


@pytest.mark.parametrize("number", ["0", "-5"])
def test_a_calibration_on_nothing_is_refused(tool, run_folder, monkeypatch, capsys, number):
    flags = ["--run", str(run_folder), "--calibration", number]
    monkeypatch.setattr(sys, "argv", ["ptq.py", *flags])
    with pytest.raises(SystemExit):
        tool.main()
    assert f"--calibration must be at least 1; got {number}" in capsys.readouterr().err


def test_the_results_go_into_a_new_folder(tool, run_folder, tmp_path, monkeypatch):
    output = tmp_path / "new" / "results.json"
    flags = ["--run", str(run_folder), "--calibration", "16", "--recipe", "vanilla"]
    monkeypatch.setattr(sys, "argv", ["ptq.py", *flags, "--output", str(output)])
    tool.main()
    assert [one["recipe"] for one in json.loads(output.read_text())] == ["bf16", "vanilla"]
