"""Definitions of the comparison of methods, against values worked out by hand."""

import json
import math
from pathlib import Path

import pytest

from megatron_trace.study import comparison
from megatron_trace.study.comparison import RunLog
from megatron_trace.study.comparison_page import write_page

FP4 = "NVFP4 W4A4 + KV4"


def log_of(
    name: str,
    seed: int,
    *,
    rewards: list[float] = [0.5] * 5,
    gaps: list[float] = [0.1] * 5,
    solved: dict[int, str] | None = None,
    is_whole: bool = True,
) -> RunLog:
    """Gives a log with two columns; the others have no number."""
    steps = {column: [math.nan] * len(rewards) for column in comparison.COLUMNS}
    steps |= {"reward": rewards, "gap.mean": gaps}
    held_out = [{"step": s, "served": "", "solved": text} for s, text in (solved or {}).items()]
    return RunLog(name, seed, "finished", is_whole, steps, held_out)


def test_a_trailing_mean_begins_with_the_first_full_window() -> None:
    assert comparison.trailing_means([1.0, 3.0, 5.0, 1.0], window=2) == [2.0, 4.0, 3.0]


def test_a_gap_drifts_from_the_first_window_after_which_all_are_beyond_twice_the_start() -> None:
    # Windows of 2 end at steps 1..7: 1, 1, 2, 3, 2.5, 3, 4. That of step 3 is exactly twice.
    gaps = [1.0, 1.0, 1.0, 3.0, 3.0, 2.0, 4.0, 4.0]
    assert comparison.drift_step(gaps, window=2) == 4


def test_a_gap_that_comes_back_has_not_drifted() -> None:
    assert comparison.drift_step([1.0, 1.0, 5.0, 5.0, 5.0, 1.0, 1.0], window=2) is None


def test_a_gap_that_is_beyond_again_drifts_from_the_second_time_on() -> None:
    assert comparison.drift_step([1.0, 1.0, 5.0, 5.0, 1.0, 1.0, 5.0, 5.0], window=2) == 6


def test_a_run_too_short_for_two_windows_has_not_drifted() -> None:
    assert comparison.drift_step([1.0, 9.0, 9.0], window=2) is None


def test_a_reward_collapses_when_its_window_is_below_half_of_the_best_one() -> None:
    # Windows of 2 end at steps 1..6: .4, .6, .8, .4, .3, .8. That of step 4 is exactly half.
    rewards = [0.4, 0.4, 0.8, 0.8, 0.0, 0.6, 1.0]
    assert comparison.collapse_step(rewards, window=2) == 5
    assert comparison.collapse_step(rewards[:5], window=2) is None


def test_the_fifth_of_ten_steps_are_two() -> None:
    values = [float(step) for step in range(10)]
    assert comparison.fifth(values, last=False) == 0.5
    assert comparison.fifth(values, last=True) == 8.5


def test_the_fifths_of_a_run_are_in_order_and_leave_nothing_out() -> None:
    assert comparison.fifths([1.0, 3.0, 2.0, 2.0, 5.0, 7.0, 0.0, 0.0, 9.0, 9.0]) == [2, 2, 6, 0, 9]
    assert comparison.fifths([1.0, 2.0, 4.0, 4.0, 5.0, 7.0]) == [1, 2, 4, 4, 6]


def test_a_paired_difference_is_students_t_over_seeds_that_both_finished() -> None:
    method = [log_of("trace", seed, rewards=[r]) for seed, r in enumerate((0.5, 0.7, 0.9, 0.1))]
    other = [log_of("qat", seed, rewards=[r]) for seed, r in enumerate((0.4, 0.5, 0.6))]
    other.append(log_of("qat", 3, rewards=[0.9], is_whole=False))
    found = comparison.paired_difference(method, other, "reward")
    # Differences .1, .2, .3: standard deviation .1, error .1 / sqrt(3), t of 2 degrees 4.3027.
    assert found.num_seeds == 3
    assert found.mean == pytest.approx(0.2)
    assert found.half_width == pytest.approx(0.24841, abs=1e-5)


def test_a_ratio_of_gaps_is_the_mean_of_logarithms() -> None:
    method = [log_of("trace", seed, gaps=[gap]) for seed, gap in enumerate((0.1, 0.4))]
    other = [log_of("qat", seed, gaps=[1.0]) for seed in (0, 1)]
    found = comparison.paired_log_ratio(method, other, "gap.mean")
    assert math.exp(found.mean) == pytest.approx(0.2)


