"""The jobs of launch/ on a Slurm cluster of two nodes, on this machine and on its CPU."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing

from megatron_trace.conversion.convert import hf_to_megatron
from megatron_trace.conversion.published_folder import published_architecture
from megatron_trace.hints.files import HintFiles
from megatron_trace.hints.files_writer import HintFilesWriter
from megatron_trace.hints.settings_file import save_settings
from megatron_trace.hints.types import QuantizerSettings, Site
from megatron_trace.rl.exchange import Exchange
from megatron_trace.rl.hf_tokenizer import HfTokenizer
from megatron_trace.rl.html_report.runs import find_runs
from megatron_trace.testing.published_model import calibration_sample, published_model
from megatron_trace.testing.single_process import single_process
from megatron_trace.testing.tiny_tokenizer import save_tiny_tokenizer

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1800)]
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def logs(run):
    """Gives everything that the jobs of a run wrote."""
    return "\n".join(
        f"--- {path}\n{path.read_text(errors='replace')[-20000:]}"
        for path in sorted((run / "logs").rglob("*"))
        if path.is_file()
    )


def completes(site, job, run):
    """Waits for the end of a job, which must be good."""
    site.cluster.wait(
        lambda: site.cluster.state(job) in ENDED, f"the end of job {job}", timeout_s=1500
    )
    assert site.cluster.state(job) == "COMPLETED", logs(run)


def tensors(checkpoint):
    """Gives the tensors of a checkpoint: parameters and the optimizer's state."""
    with single_process(seed=0):
        found = dist_checkpointing.load_plain_tensors(str(checkpoint))
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def worker_process(run, number):
    """Gives the process of a worker of a run, or None."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        wanted = {f"--rollout-run={run}".encode(), f"--rollout-worker={number}".encode()}
        if wanted <= set(words) and words[0].endswith(b"python"):
            return int(path.parent.name)
    return None


def steps_logged(run):
    """Gives what the trainer logged of each step, and whether the report takes it for whole."""
    (log,) = find_runs([run])
    numbers = [(of["step"], of["loss"], of["grad_norm"], of["reward"]) for of in log.records]
    return log.name, log.is_whole, log.problems, numbers


@pytest.fixture(scope="module")
def whole(site):
    """A colocated run of two steps that nothing disturbed."""
    path, run = site.run_file("whole")
    completes(site, site.started("colocated", path), run)
    return path, run


def test_a_colocated_run_trains_to_its_end(whole):
    _, run = whole
    assert Exchange(run).published_version() == 2
    versions = [Exchange(run).batch(number).policy_version for number in range(2)]
    assert versions == [0, 1]
    told = min((run / "logs").glob("job-*/attempt-0/job.txt"))  # An evaluation may have followed.
    for part in ("commit: ", "torch 2.", "step trainer: srun"):
        assert part in told.read_text()
    name, is_whole, problems, numbers = steps_logged(run)
    assert (name, is_whole, problems) == (run.name, True, [])
    assert [step for step, *_ in numbers] == [0, 1]


def test_a_preempted_run_is_requeued_and_ends_with_the_same_bits(site, whole):
    path, run = site.run_file("preempted")
    job = site.started("colocated", path)
    trainer = run / "logs" / f"job-{job}" / "attempt-0" / "trainer.0.log"
    site.cluster.wait(
        lambda: trainer.is_file() and "initialized tensor model parallel" in trainer.read_text(),
        "a trainer that listens",
        timeout_s=600,
        poll_s=0.1,
    )
    recorded = (run / "batches" / "b00000000.json").stat().st_mtime_ns
    site.cluster.run("scancel", "-b", "--signal=USR1", job)
    completes(site, job, run)
    said = (run / "logs" / f"job-{job}.txt").read_text()
    assert "signal ahead of the time limit: saving" in said
    assert "exiting program after receiving" in trainer.read_text()
    assert (run / "logs" / f"job-{job}" / "attempt-1").is_dir()
    assert (run / "batches" / "b00000000.json").stat().st_mtime_ns == recorded
    states = [tensors(folder / "checkpoints" / "iter_0000002") for folder in (whole[1], run)]
    assert states[0].keys() == states[1].keys()
    assert any("exp_avg" in name for name in states[0])
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name
    # Its two trainers wrote the log of one.
    assert steps_logged(run)[1:] == steps_logged(whole[1])[1:]


REWARD = """
def score(turns, record):
    told = turns[-1]["content"]
    return sum(letter in record["wanted"] for letter in told) / 4
