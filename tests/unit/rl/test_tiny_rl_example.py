"""The demo program, with one or two steps of everything."""

import json
import logging
import shutil
from pathlib import Path

import pytest

from megatron_trace.config import TraceConfig
from megatron_trace.hints import HintFilesWriter
from megatron_trace.rl.metrics_log import read_metrics
from megatron_trace.rl_config import LossConfig
from megatron_trace.testing.programs import load_program
from megatron_trace.testing.tiny_tokenizer import save_tiny_tokenizer

PROGRAM = Path(__file__).parents[3] / "examples" / "tiny_rl" / "run.py"
SMALL = "--warm-start-steps 2 --prompts 2 --samples 2 --held-out 8 --save-every 1"


@pytest.fixture(scope="module")
def demo():
    return load_program(PROGRAM)


@pytest.fixture
def do_runs(demo, one_rank, monkeypatch, tmp_path):
    """Does the runs that flags describe, of two layers and few problems, in a temporary folder."""
    monkeypatch.setattr(demo, "TASK_SIZE", 300)
    monkeypatch.setattr(demo, "PATTERN", "*E*E")
    monkeypatch.setattr(demo, "CALIBRATION_SAMPLES", 32)

    def do_runs(*flags):
        options = demo.parse_options([*SMALL.split(), "--output", str(tmp_path), *flags])
        return options, demo.do_all_runs(options)

    return do_runs


def gaps(folder):
    return [record["gap"] for record in read_metrics(folder / "seed-0" / "trace" / "metrics.jsonl")]


def test_runs_end_with_table_figure_and_metrics(demo, do_runs, tmp_path, capsys):
    options, summaries = do_runs("--steps", "1", "--runs", "bf16", "trace-half")
    demo.report(options, summaries)
    assert [summary.name for summary in summaries] == ["bf16", "trace-half"]
    assert [summary.coverage for summary in summaries[1:]] == [0.5]
    printed = capsys.readouterr().out
    assert "seconds in rollout / record / train" in printed
    assert "No claim about rewards" in printed
    assert (tmp_path / "seed-0" / "report.png").stat().st_size > 0
    assert len(json.loads((tmp_path / "summary.json").read_text())) == 2


def test_a_run_that_fails_leaves_no_process_and_gives_its_folder_up(
    demo, do_runs, tmp_path, monkeypatch
):
    """Hints are read by a process of its own, as on a GPU."""
    runs = []

    def build_run(*args, **kwargs):
        runs.append(build(*args, hint_reader="process", **kwargs))
        return runs[0]

    def fail(run, *_):
        demo.rl_step(run)
        runs.append(run.process.process_id)
        raise RuntimeError("amid its steps")

    build = demo.build_run
    with monkeypatch.context() as patched:
        patched.setattr(demo, "build_run", build_run)
        patched.setattr(demo, "do_run", fail)
        with pytest.raises(RuntimeError, match="amid its steps"):
            do_runs("--steps", "2", "--runs", "trace", "--hint-files")
    run, process_id = runs
    assert process_id is not None
    assert not Path(f"/proc/{process_id}").exists()
    assert run.process.process_id is None
    HintFilesWriter(tmp_path / "seed-0" / "trace" / "hints").close()
    # Hints of the same samples are there.
    do_runs("--steps", "1", "--runs", "trace", "--hint-files", "--resume")
    assert len(gaps(tmp_path)) == 1


def test_resumed_program_continues_exactly(do_runs, tmp_path):
    do_runs("--steps", "2", "--runs", "trace")
    through = gaps(tmp_path)
    do_runs("--steps", "1", "--runs", "trace")
    assert gaps(tmp_path) == through[:1]
    # A checkpoint of the first run would be the latest one.
    saved = (tmp_path / "seed-0" / "trace" / "checkpoints").iterdir()
    assert [path.name for path in saved] == ["step-000001"]
    unfinished = tmp_path / "seed-0" / "trace" / "checkpoints" / "step-000002.tmp-1"
    unfinished.mkdir()
    _, summaries = do_runs("--steps", "2", "--runs", "trace", "--resume")
    assert not unfinished.exists()
    assert gaps(tmp_path) == through
    assert summaries[0].name == "trace"


