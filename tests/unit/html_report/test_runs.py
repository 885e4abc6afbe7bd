"""What the folders of runs tell, complete or not."""

import json
import math
import shutil
from pathlib import Path

import pytest

from megatron_trace.rl.html_report.measures import CURVES, Curve
from megatron_trace.rl.html_report.runs import find_runs, read_run
from megatron_trace.rl.html_report.spread import groups_of, mean_of_last_fifth, points_of, spread_of
from megatron_trace.rl.run_record import flat

GAP = next(curve for curve in CURVES if curve.path == ("gap", "mean"))
REWARD = next(curve for curve in CURVES if curve.path == ("reward",))


def test_every_folder_below_seeds_is_a_run_in_the_order_of_its_name(every_state):
    runs = find_runs([every_state])
    assert [(run.name, run.seed) for run in runs] == [
        ("empty", 0),
        ("killed", 0),
        ("nothing_logged", 0),
        ("odd", 0),
        ("qat", 0),
        ("trace", 0),
        ("trace", 1),
    ]


def test_only_a_finished_run_with_all_steps_is_whole(every_state):
    status = {run.title: (run.is_whole, run.status) for run in find_runs([every_state])}
    assert status == {
        "empty, seed 0": (False, "empty: nothing was logged"),
        "killed, seed 0": (False, "1 of 9 steps; whether it ended is not known"),
        "nothing_logged, seed 0": (
            False,
            "not ended (running still, or killed): 0 steps, started ?",
        ),
        "odd, seed 0": (False, "1 steps; whether it ended is not known"),
        "qat, seed 0": (False, "crashed after 1 of 2 steps"),
        "trace, seed 0": (True, "finished, 2 of 2 steps"),
        "trace, seed 1": (True, "finished, 2 of 2 steps"),
    }


def test_a_cut_line_is_named_and_left_out(every_state):
    (run,) = find_runs([every_state / "seed-0" / "killed"])
    assert [record["step"] for record in run.records] == [0]
    assert run.problems == ["metrics.jsonl: 1 damaged lines are left out (line 2)"]


def test_steps_that_are_missing_are_counted(every_state):
    (run,) = find_runs([every_state / "seed-0" / "odd"])
    assert "metrics.jsonl: 3 damaged lines are left out (line 1, 2, 3)" in run.problems
    assert "metrics.jsonl lacks 3 of the steps 0 to 3" in run.problems


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"settings": 3, "seed": "x", "versions": []}'])
def test_a_damaged_run_file_is_no_error(write_run, text):
    folder = write_run("run", [])
    (folder / "run.json").write_text(text)
    run = read_run(folder)
    assert (run.settings, run.versions, run.seed) == ({}, {}, None)


@pytest.mark.parametrize("number", ["NaN", "Infinity"])
def test_a_seed_or_number_of_steps_that_is_no_number_is_not_known(write_run, number):
    folder = write_run("run", [], tail=f'{{"step": {number}}}\n')
    (folder / "run.json").write_text(f'{{"seed": {number}, "steps": {number}, "name": "qat"}}')
    run = read_run(folder)
    assert (run.name, run.seed, run.planned_steps, run.records) == ("qat", None, None, [])


def test_a_folder_that_does_not_exist_is_a_run_of_which_nothing_is_there(tmp_path):
    (run,) = find_runs([tmp_path / "typo"])
    assert run.status == "no such folder"
    assert not run.is_whole


def test_settings_come_from_a_checkpoint_where_the_run_has_no_file(write_run):
    folder = write_run("seed-3/trace", [])
    checkpoint = folder / "checkpoints" / "step-000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "run.json").write_text(json.dumps({"identity": {"trace": {"method": "trace"}}}))
    assert read_run(folder).settings == {"trace.method": "trace"}


