"""The statistics of answers under a recipe against those in BF16."""

import json
import sys
from pathlib import Path

import pytest

from megatron_trace.ptq.comparison import Comparison, sign_test, wilson
from megatron_trace.testing.programs import load_program


@pytest.mark.parametrize(
    ("lost", "gained", "p"), [(0, 0, 1.0), (5, 0, 2 / 32), (0, 5, 2 / 32), (3, 1, 10 / 16)]
)
def test_sign_test_by_hand(lost, gained, p):
    assert sign_test(lost, gained) == pytest.approx(p)


def test_wilsons_interval_by_hand():
    # 8 of 10: (.8 + .1921 +- 1.96 sqrt(.016 + .0096)) / 1.3841.
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(0, 10)[0] == 0.0
    assert wilson(10, 10)[1] == pytest.approx(1.0)


def test_lost_and_gained_are_counted_problem_by_problem():
    reference = [True, True, True, False, False]
    found = Comparison.of("h_scale", [True, False, False, True, False], reference)
    assert (found.right, found.asked, found.lost, found.gained) == (2, 5, 2, 1)
    assert found.p == pytest.approx(1.0)


@pytest.mark.parametrize("answers", [[], [True]])
def test_answers_to_other_problems_are_refused(answers):
    with pytest.raises(ValueError, match="must be the same ones"):
        Comparison.of("vanilla", answers, [True, False])


@pytest.fixture(scope="module")
def tool():
    """tools/compare_evaluations.py."""
    path = Path(__file__).parents[3] / "tools" / "compare_evaluations.py"
    return load_program(path)


def evaluation(folder, solved, **others):
    """Writes what examples/evaluate.py writes, and gives its folder."""
    folder.mkdir()
    record = {"method": "qat", "checkpoint": "iter_0000002", "prompts_digest": "a", **others}
    record |= {"solved": solved, "weights_digest": folder.name}
    (folder / "evaluation.json").write_text(json.dumps(record))
    return folder


def test_the_tool_tells_what_each_recipe_lost_and_gained(tool, tmp_path, monkeypatch, capsys):
    folders = [
        evaluation(tmp_path / "as_trained", [True, True, False, False], method="bf16"),
        evaluation(tmp_path / "vanilla", [True, False, False, True]),
    ]
    output = tmp_path / "ptq.json"
    monkeypatch.setattr(sys, "argv", ["tool", *map(str, folders), "--output", str(output)])
    tool.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["bf16", "2/4", "0.500", "0.150-0.850"]
    assert lines[2].split()[:1] + lines[2].split()[4:] == ["vanilla", "1", "1", "1.000"]
    assert [one["weights_digest"] for one in json.loads(output.read_text())] == [
        "as_trained",
        "vanilla",
    ]


def test_evaluations_that_do_not_say_what_was_asked_are_refused(tool, tmp_path):
    folder = evaluation(tmp_path / "bf16", [True], method="bf16")
    record = json.loads((folder / "evaluation.json").read_text())
    del record["prompts_digest"]
    (folder / "evaluation.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="bf16 does not say which prompts"):
        tool.compared(folder, [evaluation(tmp_path / "vanilla", [True])])


@pytest.mark.parametrize(
    ("reference", "other", "reason"),
    [
        ({"method": "qat"}, {}, "must be bf16"),
        ({"method": "bf16"}, {"checkpoint": "iter_0000004"}, "of iter_0000004, .* of iter_0000002"),
        ({"method": "bf16"}, {"prompts_digest": "b"}, "vanilla asked other prompts than .*bf16"),
    ],
)
def test_evaluations_that_cannot_be_compared_are_refused(tool, tmp_path, reference, other, reason):
    first = evaluation(tmp_path / "bf16", [True], **reference)
    with pytest.raises(ValueError, match=reason):
        tool.compared(first, [evaluation(tmp_path / "vanilla", [True], **other)])


def test_an_evaluation_is_printed_without_the_answer_to_each_prompt():
    program = load_program(Path(__file__).parents[3] / "examples" / "evaluate.py")
    share = {"checkpoint": "a", "iteration": 4, "method": "qat", "prompts_digest": "b"}
    share |= {"prompts": 9, "right": 3, "score_sum": 3.0, "failed": 0, "weights_digest": "c"}
    summary = program.combined([share | {"solved": [True, False, False] * 3}])
    assert len(summary["solved"]) == 9
    assert program.told(summary).keys() == summary.keys() - {"solved"}