def test_what_resume_cannot_continue_is_refused_and_left_as_it_is(do_runs, tmp_path):
    do_runs("--runs", "qat", "--steps", "2")
    folder = tmp_path / "seed-0" / "qat"
    files = [folder / "metrics.jsonl", folder / "run.json"]
    before = [file.read_bytes() for file in files]

    def resume(*flags):
        do_runs("--runs", "qat", "--resume", *flags)

    with pytest.raises(SystemExit, match=r"000002 has done 2 steps, more than the 1 that the run"):
        resume("--steps", "1")
    with pytest.raises(SystemExit, match=r"000002 is of another run: optimizer was"):
        resume("--steps", "2", "--learning-rate", "1e-4")
    shutil.rmtree(folder / "checkpoints")  # As of a run that saved none.
    with pytest.raises(SystemExit, match=r"another run: optimizer.learning_rate was 1e-05 there"):
        resume("--steps", "2", "--learning-rate", "1e-4")
    assert [file.read_bytes() for file in files] == before


def test_an_asynchronous_run_resumes_exactly_where_it_drained(do_runs, tmp_path):
    def records():
        return [
            {name: step[name] for name in ("gap", "asynchronous", "reward")}
            for step in read_metrics(tmp_path / "seed-0" / "trace" / "metrics.jsonl")
        ]

    flags = "--runs trace --async-lag 1 --async-engine-steps 2 --save-every 2"
    do_runs(*flags.split(), "--steps", "4")
    through = records()
    assert [record["asynchronous"]["in_flight"] for record in through] == [4, 0, 4, 0]
    assert "1" in through[1]["asynchronous"]["lag_tokens"]
    do_runs(*flags.split(), "--steps", "2")
    do_runs(*flags.split(), "--steps", "4", "--resume")
    assert records() == through
    with pytest.raises(SystemExit, match="asynchronous was"):
        do_runs("--runs", "trace", "--save-every", "2", "--steps", "5", "--resume")


def test_flags_run_follows_the_trace_flags(do_runs):
    flags = "--steps 1 --runs flags --trace-hint-layers 1 --trace-hint-bits 4"
    _, summaries = do_runs(*flags.split())
    # One of two layers; 4 bits and a scale byte per 16 values of fc1 (128), k and v (64 each).
    assert summaries[0].hint_bytes_per_token == (128 + 64 + 64) // 2 + (128 + 64 + 64) // 16
    assert summaries[0].coverage == 0.5


@pytest.mark.parametrize("method", ["bf16", "qarl", "quads", "score_centering", "trace"])
def test_every_method_trains_two_steps_through_its_flag(do_runs, tmp_path, method):
    _, summaries = do_runs("--steps", "2", "--runs", "flags", "--trace-method", method)
    records = read_metrics(tmp_path / "seed-0" / "flags" / "metrics.jsonl")
    assert [record["policy_version"] for record in records] == [0, 1]
    assert all(record["gap"]["num_tokens"] > 0 for record in records)
    kv_bytes = 512 if method == "bf16" else 144
    assert summaries[0].kv_bytes_per_token == kv_bytes
    assert bool(summaries[0].hint_bytes_per_token) == (method == "trace")


