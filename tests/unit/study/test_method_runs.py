"""Runs of methods side by side: what a plan says, resumption of evaluations, and what fails."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch

from megatron_trace.models.hybrid import HybridModules, build_hybrid_model
from megatron_trace.rl.asynchronous import AsyncSettings
from megatron_trace.rl.run_record import RunRecord
from megatron_trace.rl.tasks import TaskItem
from megatron_trace.study import method_runs
from megatron_trace.study.method_runs import VARIANTS, HeldOutLog, RunPlan
from megatron_trace.study.perturbation import perturb_layers
from megatron_trace.study.task_mix import with_running_sums
from megatron_trace.testing.programs import load_program
from megatron_trace.testing.single_process import tiny_moe_config

TOOL = Path(__file__).parents[3] / "tools" / "method_runs.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_program(TOOL)


def options_of(tool: ModuleType, work: Path, *arguments: str) -> Any:
    return tool.parse_options(["--work", str(work), "--out", str(work / "out"), *arguments])


@pytest.mark.parametrize("setting", ["cpu", "cpu-long", "h200", "cpu-106m"])
def test_every_variant_has_settings_that_contradict_nothing(tool: ModuleType, setting: str) -> None:
    base = tool.SETTINGS[setting].base
    for name in VARIANTS:
        settings = RunPlan(name, 1, 10, base).settings
        assert settings.seed == 1
        assert settings.trace.method == VARIANTS[name].trace["method"]


def test_the_seeds_of_a_method_come_before_the_next_method(
    tool: ModuleType, tmp_path: Path
) -> None:
    options = options_of(tool, tmp_path, "--methods", "bf16", "qat", "--perturb", "0", "0.1")
    names = [(plan.name, plan.seed) for plan in tool.plans_of(options)]
    assert names[:4] == [("bf16", 0), ("bf16", 1), ("bf16", 2), ("qat", 0)]
    assert names[-1] == ("qat-perturb-0.1", 2)
    assert len(names) == 12


def test_a_finished_run_is_not_made_again_but_for_more_steps(
    tool: ModuleType, tmp_path: Path
) -> None:
    (plan,) = tool.plans_of(options_of(tool, tmp_path, "--methods", "qat", "--seeds", "0"))
    assert not tool.is_done(plan, tmp_path)
    record = RunRecord(
        plan.folder(tmp_path), name="qat", seed=0, settings=plan.identity, steps=plan.steps
    )
    with record.running():
        assert not tool.is_done(plan, tmp_path)
    assert tool.is_done(plan, tmp_path)
    longer = options_of(tool, tmp_path, "--methods", "qat", "--seeds", "0", "--steps", "999")
    assert not tool.is_done(tool.plans_of(longer)[0], tmp_path)


def test_a_run_of_other_settings_is_refused(tool: ModuleType, tmp_path: Path) -> None:
    (plan,) = tool.plans_of(options_of(tool, tmp_path, "--methods", "qat", "--seeds", "0"))
    identity = plan.identity | {"perturb": 0.5}
    record = RunRecord(plan.folder(tmp_path), name="qat", seed=0, settings=identity, steps=1)
    with record.running():
        pass
    with pytest.raises(ValueError, match=r"of another run: perturb was 0.5 there and is 0.0 here"):
        tool.is_done(plan, tmp_path)


def test_a_run_that_fails_does_not_keep_the_others_from_being_made(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "print(sys.argv)\n"
        "sys.exit(3 if sys.argv[sys.argv.index('--methods') + 1] == 'qat' else 0)\n"
    )
    monkeypatch.setattr(tool, "__file__", str(program))
    options = options_of(tool, tmp_path, "--methods", "qat", "trace", "--seeds", "0", "1")
    options.processes = 2
    plans = tool.plans_of(options)
    assert sorted(tool.make_runs(options, plans)) == ["qat, seed 0", "qat, seed 1"]
    for plan in plans:
        assert "--in-process" in (plan.folder(tmp_path) / "log.txt").read_text()


def test_a_run_whose_samples_would_be_in_flight_when_it_is_saved_is_refused(
    tool: ModuleType,
) -> None:
    base = tool.SETTINGS["cpu-long"].base
    with pytest.raises(ValueError, match="multiples of drain_every=15"):
        RunPlan("qat", 0, 40, base, ahead=AsyncSettings(drain_every=15))
    with pytest.raises(ValueError, match="multiples of drain_every=0"):
        RunPlan("qat", 0, 40, base, ahead=AsyncSettings())


def test_a_run_ahead_is_another_run_than_one_in_turn(tool: ModuleType) -> None:
    base = tool.SETTINGS["cpu-long"].base
    ahead = RunPlan("qat", 0, 40, base, ahead=AsyncSettings(drain_every=20)).identity
    in_turn = RunPlan("qat", 0, 40, base).identity
    assert ahead.pop("asynchronous")["max_version_lag"] == 3
    assert ahead == in_turn


def test_running_sums_are_written_a_line_each_and_end_with_the_answer() -> None:
    entry = {"answer": "10", "metadata": {"expression": "6 - 14 + 8 + 10"}}
    item = TaskItem("6-14+8+10=", "10", "chain_sum", entry)
    assert with_running_sums(item) == replace(item, answer="-14=-8\n+8=0\n+10=10\n10")
    with pytest.raises(ValueError, match="its sum is 10, its answer 9"):
        with_running_sums(replace(item, entry=entry | {"answer": "9"}))


def test_a_fixed_policy_is_trained_by_every_method_at_a_rate_of_0(
    tool: ModuleType, tmp_path: Path
) -> None:
    options = options_of(tool, tmp_path, "--fixed-policy")
    plans = tool.plans_of(options)
    assert (options.name, {plan.steps for plan in plans}) == ("cpu-fixed-policy", {4})
    assert {plan.variant for plan in plans} == set(VARIANTS)
    assert {plan.settings.optimizer.learning_rate for plan in plans} == {0.0}
    (training, *_) = tool.plans_of(options_of(tool, tmp_path))
    assert training.identity != plans[0].identity


@pytest.mark.parametrize("setting", ["h200", "cpu-106m"])
def test_the_106m_moe_without_problems_is_refused(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], setting: str
) -> None:
    with pytest.raises(SystemExit):
        tool.parse_options(["--setting", setting])
    assert f"--setting {setting} needs --tasks" in capsys.readouterr().err


class _Progress:
    def __init__(self, step: int) -> None:
        self.step = step


class _Run:
    def __init__(self, step: int) -> None:
        self.progress = _Progress(step)


def test_evaluations_after_the_checkpoint_are_made_anew_and_the_others_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "held_out.jsonl"
    rows = [{"step": step, "served": "", "solved": "01"} for step in (0, 20, 40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(method_runs, "solved", lambda run, items: [True, run.progress.step > 20])
    log = HeldOutLog(path, last_step=20)
    for step in (20, 25, 40, 45):
        log.evaluate(cast("Any", _Run(step)), [], every=20, steps=45)
    assert log.shares() == {0: 0.5, 20: 0.5, 40: 1.0, 45: 1.0}
    assert method_runs.read_held_out(path) == log.rows


def test_noise_of_size_zero_leaves_a_model_alone() -> None:
    assert perturb_layers(_model(), 0.0) == []


def test_noise_multiplies_the_output_of_each_layer_the_same_way_each_time() -> None:
    model = _model()
    before = _outputs(model)
    handles = perturb_layers(model, 0.1)
    noisy, again = _outputs(model), _outputs(model)
    for handle in handles:
        handle.remove()
    assert torch.equal(noisy, again)
    assert torch.equal(_outputs(model), before)
    assert 0.01 < ((noisy - before).norm() / before.norm()).item() < 1.0
    with pytest.raises(ValueError, match=">= 0"):
        perturb_layers(model, -0.1)


def _model() -> Any:
    torch.manual_seed(0)
    return build_hybrid_model(
        tiny_moe_config("*E"),
        pattern="*E",
        vocab_size=16,
        max_sequence_length=16,
        modules=HybridModules(),
    ).eval()


@torch.no_grad()
def _outputs(model: Any) -> torch.Tensor:
    tokens = torch.arange(8, device=torch.cuda.current_device())[None]
    return model(tokens, tokens, None)


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("cpu", ["--setting", "cpu"]),
        ("cpu-long", ["--setting", "cpu-long"]),
        ("h200", ["--setting", "h200"]),
        ("cpu-fixed-policy", ["--setting", "cpu", "--fixed-policy"]),
        ("cpu-106m-fixed-policy", ["--setting", "cpu-106m", "--fixed-policy"]),
    ],
)
def test_the_page_of_results_is_made_anew_of_its_numbers_alone(
    tool: ModuleType, tmp_path: Path, name: str, chosen: list[str]
) -> None:
    results = TOOL.parents[1] / "docs" / "results"
    shutil.copy(results / f"{name}.jsonl.gz", tmp_path)
    arguments = [*chosen, "--page-only", "--out", str(tmp_path)]
    assert tool.main([*arguments, "--work", str(tmp_path / "no runs")]) == 0
    assert (tmp_path / f"{name}.md").read_text() == (results / f"{name}.md").read_text()


def test_a_page_without_its_numbers_is_refused(tool: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"there is no .*cpu\.jsonl\.gz"):
        tool.main(["--setting", "cpu", "--page-only", "--out", str(tmp_path)])
