#!/bin/bash
# One rank of a program that torchrun would start: srun starts it instead. Signals go to the rank itself only: Slurm would
# also send them to the processes that are writing a checkpoint, which end by them.
set -euo pipefail
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=${SLURM_NTASKS_PER_NODE%%[(,]*}
if [[ -n ${CUDA_VISIBLE_DEVICES:-} && $CUDA_VISIBLE_DEVICES != *,* ]]; then
    LOCAL_RANK=0 # Slurm has bound one GPU to each task (--gpus-per-task), and numbers what a task sees from 0.
fi
tell() { # tell SIGNAL: to the rank, or once it is begun. A signal may come while another is handed on.
    if [[ -z $child ]]; then
        early+=" $1"
    elif [[ $1 == USR1 ]]; then
        kill -USR1 "$child" 2>/dev/null || true
    else # A rank that has only just begun has no session of its own yet.
        kill -TERM -- "-$child" 2>/dev/null || kill -TERM "$child" 2>/dev/null || true
    fi
}
child='' early=''
trap 'tell USR1' USR1
trap 'tell TERM' TERM INT
setsid "$@" &
child=$!
for told in $early; do tell "$told"; done
wait "$child" || true
while kill -0 "$child" 2>/dev/null; do # A signal ended `wait`, not the rank.
    wait "$child" || true
done
status=0
wait "$child" || status=$? # Bash keeps it, also of a rank that ended just after the signal.
exit "$status"