@pytest.mark.parametrize(
    ("flags", "sites", "kv_bytes"),
    [
        # 2 layers x (K, V) x 2 heads x 32 values: half a byte each, and a scale for 16 or 32.
        ("", {"fc1", "fc2", "k", "v"}, 144),
        ("--trace-quantised-parts experts", {"fc1", "fc2"}, 512),
        ("--trace-quantised-parts kv", {"k", "v"}, 144),
        ("--trace-number-format mxfp4", {"fc1", "fc2", "k", "v"}, 136),
        ("--trace-number-format mxfp4_w4a8", {"fc1", "fc2", "k", "v"}, 136),
    ],
    ids=["nvfp4", "experts only", "kv only", "mxfp4", "mxfp4 w4a8"],
)
def test_every_format_trains_and_serves_through_its_flags(
    do_runs, tmp_path, flags, sites, kv_bytes
):
    """Each step ends with a push, in which the digests of both sides are compared."""
    _, summaries = do_runs("--steps", "1", "--runs", "flags", *flags.split())
    (record,) = read_metrics(tmp_path / "seed-0" / "flags" / "metrics.jsonl")
    assert record["quantisers"]["sites"].keys() == sites
    assert summaries[0].kv_bytes_per_token == kv_bytes
    assert summaries[0].coverage > 0.9


OWN_FUNCTIONS = """
def score(turns, record):
    if record["sum"] == 8:
        raise ValueError("unlucky")
    return len(turns) + turns[-1]["content"].count("1")

def reply(turns, record):
    return "again" if len(turns) == 1 else None
"""


def test_prompts_functions_and_tokenizer_of_ones_own_train_and_resume(do_runs, tmp_path):
    (tmp_path / "mine.py").write_text(OWN_FUNCTIONS)
    records = [
        {"prompt": [{"role": "user", "content": f"{a}+{b}="}], "answer": str(a + b), "sum": a + b}
        for a in range(4)
        for b in range(6)
    ]
    lines = [json.dumps(record) + "\n" for record in records]
    (tmp_path / "prompts.jsonl").write_text("".join(lines))
    save_tiny_tokenizer(tmp_path / "tokenizer")
    flags = f"""--tasks {tmp_path}/prompts.jsonl --trace-tokenizer {tmp_path}/tokenizer
        --trace-reward {tmp_path}/mine.py:score --trace-environment {tmp_path}/mine.py:reply
        --runs trace --prompts 16 --warm-start-steps 25 --max-response-tokens 6 --hint-files"""
    do_runs(*flags.split(), "--steps", "1")
    _, summaries = do_runs(*flags.split(), "--steps", "2", "--resume")
    steps = read_metrics(tmp_path / "seed-0" / "trace" / "metrics.jsonl")
    assert [step["step"] for step in steps] == [0, 1]
    # 3 of 24 prompts have the sum 8, at most one or two of them are held out.
    assert {kind for step in steps for kind in step["reward_failures"]} == {"raised"}
    # A second turn is rewarded more than a first one can be.
    assert all(step["reward"] > 1 for step in steps)
    assert all(step["response_tokens_max"] > 6 for step in steps), "given tokens are counted too"
    assert all(step["gap"]["num_tokens"] <= 16 * 2 * 6 for step in steps), "but not trained on"
    assert summaries[0].coverage == 1.0


def test_an_alarm_stops_the_program_with_a_checkpoint_that_resumes(do_runs, tmp_path):
    flags = "--steps 2 --save-every 0 --runs flags --trace-method qat --trace-alarms"
    with pytest.raises(
        SystemExit, match=r"stopped after step 0, as lag is 0 .threshold -1.; .*step-0"
    ):
        do_runs(*flags.split(), "lag=-1:stop")
    log = tmp_path / "seed-0" / "flags" / "metrics.jsonl"
    assert [record["alarms"][0]["action"] for record in read_metrics(log)] == ["stop"]
    # The same settings stop it again, one step later.
    with pytest.raises(SystemExit, match="stopped after step 1"):
        do_runs(*flags.split(), "lag=-1:stop", "--resume")
    assert [record["step"] for record in read_metrics(log)] == [0, 1]


