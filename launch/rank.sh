#!/bin/bash
# One rank of a program that torchrun would start: srun starts it instead. Signals go to the rank itself only: Slurm would
# also send them to the processes that are writing a checkpoint, which end by them.
set -euo pipefail
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=${SLURM_NTASKS_PER_NODE%%[(,]*}
if [[ -n ${CUDA_VISIBLE_DEVICES:-} && $CUDA_VISIBLE_DEVICES != *,* ]]; then
    LOCAL_RANK=0 # Slurm has bound one GPU to each task (--gpus-per-task), and numbers what a task sees from 0.
fi
hand_on() { # Also what came before the rank was begun.
    [[ -n $child && -n $told ]] || return 0
    if [[ $told == USR1 ]]; then
        kill -USR1 "$child" 2>/dev/null || true
    else # A rank that has only just begun has no session of its own yet.
        kill -TERM -- "-$child" 2>/dev/null || kill -TERM "$child" 2>/dev/null || true
    fi
    told=
}
child='' told=''
trap 'told=USR1; hand_on' USR1
trap 'told=TERM; hand_on' TERM INT
setsid "$@" &
child=$!
hand_on
wait "$child" || true
while kill -0 "$child" 2>/dev/null; do # A signal ended `wait`, not the rank.
    wait "$child" || true
done
status=0
wait "$child" || status=$? # Bash keeps it, also of a rank that ended just after the signal.
exit "$status"
