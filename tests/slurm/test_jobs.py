"""The jobs of launch/ on a Slurm cluster of two nodes, on this machine and on its CPU."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing

from megatron_trace.conversion.convert import hf_to_megatron
from megatron_trace.hints.settings_file import save_settings
from megatron_trace.hints.types import QuantizerSettings, Site
from megatron_trace.rl.exchange import Exchange
from megatron_trace.testing.published_model import published_model
from megatron_trace.testing.single_process import single_process

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


def test_a_disaggregated_run_replaces_a_lost_worker_and_keeps_what_was_complete(site):
    # A larger rate moves so small a model so far in a step that the guard rejects older hints.
    more = "ROLLOUT_NODES=1 WORKERS_PER_NODE=2 TRAIN_FLAGS+=(--lr=1e-5)"
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


def test_an_export_writes_what_the_engine_serves(site):
    path, run = site.run_file("exported", more=f"PUBLISHED={site.folder / 'published'}")
    published_model("qwen3_5_moe", site.folder / "published")
    run.mkdir()
    with single_process(seed=0):
        hf_to_megatron(site.folder / "published", run / "checkpoints")
    scales = {(layer, part): 0.001 for layer in range(4) for part in (Site.FC1, Site.FC2)}
    kv = {(3, Site.K): 0.01, (3, Site.V): 0.02}
    save_settings(QuantizerSettings(scales | kv, model_id="tiny"), run)
    completes(site, site.started("export", path), run)
    (export,) = (run / "exports").iterdir()
    config = json.loads((export / "nvfp4" / "config.json").read_text())
    assert config["quantization_config"]["quant_algo"] == "NVFP4"
    same = [
        (folder / "model.safetensors").read_bytes()
        for folder in (site.folder / "published", export / "bf16")
    ]
    assert same[0] == same[1]
