#!/bin/bash
# One rank of a program that torchrun would start: srun starts it instead.
set -euo pipefail
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=${SLURM_NTASKS_PER_NODE%%(*}
exec "$@"