"""


def own_task(folder):
    """Writes conversations, a tokenizer with a chat template and a reward, and gives settings."""
    folder.mkdir()
    save_tiny_tokenizer(folder / "tokenizer")
    (folder / "rewards.py").write_text(REWARD)
    (folder / "prompts.jsonl").write_text(
        "".join(
            json.dumps({"prompt": [{"role": "user", "content": f"{n}+1="}], "wanted": "0123456789"})
            + "\n"
            for n in range(6)
        )
    )
    flags = f"--trace-tokenizer={folder}/tokenizer --trace-reward={folder}/rewards.py:score"
    return f"TASKS={folder}/prompts.jsonl ROLLOUT_FLAGS+=({flags} --trace-failed-reward=0)"


def rewards_by_hand(run, batch, folder):
    """Gives what the reward function says of the texts of a batch."""
    scope, tokenizer = {}, HfTokenizer(folder / "tokenizer")
    exec((folder / "rewards.py").read_text(), scope)
    files = HintFiles(run / batch.folder)
    samples = [files.sample(reward.sample_id) for reward in batch.rewards]
    texts = [tokenizer.decode(list(sample.response_tokens)) for sample in samples]
    return [scope["score"]([{"content": text}], {"wanted": "0123456789"}) for text in texts]


def test_tasks_of_ones_own_train_over_two_nodes(site):
    folder = site.folder / "own"
    more = f"TRAIN_NODES=2 PROMPTS_PER_BATCH=1 {own_task(folder)}"
    path, run = site.run_file("own_run", steps=1, batches=2, more=more)
    completes(site, site.started("colocated", path), run)
    exchange = Exchange(run)
    assert exchange.published_version() == 1
    batches = [exchange.batch(number) for number in range(2)]
    for batch in batches:
        found = [reward.reward for reward in batch.rewards]
        assert found == pytest.approx(rewards_by_hand(run, batch, folder))
    trainer = next((run / "logs").glob("job-*/attempt-0/trainer.0.log")).read_text()
    assert "using world size: 2, data-parallel size: 2" in trainer


def test_a_disaggregated_run_replaces_a_lost_worker_and_keeps_what_was_complete(site):
    # A larger rate moves so small a model so far in a step that the guard rejects older hints.
    own = own_task(site.folder / "own_apart")
    more = f"ROLLOUT_NODES=1 WORKERS_PER_NODE=2 TRAIN_FLAGS+=(--lr=1e-5) {own}"
    path, run = site.run_file("apart", steps=3, batches=2, max_lag=1, more=more)
    job = site.started("disaggregated", path)
    batches = run / "batches"
    site.cluster.wait(
        lambda: (batches.is_dir() and any(batches.iterdir())) and worker_process(run, 0),
        "the first batch",
        timeout_s=600,
        poll_s=0.1,
    )
    complete = {p: p.read_bytes() for p in batches.glob("b*.json")}
    os.kill(worker_process(run, 0), signal.SIGKILL)
    completes(site, job, run)
    exchange = Exchange(run)
    told = (run / "logs" / f"job-{job}" / "attempt-0" / "rollout.0.log").read_text()
    assert "worker 0 was lost with status 137; beginning anew" in told
    assert exchange.published_version() == 3
    assert {p: p.read_bytes() for p in complete} == complete
    found = [exchange.batch(number) for number in range(6)]
    assert all(0 <= batch.number // 2 - batch.policy_version <= 1 for batch in found)
    assert (run / "rollouts" / "0.1").is_dir(), "the worker's second life has a folder of its own"


def test_an_evaluation_scores_every_prompt(site, whole):
    path, run = site.run_file(
        "whole", more=f"EVALUATE_TASKS={site.folder / 'tasks.jsonl'} WORKERS_PER_NODE=2"
    )
    completes(site, site.started("evaluate", path), run)
    found = json.loads((run / "evaluations" / "version-2" / "evaluation.json").read_text())
    assert found["prompts"] == 10
    assert found["iteration"] == 2
    assert found["accuracy"] == found["right"] / 10


@pytest.fixture(scope="module")
def published(site):
    """A published model, and settings of a run that names its flags."""
    folder = site.folder / "published"
    published_model("qwen3_5_moe", folder)
    flags = " ".join(published_architecture(folder).flags(mtp=False))
    more = (
        f"PUBLISHED={folder} MODEL_FLAGS=({flags} @launch/cpu.args @launch/trace.args"
        " --seq-length=16 --max-position-embeddings=16)"
    )
    return folder, more


def test_an_export_writes_what_the_engine_serves(site, published):
    folder, more = published
    path, run = site.run_file("exported", more=more)
    with single_process(seed=0):
        hf_to_megatron(folder, run / "checkpoints")
    scales = {(layer, part): 0.001 for layer in range(4) for part in (Site.FC1, Site.FC2)}
    kv = {(3, Site.K): 0.01, (3, Site.V): 0.02}
    save_settings(QuantizerSettings(scales | kv, model_id="tiny"), run)
    completes(site, site.started("export", path), run)
    export = run / "exports" / "version-0"
    config = json.loads((export / "nvfp4" / "config.json").read_text())
    assert config["quantization_config"]["quant_algo"] == "NVFP4"
    same = [
        (one / "model.safetensors").read_bytes()
        for one in (site.folder / "published", export / "bf16")
    ]
    assert same[0] == same[1]


def test_post_training_quantisation_serves_what_it_exports(site, published):
    folder, more = published
    more += f" EVALUATE_TASKS={site.folder / 'tasks.jsonl'} PTQ_RECIPES='vanilla h_scale'"
    path, run = site.run_file("quantised", more=f"{more} CALIBRATION={site.folder / 'samples'}")
    with single_process(seed=0):
        hf_to_megatron(folder, run / "checkpoints")
    with HintFilesWriter(site.folder / "samples") as files:
        files.commit([calibration_sample(number) for number in range(8)])
    job = site.started("ptq", path)
    completes(site, job, run)
    output = run / "ptq" / "version-0"
    results = {one["recipe"]: one for one in json.loads((output / "ptq.json").read_text())}
    assert list(results) == ["bf16", "vanilla", "h_scale"]
    for recipe in ("vanilla", "h_scale"):
        config = json.loads((output / recipe / "hf_quant_config.json").read_text())
        assert config["quantization"]["kv_cache_quant_algo"] == "NVFP4"
        log = run / "logs" / f"job-{job}" / "attempt-0" / f"export-{recipe}.0.log"
        assert f"digest {results[recipe]['weights_digest']}" in log.read_text(), recipe
    assert results["vanilla"]["weights_digest"] != results["h_scale"]["weights_digest"]
    assert {one["asked"] for one in results.values()} == {10}
