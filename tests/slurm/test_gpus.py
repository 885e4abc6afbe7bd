"""Which GPUs ranks and workers take by Slurm's CUDA_VISIBLE_DEVICES; the devices are none."""

from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"
SHOW = "'echo $SLURM_PROCID of $WORLD_SIZE: $LOCAL_RANK of $CUDA_VISIBLE_DEVICES'"
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]


def told(cluster, folder, step):
    """Runs a step of four tasks on two nodes, and gives what they wrote."""
    if not cluster.gpus:
        pytest.skip("only root can make device files")
    (folder / "job.sh").write_text(f"#!/bin/bash\nexport GPUS_PER_NODE=2 PAUSED=none\n{step}\n")
    done = cluster.run(
        *("sbatch", "--wait", "--nodes=2", "--ntasks-per-node=2", "--gres=gpu:2"),
        *(f"--output={folder}/told", folder / "job.sh"),
        timeout_s=200,
    )
    written = (folder / "told").read_text()
    assert done.returncode == 0, written
    return sorted(written.splitlines())


def test_ranks_take_the_gpus_of_their_node_by_number(cluster, tmp_path):
    ranks = told(cluster, tmp_path, f"srun {LAUNCH}/rank.sh bash -c {SHOW}")
    assert ranks == ["0 of 4: 0 of 0,1", "1 of 4: 1 of 0,1", "2 of 4: 0 of 0,1", "3 of 4: 1 of 0,1"]


def test_ranks_take_the_gpu_that_slurm_binds(cluster, tmp_path):
    bound = f"srun --gpus-per-task=1 {LAUNCH}/rank.sh bash -c {SHOW}"
    ranks = told(cluster, tmp_path, bound)
    assert [rank.split(" of ")[1] for rank in ranks] == ["4: 0"] * 4, ranks
    assert all("," not in rank for rank in ranks), ranks


def test_workers_see_one_gpu_each(cluster, tmp_path):
    workers = told(cluster, tmp_path, f"srun {LAUNCH}/worker.sh --number bash -c {SHOW}")
    assert workers == ["0 of 1: 0 of 0", "1 of 1: 0 of 1", "2 of 1: 0 of 0", "3 of 1: 0 of 1"]