def test_catching_up_counts_from_the_last_evaluation_that_was_behind() -> None:
    reference = [
        log_of("bf16", seed, solved=dict.fromkeys((0, 20, 40, 60), "1100")) for seed in (0, 1)
    ]
    curve = {0: "1000", 20: "1100", 40: "0100", 60: "1100"}
    method = [log_of("trace", seed, solved=curve) for seed in (0, 1)]
    found = comparison.catch_up(method, reference)
    assert found is not None
    assert (found.step, found.num_seeds) == (60, 2)


def test_a_method_that_is_never_behind_caught_up_at_the_start_in_every_resample() -> None:
    reference = [log_of("bf16", 0, solved={0: "1010", 20: "1010"})]
    found = comparison.catch_up([log_of("qat", 0, solved={0: "1010", 20: "1110"})], reference)
    assert found == comparison.CatchUp(0, 0, 0, 1)


def test_a_method_that_is_behind_at_the_end_never_caught_up() -> None:
    reference = [log_of("bf16", 0, solved={0: "1111", 20: "1111"})]
    found = comparison.catch_up([log_of("qat", 0, solved={0: "1111", 20: "0000"})], reference)
    assert found == comparison.CatchUp(None, None, None, 1)


def test_runs_without_a_partner_have_no_catch_up_step() -> None:
    alone = [log_of("qat", 1, solved={0: "1"})]
    assert comparison.catch_up(alone, [log_of("bf16", 0, solved={0: "1"})]) is None


def test_held_out_accuracy_is_the_mean_over_seeds_and_problems() -> None:
    logs = [log_of("qat", 0, solved={0: "0000", 20: "1110"}), log_of("qat", 1, solved={20: "1000"})]
    found = comparison.held_out_accuracy(logs, last=True)
    assert found is not None
    assert found.value == 0.5
    assert 0.0 <= found.low < 0.5 < found.high <= 1.0


def test_a_difference_of_equal_answers_has_no_width() -> None:
    logs = [log_of("qat", 0, solved={20: "1010"})]
    found = comparison.held_out_difference(logs, logs)
    assert found is not None
    assert (found.value, found.low, found.high) == (0.0, 0.0, 0.0)


def test_a_change_is_from_the_first_evaluation_to_the_last_of_the_same_run() -> None:
    logs = [
        log_of("qat", 0, solved={0: "1100", 20: "0000", 40: "1110"}),
        log_of("qat", 1, solved={0: "1111", 40: "1100"}),
    ]
    found = comparison.held_out_change(logs)
    assert found is not None
    assert found.value == pytest.approx((1 - 2) / 8)
    other = [log_of("bf16", 1, solved={0: "0000", 40: "1000"})]
    less = comparison.held_out_change(logs, other)
    assert less is not None
    assert less.value == pytest.approx((-2 - 1) / 4)
    assert comparison.held_out_changes(logs) == [0.25, -0.5]
    assert comparison.held_out_changes(logs, other) == [-0.75]


def test_steps_without_lag_are_those_whose_samples_are_all_of_the_policy_they_train() -> None:
    log = log_of("trace", 0, rewards=[0.1, 0.2, 0.3, 0.4], gaps=[1.0, 2.0, 3.0, 4.0])
    log.steps["health.lag_max"] = [0.0, 3.0, 0.0, math.nan]
    fresh = log.without_lag()
    assert (fresh.steps["gap.mean"], fresh.num_steps) == ([1.0, 3.0], 2)
    assert log.num_steps == 4


def test_the_page_has_the_gap_without_lag_where_rollouts_run_ahead(tmp_path: Path) -> None:
    logs = [
        log_of(name, 0, gaps=gaps) for name, gaps in (("qat", [2.0, 9.0]), ("trace", [1.0, 9.0]))
    ]
    for log in logs:
        log.steps.update({"health.lag_max": [0.0, 3.0], "health.lag_mean": [0.0, 2.5]})
    write_page(tmp_path / "page.md", "Title", logs, command="make")
    text = (tmp_path / "page.md").read_text()
    assert "| trace | 2.5 | 1 | 1 | 1 | 1 | 0.5; 0.5 |" in text


