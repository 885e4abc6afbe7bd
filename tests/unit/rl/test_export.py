"""Export of reasoning-gym tasks to prompt files."""

from pathlib import Path

import pytest

from megatron_trace.rl.export import make_items
from megatron_trace.rl.rewards import score_answer
from megatron_trace.rl.tasks import load_tasks
from megatron_trace.testing.programs import load_program

PROGRAM = Path(__file__).parents[3] / "tools" / "export_tasks.py"
ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
EXPRESSION = {"prompt_template": "{metadata[expression]}=", "drop_characters": " "}


@pytest.fixture
def export_tasks():
    return load_program(PROGRAM)


def test_same_seed_gives_the_same_items():
    first = make_items("chain_sum", size=50, seed=3, parameters=ONE_DIGIT)
    assert first == make_items("chain_sum", size=50, seed=3, parameters=ONE_DIGIT)
    assert first != make_items("chain_sum", size=50, seed=4, parameters=ONE_DIGIT)


def test_repeated_prompts_are_exported_once():
    # 10 * 10 numbers and 2 signs give at most 200 prompts.
    items = make_items("chain_sum", size=2000, seed=0, parameters=ONE_DIGIT, **EXPRESSION)
    assert len({item.prompt for item in items}) == len(items) <= 200


def test_template_and_dropped_characters_shape_the_prompt():
    item = make_items("chain_sum", size=1, seed=0, parameters=ONE_DIGIT, **EXPRESSION)[0]
    assert item.prompt == item.entry["metadata"]["expression"].replace(" ", "") + "="


@pytest.mark.parametrize("task", ["chain_sum", "gcd", "basic_arithmetic", "countdown", "maze"])
def test_exported_answer_scores_one(task):
    for item in make_items(task, size=5, seed=0, parameters={}):
        assert score_answer(item.answer, item) == 1.0


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        ("no such task", {}, "not registered"),
        ("chain_sum", {"parameters": {"no_such": 1}}, "does not accept .*no_such"),
        ("chain_sum", {"parameters": {"min_terms": 9, "max_terms": 2}}, "does not accept"),
        ("chain_sum", {"prompt_template": "{no_such}"}, "names 'no_such'.*has .*'question'"),
    ],
)
def test_bad_request_raises(task, changes, message):
    arguments = {"size": 1, "seed": 0, "parameters": {}} | changes
    with pytest.raises(ValueError, match=message):
        make_items(task, **arguments)


def test_program_writes_a_loadable_file(export_tasks, tmp_path, capsys):
    output = tmp_path / "tasks.jsonl"
    options = "--size 2000 --seed 1 --prompt {metadata[expression]}= --parameters min_terms=2"
    export_tasks.main(
        ["chain_sum", str(output), "--drop", " ", *options.split()]
        + [f"{name}={value}" for name, value in ONE_DIGIT.items() if name != "min_terms"]
    )
    assert len(load_tasks(output)) == len(
        make_items("chain_sum", size=2000, seed=1, parameters=ONE_DIGIT, **EXPRESSION)
    )
    assert "of 2000 repeated a prompt" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("a=1", ("a", 1)),
        ("a=true", ("a", True)),
        ("a=[1, 2]", ("a", [1, 2])),
        ("a=x=y", ("a", "x=y")),
    ],
)
def test_parameter_values_are_json_or_text(export_tasks, text, parsed):
    assert export_tasks.parse_parameter(text) == parsed


@pytest.mark.parametrize("text", ["a", "=1"])
def test_parameter_without_name_or_value_is_refused(export_tasks, text, capsys):
    with pytest.raises(SystemExit):
        export_tasks.main(["chain_sum", "unused", "--parameters", text])
    assert "must be name=value" in capsys.readouterr().err
