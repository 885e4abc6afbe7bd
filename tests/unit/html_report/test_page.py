"""The page as text and as parsed HTML, on every machine."""

import re
import sys
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron_trace.rl.html_report.chart import NUM_COLOURS, chart, line_style, number_text
from megatron_trace.rl.html_report.measures import Curve
from megatron_trace.rl.html_report.page import page
from megatron_trace.rl.html_report.runs import find_runs
from megatron_trace.rl.html_report.spread import Point
from megatron_trace.testing.programs import load_program

VOID = {"meta", "link", "br"}
LOG = Curve(("gap",), "Gap", "", "", "nats", axis="log")
LINEAR = Curve(("loss",), "Loss", "", "")


class Parsed(HTMLParser):
    """Elements that do not nest, addresses, and the text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.faults, self.addresses, self.words, self.tags = [], [], [], [], []
        self.feed(text)
        self.close()
        self.faults += [f"<{tag}> is not closed" for tag in self.open]
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> closes another element")

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.words.append(data)


def made(runs):
    return page(runs, title="A & B", made=datetime(2026, 11, 30, 7, 0, tzinfo=UTC))


@pytest.fixture
def parsed(every_state):
    return Parsed(made(find_runs([every_state])))


def test_elements_nest(parsed):
    assert parsed.faults == []


def test_the_page_refers_to_nothing_outside_it(every_state):
    text = made(find_runs([every_state]))
    parsed = Parsed(text)
    assert parsed.addresses == ["data:,"]
    assert {"script", "img", "iframe", "object"}.isdisjoint(parsed.tags)
    assert not re.search(r"https?://|@import|url\(", text)


def test_every_run_that_is_not_whole_is_named_with_its_state(parsed):
    for told in (
        "5 of 7 runs are not known to be whole.",
        "empty, seed 0 : empty: nothing was logged",
        "killed, seed 0 : 1 of 9 steps; whether it ended is not known",
        "qat, seed 0 : crashed after 1 of 2 steps (RuntimeError: <boom> & more)",
    ):
        assert told in parsed.text


def test_means_stand_with_intervals_over_seeds(parsed):
    # Held-out .25 and .75: mean .5, standard error .25, times 12.706.
    assert "Held-out accuracy, after – – – 0.5 ± 3.18" in parsed.text


def test_settings_that_differ_are_listed_but_not_the_seed(parsed):
    section = parsed.text.split("Settings that differ")[1].split("All 2 settings")[0]
    assert 'trace.method "qat" "trace"' in section
    assert "hint_bits" not in section
    assert "Not known of: empty, killed, nothing_logged, odd." in section


def test_runs_of_one_name_that_differ_in_more_than_the_seed_are_told(tmp_path, write_run):
    for seed in (0, 1):
        settings = {"optimizer": {"learning_rate": 10.0**-seed}, "seed": seed}
        step = {"step": 0, "reward": 0.5}
        write_run(f"seed-{seed}/qat", [step], name="qat", seed=seed, settings=settings)
    parsed = Parsed(made(find_runs([tmp_path])))
    section = parsed.text.split("Settings that differ")[1].split("All 1 settings")[0]
    assert "Runs named qat are no repetitions, by optimizer.learning_rate 1.0 / 0.1" in section


def test_repetitions_are_not_told_to_differ(parsed):
    assert "are no repetitions" not in parsed.text


def test_versions_that_differ_are_marked(parsed):
    assert "torch (differs) 2.10.0 2.11.0" in parsed.text
    assert "commit abc abc" in parsed.text


def test_alarms_and_skipped_updates_are_listed_with_their_steps(parsed):
    assert "qat, seed 0 gap_mean warn 1 0 0.5 0.5 0.25" in parsed.text
    assert "trace, seed 1 updates skipped for NaN or Inf – 1 1" in parsed.text


def test_text_of_runs_cannot_become_markup(every_state):
    assert "<boom>" not in made(find_runs([every_state]))


def test_runs_without_any_step_give_a_page_that_says_so(tmp_path):
    parsed = Parsed(made(find_runs([tmp_path / "nothing"])))
    assert "No run logged a step" in parsed.text
    assert parsed.faults == []


def test_a_record_of_wrong_types_gives_a_page(write_run):
    folder = write_run(
        "run",
        [
            {"step": 0, "gap": [], "health": 3, "alarms": "x", "skipped_updates": None},
            {"step": 1, "reward": "high", "health": {"code_mismatch": 1}, "alarms": [3, {}]},
            {"step": 2, "reward": float("inf"), "loss": float("nan"), "seconds": {"train": 1e999}},
        ],
    )
    assert Parsed(made(find_runs([folder]))).faults == []


def test_numbers_beyond_fp64_and_text_that_is_no_unicode_give_a_page(write_run):
    """As of a collapsed run: an alarm of Inf, means and squares that overflow."""
    alarm = {"alarm": "gap_max", "value": "Infinity", "threshold": 1.0, "action": "warn"}
    runs = [
        write_run(
            f"seed-{seed}/trace",
            [{"step": n, "loss": loss, "alarms": [alarm]} for n in range(2)],
            name="trace",
            seed=seed,
            reason="\udcff",
        )
        for seed, loss in ((0, 1.7e308), (1, 1.1e308))
    ]
    text = made(find_runs(runs))
    assert "gap_max warn 2 0, 1 ∞ ∞ 1" in Parsed(text).text
    text.encode("utf-8")


def test_a_report_of_no_run_is_refused():
    with pytest.raises(ValueError, match="at least one run"):
        made([])


def points(*values):
    return [Point(step, value, value, value, 1) for step, value in enumerate(values)]


def ticks(svg):
    return re.findall(r'text-anchor="end">([^<]*)<', svg)


def test_a_logarithmic_axis_has_decades_and_a_place_for_zero():
    assert ticks(chart(LOG, [("a", points(0.0, 1e-3, 1.0))], 2)) == [
        "0",
        "0.001",
        "0.01",
        "0.1",
        "1",
        "step",
    ]


def test_values_that_span_little_have_a_linear_axis():
    assert ticks(chart(LOG, [("a", points(1.0, 2.0))], 1))[:-1] == ["0", "0.5", "1", "1.5", "2"]


@pytest.mark.parametrize("value", [0.0, -3.0, 1e-30, 7e12])
def test_a_constant_curve_has_an_axis_around_it(value):
    svg = chart(LINEAR, [("a", points(value, value))], 1)
    heights = {float(y) for y in re.findall(r'cy="([^"]*)"', svg)}
    assert len(heights) == 1
    assert 0 <= heights.pop() <= 220


def test_a_line_breaks_where_a_number_is_missing():
    broken = [point for point in points(1, 2, 3, 4, 5) if point.step != 2]
    assert chart(LINEAR, [("a", broken)], 4).count("<polyline") == 2


def test_a_band_is_drawn_only_over_several_seeds():
    spread = [Point(step, 1.0, 0.5, 1.5, 2) for step in range(3)]
    assert "<polygon" in chart(LINEAR, [("a", spread)], 2)
    assert "<polygon" not in chart(LINEAR, [("a", points(1, 2))], 2)


def test_a_long_curve_is_thinned_to_400_points_with_its_extremes():
    svg = chart(LINEAR, [("a", [Point(n, 0, -(n == 777), n == 778, 2) for n in range(4000)])], 3999)
    polyline = re.search(r'<polyline [^>]*points="([^"]*)"', svg)
    band = re.search(r'<polygon [^>]*points="([^"]*)"', svg)
    assert polyline is not None
    assert band is not None
    assert len(polyline[1].split()) == 400
    heights = {pair.split(",")[1] for pair in band[1].split()}
    assert len(heights) == 3


def test_lines_of_sixteen_groups_are_all_different():
    assert len({line_style(number) for number in range(2 * NUM_COLOURS)}) == 2 * NUM_COLOURS


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.5, "0.5"), (123456.0, "1.2e5"), (1234.6, "1235"), (2e-5, "2e-5"), (-0.0123456, "-0.0123")],
)
def test_numbers_have_three_digits(value, text):
    assert number_text(value) == text


def test_the_tool_writes_the_page_and_names_what_is_not_whole(every_state, monkeypatch, capsys):
    path = Path(__file__).parents[3] / "tools" / "report.py"
    tool = load_program(path)
    output = every_state / "pages" / "a.html"
    monkeypatch.setattr(sys, "argv", ["report.py", str(every_state), "--output", str(output)])
    tool.main()
    assert output.read_text().startswith("<!doctype html>")
    assert "qat, seed 0: crashed after 1 of 2 steps" in capsys.readouterr().out