def test_loss_flags_reach_the_run(demo, tmp_path):
    flags = "--runs qat --trace-objective gspo --trace-correction icepop --trace-max-lag 3"
    options = demo.parse_options(["--output", str(tmp_path), *flags.split()])
    settings = demo.run_settings(options, "qat", seed=0)
    assert settings.loss == LossConfig(objective="gspo", correction="icepop", max_lag=3)


def test_a_loss_flag_that_contradicts_a_run_is_refused(demo, capsys):
    with pytest.raises(SystemExit):
        demo.parse_options(["--trace-objective", "score_centering", "--trace-clip-low", "0.1"])
    assert "clip_low=0.1 has no effect with objective=score_centering" in capsys.readouterr().err


def test_a_flag_of_the_quantised_runs_leaves_the_one_in_bf16_as_it_is(demo):
    flags = "--runs bf16 trace --trace-number-format mxfp4 --trace-diagnostic-share 0.5"
    options = demo.parse_options(flags.split())
    found = {name: demo.run_settings(options, name, seed=0).trace for name in options.runs}
    assert found["bf16"] == TraceConfig(method="bf16")
    assert (found["trace"].number_format, found["trace"].diagnostic_share) == ("mxfp4", 0.5)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--trace-method qat", "--trace-method has no effect on --runs bf16 qat trace trace-half"),
        ("--runs trace --trace-hint-layers 1", "--trace-hint-layers has no effect on --runs trace"),
        ("--runs flags --trace-hint-layers 4", "names decoder layer 4, but the model has 4"),
        ("--trace-hint-bits 3", "hint_bits must be 1, 2 or 4; got 3"),
        (
            "--runs flags --trace-method bf16 --trace-number-format mxfp4",
            "number_format=mxfp4 has no effect with method=bf16",
        ),
        ("--runs bf16 --trace-quantised-parts kv", "quantised_parts=kv has no effect"),
        (
            "--runs flags --trace-method quads --trace-diagnostic-share 0.5",
            "diagnostic_share=0.5 has no effect with method=quads",
        ),
        ("--tasks nowhere.jsonl", "--tasks nowhere.jsonl does not exist"),
        ("--learning-rate nan", "learning_rate must be >= 0 and finite; got nan"),
        ("--seeds 0 1 0", "--seeds names one twice: 0 1 0"),
        ("--runs trace trace", "--runs names one twice"),
        ("--steps 0", "--steps must be at least 1; got 0"),
    ],
)
def test_flag_that_cannot_be_followed_is_refused(demo, flags, message, capsys):
    with pytest.raises(SystemExit):
        demo.parse_options(flags.split())
    assert message in capsys.readouterr().err


def test_broken_prompt_file_is_told_in_one_line(demo, do_runs, tmp_path):
    tasks = tmp_path / "broken.jsonl"
    tasks.write_text('{"prompt": "1+1=",\n')
    with pytest.raises(SystemExit, match=r"error: .*broken\.jsonl, line 1: not valid JSON"):
        do_runs("--tasks", str(tasks))


def test_second_program_in_the_same_folder_is_refused(demo, tmp_path):
    with demo.alone_in(tmp_path):
        second = demo.alone_in(tmp_path)
        with pytest.raises(SystemExit, match="another run writes into"):
            second.__enter__()
    with demo.alone_in(tmp_path):
        pass


def test_the_program_tells_warnings_of_its_steps_and_errors_of_all(demo, capfd, monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root.manager, "disable", logging.WARNING)
    demo.tell_warnings_of_steps()
    logging.getLogger("megatron_trace.rl.health").warning("alarm")
    logging.getLogger("megatron_trace.rollout.samples").warning("other")
    logging.getLogger("megatron.core").warning("other")
    logging.getLogger("megatron.core").error("broken")
    assert capfd.readouterr().err.splitlines() == [
        "WARNING:megatron_trace.rl.health:alarm",
        "ERROR:megatron.core:broken",
    ]