def test_the_page_has_gap_and_accuracy_over_the_run(tmp_path: Path) -> None:
    gaps = [1.0, 2.0, 3.0, 4.0, 5.0]
    logs = [
        log_of("qat", 0, rewards=[0.5] * 5, gaps=gaps, solved={0: "01", 5: "11"}),
        log_of("qat", 1, rewards=[0.5] * 5, gaps=gaps, solved={0: "00", 5: "01"}),
        log_of("qat", 2, rewards=[0.5] * 5, gaps=gaps, solved={0: "00"}, is_whole=False),
    ]
    write_page(tmp_path / "page.md", "Title", logs, command="make")
    text = (tmp_path / "page.md").read_text()
    assert "| qat | 1 ± 0 | 2 ± 0 | 3 ± 0 | 4 ± 0 | 5 ± 0 |" in text
    assert (
        "| held-out after | 0 steps | 5 steps |\n| --- | --- | --- |\n| qat | 0.250 | 0.750 |"
        in text
    )


def test_the_page_of_a_fixed_policy_has_means_over_all_steps(tmp_path: Path) -> None:
    log = log_of("qat", 0, rewards=[0.5] * 5, gaps=[1.0, 2.0, 3.0, 4.0, 10.0])
    for rate, last in ((0.0, "4"), (1e-5, "10")):
        log.settings["optimizer.learning_rate"] = rate
        write_page(tmp_path / "page.md", "Title", [log], command="make")
        text = (tmp_path / "page.md").read_text()
        assert ("The policy is fixed" in text) == (rate == 0.0)
        assert f"| {last} | 1 | - |" in text


def test_folders_give_logs_that_survive_their_file(tmp_path: Path) -> None:
    folder = tmp_path / "work" / "seed-3" / "qat"
    folder.mkdir(parents=True)
    record = {
        "step": 0,
        "reward": 0.25,
        "gap": {"mean": None},
        "health": {"code_mismatch": {"k": 0.1, "v": 0.2}},
    }
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    (folder / "held_out.jsonl").write_text('{"step": 0, "served": "", "solved": "01"}\n')
    (log,) = comparison.logs_of_folders(tmp_path / "work")
    assert (log.name, log.seed, log.is_whole, log.num_steps) == ("qat", 3, False, 1)
    assert log.steps["reward"] == [0.25]
    assert math.isnan(log.steps["gap.mean"][0])
    assert log.steps["health.code_mismatch"] == [0.2]
    assert log.solved()[0].tolist() == [0.0, 1.0]
    comparison.save_logs(tmp_path / "logs.jsonl.gz", [log])
    (read,) = comparison.load_logs(tmp_path / "logs.jsonl.gz")
    assert read.held_out == log.held_out
    assert read.steps["reward"] == log.steps["reward"]


def test_logs_from_before_a_column_was_kept_still_give_their_page(tmp_path: Path) -> None:
    log = log_of("qat", 0, solved={0: "01"})
    del log.steps["health.lag_max"]
    comparison.save_logs(tmp_path / "logs.jsonl.gz", [log])
    logs = comparison.load_logs(tmp_path / "logs.jsonl.gz")
    write_page(tmp_path / "page.md", "Title", logs, command="make")
    assert "| qat | 1 of 1 |" in (tmp_path / "page.md").read_text()


def test_the_page_has_partial_runs_and_keeps_them_out_of_the_numbers(tmp_path: Path) -> None:
    logs = [
        log_of("bf16", 0, rewards=[0.5], gaps=[0.1], solved={0: "11"}),
        log_of("qat", 0, rewards=[0.25], gaps=[0.2], solved={0: "01"}),
        log_of("qat", 1, rewards=[0.75], gaps=[0.9], is_whole=False),
        log_of("qat-perturb-0.1", 0, rewards=[0.125], gaps=[0.4]),
    ]
    logs[0].held_out.append({"step": 0, "served": FP4, "solved": "00"})
    write_page(tmp_path / "page.md", "Title", logs, command="make")
    text = (tmp_path / "page.md").read_text()
    assert "| qat | 1 of 2 | 0.25 | 0.25 | 0.500" in text
    assert "## Trainer perturbed by 0.1" in text
    assert "| bf16, quantised to nearest after RL | 0.000 [0.000, 0.000] | - |" in text
    assert "| qat | 0.500 [0.000, 1.000] | 0.500 [0.000, 1.000]; +0.500 |" in text
    assert "| qat, bf16 | × 2; 2 | -0.25; -0.250 | -0.500 [-1.000, 0.000]; -0.500 |" in text
