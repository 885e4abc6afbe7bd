"""A Slurm cluster of two nodes on this machine, prompts, and a checkpoint to start from."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_trace.rl.tasks import save_tasks
from megatron_trace.testing.programs import clean_environment, torchrun
from megatron_trace.testing.slurm_cluster import SlurmCluster, missing_programs
from megatron_trace.testing.sums import ITEMS

ROOT = Path(__file__).parents[2]
MODEL = """
    --hybrid-layer-pattern=*E*E --hidden-size=64 --ffn-hidden-size=32 --num-attention-heads=4
    --group-query-attention --num-query-groups=2 --kv-channels=16 --qk-layernorm --swiglu
    --normalization=RMSNorm --position-embedding-type=rope --disable-bias-linear
    --untie-embeddings-and-output-weights --num-experts=8 --moe-router-topk=2
    --moe-ffn-hidden-size=32 --moe-router-dtype=fp32 --seq-length=16 --max-position-embeddings=16
    --vocab-size=128 --make-vocab-size-divisible-by=16
"""
CLUSTER = """\
PYTHON={python}
GPUS_PER_NODE=1
TIME_LIMIT_MIN=60
SIGNAL_S=60
export OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1 TORCHDYNAMO_DISABLE=1 PYTHONWARNINGS=ignore
export GLOO_SOCKET_IFNAME=lo
"""
RUN = """\
RUN={run}
START={start}
TASKS={tasks}
STEPS_OF_RUN={steps}
PROMPTS_PER_BATCH=2 SAMPLES_PER_PROMPT=4 BATCHES_PER_STEP={batches} MAX_LAG={max_lag}
RESPAWN_S=0
export RESPAWN_S
MODEL_FLAGS=(@{model} @launch/cpu.args @launch/trace.args)
ROLLOUT_FLAGS=(--rollout-max-response-tokens=4)
WORKER_FLAGS=(--rollout-poll-s=0.3)
TRAIN_FLAGS=(--micro-batch-size=4 --lr=1e-3 --log-interval=1 --eval-iters=0
    --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable)
{more}
"""


class Site:
    """Files that a user would write, and commands that one would give.

    Attributes:
        folder: Folder of all of it.
        cluster: The Slurm cluster, or None where nothing is submitted.
    """

    def __init__(self, folder, cluster=None, *, python=sys.executable):
        self.folder, self.cluster = folder, cluster
        self.cluster_file = folder / "cluster.env"
        self.cluster_file.write_text(CLUSTER.format(python=python))
        (folder / "model.args").write_text("\n".join(MODEL.split()) + "\n")
        save_tasks(folder / "tasks.jsonl", ITEMS)

    def run_file(self, name, *, steps=2, batches=1, max_lag=0, more=""):
        """Writes the settings of a run; gives their file and the run's folder."""
        run, path = self.folder / name, self.folder / f"{name}.env"
        path.write_text(
            RUN.format(
                run=run,
                start=self.folder / "start",
                tasks=self.folder / "tasks.jsonl",
                steps=steps,
                batches=batches,
                max_lag=max_lag,
                model=self.folder / "model.args",
                more=more,
            )
        )
        return path, run

    def submit(self, kind, run_file, *options):
        """Runs launch/submit.sh and gives its result."""
        command = [ROOT / "launch" / "submit.sh", *options, kind, self.cluster_file, run_file]
        return subprocess.run(
            list(map(str, command)),
            env=clean_environment() if self.cluster is None else self.cluster.environment,
            text=True,
            capture_output=True,
            timeout=600,
            check=False,
        )

    def started(self, kind, run_file):
        """Submits a job and gives its number."""
        done = self.submit(kind, run_file)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.split()[-1]

    def make_start(self):
        """Makes the checkpoint to start from: a model that saw the answers for a moment."""
        flags = [
            f"@{self.folder / 'model.args'}",
            "@launch/cpu.args",
            "@launch/trace.args",
            f"--rollout-tasks={self.folder / 'tasks.jsonl'}",
            f"--rollout-output={self.folder / 'unused'}",
            f"--save={self.folder / 'start'}",
            *("--rollout-warm-start=10", "--rollout-prompts=1", "--rollout-samples=2"),
            *("--rollout-max-response-tokens=2", "--micro-batch-size=1"),
        ]
        done = torchrun(ROOT / "examples" / "record_rollouts.py", flags, ROOT)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """Two nodes, with GPUs that are none if root can make them."""
    if missing := missing_programs():
        pytest.skip(
            f"Slurm is not installed: {', '.join(missing)} missing (see docs/my_cluster.md)"
        )
    gpus = 2 if os.geteuid() == 0 else 0
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), clean_environment(), gpus=gpus) as made:
        yield made


@pytest.fixture(scope="session")
def site(cluster, tmp_path_factory):
    """A cluster with everything that a run needs."""
    folder = tmp_path_factory.mktemp("site")
    made = Site(folder, cluster)
    made.make_start()
    yield made
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def site_without_model():
    """What makes a site, for tests whose programs load none."""
    return Site


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """The same files where there is no Slurm."""
    made = Site(tmp_path_factory.mktemp("desk"))
    (made.folder / "start").mkdir()
    return made
