#!/bin/bash
# worker.sh FLAG PROGRAM...: a process of its own that gets its number as FLAG; begun anew when it is lost, until its work
# is done or the job is told to end.
set -uo pipefail
export RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1
# Workers of a node differ by their local number, those of other nodes have their own ports.
export MASTER_PORT=$((31000 + (SLURM_JOB_ID * 16 + SLURM_LOCALID) % 1500))
# Each sees one GPU (or MIG instance, of which CUDA shows a process one only) of those that Slurm gave, or else of the node's;
# more workers than GPUs share.
if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
    IFS=, read -ra devices <<<"$CUDA_VISIBLE_DEVICES"
    export CUDA_VISIBLE_DEVICES=${devices[SLURM_LOCALID % ${#devices[@]}]}
else
    export CUDA_VISIBLE_DEVICES=$((SLURM_LOCALID % GPUS_PER_NODE))
fi
flag=$1 name=$SLURM_PROCID losses=0
shift
trap : USR1 # The worker ends by it; this script looks why.
while :; do
    "$@" "$flag=$name"
    status=$?
    ((status == 0)) && exit 0
    [[ -e $PAUSED ]] && exit 0
    ((status == 2)) && exit 2 # A flag that the program does not know: the next life would not either.
    losses=$((losses + 1))
    if ((losses > ${MAX_LOSSES:-10})); then
        echo "worker $name was lost $losses times, the last time with status $status: giving up"
        exit "$status"
    fi
    echo "worker $name was lost with status $status; beginning anew ($losses of ${MAX_LOSSES:-10})"
    sleep "${RESPAWN_S:-5}"
done