@pytest.mark.parametrize("above", [1, 0])
def test_a_trainers_log_within_an_exchange_is_the_run_of_its_name(exchange, above):
    (run,) = find_runs([exchange.parent if above else exchange])
    assert (run.title, run.status) == ("moe, seed 1234", "left off after 2 of 9 steps")
    assert run.reason == "asked to"
    assert run.settings == {"megatron.lr": 1e-6, "trace.method": "trace"}
    (exchange / "training" / "run.json").unlink()
    assert find_runs([exchange])[0].name == "moe"


def test_exchanges_of_one_name_are_told_apart_by_the_folder_above_them(exchange, tmp_path):
    shutil.copytree(exchange, tmp_path / "other" / "moe")
    runs = find_runs([exchange, tmp_path / "other"])
    assert [run.name for run in runs] == ["loops/moe", "other/moe"]


def test_runs_of_one_name_and_seed_are_told_apart_by_the_folder_above(write_run, tmp_path):
    for above in ("a", "b"):
        write_run(f"{above}/seed-0/qat", [])
    assert [run.name for run in find_runs([tmp_path / "a", tmp_path / "b"])] == ["a/qat", "b/qat"]


def test_a_folder_given_twice_is_one_run(write_run, tmp_path):
    folder = write_run("seed-0/qat", [])
    assert len(find_runs([folder, tmp_path])) == 1


def test_a_folder_of_others_is_named_and_the_runs_beside_it_are_read(
    write_run, tmp_path, monkeypatch
):
    """As root, who may run the tests, reads every folder, its lack of permission is played."""
    write_run("seed-0/qat", [{"step": 0}])
    (tmp_path / "theirs").mkdir()
    listed = Path.iterdir

    def iterdir(path):
        if path.name == "theirs":
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    runs = {run.name: run for run in find_runs([tmp_path])}
    assert [len(runs[name].records) for name in ("qat", "theirs")] == [1, 0]
    assert runs["theirs"].status == "cannot be read"
    assert "Permission denied" in runs["theirs"].problems[0]


def test_a_run_that_links_lead_to_is_one_run(write_run, tmp_path):
    folder = write_run("seed-0/qat", [])
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "link").symlink_to(folder)
    assert len(find_runs([tmp_path, tmp_path / "link", tmp_path / "loop" / "seed-0"])) == 1


def test_the_largest_number_below_an_object_counts_and_nan_is_none():
    curve = Curve(("health", "d_act"), "", "", "")
    assert curve.of({"health": {"d_act": {"fc1": {"0": 0.5, "1": math.nan}, "k": {"0": 2}}}}) == 2
    assert math.isnan(curve.of({"health": {"d_act": {}}}))
    assert math.isnan(curve.of({"health": None}))


def test_interval_of_two_seeds_is_that_of_students_t():
    # Of 0 and 2: mean 1, standard error 1, t(1; 0.975) = 12.7062.
    spread = spread_of([0.0, 2.0, math.nan])
    assert (spread.mean, spread.num_seeds) == (1.0, 2)
    assert spread.half_width == pytest.approx(12.7062, abs=1e-4)


def test_one_seed_has_no_interval():
    assert math.isnan(spread_of([3.0]).half_width)


def test_points_have_mean_and_extremes_of_the_seeds(every_state):
    group = groups_of(find_runs([every_state]))[-1]
    first, last = points_of(group, REWARD)
    assert (first.mean, first.num_runs) == (0.0, 2)
    assert (last.step, last.mean, last.low, last.high) == (1, 0.5, 0.25, 0.75)


def test_last_fifth_is_at_least_one_step(every_state):
    (run,) = find_runs([every_state / "seed-1" / "trace"])
    assert mean_of_last_fifth(run, REWARD) == 0.75
    assert math.isnan(mean_of_last_fifth(read_run(every_state / "seed-0" / "empty"), GAP))


def test_nested_settings_get_dotted_names():
    assert flat({"a": {"b": 1, "c": {"d": [2]}}, "e": None}) == {"a.b": 1, "a.c.d": [2], "e": None}
