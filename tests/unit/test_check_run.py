"""tools/check_run.py: in which order parts run, and what it finds wrong in what they printed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from megatron_trace.testing.programs import load_program

ROOT = Path(__file__).parents[2]
SITES = "".join(f"  {site}: 100.0% of the rows guided; 0 rejected\n" for site in ("fc1", "k", "v"))
STEP = " iteration        {step}/       4 | log-prob gap: {gap} | grad norm: 1.5 |\n"
TRACE = (
    "".join(STEP.format(step=step, gap=gap) for step, gap in ((1, 2e-3), (2, 3e-3), (3, 4e-3)))
    + "TRACE ran: method trace, 64 samples\n"
    + SITES
    + "  version 4 has digest ab12\n"
)
QAT = STEP.format(step=1, gap=3e-2) + "TRACE ran: method qat, 64\n  fc1: all rounded to nearest\n"
GOES_ON = "".join(STEP.format(step=step, gap=gap) for step, gap in ((3, 4e-3), (4, 5e-3)))
EVALUATION = "out/evaluation: {'iteration': 4, 'method': 'trace', 'weights_digest': 'ab12'}\n"
JOB = "".join(
    f"worker 0: version {step} has digest {old}\n"
    f"version {step} has the digest of its rollouts, {old}\n"
    + STEP.format(step=step + 1, gap=2e-3)
    + "TRACE ran: method trace, 64 samples\n"
    + SITES
    + f"  version {step + 1} has digest {new}\n"
    for step, old, new in ((0, "aa00", "bb11"), (1, "bb11", "cc22"))
)
LOGS = {
    "job": JOB,
    "trace": TRACE,
    "qat": QAT,
    "goes-on": GOES_ON + "TRACE ran: method trace, 64 samples\n" + SITES,
    "evaluation": EVALUATION,
}


@pytest.fixture
def check(tmp_path):
    """Gives the program, and a check of logs that it need not make."""
    program = load_program(ROOT / "tools" / "check_run.py")
    options = argparse.Namespace(out=tmp_path, cpu=False, steps=2, at_once=2)
    run = program.Run(options)
    run.logs.folder.mkdir()

    def judged(**changed):
        for name, text in (LOGS | changed).items():
            run.logs.log(name).write_text(text)
            run.logs.mark(name).touch()
        judge = program.Judge(run.logs, most_of_qat=0.5, steps=options.steps)
        judge.judge_all()
        return judge.problems

    return program, run, judged


def test_a_run_that_did_all_it_should_has_no_problem(check):
    _, _, judged = check
    assert judged() == []


@pytest.mark.parametrize(
    ("name", "old", "new", "problem"),
    [
        ("trace", "gap: 0.002 ", "gap: 0.02 ", "the gap of trace is 0.02, of qat 0.03"),
        ("trace", "k: 100.0%", "k: 94.9%", "trace: only 94.9% of the rows of a site were guided"),
        ("job", "k: 100.0%", "k: 99.8%", "job: only 99.8% of the rows of a site were guided"),
        ("trace", "norm: 1.5", "norm: 0.0", "trace: gradient norms [0.0, 1.5, 1.5]"),
        ("goes-on", "gap: 0.004 ", "gap: 0.006 ", "step 3: log-prob gap 0.006 after a checkpoint"),
        ("evaluation", "ab12", "cd34", "version 4: digest ['ab12'] in trace, ['cd34']"),
        ("qat", "fc1: all rounded", "fc1: 9 % rounded", "qat did not round all rows of fc1"),
        ("job", "the digest of its", "digests of", "job: weights were compared in 1 steps only"),
        ("job", "cc22", "bb11", "job: no step changed the quantised weights, bb11"),
    ],
)
def test_what_is_wrong_is_said(check, name, old, new, problem):
    _, _, judged = check
    assert old in LOGS[name]
    (found,) = judged(**{name: LOGS[name].replace(old, new, 1)})
    assert problem in found


def test_a_part_whose_needs_failed_does_not_run_and_what_ended_well_is_not_repeated(check):
    program, run, _ = check

    def part(name, status, *needs):
        code = f"open('{run.out}/ran', 'a').write('{name} '); exit({status})"
        return program.Part(name, (sys.executable, "-c", code), needs)

    for status in (1, 0):
        run.problems.clear()
        run.run([part("a", 0), part("b", status, "a"), part("c", 0, "b")])
    assert (run.out / "ran").read_text() == "a b b c "
    assert run.problems == []


def test_a_part_that_was_chosen_without_what_it_needs_does_not_run(check):
    program, run, _ = check
    run.run([program.Part("c", (sys.executable, "-c", ""), ("b",))])
    assert run.problems == ["c did not run: it needs b"]


def test_the_pattern_is_that_of_the_presets_first_layers(check):
    program, _, _ = check
    preset = ROOT / "launch" / "models" / "qwen3.5-35b-a3b.args"
    assert program.pattern_of(preset, 5, attention_only=False) == "GEGEGE*EGE"
    assert program.pattern_of(preset, 2, attention_only=True) == "*E*E"


def test_a_folder_with_parts_of_another_model_is_refused(check):
    program, run, _ = check
    options = program.parse_arguments(["--out", str(run.out), "--cpu"])
    options.tasks = run.out / "prompts.jsonl"
    for _ in range(2):
        program.Run(options).write_settings()
    options.layers = 2
    with pytest.raises(SystemExit, match="is of another model: give another --out"):
        program.Run(options).write_settings()


def test_a_mean_that_megatron_did_not_log_is_no_number_in_the_table(check):
    program, _, _ = check
    row = program.table({"qat": {"log-prob gap": 3e-2, "grad norm": 1.5}}).splitlines()[1]
    assert row.split() == ["qat", "3.000e-02", "-", "1.500e+00"]
