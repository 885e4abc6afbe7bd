#!/bin/bash
# One rank of a program that torchrun would start: srun starts it instead. Signals go to the rank itself only: Slurm would
# also send them to the processes that are writing a checkpoint, which end by them.
set -euo pipefail
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=${SLURM_NTASKS_PER_NODE%%[(,]*}
if [[ -n ${CUDA_VISIBLE_DEVICES:-} && $CUDA_VISIBLE_DEVICES != *,* ]]; then
    LOCAL_RANK=0 # Slurm has bound one GPU to each task (--gpus-per-task), and numbers what a task sees from 0.
fi
setsid "$@" &
child=$!
trap 'kill -USR1 "$child" 2>/dev/null || true' USR1
# A rank that has only just begun has no session of its own yet.
trap 'kill -TERM -- "-$child" 2>/dev/null || kill -TERM "$child" 2>/dev/null || true' TERM INT
status=0
wait "$child" || status=$?
while kill -0 "$child" 2>/dev/null; do # A signal ended `wait`, not the rank.
    status=0
    wait "$child" || status=$?
done
exit "$status"
