"""Summaries of runs, the table, the ratios and the figure, on records written by hand."""

import dataclasses
import math

import pytest

from megatron_trace.rl.report import format_ratios, format_table, save_figure
from megatron_trace.rl.summary import summarise

NOTHING = {"guided": 0, "rejected": 0, "missing": 0, "not_recorded": 0}


def record(step, reward, gap, num_tokens, *, sites=None, mismatch=None):
    return {
        "step": step,
        "reward": reward,
        "gap": {
            "mean": gap,
            "p99": 10 * gap,
            "max": 100 * gap,
            "kl": gap / 2,
            "num_tokens": num_tokens,
        },
        "quantisers": {"sites": sites or {}, "code_mismatch": mismatch or {}},
        "hint_bytes_per_token": 192 if sites else 0,
        "kv_bytes_per_token": 288 if sites else 1024,
        "kv_bytes_per_token_bf16": 1024,
        "seconds": {"rollout": 2.0, "record": 0.5, "train": 3.0, "push": 0.25},
    }


def codes(values, rtn_different, guided_values, out_of_bracket, sign_flip):
    return {
        "values": values,
        "rtn_different": rtn_different,
        "guided_values": guided_values,
        "guided_different": out_of_bracket + sign_flip,
        "out_of_bracket": out_of_bracket,
        "sign_flip": sign_flip,
        "unexplained": 0,
    }


def plain_run(name="bf16", seed=0, gap=0.01):
    records = [record(0, 0.2, gap, 100), record(1, 0.6, 2 * gap, 300)]
    return summarise(name, seed, records, (0.5, 0.75)), records


def guided_run(name="trace", seed=0, gap=0.001):
    sites = {
        "fc1": NOTHING | {"guided": 90, "rejected": 10},
        "k": NOTHING | {"guided": 80, "missing": 20},
        "v": NOTHING | {"not_recorded": 100},
        "fc2": NOTHING | {"not_recorded": 1000},
    }
    records = [
        record(0, 0.2, gap, 10, sites=sites, mismatch={"fc1": codes(1000, 20, 1000, 1, 1)}),
        record(1, 0.4, gap, 10, sites=sites),
        record(2, 0.4, gap, 10, sites=sites, mismatch={"fc1": codes(3000, 40, 1000, 2, 0)}),
    ]
    return summarise(name, seed, records, (0.5, 0.75)), records


def test_gap_is_the_mean_over_tokens_and_p99_over_steps():
    summary, _ = plain_run(gap=0.01)
    assert summary.gap_mean == pytest.approx((0.01 * 100 + 0.02 * 300) / 400)
    assert summary.gap_p99 == pytest.approx((0.1 + 0.2) / 2)
    assert summary.gap_max == pytest.approx(2.0)
    assert summary.kl == pytest.approx(summary.gap_mean / 2)


def test_a_step_of_which_every_sample_was_left_out_has_no_gap(tmp_path):
    nothing = record(1, 0.9, 0.0, 0)
    nothing["gap"] = dict.fromkeys(nothing["gap"]) | {"num_tokens": 0}
    records = [record(0, 0.2, 0.01, 100), nothing]
    summary = summarise("qat", 0, records, (0.1, 0.2))
    alone = summarise("qat", 0, records[:1], (0.1, 0.2))
    for name in ("gap_mean", "gap_p99", "gap_max", "kl"):
        assert getattr(summary, name) == getattr(alone, name)
    save_figure(tmp_path / "report.png", [summary], {"qat": records})


def test_rewards_are_those_of_the_first_and_last_fifth():
    records = [record(step, step / 10, 0.01, 1) for step in range(10)]
    summary = summarise("bf16", 0, records, (0.0, 0.0))
    assert summary.reward_first == pytest.approx(0.05)
    assert summary.reward_last == pytest.approx(0.85)


def test_mismatch_adds_the_steps_that_have_diagnostics():
    found = guided_run()[0].mismatch
    assert found.keys() == {"fc1"}
    assert found["fc1"].nearest == pytest.approx(60 / 4000)
    assert found["fc1"].guided == found["fc1"].as_trained == pytest.approx(4 / 2000)
    assert (found["fc1"].num_out_of_bracket, found["fc1"].num_sign_flip) == (3, 1)


def test_mismatch_of_an_unguided_run_is_that_of_rounding_to_nearest():
    mismatch = {"v": codes(1000, 20, 0, 0, 0)}
    summary = summarise("qat", 0, [record(0, 0.0, 0.1, 1, mismatch=mismatch)], (0.0, 0.0))
    assert math.isnan(summary.mismatch["v"].guided)
    assert summary.mismatch["v"].as_trained == pytest.approx(0.02)


def test_coverage_counts_guided_rows_of_the_guided_sites_only():
    summary, _ = guided_run()
    assert summary.coverage == pytest.approx((90 + 80) / 300)
    assert summary.guard_rejections == 3 * 10


def test_fc2_counts_where_it_has_hints():
    sites = {"fc1": NOTHING | {"guided": 100}, "fc2": NOTHING | {"guided": 100, "missing": 200}}
    summary = summarise("trace", 0, [record(0, 0.0, 0.1, 1, sites=sites)], (0.0, 0.0))
    assert summary.coverage == pytest.approx(200 / 400)


def test_seconds_add_up():
    summary, _ = guided_run()
    assert (summary.rollout_s, summary.record_s, summary.train_s, summary.push_s) == (
        6,
        1.5,
        9,
        0.75,
    )


def test_run_without_steps_raises():
    with pytest.raises(ValueError, match="run bf16, seed 3: no step"):
        summarise("bf16", 3, [], (0.0, 0.0))


def test_table_has_every_quantity_and_run():
    lines = format_table([plain_run()[0], guided_run()[0]]).splitlines()
    assert lines[0].split() == ["bf16", "trace"]
    table = {line[:38].strip(): line[38:].split() for line in lines[1:]}
    assert [label.split(",")[0] for label in table] == [
        "reward",
        "held-out accuracy",
        "|log-prob gap| mean",
        "|log-prob gap| p99",
        "|log-prob gap| max",
        "KL(rollout",
        "code mismatch fc1",  # as trained; only sites that a run compared
        "code mismatch fc1",  # to nearest
        "out of bracket / sign flip / other",
        "hint coverage",
        "guard rejections",
        "hint bytes / token",
        "KV bytes / token",
        "seconds in rollout / record / train",
    ]
    assert table["out of bracket / sign flip / other"] == ["-", "3", "/", "1", "/", "0"]
    assert table["hint bytes / token"] == ["-", "192"]


def test_ratios_compare_runs_of_the_same_seed():
    runs = [plain_run("qat", seed, gap)[0] for seed, gap in ((0, 0.01), (1, 0.1))] + [
        plain_run("trace", seed, gap)[0] for seed, gap in ((0, 0.001), (1, 0.001), (2, 0.001))
    ]
    assert format_ratios(runs, baseline="qat", guided=["trace", "absent"]).splitlines() == [
        "gap trace / gap qat, seed 0: mean 0.1000, p99 0.1000",
        "gap trace / gap qat, seed 1: mean 0.0100, p99 0.0100",
    ]


@pytest.mark.parametrize("gap", [0.001, 0.0])
def test_figure_is_a_png(tmp_path, gap):
    runs = [plain_run(gap=gap), guided_run(gap=gap)]
    path = tmp_path / "report.png"
    save_figure(path, [run for run, _ in runs], {run.name: records for run, records in runs})
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_summary_is_plain_data():
    assert dataclasses.asdict(guided_run()[0])["mismatch"]["fc1"]["num_sign_flip"] == 1
